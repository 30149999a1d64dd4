"""The visible zoo: the models that the exactness catalogue names."""

from __future__ import annotations

from tests.capture import zoo
from tests.zoo.entry import Entry

VISIBLE: dict[str, Entry] = {name: Entry(build, inputs) for name, (build, inputs, _) in zoo.ZOO.items()}
