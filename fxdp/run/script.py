"""Run a script as `__main__`, as `python train.py` or `python -m train` would."""

from __future__ import annotations

import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader

from fxdp.run.command import find_script
from fxdp.run.session import RunOptions


def run_script(options: RunOptions) -> None:
    """Run the script to its end, in a module `__main__` that stays.

    Raises
    ------
    InputError : there is no such file.
    """
    sys.argv = [options.script, *options.arguments]
    if options.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    path = find_script(options.script)
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = options.script, __builtins__  # type: ignore[attr-defined]
    main.__loader__ = SourceFileLoader("__main__", str(path))
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), options.script, "exec"), main.__dict__)
