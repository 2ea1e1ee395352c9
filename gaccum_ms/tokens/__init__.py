"""Micro-batches by length: as many tokens as fit, in few compiled shapes; and batches with equal tokens over ranks."""
