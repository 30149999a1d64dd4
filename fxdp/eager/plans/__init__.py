"""How an op runs on global tensors: found once for a kind of call, then a straight function."""
