"""Load the model for a command from `module:factory` or `file.py:factory`, and parse the mesh."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import operator
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import fxdp
from fxdp.capture.locations import Origin, location_of_function
from fxdp.cli.show import working
from fxdp.errors import FxdpError, InputError, a_kind
from fxdp.ir.graph.metadata import Location
from fxdp.ir.types.mesh_text import ON_COMMAND_LINE, mesh_grammar, parse_mesh

_KEYS = ("model", "args", "kwargs")
_FACTORY = """\
module:factory is a function without arguments, of a module or of a file
(models.py:tiny). It returns (model, args), (model, args, kwargs), or a dict,
which takes options of fxdp.compile, too:

  def tiny():
      return {"model": Net(), "args": (x,), "kwargs": {"target": y},
              "loss_fn": F.cross_entropy}

options of fxdp.compile in that dict:
"""
_RETURNS = (
    "expected (model, args), (model, args, kwargs), or a dict with these names and options of fxdp.compile:\n"
    "  def factory():\n"
    "      return {'model': Net(), 'args': (x,), 'kwargs': {'target': y}, 'loss_fn': loss}"
)


@dataclass(frozen=True)
class Target:
    """A model with an example batch and the options given by the factory."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    """The lines of the factory and the loss function, named as location of ops without a line of the user."""


def declare_target(parser: argparse.ArgumentParser, mesh: str) -> None:
    """Declare the arguments that several commands share."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{_FACTORY}{_option_lines()}\n\n--mesh:\n{mesh_grammar(ON_COMMAND_LINE)}"
    parser.add_argument(
        "target",
        metavar="module:factory",
        help="a function, or file.py:function, that returns (model, args, kwargs)",
    )
    parser.add_argument("--mesh", metavar="dp=N", default=mesh, help="axes and sizes, as dp_replicate=2,dp=4")
    parser.add_argument("--rng", choices=("sharded", "single-device"), help="how random numbers are drawn")
    parser.add_argument("--strict", action="store_true", help="an op without a placement rule is an error")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _option_lines() -> str:
    """Return the options of `fxdp.compile`, each with the first sentence of its documentation."""
    said = inspect.getdoc(fxdp.compile) or ""
    shown = []
    for name, parameter in inspect.signature(fxdp.compile).parameters.items():
        until = r"(?=^\w[\w, ]* : |^\w+\n-+|\Z)"
        found = re.search(rf"^{name} : (.*?){until}", said, re.M | re.S)
        if parameter.kind is parameter.KEYWORD_ONLY and found:
            first = re.split(r"\.(?: |$)", " ".join(found[1].split()), maxsplit=1)[0].replace("`", "")
            head = f"  {name:25}"
            wrapped = textwrap.wrap(first, 80 - len(head), break_on_hyphens=False)
            shown.append(head + f"\n{' ' * len(head)}".join(wrapped))
    return "\n".join(shown)


def load_target(asked: argparse.Namespace) -> Target:
    """Load the target named by the arguments; options of the command line override the factory's.

    Raises
    ------
    InputError : the module or function does not exist, or the function returns an unexpected value.
    """
    with working(f"loading {asked.target}"):
        factory = _find(asked.target)
        target = _read(_call(factory, asked.target), asked.target)
    call = location_of_function(factory) or Location(asked.target, 1)
    origin = Origin(call, location_of_function(target.options.get("loss_fn")) or call)
    chosen = {"rng": asked.rng} if asked.rng else {}
    if asked.strict:
        chosen["strict"] = True
    return replace(target, options={**target.options, **chosen}, origin=origin)


def mesh_asked(asked: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the mesh in the arguments.

    Raises
    ------
    MeshError : the mesh cannot be parsed.
    """
    return parse_mesh(asked.mesh, ON_COMMAND_LINE)


def _find(text: str) -> Callable[[], Any]:
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise InputError(f"{text}: expected module:factory, as in project.models:tiny, or file.py:factory")
    module = _import(where, text)
    try:
        found: Any = operator.attrgetter(name)(module)
    except AttributeError:
        functions = sorted(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise InputError(
            f"{text}: {where} has no {name!r}; its functions are {', '.join(functions) or 'none'}"
        ) from None
    if not callable(found) or isinstance(found, nn.Module):
        raise InputError(
            f"{text}: {name} is {a_kind(found)}, expected a function without arguments that returns a model "
            "and its batch: (model, args)"
        )
    return found  # type: ignore[no-any-return]


def _import(where: str, text: str) -> ModuleType:
    sys.path.insert(0, "")  # a module of the current folder, as with python -m
    try:
        if where.endswith(".py"):
            return _import_file(Path(where))
        return importlib.import_module(where)
    except Exception as error:  # the user's module may raise any exception on import
        raise InputError(f"{text}: cannot import {where}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _call(factory: Callable[[], Any], text: str) -> Any:
    try:
        return factory()
    except FxdpError:
        raise
    except Exception as error:  # the user's code may raise any exception
        raise InputError(f"{text} raised {type(error).__name__}: {error}. --debug shows where") from error


def _read(returned: Any, text: str) -> Target:
    if isinstance(returned, dict) and "model" in returned:
        given = {name: returned[name] for name in _KEYS if name in returned}
        options = {name: value for name, value in returned.items() if name not in _KEYS}
    elif isinstance(returned, tuple) and len(returned) in (2, 3):
        given, options = dict(zip(_KEYS, returned, strict=False)), {}
    else:
        raise InputError(f"{text} returned {a_kind(returned)}, {_RETURNS}")
    if not isinstance(given["model"], nn.Module) or not isinstance(given.get("args", ()), tuple):
        kinds = ", ".join(type(value).__name__ for value in given.values())
        raise InputError(f"{text} returned ({kinds}), {_RETURNS}")
    return Target(**given, options=options)
