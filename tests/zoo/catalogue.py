"""All models of the sweep, by kind."""

from __future__ import annotations

from tests.zoo.decoders import DECODERS
from tests.zoo.detection import DETECTION
from tests.zoo.encoders import ENCODERS, SEQ2SEQS
from tests.zoo.entry import Entry
from tests.zoo.others import MULTIMODAL, OTHERS, SPEECH
from tests.zoo.visible import VISIBLE
from tests.zoo.vision import VISION

KINDS: dict[str, dict[str, Entry]] = {
    "visible zoo": VISIBLE,
    "decoders": DECODERS,
    "encoders": ENCODERS,
    "sequence to sequence": SEQ2SEQS,
    "vision": VISION,
    "detection": DETECTION,
    "images and text": MULTIMODAL,
    "speech": SPEECH,
    "others": OTHERS,
}

CATALOGUE: dict[str, Entry] = {name: entry for kind in KINDS.values() for name, entry in kind.items()}
