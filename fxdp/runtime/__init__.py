"""Code that runs at each step, and no other code."""
