"""Pushing to whom can be reached."""

from __future__ import annotations

from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import SendRequest
from pulsenet.wire.messages import GetRounds

FIRST, SECOND, THIRD = (PeerId(bytes([number]) * 32) for number in range(3))


def receivers(effects: list[object]) -> list[PeerId]:
    return [effect.peer_id for effect in effects if isinstance(effect, SendRequest)]


def test_ids_never_repeat() -> None:
    courier = Courier()
    ids = [courier.take_request_id(), courier.send(FIRST, GetRounds(0)).request_id, courier.take_request_id()]
    assert len(set(ids)) == 3


def test_only_connected_peers_are_sent_to_in_order() -> None:
    courier = Courier()
    courier.connected |= {THIRD, FIRST}
    assert receivers([*courier.send_to_connected(GetRounds(0))]) == [FIRST, THIRD]
    assert receivers([*courier.send_to_connected(GetRounds(0), (SECOND, THIRD))]) == [THIRD]
