"""The proven releases of torch (`fxdp/releases.py`), for the room that fits torch to them."""

from fxdp.releases import OLDEST, PROVEN, installed, is_proven, release

__all__ = ["OLDEST", "PROVEN", "installed", "is_proven", "release"]
