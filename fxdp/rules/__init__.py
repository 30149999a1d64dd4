"""Op rules by family; importing this package registers them all."""
