"""Wing: a transport for CPUs. Small values by message, large ones through shared memory; else gloo alone."""
