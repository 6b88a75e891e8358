"""One key in two places is told, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain.records import Have
from pulsenet.ids import PeerId, RunId
from pulsenet.node.doubles import OWN_RECORDS_MAX, PEERS_MAX, RETURN_SECONDS_MAX, TELL_AGAIN_SECONDS, Doubles

OWN, OTHER = PeerId(b"o" * 32), PeerId(b"p" * 32)
HERE, THERE = "/ip4/192.0.2.1/tcp/1", "/ip4/198.51.100.2/tcp/2"


def make_have(issued_at_ms: int, *addresses: str) -> Have:
    return Have(RunId(bytes(32)), "seed", 0, 0, 0, (), addresses, issued_at_ms)


@pytest.fixture
def doubles() -> Doubles:
    return Doubles(OWN)


def test_a_record_in_the_own_name_that_this_node_did_not_sign_is_told_once(doubles: Doubles) -> None:
    doubles.note_own(1_000)
    doubles.note_own(2_000)
    text = doubles.look(OWN, make_have(2_500, THERE), 10.0)
    assert text is not None
    assert THERE in text
    assert "key of its own" in text
    assert doubles.look(OWN, make_have(2_600, THERE), 11.0) is None
    assert doubles.look(OWN, make_have(2_700, THERE), 10.0 + TELL_AGAIN_SECONDS) is not None


def test_own_records_and_those_from_before_a_restart_are_nobody_elses(doubles: Doubles) -> None:
    assert doubles.look(OWN, make_have(500, HERE), 0.0) is None
    doubles.note_own(1_000)
    for issued_at_ms in range(2_000, 2_000 + OWN_RECORDS_MAX - 1):
        doubles.note_own(issued_at_ms)
    assert doubles.look(OWN, make_have(999, HERE), 1.0) is None
    assert all(doubles.look(OWN, make_have(own, HERE), 1.0) is None for own in (1_000, 2_000, 2_100))


def tell(doubles: Doubles, *records: tuple[float, str], peer_id: PeerId = OTHER) -> list[str]:
    told = [doubles.look(peer_id, make_have(int(now * 1000), *address.split()), now) for now, address in records]
    return [text for text in told if text is not None]


def test_a_key_whose_addresses_go_to_and_fro_is_told(doubles: Doubles) -> None:
    (text,) = tell(doubles, *((30.0 * number, (HERE, THERE)[number % 2]) for number in range(8)))
    assert HERE in text
    assert THERE in text


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([(0, HERE), (30, THERE), (60, THERE)], id="it moved"),
        pytest.param([(0, HERE), (30, THERE), (60, HERE)], id="it moved and came back once"),
        pytest.param([(0, HERE), (30, ""), (60, HERE), (90, ""), (120, HERE), (150, "")], id="nobody can dial it"),
        pytest.param([(30 * n, (HERE, f"{HERE} {THERE}", THERE)[n % 3]) for n in range(3)], id="one by one"),
        pytest.param([(n * RETURN_SECONDS_MAX, (HERE, THERE)[n % 2]) for n in range(9)], id="home and office"),
        pytest.param([(30 * n, f"{HERE} /ip4/10.0.0.{n}/tcp/1") for n in range(9)], id="one address stays"),
    ],
)
def test_a_node_that_moves_is_one_node(doubles: Doubles, records: Any) -> None:
    assert tell(doubles, *((float(now), address) for now, address in records)) == []


def test_memory_is_bounded(doubles: Doubles) -> None:
    for number in range(2 * PEERS_MAX):
        tell(doubles, (float(number), HERE), peer_id=PeerId(number.to_bytes(32, "big")))
    assert len(doubles._places) == PEERS_MAX
