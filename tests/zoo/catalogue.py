"""All models of the sweep, by kind."""

from __future__ import annotations

from tests.zoo.boxes import BOXES
from tests.zoo.captioning import CAPTIONING
from tests.zoo.decoders import DECODERS
from tests.zoo.detection import DETECTION
from tests.zoo.encoders import ENCODERS, SEQ2SEQS
from tests.zoo.entry import Entry
from tests.zoo.experts import MIXTURES
from tests.zoo.listening import LISTENING
from tests.zoo.looking import LOOKING
from tests.zoo.matching import MATCHING
from tests.zoo.newest import NEWEST
from tests.zoo.others import MULTIMODAL, OTHERS, SPEECH
from tests.zoo.pictures import PICTURES
from tests.zoo.pixelwise import PIXELWISE
from tests.zoo.recent import RECENT
from tests.zoo.seeing import SEEING
from tests.zoo.series import SERIES
from tests.zoo.sounds import SOUNDS
from tests.zoo.speaking import SPEAKING
from tests.zoo.tasks import TASKS
from tests.zoo.texts import TEXTS
from tests.zoo.translators import TRANSLATORS
from tests.zoo.videos import VIDEOS
from tests.zoo.views import VIEWS
from tests.zoo.visible import VISIBLE
from tests.zoo.vision import VISION

KINDS: dict[str, dict[str, Entry]] = {
    "visible zoo": VISIBLE,
    "decoders": DECODERS,
    "recent decoders": RECENT,
    "newest decoders": NEWEST,
    "mixtures of experts": MIXTURES,
    "encoders": ENCODERS,
    "more encoders": TEXTS,
    "other tasks": TASKS,
    "sequence to sequence": SEQ2SEQS,
    "more sequence to sequence": TRANSLATORS,
    "vision": VISION,
    "more vision": PICTURES,
    "still more vision": VIEWS,
    "videos": VIDEOS,
    "a value per pixel": PIXELWISE,
    "detection": DETECTION,
    "more detection": BOXES,
    "images and text": MULTIMODAL,
    "images among tokens": SEEING,
    "more images among tokens": LOOKING,
    "images beside tokens": CAPTIONING,
    "pairs": MATCHING,
    "speech": SPEECH,
    "more speech": SOUNDS,
    "speech and text": LISTENING,
    "sounds written": SPEAKING,
    "others": OTHERS,
    "time series": SERIES,
}

CATALOGUE: dict[str, Entry] = {name: entry for kind in KINDS.values() for name, entry in kind.items()}
