"""What fxdp touches of torch, as data: a file for each proven release, which `__main__` writes."""
