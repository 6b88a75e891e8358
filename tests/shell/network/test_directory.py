"""Signed records in a real DHT on loopback."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from networks import RUN_ID, open_both, open_directory, sign_head

from pulsenet import limits
from pulsenet.chain.records import Have, SignedRecord
from pulsenet.chain.signing import encode_signed, seal
from pulsenet.errors import LocalProtocolError, UnavailableError
from pulsenet.node.mesh import HAVE_SECONDS
from pulsenetd.identity import Identity
from pulsenetd.network import hivemind_repairs
from pulsenetd.network.directory_keys import DirectoryKeys, get_shard, get_slot


def sign_have(identity: Identity, *, issued_at_ms: int | None = None) -> SignedRecord:
    issued_at_ms = int(time.time() * 1000) if issued_at_ms is None else issued_at_ms
    have = Have(RUN_ID, "seed", 0, 0, 0, (), ("/ip4/127.0.0.1/tcp/1",), issued_at_ms)
    return seal(have, identity.sign, identity.peer_id)


async def test_heads_and_haves_travel_between_nodes_that_only_share_a_bootstrap(make_node: Any) -> None:
    async with (
        make_node("a") as a,
        make_node("b") as b,
        make_node("c") as c,
        open_directory(a, b) as boot,
        open_directory(b, b) as writer,
        open_directory(c, b, client_mode=True) as reader,
    ):
        await b.meet(a)
        await c.meet(a)
        assert await writer.join([a.peer_id]) == (a.peer_id,)
        assert await reader.join([a.peer_id, c.peer_id]) == (a.peer_id,)
        assert await reader.read_heads() == []
        head, have = sign_head(b.identity, 1), sign_have(b.identity)
        assert await writer.announce_head(head)
        assert await writer.announce_have(have)
        shard = get_shard(b.peer_id)
        for directory in (boot, reader):
            assert await directory.read_heads() == [encode_signed(head)]
            assert await directory.read_haves(shard) == [encode_signed(have)]
            assert await directory.read_haves((shard + 1) % 16) == []
        newer = sign_head(b.identity, 2)
        assert await writer.announce_head(newer)
        assert await reader.read_heads() == [encode_signed(newer)]
        assert reader.clock_offset.ahead_seconds == pytest.approx(0.0, abs=1.0)


async def test_an_announcement_that_does_not_grow_is_dropped_and_the_newer_record_stays(make_node: Any) -> None:
    async with make_node("a") as a, open_directory(a, a) as directory:
        now_ms = int(time.time() * 1000)
        newer = sign_head(a.identity, 2, issued_at_ms=now_ms)
        assert await directory.announce_head(newer)
        assert not await directory.announce_head(newer)
        assert not await directory.announce_head(sign_head(a.identity, 1, issued_at_ms=now_ms - 1_000))
        assert not await directory.announce_have(sign_have(a.identity, issued_at_ms=now_ms - 121_000))
        assert await directory.read_heads() == [encode_signed(newer)]


async def test_what_the_directory_did_not_take_is_announced_again_at_the_next_mending(make_node: Any) -> None:
    """A-DHT-1, A-DHT-4: the next regular announcement may come minutes later."""
    async with make_node("a") as a, open_directory(a, a) as directory:
        head = sign_head(a.identity, 1)
        await directory.close()
        with pytest.raises(UnavailableError):
            await directory.announce_head(head)
        await directory.open(a.transport.p2pd.hivemind_p2p)
        await directory.announce_overdue()
        assert await directory.read_heads() == [encode_signed(head)]
        assert not await directory.announce_head(head), "it is announced"


async def test_an_overdue_head_of_a_key_that_is_revoked_meanwhile_is_given_up(make_node: Any) -> None:
    """It ended the node at the next mending."""
    async with make_node("a") as a, make_node("b") as b, open_directory(a, a) as directory:
        await directory.close()
        with pytest.raises(UnavailableError):
            await directory.announce_head(sign_head(a.identity, 1))
        await directory.open(a.transport.p2pd.hivemind_p2p)
        directory.set_authorities([b.peer_id])
        for _ in range(2):
            await directory.announce_overdue()
        directory.set_authorities([a.peer_id])
        await directory.announce_overdue()
        assert await directory.read_heads() == []


async def test_a_newer_record_takes_the_place_of_one_that_is_overdue(make_node: Any) -> None:
    async with make_node("a") as a, open_directory(a, a) as directory:
        now_ms = int(time.time() * 1000)
        old, newer = (
            sign_head(a.identity, 1, issued_at_ms=now_ms),
            sign_head(a.identity, 2, issued_at_ms=now_ms + 1_000),
        )
        await directory.close()
        for head in (old, newer):
            with pytest.raises(UnavailableError):
                await directory.announce_head(head)
        await directory.open(a.transport.p2pd.hivemind_p2p)
        await directory.announce_overdue()
        assert await directory.read_heads() == [encode_signed(newer)]


async def test_a_forged_head_under_the_authoritys_key_is_ignored(make_node: Any) -> None:
    """A-DHT-6, A-AUTH-4: junk and a replay with a later expiry change nothing."""
    async with open_both(make_node) as (a, b, honest, attacker):
        old = sign_head(a.identity, 1)
        head = sign_head(a.identity, 2, issued_at_ms=int(time.time() * 1000) + 1)
        assert await honest.announce_head(head)
        key = DirectoryKeys(RUN_ID).get_head_key(a.peer_id, get_slot(time.time()))
        forged = encode_signed(sign_head(b.identity, 9))
        assert not await attacker._node.store(key, forged, time.time() + 250)
        assert not await attacker._node.store(key, encode_signed(old), time.time() + 250)
        assert not await attacker._node.store(key, b"junk", time.time() + 250, subkey="junk")
        assert await honest.read_heads() == [encode_signed(head)]
        assert await attacker.read_heads() == [encode_signed(head)]
        assert honest.validator.rejected["untrusted"] >= 1
        assert honest.validator.rejected["expiry"] >= 1


async def test_a_private_runs_records_are_not_found_without_its_secret(make_node: Any) -> None:
    async with (
        make_node("a") as a,
        make_node("b") as b,
        open_directory(a, a, secret=b"s" * 16) as member,
        open_directory(b, a) as outsider,
    ):
        await b.meet(a)
        assert await outsider.join([a.peer_id]) == ()
        head = sign_head(a.identity, 1)
        assert await member.announce_head(head)
        assert await member.read_heads() == [encode_signed(head)]
        assert await outsider.read_heads() == []


async def test_records_that_are_not_ours_to_announce_are_refused(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b, open_directory(a, b) as directory:
        assert not await directory.announce_head(sign_head(a.identity, 1))
        with pytest.raises(LocalProtocolError):
            await directory.announce_head(sign_have(b.identity))
        with pytest.raises(LocalProtocolError):
            await directory.announce_have(sign_head(b.identity, 1))


async def test_what_was_stored_survives_a_restart_of_p2pd(make_node: Any) -> None:
    async with make_node("a") as a, open_directory(a, a) as directory:
        head = sign_head(a.identity, 1)
        await directory.announce_head(head)
        await directory.close(p2pd_is_alive=False)
        assert not directory.is_open
        with pytest.raises(UnavailableError):
            await directory.read_heads()
        await a.transport.reopen()
        await directory.open(a.transport.p2pd.hivemind_p2p)
        assert directory.is_open
        assert await directory.read_heads() == [encode_signed(head)]


async def test_a_clock_ten_minutes_ahead_is_named_and_corrected_once_three_peers_agree(make_node: Any) -> None:
    """A-DHT-2."""
    async with make_node("a") as a, open_directory(a, a) as directory:
        for number, ahead in enumerate((600.0, 600.2, 599.9)):
            directory._learn_offset(sign_have(a.identity).signers[0][:31] + bytes([number]), ahead, 0.1)  # type: ignore[arg-type]
        assert directory.clock_offset.warning is not None
        assert "600.0 s ahead" in directory.clock_offset.warning
        assert directory.now() == pytest.approx(time.time() - 600.0, abs=1.0)
        assert directory.now_ms() == pytest.approx((time.time() - 600.0) * 1000, abs=1000)


async def test_a_clock_that_is_off_is_named_once_at_the_first_peer_that_says_so(
    make_node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A-DHT-2: two nodes alone never get the three peers that correct a clock, and must not be silent."""
    caplog.set_level(logging.WARNING)
    async with (
        make_node("a") as a,
        make_node("b") as b,
        open_directory(b),
        open_directory(a, wall_clock=lambda: time.time() - 600) as directory,
    ):
        hivemind_repairs.set_clock(time.time)  # one clock per process; here two nodes share it
        await a.meet(b)
        for _ in range(3):
            assert await directory.join([b.peer_id]) == (b.peer_id,)
    lines = [record.getMessage() for record in caplog.records if "clock" in record.getMessage()]
    assert len(lines) == 1, lines
    assert "600" in lines[0]
    assert "behind its peers (1 asked)" in lines[0]
    assert "timedatectl" in lines[0]


