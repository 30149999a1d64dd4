"""One call of a compiled module: what it was given, what ranks agree on, what it returns."""
