"""Builds of C++ kernels: together, shared between ranks, with known vector instructions."""
