"""`fxdp doctor`: what of fxdp works in this environment, as plain text for an issue."""
