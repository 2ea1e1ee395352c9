"""What a finished gradient goes through between division and optimizer."""
