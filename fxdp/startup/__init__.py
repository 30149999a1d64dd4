"""Wing: faster first steps. Without this room fxdp computes the same, and starts later."""
