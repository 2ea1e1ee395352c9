"""Ranks: what they send each other, and what each keeps a part of."""
