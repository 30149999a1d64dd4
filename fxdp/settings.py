"""All settings from the environment: the one module that reads environment variables.

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

_LONGEST = 1e7  # seconds, 115 days: longer timeouts overflow in socket calls
_MOST_RANKS = 1 << 20
_MOST_RESTARTS = 1 << 20
_SHORTCUTS = "FXDP_SHORTCUTS"
_SWITCHES = {
    "FXDP_LAYERS": ("repeated_layers",),
    "FXDP_COLD_START": ("cold_start",),
    "FXDP_CACHE": ("cached_joint", "cached_pair", "cached_libraries"),
}
"""Variables that turn off certain shortcuts."""
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_OF_TORCHRUN = (
    *_LAUNCH_VARIABLES, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes that torchrun started."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    ranks_here: int = 0
    """The number of torchrun's processes on this host; 0 if unknown."""
    restarts: int = 0
    """The number of restarts by torchrun with the same store, in which old failure broadcasts remain."""
    agent_store: bool = False
    """True if the store belongs to torchrun, so that the store exists before any rank starts."""

    @property
    def several_hosts(self) -> bool:
        """True if some of the processes may be on other hosts."""
        return self.ranks_here < self.world_size


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
    def from_environment(environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `environment` (default: the process's own).

        Raises
        ------
        MeshError : a variable is not a number or out of range, or torchrun's set is incomplete.
        """
        env = os.environ if environment is None else environment
        return Settings(
            launch=_launch(env),
            timeout_s=_number(env, "FXDP_TIMEOUT_S", 300.0),
            lost_s=_number(env, "FXDP_LOST_S", 25.0),
            host=env.get("FXDP_HOST") or None,
            shared_memory=_number(env, "FXDP_SHARED_MEMORY", 1) != 0,
            tree_above=_integer(env, "FXDP_TREE_ABOVE", Settings.tree_above, 1, _MOST_RANKS),
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
    def from_environment(environment: Mapping[str, str] | None = None) -> ShortcutSettings:
        """Read the settings from `environment` (default: the process's own).

        Raises
        ------
        MeshError : a variable is not a number, or not a list of names with a minus.
        """
        env = os.environ if environment is None else environment
        off = {name: f"{_SHORTCUTS}=-{name}" for name in _left_out(env)}
        for variable, names in _SWITCHES.items():
            if not _number(env, variable, 1):
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
    def from_environment(environment: Mapping[str, str] | None = None) -> CacheSettings:
        """Read the settings from `environment` (default: the process's own).

        Raises
        ------
        MeshError : a variable is not a number.
        """
        env = os.environ if environment is None else environment
        inductor = env.get("TORCHINDUCTOR_CACHE_DIR") or None
        megabytes = _number(env, "FXDP_CACHE_MB", CacheSettings.megabytes)
        return CacheSettings(
            folder=env.get("FXDP_CACHE_DIR") or (inductor and os.path.join(inductor, "fxdp")),
            megabytes=megabytes if _number(env, "FXDP_CACHE", 1) else 0.0,
        )


@dataclass(frozen=True)
class UntestedSettings:
    """Settings of the warning about an unproven torch; separate, because torch is not imported yet.

    Attributes
    ----------
    known : True if the user wants no warning.
    rank : the rank of this process, as set by torchrun.
    """

    known: bool = False
    rank: int = 0

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> UntestedSettings:
        """Read the settings from `environment` (default: the process's own).

        Raises
        ------
        MeshError : `FXDP_UNTESTED_TORCH` is not a number.
        """
        env = os.environ if environment is None else environment
        rank = env.get("RANK", "0")
        return UntestedSettings(
            known=_number(env, "FXDP_UNTESTED_TORCH", 0) != 0, rank=int(rank) if rank.isdigit() else 0
        )


def wings_are_on(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the wings of fxdp are loaded (`fxdp/wings.py`).

    Raises
    ------
    MeshError : `FXDP_WINGS` is neither on nor off.
    """
    env = os.environ if environment is None else environment
    text = env.get("FXDP_WINGS", "").strip()
    if text not in ("", "on", "off"):
        raise MeshError(f"environment variable FXDP_WINGS is {text[:80]!r}; expected on or off")
    return text != "off"


def compiler_asked(environment: Mapping[str, str] | None = None) -> str:
    """Return the C++ compiler that the environment tells Inductor to use."""
    env = os.environ if environment is None else environment
    return env.get("CXX") or "g++"


def inductor_cache_asked(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the folder in which the environment tells Inductor to keep compiled code; None if not set."""
    env = os.environ if environment is None else environment
    return env.get("TORCHINDUCTOR_CACHE_DIR") or None


def compile_into(folder: str) -> None:
    """Let Inductor keep compiled code in this folder, also in processes that are forked from now on."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def settings_given(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return fxdp's own variables that the environment sets, sorted by name."""
    env = os.environ if environment is None else environment
    return {name: env[name] for name in sorted(env) if name.startswith("FXDP_")}


def become(place: Launch) -> None:
    """Make this process a rank: set torchrun's variables, for a store in another process."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def see_one_gpu(local_rank: int) -> None:
    """Leave the rank's own GPU visible, as device 0; before CUDA is used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return
    devices = visible.split(",") if visible else [str(local_rank)] * (local_rank + 1)
    os.environ.update(CUDA_VISIBLE_DEVICES=",".join(devices[local_rank : local_rank + 1]), LOCAL_RANK="0")


def hide_launch() -> None:
    """Take torchrun's variables from the environment."""
    for name in [name for name in os.environ if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def hashes_alike(environment: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Return the environment in which all processes hash text alike; None if it is this one's."""
    env = os.environ if environment is None else environment
    if env.get("PYTHONHASHSEED", "random") != "random":
        return None
    return {**env, "PYTHONHASHSEED": "0"}


def lead_gloo_to(interface: str) -> None:
    """Let gloo use this network interface, unless the environment names one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _launch(env: Mapping[str, str]) -> Launch | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    world_size = _integer(env, "WORLD_SIZE", 1, 1, _MOST_RANKS)
    missing = [name for name in _LAUNCH_VARIABLES if not env.get(name) and name != "LOCAL_RANK"]
    rank = _integer(env, "RANK", 0, 0, world_size - 1)
    if missing and world_size == 1:
        return None
    if missing:
        raise MeshError(
            f"the environment says WORLD_SIZE={world_size}, but {', '.join(missing)} is not set; "
            f"expected all of {', '.join(_LAUNCH_VARIABLES)}: launch with torchrun, or call "
            "torch.distributed.init_process_group yourself before fxdp.compile"
        )
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, "LOCAL_RANK", rank, 0, _MOST_RANKS),
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT", 0, 1, 65_535),
        ranks_here=_integer(env, "LOCAL_WORLD_SIZE", 0, 0, _MOST_RANKS),
        restarts=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0, 0, _MOST_RESTARTS) if shared else 0,
        agent_store=shared,
    )


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


def _integer(env: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = env.get(name)
    if not text:
        return default
    digits = text.isascii() and text.isdigit() and len(text) < 10  # rejects numbers of any length
    if not digits or not least <= int(text) <= most:
        raise MeshError(
            f"environment variable {name} is {text[:30]!r}; expected an integer from {least} to {most}"
            + (", as torchrun sets it" if name in _LAUNCH_VARIABLES else "")
        )
    return int(text)


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST:
        raise MeshError(
            f"environment variable {name} is {text!r}; expected a number >= 0, and at most {_LONGEST:g}"
        )
    return value


def variables_of_user() -> Mapping[str, str]:
    """Return all variables of the environment, for code of a model that reads variables."""
    return os.environ
