"""What several test files need, and the programs that they start."""
