"""Micro-batches by length: as many tokens as fit, in few compiled shapes, and ranks that have equally many."""
