"""Models and calls that cannot be captured: detection, and errors in the user's terms."""
