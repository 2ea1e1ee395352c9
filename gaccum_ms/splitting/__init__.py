"""How a batch becomes micro-batches: evenly, by length, or by a function; and ranks with equally many tokens."""
