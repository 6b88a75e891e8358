"""Who feeds whom, as this node sees it: a picture and a table of the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.etree.ElementTree import Element

from pulsenetd.page.markup import tag
from pulsenetd.words import say_rate, say_size

Peer = Mapping[str, Any]

DRAWN_MAX: Final = 6
"""Peers on each side; all are in the table."""

ROW_HEIGHT: Final = 58
LABEL_END, NODE_START, NODE_END, LABEL_START = 31, 43, 57, 69
"""Places from the left, in hundredths of the width: the picture stretches, its text does not."""

ACTIVE_BYTES_PER_SECOND: Final = 1.0


def short_name(peer_id: str) -> str:
    """Return the end of a peer id: all begin alike."""
    return f"…{peer_id[-6:]}"


def draw_map(peers: Sequence[Peer]) -> list[Element]:
    """Return the picture: who feeds this node on the left, whom it feeds on the right.

    Args:
        peers: ``peer_list`` of ``/status``.
    """
    feeders = [peer for peer in peers if peer["received_bytes"]]
    readers = [peer for peer in peers if peer["sent_bytes"]]
    if not feeders and not readers:
        return [tag("p", "No chunk has moved between this node and others yet.", class_="empty")]
    sides = (feeders[:DRAWN_MAX], readers[:DRAWN_MAX])
    height = ROW_HEIGHT * max(*map(len, sides), 1) + 8
    middle = height / 2
    svg = tag("svg", class_="map", width="100%", height=height, role="img")
    svg.set("aria-label", _describe(feeders, readers))
    for peers_there, direction in zip(sides, ("received", "sent"), strict=True):
        top = middle - ROW_HEIGHT * len(peers_there) / 2
        if not peers_there:
            x, anchor = ("30%", "end") if direction == "received" else ("70%", "start")
            svg.append(tag("text", "nobody yet", x=x, y=middle + 4, text_anchor=anchor, class_="nobody"))
        for row, peer in enumerate(peers_there):
            svg.extend(_draw_peer(peer, direction, y=top + ROW_HEIGHT * (row + 0.5), middle=middle))
    svg.append(
        tag(
            "rect", x=f"{NODE_START}%", width=f"{NODE_END - NODE_START}%", y=middle - 20, height=40, rx=6, class_="self"
        )
    )
    svg.append(tag("text", "this", x="50%", y=middle - 3, text_anchor="middle", class_="self-text"))
    svg.append(tag("text", "node", x="50%", y=middle + 12, text_anchor="middle", class_="self-text"))
    left_out = max(len(feeders) - DRAWN_MAX, 0) + max(len(readers) - DRAWN_MAX, 0)
    quiet = sum(1 for peer in peers if not peer["received_bytes"] and not peer["sent_bytes"])
    notes = [f"{left_out} more are in the table."] if left_out else []
    notes += [_idle(quiet)] if quiet else []
    heads = tag(
        "div", tag("span", "feed this node"), tag("span", "are fed by it"), class_="map-heads", aria_hidden="true"
    )
    return [heads, svg, tag("p", " ".join(notes), class_="quiet")] if notes else [heads, svg]


def draw_table_rows(peers: Sequence[Peer]) -> list[Element]:
    """Return one row a peer."""
    return [
        tag(
            "tr",
            tag("th", tag("code", short_name(peer["peer_id"]), title=peer["peer_id"]), scope="row"),
            tag("td", peer["role"] or "unknown"),
            tag("td", peer["version"] or "none", class_="number"),
            tag("td", _link(peer)),
            tag("td", _milliseconds(peer["round_trip_seconds"]), class_="number"),
            [
                cell
                for name in ("received", "sent")
                for cell in (
                    tag("td", say_rate(peer[f"{name}_bytes_per_second"] or None) or "0", class_="number"),
                    tag("td", say_size(peer[f"{name}_bytes"]) if peer[f"{name}_bytes"] else "0", class_="number"),
                )
            ],
        )
        for peer in peers
    ] or [tag("tr", tag("td", "nobody is connected", colspan=9))]


def _draw_peer(peer: Peer, direction: str, *, y: float, middle: float) -> list[Element]:
    rate = peer[f"{direction}_bytes_per_second"] or 0.0
    is_left, is_active = direction == "received", rate >= ACTIVE_BYTES_PER_SECOND
    kind = f"edge {direction} {'active' if is_active else 'resting'}"
    # Towards the middle of the node, each at its own height.
    end = middle + max(-14.0, min(14.0, (y - middle) / 4))
    start_x, end_x = (LABEL_END, NODE_START) if is_left else (LABEL_START, NODE_END)
    line = tag("line", x1=f"{start_x}%", y1=y, x2=f"{end_x}%", y2=end, class_=kind, stroke_width=_width(rate))
    x, anchor = ("30%", "end") if is_left else ("70%", "start")
    about = " ".join(filter(None, (peer["role"] or "peer", peer["version"] or "")))
    amount = say_rate(rate) if is_active else f"{say_size(peer[f'{direction}_bytes'])} so far"
    # A picture in the picture: only that can be placed in hundredths.
    arrow = tag("path", d="M-9,-4.5 L0,0 L-9,4.5 Z", class_=f"tip {direction}")
    tip = tag("svg", arrow, x=f"{end_x if is_left else start_x}%", y=end if is_left else y, overflow="visible")
    texts = [
        tag("text", short_name(peer["peer_id"]), x=x, y=y - 12, text_anchor=anchor, class_="name"),
        tag("text", about, x=x, y=y + 4, text_anchor=anchor, class_="about"),
        tag("text", amount, x=x, y=y + 19, text_anchor=anchor, class_="amount"),
    ]
    return [line, tip, *texts]


def _width(bytes_per_second: float) -> float:
    """Return a line width that grows with the order of magnitude."""
    for width, least in ((5, 1e8), (4, 1e7), (3, 1e6), (2, 1e5)):
        if bytes_per_second >= least:
            return width
    return 1.5


def _link(peer: Peer) -> str:
    if not peer["is_connected"]:
        return "gone"
    return ("out" if peer["is_outbound"] else "in") + (", neighbour" if peer["is_neighbour"] else "")


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "< 1 ms"


def _idle(count: int) -> str:
    if not count:
        return ""
    return "1 more peer is connected and quiet." if count == 1 else f"{count} more peers are connected and quiet."


def _describe(feeders: Sequence[Peer], readers: Sequence[Peer]) -> str:
    fed = ", ".join(short_name(peer["peer_id"]) for peer in feeders[:DRAWN_MAX]) or "nobody"
    read = ", ".join(short_name(peer["peer_id"]) for peer in readers[:DRAWN_MAX]) or "nobody"
    return f"Fed by {fed}; feeds {read}. The table below says the same in figures."
