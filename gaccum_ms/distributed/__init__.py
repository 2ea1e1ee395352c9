"""Ranks: their communication, and state that is sharded over them."""
