"""Mesh sizes as text, such as `pp=2,dp=8`.

Users write a mesh so on the command line, and as `mesh=` of functions that need no ranks.
"""

from __future__ import annotations

from fxdp.errors import MeshError

ON_COMMAND_LINE = "--mesh {}"
_IN_PYTHON = 'mesh="{}"'
_EXAMPLES = ("dp=4", "pp=2,dp=8", "dp_replicate=2,dp_shard=8")


def mesh_grammar(form: str) -> str:
    """Return the grammar that `parse_mesh` accepts, with examples in the format `form`."""
    return (
        "  mesh  is  axis=size[,axis=size ...]\n"
        "  axis  is  dp (data), pp (pipeline stages), dp_replicate,\n"
        "            dp_shard (rows of sharded parameters)\n"
        "  size  is  a number of ranks, at least 1\n"
        "  as in  " + "    ".join(map(form.format, _EXAMPLES))
    )


def parse_mesh(text: str, form: str = _IN_PYTHON) -> dict[str, int]:
    """Parse `dp_replicate=2,dp=32` to sizes by axis name; the mesh checks which names exist.

    `form` is the format in which the user wrote the mesh, for the error.

    Raises
    ------
    MeshError : a part is not `axis=size`, or an axis is given twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not axis or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise MeshError(
                f"{form.format(text)}: got {part.strip()!r}, expected axis=size once per axis; commas "
                f"between:\n{mesh_grammar(form)}"
            )
        sizes[axis] = int(size)
    return sizes
