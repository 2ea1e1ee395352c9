"""The memory that a micro-batch needs, and the largest micro-batch that fits."""
