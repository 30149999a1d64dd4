"""The house as data: its floors, its rooms, and what each says of itself."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FXDP = ROOT / "fxdp"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "skip"),
    ("settings",),
    ("torch_compat", "wings"),
    ("disk", "ir"),
    ("ranks", "capture", "rules", "lowering"),  # none knows another
    ("placing", "runtime", "sharding", "startup", "transport"),
    ("pipeline",),
    ("passes", "reports", "options"),
    ("compiler", "eager"),
    ("module",),
    ("oracle",),
    ("__init__",),
    ("cli", "integrations", "dynamo", "run"),
)
"""Rooms and files of the top level, from the ground up; a room imports from the floors below it only."""

WINGS = ("startup", "transport", "dynamo", "run")
"""Rooms that extend the core at its seams, and that it does without."""

SIZES: dict[str, tuple[int, int]] = {
    "capture": (12_800, 310),
    "cli": (2_400, 70),
    "compiler": (3_300, 55),
    "disk": (300, 5),
    "dynamo": (1_700, 25),
    "eager": (6_300, 155),
    "integrations": (1_000, 15),
    "ir": (6_200, 370),
    "lowering": (2_200, 65),
    "module": (5_800, 110),
    "options": (800, 25),
    "oracle": (2_600, 50),
    "passes": (3_600, 25),
    "pipeline": (4_500, 97),
    "placing": (1_800, 40),
    "ranks": (6_000, 130),
    "reports": (3_700, 80),
    "rules": (4_800, 80),
    "run": (4_170, 75),
    "runtime": (1_600, 50),
    "settings": (400, 25),
    "sharding": (1_600, 30),
    "skip": (1_200, 30),
    "startup": (4_100, 80),
    "torch_compat": (4_000, 180),
    "transport": (1_700, 30),
}
"""Most lines and most public names of a room's modules, so that the house does not grow unseen.

A room that passes its bound is read again first: what says the same twice goes, a helper of one module
becomes private to it. Then the bound may rise by what the new capability needs; a room that became smaller
lowers it.
"""

START = "<!-- rooms: written by `python tests/rooms.py`, which a test compares -->\n"
END = "<!-- end of rooms -->\n"


def floor(room: str) -> int:
    """The floor of a room."""
    for i, rooms in enumerate(LAYERS):
        if room in rooms:
            return i
    raise AssertionError(f"fxdp/{room} has no floor: add it to LAYERS")


def first_line(package: Path) -> str:
    """What a room or file says of itself."""
    file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def table() -> str:
    """The rooms from the face of the house down to its ground, with their sub-rooms."""
    lines = ["| room | what is in it |", "|---|---|"]
    for rooms in reversed(LAYERS):
        for room in (name for name in rooms if not name.startswith("__")):
            where = ROOT / "passes" if room == "passes" else FXDP / room
            lines.append(f"| `{_shown(where)}` | {first_line(where)} |")
            if where.is_dir():
                inner = sorted(d for d in where.iterdir() if (d / "__init__.py").exists())
                lines += [f"| &nbsp;&nbsp;`{_shown(d)}` | {first_line(d)} |" for d in inner]
    return "\n".join(lines) + "\n"


def _shown(where: Path) -> str:
    return str(where.relative_to(ROOT)) + ("/" if where.is_dir() else ".py")


def contributing(text: str) -> str:
    """CONTRIBUTING.md with the table as it must be."""
    before, _, rest = text.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(contributing(page.read_text()))
