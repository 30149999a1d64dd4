"""Replace the code that Dynamo makes of a frame by a call, before the frame runs.

Dynamo compiles a frame into code that runs its graphs and, between them, the user's own instructions. A
backend may want the entire call instead: to run it in another way, graph breaks included.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch._dynamo.convert_frame import register_bytecode_hook

__all__ = ["call_instead"]

_CALL = "fxdp: call"


def call_instead(asked: CodeType, call: Callable[..., Any]) -> None:
    """From within a backend, make the frame with this code return `call` of the frame's arguments."""

    def replace(code: CodeType, new_code: CodeType) -> CodeType | None:
        if code is not asked:
            return None
        handle.remove()
        return _calling(code, call)

    handle = register_bytecode_hook(replace)


def _calling(code: CodeType, call: Callable[..., Any]) -> CodeType:
    """Return code with the arguments, cells and locals of `code`, which returns `call` of the arguments."""
    names = list(code.co_varnames)
    keyword_from, rest_from = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    positional, keyword, others = names[:keyword_from], names[keyword_from:rest_from], names[rest_from:]
    star = [f"*{others.pop(0)}"] if code.co_flags & inspect.CO_VARARGS else []
    two_stars = [f"**{others.pop(0)}"] if code.co_flags & inspect.CO_VARKEYWORDS else []
    taken = [*positional, *(star or ["*"] * bool(keyword)), *keyword, *two_stars]
    taken.insert(code.co_posonlyargcount, "/")
    given = [*positional, *star, *(f"{name}={name}" for name in keyword), *two_stars]
    cells = [name for name in code.co_cellvars if name not in names]
    inner = [
        f"def inner({', '.join(taken if code.co_posonlyargcount else taken[1:])}):",
        f" return {_CALL!r}({', '.join(given)})",
        # never reached: torch wants the same locals, cells and free variables
        *(f" {name} = None" for name in (*others, *cells)),
        f" lambda: ({' '.join(f'{name},' for name in (*code.co_cellvars, *code.co_freevars))})",
    ]
    free = [f" {name} = None" for name in code.co_freevars]
    text = "\n".join(["def outer():", *free, *(f" {line}" for line in inner)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a text that is called, until it is replaced
        module = compile(text, code.co_filename, "exec")
    made = _inside(_inside(module))
    constants = tuple(call if value == _CALL else value for value in made.co_consts)
    return made.replace(co_consts=constants, co_name=code.co_name, co_firstlineno=code.co_firstlineno)


def _inside(code: CodeType) -> CodeType:
    return next(value for value in code.co_consts if isinstance(value, CodeType))
