"""A notebook's cells and what they display, as IPython runs them in a kernel.

`python -m tests.notebook examples/inspect.ipynb` prints these as a page in Markdown, which the site has.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


def displayed(notebook: Path, folder: str) -> list[dict[str, Any]]:
    """What the cells with code display, by kinds of text; `folder` is IPython's own."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell(config=config, ipython_dir=folder)
    # as in a kernel, a cell is a file: fxdp names its lines
    shell.compile.get_code_name = lambda raw, code, number: f"{folder}/notebook/cell_{number}.py"
    found = []
    for cell in _cells(notebook):
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()):  # where it prints what a kernel sends
                ran = shell.run_cell("".join(cell["source"]), store_history=True)
            ran.raise_error()
            found.append({} if ran.result is None else shell.display_formatter.format(ran.result)[0])
    return found


def page(notebook: Path) -> str:
    """The page in Markdown: text, code, and below each cell of code what it displays."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = iter([_output(shown).replace(f"{folder}/", "") for shown in displayed(notebook, folder)])
    parts = []
    for cell in _cells(notebook):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", next(outputs)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    return re.sub(r"/\S*/site-packages/", "", text)


def _cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text())["cells"]


def _output(shown: dict[str, Any]) -> str:
    """The richest of the kinds of text that a page can have."""
    for kind in ("text/html", "image/svg+xml"):
        if kind in shown:  # without empty lines, at which Markdown would end the HTML
            lines = (line for line in shown[kind].splitlines() if line.strip())
            return '<div class="shown">\n' + "\n".join(lines) + "\n</div>"
    return f"```text\n{shown['text/plain']}\n```" if "text/plain" in shown else ""


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1])))
