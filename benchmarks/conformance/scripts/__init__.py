"""Training scripts for one device, as people write them: structures of public ones in words of our own."""
