"""The elements of a program.

Placements, sizes, types, graph signature, node metadata, graph text and fxdp's ops.
"""
