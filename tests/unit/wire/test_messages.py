"""Every message has the number that the specification gives it."""

from __future__ import annotations

import re
from pathlib import Path

from pulsenet.wire.messages import MESSAGE_TYPES

SPEC = Path(__file__).resolve().parents[3] / "proto" / "SPEC.md"


def test_every_message_has_the_number_of_the_specification() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z]\w+) \|", SPEC.read_text(), re.MULTILINE)
    assert [(str(number), kind.__name__) for number, kind in MESSAGE_TYPES.items()] == rows
    assert len(set(MESSAGE_TYPES.values())) == len(rows)
