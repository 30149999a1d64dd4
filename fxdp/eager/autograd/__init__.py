"""Gradients of what global tensors are computed from: parameters, plain tensors, tables."""
