"""Checks of arguments and inputs, for all packages."""
