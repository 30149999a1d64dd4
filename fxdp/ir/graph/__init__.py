"""Graphs and the metadata of their nodes: queries, edits, text, signature, and packing of several values."""
