"""The options of accumulation: each one, and which of them go together."""
