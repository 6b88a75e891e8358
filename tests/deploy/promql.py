"""Which series a query asks for, found without a parser; where one is installed, a test compares the two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

KEYWORDS: Final = frozenset(
    {
        *("and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"),
        *("inf", "nan", "start", "end"),
    }
)
GROUPING: Final = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
"""Words after which a list of labels may stand."""

_TOKEN: Final = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<range>\[[^\]]*\])
  | (?P<number>\d[\d.]*(?:[eE][+-]?\d+)?(?:ms|[smhdwy])?)
  | (?P<name>[A-Za-z_:][A-Za-z0-9_:.]*|\$\w+)
  | (?P<other>\S)
    """,
    re.VERBOSE,
)
_MATCHER: Final = re.compile(r"""\s*(\w+)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*")\s*,?""")


@dataclass(frozen=True, slots=True)
class Selector:
    """One series a query asks for."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    """Label, operator, value."""


def find_selectors(query: str) -> list[Selector]:
    """Return every selector of a query, in order."""
    found: list[Selector] = []
    position = 0
    while (token := _TOKEN.search(query, position)) is not None:
        position = token.end()
        word = token["name"]
        if word is None:
            continue
        rest = query[position:].lstrip()
        start = len(query) - len(rest)
        if word.lower() in GROUPING and rest.startswith("("):
            position = query.index(")", start) + 1
        elif word.lower() in KEYWORDS or rest.startswith("("):
            continue
        elif re.match(r"(by|without)\b", rest):
            continue  # an aggregation whose labels stand before its argument
        elif rest.startswith("{"):
            matchers, position = _read_matchers(query, start)
            found.append(Selector(word, matchers))
        else:
            found.append(Selector(word))
    return found


def find_labels(query: str) -> set[str]:
    """Return the labels a query groups by."""
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", query)
    return {label.strip() for one in lists for label in one.split(",") if label.strip()}


def _read_matchers(query: str, start: int) -> tuple[tuple[tuple[str, str, str], ...], int]:
    matchers, position = [], start + 1
    while query[position:].lstrip()[0] != "}":
        matcher = _MATCHER.match(query, position)
        assert matcher is not None, f"no matcher at {query[position:]!r}"
        matchers.append((matcher[1], matcher[2], matcher[3][1:-1]))
        position = matcher.end()
    return tuple(matchers), query.index("}", position) + 1


def read_parsed(expression: Any, found: set[str]) -> set[str]:
    """Collect the names a real parser finds."""
    if type(expression).__name__ in ("VectorSelector",):
        found.add(expression.name)
    for attribute in ("expr", "lhs", "rhs", "param", "args", "vector_selector", "vs"):
        below = getattr(expression, attribute, None)
        for one in below if isinstance(below, list) else [below]:
            if one is not None and not isinstance(one, str | float | int):
                read_parsed(one, found)
    return found
