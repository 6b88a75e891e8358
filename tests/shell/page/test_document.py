"""The page as a whole, without a browser: all parts are there, and nothing a stranger says is markup."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
from scenes import HOSTILE, SCENES, Scene, hostile

from pulsenetd.page.document import ASSETS, draw_page, read_asset

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Outline(HTMLParser):
    """Elements with their attributes, and whether they are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


def draw(scene: Scene, *, log: Any = "yes") -> str:
    found = scene.log_tail.select() if log == "yes" else log
    return draw_page({**scene.status(), "history": scene.history.columns(), "log": found}).decode()


@pytest.mark.parametrize("name", SCENES)
def test_a_page_is_well_formed_and_asks_nobody_else(name: str) -> None:
    page = draw(SCENES[name]())
    outline = Outline(page)
    assert outline.open == []
    counted = Counter(attributes["id"] for _, attributes in outline.elements if "id" in attributes)
    assert max(counted.values()) == 1
    names = Counter(name for name, _ in outline.elements)
    assert names["main"] == names["h1"] == names["script"] == 1
    for element, attributes in outline.elements:
        for key in ("src", "href", "action"):
            if key in attributes:
                assert str(attributes[key]).startswith(("/", "#"))
        assert "style" not in attributes
        assert not [key for key in attributes if key.startswith("on")], element


def test_what_the_node_says_is_on_the_page() -> None:
    page = draw(SCENES["busy"]())
    for text in ("2 versions behind", "Version 0.419", "12 s left", "11.9 MB/s", "6 in the last", "93", "trainer"):
        assert text in page
    assert "Round 419" in page
    assert "is tried again later" in page


def test_nothing_a_stranger_names_is_markup() -> None:
    page = draw(hostile())
    assert page.count("&lt;script&gt;") >= 8
    names = Counter(name for name, _ in Outline(page).elements)
    assert names["script"] == 1
    assert names["img"] == 0
    assert HOSTILE not in page
    assert "two\\nlines \\x1b[31m" in page


def test_the_filter_keeps_what_was_asked() -> None:
    scene = SCENES["busy"]()
    page = draw(scene, log=scene.log_tail.select("warning", 'a "bootstrap"'))
    assert 'value="a &quot;bootstrap&quot;"' in page
    assert re.search(r'<option value="warning" selected', page)
    assert "No line passes the filter." in page


def test_without_a_log_other_machines_are_told_where_it_is() -> None:
    page = draw(SCENES["busy"](), log=None)
    assert "programs of this machine only" in page
    assert "is tried again later" not in page


def test_disagreement_is_drawn_in_runs_with_gossip_only() -> None:
    mixing = draw(SCENES["mixing"]())
    for text in ("Disagreement of trainers", "0.021", "4.71, bound 6.02", "mix 1 open, mix 2 part"):
        assert text in mixing
    assert "Disagreement" not in draw(SCENES["idle"]())


def test_the_files_beside_the_page_ask_nobody_else_either() -> None:
    for name, _ in ASSETS.values():
        text = read_asset(name).decode().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text
        assert "@import" not in text
        assert "eval(" not in text
    assert ".innerHTML =" not in read_asset("status.js").decode()


def test_rounds_are_shown_open_where_there_are_some() -> None:
    assert "<details open>" in draw(SCENES["busy"]())
    assert "<details open>" not in draw(SCENES["idle"]())
