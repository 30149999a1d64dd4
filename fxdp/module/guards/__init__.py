"""Guards: conditions of a compiled program beside the values of tensors, checked at each call."""
