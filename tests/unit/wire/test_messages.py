"""Every message has a number and a wire form."""

from __future__ import annotations

import typing

from pulsenet.wire.messages import MESSAGE_TYPES, Message


def test_every_message_has_exactly_one_number() -> None:
    assert set(MESSAGE_TYPES.values()) == set(typing.get_args(Message))
    assert len(set(MESSAGE_TYPES.values())) == len(MESSAGE_TYPES)
    assert all(1 <= number <= 255 for number in MESSAGE_TYPES)
