"""What is text stays text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from pulsenetd.page.markup import render, tag


class Reader(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, attributes))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_children_and_attributes_take_their_places() -> None:
    made = tag("p", "a", tag("b", "c"), "d", None, ["e", tag("i")], class_="x", aria_label="y", hidden=True, id=None)
    assert render([made]) == '<p class="x" aria-label="y" hidden="">a<b>c</b>de<i></i></p>'
    assert render([tag("br"), tag("input", name="n")]) == '<br>\n<input name="n">'


@given(st.text(), st.text())
def test_no_text_becomes_markup(text: str, attribute: str) -> None:
    seen = Reader(render([tag("p", text, title=attribute)]))
    assert [name for name, _ in seen.tags] == ["p"]
    if text.isprintable():
        assert seen.text == text
    if attribute.isprintable():
        assert seen.tags[0][1] == [("title", attribute)]


def test_control_characters_are_seen() -> None:
    assert render([tag("p", "a\x00\u202eb\n")]) == "<p>a\\x00\\u202eb\\n</p>"
