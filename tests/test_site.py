"""The site of `docs/`, which `.ci/docs` builds: every page can be reached, links lead to headings."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from docs.site import pages

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)#([^)\s]+)\)")
SOURCES = pages.sources(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def _anchors(text: str) -> set[str]:
    """Names of a page's headings, as GitHub and the site make them."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", without_code, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_page_and_example_is_in_the_navigation() -> None:
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*"), *ROOT.glob("benchmarks/**/*.md")]
    named = {str(file.relative_to(ROOT)) for file in files if file.suffix in (".md", ".py", ".ipynb")}
    assert named - set(SOURCES.values()) == set()


def test_links_between_pages_lead_to_headings() -> None:
    lost = []
    for source in SOURCES.values():
        if source.endswith(".md"):
            for file, anchor in _LINK.findall((ROOT / source).read_text()):
                led = (ROOT / source).parent / file if file else ROOT / source
                if anchor not in _anchors(led.read_text()):
                    lost.append(f"{source}: {file}#{anchor}")
    assert lost == []


def test_a_link_goes_to_the_page_of_its_file_and_else_is_text() -> None:
    places = {source: place for place, source in SOURCES.items()}
    text = "[a](../examples/gan.py), [b](run.md#x), [c](../fxdp/version.py), [d](https://e.f), `g[0](h)`"
    assert pages.linked(text, "gallery.md", "docs/gallery.md", places) == (
        "[a](examples/gan.md), [b](run.md#x), c, [d](https://e.f), `g[0](h)`"
    )
    back = pages.linked("[a](docs/run.md)", "CHANGELOG.md", "CHANGELOG.md", places)
    assert back == "[a](run.md)"


def test_a_list_begins_after_an_empty_line() -> None:
    text = "what:\n- a\n  more\n- b\n\n    code\n- c\n```\nx\n- d\n```\n"
    assert pages.spaced(text) == "what:\n\n- a\n  more\n- b\n\n    code\n\n- c\n```\nx\n- d\n```\n"
