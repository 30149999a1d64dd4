"""What cannot be captured, and why, in the words of its user."""
