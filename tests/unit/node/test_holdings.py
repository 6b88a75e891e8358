"""Flags travel as bits, and what was given is remembered within a bound."""

from __future__ import annotations

import numpy as np
import pytest

from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.node.holdings import DIGESTS_AT_ONCE, GIVEN_MAX, Given, make_holdings_reply, pack_flags, unpack_flags
from pulsenet.wire.chunks import ChunkList


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 1000])
def test_flags_arrive_as_they_were_sent(count: int) -> None:
    flags = [bool((place * 7) % 3) for place in range(count)]
    data = pack_flags(flags)
    assert len(data) == (count + 7) // 8
    assert unpack_flags(data, count).tolist() == flags


def test_the_first_flag_is_the_highest_bit() -> None:
    assert pack_flags([True, False, True]) == b"\xa0"


@pytest.mark.parametrize(("data", "count"), [(b"", 1), (b"\x00\x00", 8), (b"\x80", 0), (b"\x10", 3)])
def test_another_size_or_a_spare_bit_is_refused(data: bytes, count: int) -> None:
    with pytest.raises(RemoteProtocolError, match="schema"):
        unpack_flags(data, count)


def test_what_was_given_longest_ago_is_forgotten_first() -> None:
    given = Given()
    digests = [Digest(number.to_bytes(32, "big")) for number in range(GIVEN_MAX + 1)]
    given.note(digests[0])
    given.note(digests[1])
    given.note(digests[0])
    for digest in digests[2:]:
        given.note(digest)
    assert digests[0] in given
    assert digests[1] not in given
    assert digests[-1] in given


def test_flags_are_booleans_of_their_own() -> None:
    flags = unpack_flags(b"\xff", 8)
    assert flags.dtype == np.bool_
    flags[0] = False
    assert unpack_flags(b"\xff", 8)[0]


@pytest.mark.parametrize("count", [0, 5, 8, DIGESTS_AT_ONCE, DIGESTS_AT_ONCE + 3])
def test_a_reply_has_a_flag_for_each_entry_however_many_there_are(count: int) -> None:
    digests = [Digest(number.to_bytes(32, "big")) for number in range(count)]
    chunk_list = ChunkList(tuple((7, digest) for digest in digests))
    held = set(digests[::3])
    reply = make_holdings_reply(
        chunk_list.blob_id, chunk_list.encode(), held.__contains__, lambda digest: digest[-1] == 1
    )
    assert unpack_flags(reply.held, count).tolist() == [place % 3 == 0 for place in range(count)]
    assert unpack_flags(reply.given, count).tolist() == [place % 256 == 1 for place in range(count)]
