"""What `audit` does: measures two updates, tries remedies, and judges."""