async def test_what_was_announced_reaches_a_node_that_was_away_when_it_was(make_node: Any) -> None:
    """A-DHT-1, A-DHT-4: joined after a partition, without waiting for the next announcement."""
    async with (
        make_node("a") as a,
        make_node("b") as b,
        open_directory(a, a) as ours,
        open_directory(b, a) as theirs,
    ):
        head = sign_head(a.identity, 1)
        await ours.announce_head(head)
        await a.meet(b)
        assert not len(theirs._storage)
        await ours.join([b.peer_id])
        assert await theirs.read_heads() == [encode_signed(head)]


def test_records_outlive_two_announcements_that_fail() -> None:
    """A-DHT-1: refreshed long before they expire."""
    assert max(limits.HEAD_RESIGN_SECONDS, HAVE_SECONDS) * 3 <= limits.RECORD_VALIDITY_SECONDS
    assert limits.RECORD_VALIDITY_SECONDS < limits.DHT_EXPIRY_SECONDS_MAX < limits.DHT_SLOT_SECONDS


async def test_after_the_clock_was_set_back_new_records_count_at_once(make_node: Any) -> None:
    """A-DHT-3."""
    wall_offset = 86_400.0

    def wall_clock() -> float:
        return time.time() + wall_offset

    async with make_node("a") as a, open_directory(a, a, wall_clock=wall_clock) as directory:
        ahead = sign_head(a.identity, 1, issued_at_ms=directory.now_ms())
        assert await directory.announce_head(ahead)
        wall_offset = 0.0
        head = sign_head(a.identity, 2, issued_at_ms=directory.now_ms())
        assert await directory.announce_head(head)
        assert await directory.read_heads() == [encode_signed(head)]


