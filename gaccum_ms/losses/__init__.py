"""The counts that losses are means over, and losses of whole batches."""
