"""What losses are means over, and losses of whole batches."""
