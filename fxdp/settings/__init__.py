"""All settings from the environment: the one room that reads environment variables.

variable         meaning                                                           default
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT        set by torchrun      none
FXDP_TIMEOUT_S   seconds that a rank waits for another before raising              300
FXDP_LOST_S      seconds without an answer after which another machine counts as lost    25
FXDP_SHARED_MEMORY   0: ranks of one host sum gradients by gloo, not by shared memory    1
FXDP_WINGS       off: the core alone, without what makes it faster or take more models    on
FXDP_SHORTCUTS       off: no optimization that only saves time; -NAME,-NAME: all but these    on
FXDP_COLD_START      0: Inductor builds each kernel separately, ranks do not share compiling    1
FXDP_LAYERS      0: Inductor compiles a model's layers together, not one layer for all    1
FXDP_CACHE       0: no cache on disk from run to run, except Inductor's own             1
FXDP_CACHE_DIR   folder of the cache; only its owner may have write permission         fxdp in Inductor's
FXDP_CACHE_MB    maximal size; the least recently used entries go first; 0: no cache   512
FXDP_UNTESTED_TORCH  1: no warning if fxdp is not proven with the installed torch      0
FXDP_TREE_ABOVE  more ranks than this are connected as a tree, not all to all; equal on all ranks    8
FXDP_HOST        address at which other ranks reach this one (control channel)     found automatically
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fxdp.errors import MeshError
from fxdp.settings.launch import MOST_RANKS, Launch, integer, launch_of, number

_SHORTCUTS = "FXDP_SHORTCUTS"
_SWITCHES = {
    "FXDP_LAYERS": ("repeated_layers",),
    "FXDP_COLD_START": ("cold_start",),
    "FXDP_CACHE": ("cached_joint", "cached_pair", "cached_libraries"),
}
"""Variables that turn off certain shortcuts."""


@dataclass(frozen=True)
class Settings:
    """All settings from the environment, read once per use and passed on as a value.

    Attributes
    ----------
    launch : torchrun's variables; None if the process was not started by torchrun.
    timeout_s : seconds that a rank waits for another in a collective or in the control channel.
    lost_s : seconds without an answer after which another machine counts as lost.
    host : the address at which other ranks reach this one; None to find the address.
    shared_memory : True if ranks of one host may sum large values through shared memory.
    tree_above : the largest number of ranks with a connection between each pair; more ranks form a tree.
    """

    launch: Launch | None = None
    timeout_s: float = 300.0
    lost_s: float = 25.0
    host: str | None = None
    shared_memory: bool = True
    tree_above: int = 8

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from an environment.

        Raises
        ------
        MeshError : a variable is not a number or out of range, or torchrun's set is incomplete.
        """
        return Settings(
            launch=launch_of(env),
            timeout_s=number(env, "FXDP_TIMEOUT_S", 300.0),
            lost_s=number(env, "FXDP_LOST_S", 25.0),
            host=env.get("FXDP_HOST") or None,
            shared_memory=number(env, "FXDP_SHARED_MEMORY", 1) != 0,
            tree_above=integer(env, "FXDP_TREE_ABOVE", Settings.tree_above, 1, MOST_RANKS),
        )


@dataclass(frozen=True)
class ShortcutSettings:
    """Shortcuts that are turned off; `FXDP_LAYERS` and similar variables switch single shortcuts.

    Attributes
    ----------
    all_off : True if all shortcuts are off.
    off : the names of shortcuts that are off, each with the responsible setting.
    """

    all_off: bool = False
    off: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> ShortcutSettings:
        """Read the settings from an environment.

        Raises
        ------
        MeshError : a variable is not a number, or not a list of names with a minus.
        """
        off = {name: f"{_SHORTCUTS}=-{name}" for name in _left_out(env)}
        for variable, names in _SWITCHES.items():
            if not number(env, variable, 1):
                off |= dict.fromkeys(names, f"{variable}=0")
        return ShortcutSettings(env.get(_SHORTCUTS, "").strip() == "off", off)

    @property
    def text(self) -> str:
        """The settings as text, for the key of a cache entry that depends on shortcuts."""
        return "off" if self.all_off else " ".join(sorted(self.off))

    def why_off(self, name: str) -> str | None:
        """Return the setting that turns a shortcut off; None if the shortcut is on."""
        return f"{_SHORTCUTS}=off" if self.all_off else self.off.get(name)


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the cache on disk; separate from `Settings`, because a plan without ranks needs them, too.

    Attributes
    ----------
    folder : the folder for captures and compiled programs; None: next to Inductor's cache, known by torch.
    megabytes : the limit for the total size; 0: nothing is stored or read.
    """

    folder: str | None = None
    megabytes: float = 512.0

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> CacheSettings:
        """Read the settings from an environment.

        Raises
        ------
        MeshError : a variable is not a number.
        """
        inductor = env.get("TORCHINDUCTOR_CACHE_DIR") or None
        megabytes = number(env, "FXDP_CACHE_MB", CacheSettings.megabytes)
        return CacheSettings(
            folder=env.get("FXDP_CACHE_DIR") or (inductor and os.path.join(inductor, "fxdp")),
            megabytes=megabytes if number(env, "FXDP_CACHE", 1) else 0.0,
        )


def wings_are_on(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the wings of fxdp are loaded (`fxdp/wings.py`).

    Raises
    ------
    MeshError : `FXDP_WINGS` is neither on nor off.
    """
    text = env.get("FXDP_WINGS", "").strip()
    if text not in ("", "on", "off"):
        raise MeshError(f"environment variable FXDP_WINGS is {text[:80]!r}; expected on or off")
    return text != "off"


def warns_untested() -> bool:
    """Return whether an unproven torch causes a warning.

    Raises
    ------
    MeshError : `FXDP_UNTESTED_TORCH` is not a number.
    """
    return not number(os.environ, "FXDP_UNTESTED_TORCH", 0)


def rank_asked() -> int:
    """Return the rank that torchrun gave to this process; 0 without torchrun."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def compiler_asked() -> str:
    """Return the C++ compiler that the environment tells Inductor to use."""
    return os.environ.get("CXX") or "g++"


def inductor_cache_asked() -> str | None:
    """Return the folder in which the environment tells Inductor to keep compiled code; None if not set."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or None


def check_settings() -> None:
    """Raise if any setting cannot be read.

    Raises
    ------
    MeshError : a variable has a value that is not among those it takes.
    """
    Settings.from_environment()
    ShortcutSettings.from_environment()
    CacheSettings.from_environment()
    wings_are_on()
    warns_untested()


def settings_given() -> dict[str, str]:
    """Return fxdp's own variables that the environment sets, sorted by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("FXDP_")}


def hashes_alike() -> dict[str, str] | None:
    """Return the environment in which all processes hash text alike; None if it is this one's."""
    given = os.environ.get("PYTHONHASHSEED", "random") != "random"
    return None if given else {**os.environ, "PYTHONHASHSEED": "0"}


def _left_out(env: Mapping[str, str]) -> list[str]:
    """Return the names that `FXDP_SHORTCUTS` turns off one by one."""
    text = env.get(_SHORTCUTS, "").strip()
    if text in ("", "on", "off"):
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(re.fullmatch(r"-[a-z_]+", name) for name in names):
        raise MeshError(
            f"environment variable {_SHORTCUTS} is {text[:80]!r}; expected on, off, or what to leave out, "
            "each name with a minus: -memoized_fakes,-repeated_layers"
        )
    return [name[1:] for name in names]


def variables_of_user() -> Mapping[str, str]:
    """Return all variables of the environment, for code of a model that reads variables."""
    return os.environ
