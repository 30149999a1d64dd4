"""Artifacts on disk: joint graphs, compiled programs and libraries of kernels of earlier runs."""