async def test_a_peer_that_does_not_answer_is_left_out(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b, open_directory(a, a) as directory:
        await a.meet(b)
        assert await directory.join([b.peer_id]) == ()


async def test_who_only_asks_from_now_on_is_told_of_itself_and_goes_on(make_node: Any) -> None:
    """A peer that knew it as one that answers names it; hivemind asserts that nobody does, and that ended the node."""
    async with open_both(make_node) as (a, b, boot, directory):
        assert await directory.set_client_mode(True)
        assert await directory.join([a.peer_id]) == (a.peer_id,)
        have = sign_have(b.identity)
        assert await directory.announce_have(have)
        assert await boot.read_haves(get_shard(b.peer_id)) == [encode_signed(have)]


async def test_what_hivemind_raises_ends_no_node(make_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise AssertionError("a peer said something else than hivemind takes for granted")

    async with open_both(make_node) as (a, b, _, directory):
        for name in ("store", "get_many", "find_nearest_nodes"):
            monkeypatch.setattr(directory._node, name, fail)
        for ask in (lambda: directory.announce_have(sign_have(b.identity)), lambda: directory.read_haves(0)):
            with pytest.raises(UnavailableError, match="takes for granted"):
                await ask()
        assert await directory.join([a.peer_id]) == (a.peer_id,)
