"""The transforms of a finished gradient, between division and optimizer."""
