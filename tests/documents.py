"""The pages of `docs/` that are made: the API reference from docstrings, and a schedule's picture.

`python -m tests.documents` writes them; a test compares. `--screenshots` takes those of the report, too.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

import fxdp

DOCS = Path(__file__).resolve().parent.parent / "docs"

GROUPS: dict[str, tuple[str, ...]] = {
    "Compile and run": (
        "compile", "Pipeline", "ActivationCheckpointing", "Communication", "Bitwise", "Debug",
        "RowsPerSample", "Rows", "CompiledModule", "launch", "save", "load", "save_safetensors",
    ),
    "Global tensors": (
        "global_batch", "shard", "GlobalTensor", "eager_report", "data_loader", "ResumableLoader",
    ),
    "Plan and check": ("plan", "Plan", "CommRow", "explain", "verify", "Report"),
    "Op rules": ("register_rule", "check_rule", "Sample", "S", "R", "P"),
    "Skip connections": tuple(f"skip.{name}" for name in (
        "skippable", "stash", "pop", "Namespace", "Skippable", "verify_skippables", "SkipLayout",
        "inspect_skip_layout", "SkipTracker", "use_skip_tracker", "current_skip_tracker",
    )),
    "Trainers": (
        "integrations.transformers.compile_trainer", "integrations.accelerate.compile_accelerator",
        "integrations.lightning.FxdpStrategy", "integrations.lightning.FxdpFabricStrategy",
        "integrations.batch_parts.loader_of_parts",
    ),
    "Errors": (
        "FxdpError", "CaptureError", "PlacementError", "ExactnessError", "RuleError", "MeshError",
        "InputError", "AgreementError", "RankFailedError", "ScheduleError", "DeadlockError", "StageError",
        "VerifierError", "StateError", "TorchMismatchError", "UnsupportedTorchError", "UntestedTorchWarning",
    ),
}  # fmt: skip
"""What the reference has, in its order."""

_HEAD = """\
# API reference

Made from docstrings by `python -m tests.documents`; do not edit by hand. The [recipes](README.md) show how
things go together.

"""


def reference() -> str:
    """The entire page."""
    shown = [_HEAD]
    for group, names in GROUPS.items():
        shown.append(f"## {group}\n\n")
        shown += [text for name in names for text in _entry(f"fxdp.{name}", _found(name))]
    return "".join(shown).rstrip() + "\n"


def _found(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(import_module(f"fxdp.{module}") if module else fxdp, last)


def _entry(name: str, found: Any) -> Iterator[str]:
    yield _shown("###", name, found)
    if not inspect.isclass(found) or issubclass(found, Exception):
        return
    own = name.rpartition(".")[2]
    ours = [kind for kind in found.__mro__ if kind.__module__.startswith("fxdp.")]
    members = {name: value for kind in reversed(ours) for name, value in vars(kind).items()}
    for member, value in members.items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        public = not member.startswith("_") and not hasattr(nn.Module, member)  # of which users know the rest
        if public and inspect.isfunction(function) and function.__doc__:
            yield _shown("####", f"{own}.{member}", function, called=not isinstance(value, property))


def _shown(level: str, name: str, found: Any, called: bool = True) -> str:
    """Its name, how it is called, and what its docstring says."""
    call = f"{name.rpartition('.')[2]}{_signature(found)}" if called else ""
    code = "\n".join(textwrap.wrap(call, 100, subsequent_indent="    "))
    signature = f"```py\n{code}\n```\n\n" if "(" in call else ""
    return f"{level} `{name}`\n\n{signature}{_markdown(inspect.getdoc(found) or '')}\n\n"


def _signature(found: Any) -> str:
    """Names and defaults; what they mean is said below."""
    if not callable(found) or (inspect.isclass(found) and issubclass(found, Exception)):
        return ""
    given = inspect.signature(found)
    # of a type that has no values are arguments that are refused, with words
    named = [p for n, p in given.parameters.items() if n not in ("self", "cls") and p.annotation != "Never"]
    kept = [p.replace(annotation=p.empty) for p in named]
    plain = given.replace(parameters=kept, return_annotation=given.empty)
    return re.sub(r"<([\w.]+)[^<>]*>", r"\1", str(plain))


def _markdown(text: str) -> str:
    """A docstring with numpydoc sections as Markdown."""
    head, *sections = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.M)
    shown = [_block(head)]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = re.sub(r"^(\S[^\n]*?) : ", r"- `\1`: ", body.strip(), flags=re.M)
        lines = [re.sub(r"^ {4}", "  ", line) for line in entries.splitlines()]
        shown.append(f"**{title}**\n\n" + "\n".join(lines))
    return "\n\n".join(part.strip("\n") for part in shown if part.strip())


def _block(text: str) -> str:
    """Indented lines in a docstring are pictures and code, as they are in Markdown; but not after prose."""
    return re.sub(r"(?<=\S)\n(    \S)", r"\n\n\1", text)


def schedule() -> str:
    """Two stages, four micro-batches, as the library draws them."""
    from fxdp.pipeline.schedule.catalogue import make
    from fxdp.reports.schedule_svg import schedule_svg

    return schedule_svg(make("1f1b", 2, 2, 4))


MADE = {"api.md": reference, "pictures/schedule.svg": schedule}


def screenshots() -> None:
    """The report of a GPT, as a browser shows its top in both themes."""
    import torch
    from PIL import Image

    from fxdp.cli.demo.model import GPT, GPTConfig

    tokens = torch.zeros(4, 32, dtype=torch.int64)
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 8}
    plan = fxdp.plan(
        GPT(GPTConfig(length=32)), (tokens, tokens), mesh=mesh, strategy="shard", pipeline={"microbatches": 4}
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        plan.to_html(page)
        for theme, number in (("light", 1), ("dark", 0)):
            picture = DOCS / "pictures" / f"report-{theme}.png"
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            flags += ["--window-size=1100,900", f"--screenshot={picture}"]
            flags += [f"--blink-settings=preferredColorScheme={number}"]
            subprocess.run(["chromium", *flags, page.as_uri()], check=True, capture_output=True)
            # few colours make a small file; by how often they occur, the three of placements would be lost
            few = Image.open(picture).convert("RGB").quantize(96, Image.Quantize.MAXCOVERAGE)
            few.save(picture, optimize=True)


if __name__ == "__main__":
    for name, make_page in MADE.items():
        (DOCS / name).write_text(make_page())
    if "--screenshots" in sys.argv:
        screenshots()
