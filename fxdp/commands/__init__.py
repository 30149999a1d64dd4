"""The commands that look at a model: `fxdp verify`, `fxdp plan`, `fxdp explain`; one file each.

Each file has `HELP`, `declare(parser)` and `run(asked) -> exit code`.
"""
