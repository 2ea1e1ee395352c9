"""Helpers of several test files, and the programs that tests start."""
