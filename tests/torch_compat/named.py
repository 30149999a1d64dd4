"""Private names of torch that the library's files name: imports, attributes, and names kept as data."""
