"""Cutting one program into stages and phases, and into a graph for each."""
