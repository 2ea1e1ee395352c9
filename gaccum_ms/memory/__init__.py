"""How much memory a micro-batch needs, and the largest one that fits."""
