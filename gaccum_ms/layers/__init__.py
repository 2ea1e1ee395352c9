"""Layers that need care when a batch is split."""
