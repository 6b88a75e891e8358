"""Budgets of the answering side: what one peer, and all that nobody listed, may take up."""

from __future__ import annotations

import contextlib

from pulsenet.ids import PeerId
from pulsenet.wire.messages import GetChunks, GetHead
from pulsenetd.network.admission import (
    BUFFERED_SIZE_BYTES_MAX,
    CHUNK_REQUESTS_BURST,
    PEERS_MAX,
    REQUESTS_BURST,
    REQUESTS_PER_SECOND,
    STREAMS_ACCEPTED_MAX,
    STREAMS_ACCEPTED_PER_PEER_MAX,
    UNLISTED_BUFFERED_SIZE_BYTES_MAX,
    UNLISTED_REQUESTS_BURST,
    UNLISTED_STREAMS_ACCEPTED_MAX,
    Doorkeeper,
)

MEMBER = PeerId(b"m" * 32)
CHUNKS = GetChunks(())


def stranger(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


class Rules:
    """A run that everybody may join, with one member."""

    def __init__(self, *, is_private: bool = False) -> None:
        self.is_private = is_private

    def admits(self, peer_id: PeerId) -> bool:
        return peer_id == MEMBER or not self.is_private

    def is_member(self, peer_id: PeerId) -> bool:
        return peer_id == MEMBER


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock | None = None, *, is_private: bool = False) -> Doorkeeper:
    doorkeeper = Doorkeeper(clock or Clock())
    doorkeeper.rules = Rules(is_private=is_private)
    return doorkeeper


def code(refusal: object) -> str | None:
    return getattr(refusal, "code", None)


def test_a_private_run_lets_in_its_members_only() -> None:
    doorkeeper = make(is_private=True)
    with doorkeeper.enter(MEMBER) as member, doorkeeper.enter(stranger(1)) as other:
        assert (code(member), code(other)) == (None, "not-admitted")
    assert doorkeeper.peers == frozenset()


def test_any_number_of_strangers_leaves_streams_for_the_runs_own() -> None:
    doorkeeper = make()
    with contextlib.ExitStack() as held:
        for number in range(UNLISTED_STREAMS_ACCEPTED_MAX):
            assert held.enter_context(doorkeeper.enter(stranger(number))) is None
        assert code(held.enter_context(doorkeeper.enter(stranger(5_000)))) == "too-many-streams"
        for _ in range(STREAMS_ACCEPTED_PER_PEER_MAX):
            assert held.enter_context(doorkeeper.enter(MEMBER)) is None
        assert code(held.enter_context(doorkeeper.enter(MEMBER))) == "too-many-streams"
    with doorkeeper.enter(stranger(1)) as refusal:
        assert refusal is None


def test_all_streams_together_are_bounded_before_a_run_is_known() -> None:
    doorkeeper = Doorkeeper(Clock())
    with contextlib.ExitStack() as held:
        codes = [code(held.enter_context(doorkeeper.enter(stranger(number)))) for number in range(STREAMS_ACCEPTED_MAX)]
        assert codes.count(None) == UNLISTED_STREAMS_ACCEPTED_MAX
        assert code(held.enter_context(doorkeeper.enter(stranger(9_999)))) == "too-many-streams"


def test_one_peers_requests_have_a_rate_and_those_for_chunks_another() -> None:
    clock = Clock()
    doorkeeper = make(clock)
    codes = [code(doorkeeper.refuse_request(MEMBER, GetHead())) for _ in range(REQUESTS_BURST + 1)]
    assert codes == [None] * REQUESTS_BURST + ["busy"]
    assert doorkeeper.refuse_request(stranger(1), GetHead()) is None
    codes = [code(doorkeeper.refuse_request(MEMBER, CHUNKS)) for _ in range(CHUNK_REQUESTS_BURST + 1)]
    assert codes == [None] * CHUNK_REQUESTS_BURST + ["busy"]
    clock.now += 1.0
    codes = [code(doorkeeper.refuse_request(MEMBER, GetHead())) for _ in range(int(REQUESTS_PER_SECOND) + 1)]
    assert codes.count(None) == REQUESTS_PER_SECOND


def test_a_flood_from_many_keys_is_bounded_and_the_runs_own_are_answered() -> None:
    doorkeeper = make()
    codes = [
        code(doorkeeper.refuse_request(stranger(number), GetHead())) for number in range(UNLISTED_REQUESTS_BURST + 50)
    ]
    assert codes == [None] * UNLISTED_REQUESTS_BURST + ["busy"] * 50
    assert doorkeeper.refuse_request(MEMBER, GetHead()) is None
    assert len(doorkeeper._rates) <= PEERS_MAX


def test_a_peer_that_struck_out_is_refused_until_its_time_is_over() -> None:
    clock = Clock()
    doorkeeper = make(clock)
    while not doorkeeper.standing.strike(MEMBER, clock.now):
        pass
    refusal = doorkeeper.refuse_peer(MEMBER)
    assert (code(refusal), refusal and refusal.retry_after_ms) == ("struck-out", 60_001)
    assert doorkeeper.refuse_peer(stranger(1)) is None
    clock.now += 60.0
    assert doorkeeper.refuse_peer(MEMBER) is None


def test_bytes_that_are_held_are_counted_by_stream_and_given_back() -> None:
    doorkeeper = make()
    theirs, own = doorkeeper.open_account(stranger(1)), doorkeeper.open_account(MEMBER)
    assert theirs.note_arriving(UNLISTED_BUFFERED_SIZE_BYTES_MAX)
    assert not doorkeeper.open_account(stranger(2)).note_leaving(1)
    assert not theirs.note_leaving(1)
    rest = BUFFERED_SIZE_BYTES_MAX - UNLISTED_BUFFERED_SIZE_BYTES_MAX
    assert own.note_leaving(rest)
    assert not own.note_arriving(1)
    assert theirs.note_arriving(10)
    assert own.note_arriving(1)
    assert doorkeeper.buffered_size_bytes == rest + 11
    theirs.close()
    own.close()
    assert doorkeeper.buffered_size_bytes == 0
