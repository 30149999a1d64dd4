"""The page of a plan: full, small, without network and scripts, every message with its cause."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.reports.graph_display import symbol_of
from fxdp.reports.page.module_tree import ModuleBranch, module_tree
from fxdp.reports.page.plan_page import plan_page
from tests.reports.page.browser import tab

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class Layers(nn.Module):
    """Alike but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.h.append(nn.Sequential(nn.Linear(4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def full() -> fxdp.Plan:
    return fxdp.plan(Layers(), (torch.randn(4, 4),), mesh={"dp": 2}, communication={"bucket_cap_mb": 2**-14})


@pytest.fixture(scope="module")
def staged() -> fxdp.Plan:
    return fxdp.plan(Layers(), (torch.randn(4, 4),), mesh={"pp": 2, "dp": 2}, pipeline={"microbatches": 2})


class _Checker(HTMLParser):
    """Open and closed elements, ids, and where links go."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.comms: set[str] = set()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names.add(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.comms |= {given["href"] or ""} if "href" in given else set()
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())


def _checked(page: str) -> _Checker:
    found = _Checker()
    found.feed(page)
    assert found.open == []
    return found


def test_a_page_is_whole_and_needs_nothing_else(full: fxdp.Plan, staged: fxdp.Plan) -> None:
    for plan in (full, staged, fxdp.plan(Layers(), (torch.randn(4, 4),), mesh={"dp": 1})):
        page = plan_page(plan)
        found = _checked(page)
        assert not {"script", "img", "iframe"} & found.names
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
        assert len(set(found.ids)) == len(found.ids)
        assert {link for link in found.comms if link != "data:,"} <= {f"#{one}" for one in found.ids}
        assert {row.key for row in plan.collectives()} <= set(found.ids)
        assert "prefers-color-scheme:dark" in page
        assert len(page) < 100_000


def test_each_message_has_its_chain(full: fxdp.Plan) -> None:
    page = plan_page(full)
    assert page.count('<ol class="chain">') == sum(len(row.needs) for row in full.collectives())
    assert '<span class="p partial">P(sum)</span>' in page
    assert "x = layer(x)" in page
    assert "gradient of h.*.0.weight" in page


def test_equal_layers_are_one_row(full: fxdp.Plan) -> None:
    (h,) = module_tree(full.details()).children.values()
    four, last = h.children.values()
    assert (four.name, four.times, last.name, last.times) == ("0 to 3", 4, "4", 1)
    assert four.parameters == 4 * 4 * (4 * 4 + 4)
    assert h.parameters == four.parameters + last.parameters
    assert set(four.values) >= {"shard", "partial", "replicate"}
    assert '0 to 3 <b class="times">&times;4</b>' in plan_page(full)
    assert module_tree(fxdp.Plan("", (), (), ()).details()) == ModuleBranch("the model")


def test_which_way_a_placement_lies() -> None:
    assert [symbol_of(text) for text in ("S(0)", "ParamShard", "P(max)", "R", "")] == [
        "shard", "shard", "partial", "replicate", "",
    ]  # fmt: skip


def test_stages_are_drawn(staged: fxdp.Plan, tmp_path: Path) -> None:
    page = plan_page(staged)
    assert 'class="forward-edge"' in page
    assert 'class="backward-edge"' in page
    assert "1f1b: 2 stages on 2 ranks" in page
    staged.to_svg(tmp_path / "schedule.svg")
    assert (tmp_path / "schedule.svg").read_text() == staged.schedule_svg()
    with pytest.raises(fxdp.InputError, match=r"cannot write .*/no/page\.html: No such file"):
        staged.to_html(tmp_path / "no" / "page.html")
    for path, why in ((3, "expected str"), ("a\0b", "embedded null byte")):
        with pytest.raises(fxdp.InputError, match=f"cannot write .*{why}.*Expected the path of a file"):
            staged.to_html(path)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_a_browser_shows_it_and_a_click_opens_the_causes(staged: fxdp.Plan, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    staged.to_html(page)
    with tab(tmp_path / "profile") as browser:
        browser.open(page.as_uri())
        link = "#lines .row a"
        there = f"document.getElementById(document.querySelector({link!r}).hash.slice(1)).parentElement"
        assert browser.value(f"{there}.open") is False
        browser.click(link)  # by the browser alone: the page has no scripts
        assert browser.value(f"{there}.open") is True
        top, shown = browser.value(f"[{there}.getBoundingClientRect().top, {there}.innerText]")
        assert -100 < top < 1000
        assert "needs it as R" in shown
        assert "test_plan_page.py:" in shown
        colours = set()
        for theme in ("light", "dark"):
            prefers = {"name": "prefers-color-scheme", "value": theme}
            browser.call("Emulation.setEmulatedMedia", features=[prefers])
            colours.add(browser.value("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        assert len(browser.call("Page.captureScreenshot")["data"]) > 10_000
        asked = [event["request"]["url"] for event in browser.happened("Network.requestWillBeSent")]
        assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
        assert browser.happened("Log.entryAdded") == []
        assert browser.happened("Runtime.consoleAPICalled") == []
