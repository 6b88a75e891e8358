"""HTML and SVG as trees: what is text stays text, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

from pulsenetd.logs import printable

Child = Element | str | None
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child | Iterable[Child], **attributes: Attribute) -> Element:
    """Return an element.

    Args:
        name: Of HTML or SVG.
        children: Elements and texts, or rows of them; ``None`` is left out.
        attributes: ``aria_label`` stands for ``aria-label``, ``class_`` for ``class``; ``True`` is an attribute without
            a value, ``None`` and ``False`` none at all.
    """
    element = Element(name)
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else str(value)
        element.set(key.rstrip("_").replace("_", "-"), text if text.isprintable() else printable(text))
    for child in children:
        for one in [child] if child is None or isinstance(child, str | Element) else child:
            _append(element, one)
    return element


def render(elements: Iterable[Element]) -> str:
    """Return elements as HTML."""
    return "\n".join(tostring(element, encoding="unicode", method="html") for element in elements)


def _append(element: Element, child: Child) -> None:
    if child is None:
        return
    if isinstance(child, Element):
        element.append(child)
        return
    text = child if child.isprintable() else printable(child)
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text
