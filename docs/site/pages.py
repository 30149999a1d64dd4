"""Pages of the site that are made of files outside of docs/, and links that lead there.

mkdocs calls three functions of this file (`hooks:` in mkdocs.yml):

    on_config          the header of each page leads to the repository that pyproject.toml names
    on_files           adds a page for each entry of the navigation that is no file of docs/:
                       examples/gan.md is made of examples/gan.py, CHANGELOG.md of the file of that name
    on_page_markdown   a link to a file of the repository goes to the page made of that file; where the
                       site has none, its text stays; GitHub's lists become those of Python's Markdown
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(
    r"\[(?P<text>[^][]*(?:\[[^][]*\][^][]*)*)\]\((?![a-z]+:)(?P<file>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def sources(nav: Any) -> dict[str, str]:
    """Return the file of the repository of each page in a navigation, by the page's place in the site."""
    return {page: _source(page) for page in _pages(nav)}


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(entry)


def _source(page: str) -> str:
    name = page.removesuffix(".md")
    for source in (f"docs/{page}", page, f"{name}.py", f"{name}.ipynb"):
        if (ROOT / source).is_file():
            return source
    raise FileNotFoundError(f"mkdocs.yml: no file of the repository makes the page {page}")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the repository, where `[project.urls]` does."""
    import tomllib  # where the site is made, from Python 3.11 on; the tests read this file on all

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"].get("Repository")
    config.repo_name = config.repo_url and "Repository"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for page, source in sources(config.nav).items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, page, content=_made(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of a page lead to pages of the site."""
    places = {source: place for place, source in sources(config.nav).items()}
    here = page.file.src_uri
    return linked(spaced(markdown), here, _source(here), places)


def spaced(markdown: str) -> str:
    """Return a text with an empty line before each list: GitHub's Markdown needs none, Python's does."""
    lines: list[str] = []
    fenced = apart = False  # in code; behind an empty line since the last item
    for line in markdown.splitlines():
        fenced ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        item = not fenced and bool(_ITEM.match(line))
        if item and before and not _ITEM.match(before) and (apart or not before.startswith(" ")):
            lines.append("")
        apart = not item and (apart or not line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def linked(markdown: str, here: str, source: str, places: dict[str, str]) -> str:
    """Return the text of the page `here`, made of the file `source`, with its links into the site.

    `places` has the page of each file that makes one.
    """

    def led(found: re.Match[str]) -> str:
        file = os.path.normpath(os.path.join(os.path.dirname(source), found["file"]))
        if not (ROOT / file).exists() or file.startswith("docs/pictures/"):
            return found[0]  # code that looks like a link, or a picture; mkdocs refuses what is not there
        if file not in places:
            return found["text"]
        place = os.path.relpath(places[file], os.path.dirname(here) or ".")
        return f"[{found['text']}]({place}{found['anchor'] or ''})"

    return _LINK.sub(led, markdown)


def _made(source: str) -> str:
    """Return a page as Markdown: of a program, of a notebook with what its cells display, or as it is."""
    if source.endswith(".py"):
        return _program(source)
    if source.endswith(".ipynb"):
        command = [sys.executable, "-m", "tests.notebook", source]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return (ROOT / source).read_text()


def _program(source: str) -> str:
    """Return the docstring of a program as text, and its code below."""
    text = (ROOT / source).read_text()
    head = ast.parse(text).body[0]
    assert isinstance(head, ast.Expr), f"{source} has no docstring"
    assert isinstance(head.value, ast.Constant), f"{source} has no docstring"
    title, _, said = str(head.value.value).partition("\n")
    code = "".join(text.splitlines(keepends=True)[head.end_lineno :]).strip()
    return f'# {title.rstrip(".")}\n{said}\n```python title="{source}"\n{code}\n```\n'
