"""What runs at each step: collectives, the autograd step, agreement between ranks."""
