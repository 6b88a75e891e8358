"""Which chunks of a blob somebody holds: bits on the wire, arrays here (SPEC section 5, Holdings)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.wire.chunks import split_digests
from pulsenet.wire.messages import HoldingsReply

GIVEN_MAX = 65_536
"""Chunks remembered as given to somebody; the one given longest ago is forgotten beyond."""

DIGESTS_AT_ONCE = 65_536
"""Entries looked at together: whole bytes of flags, and little memory for a list of a million."""

Flags = NDArray[np.bool_]
"""One flag for each entry of a chunk list."""


def pack_flags(flags: Iterable[bool]) -> bytes:
    """Return flags as they travel: a bit each, from the highest of the first byte."""
    return np.packbits(np.fromiter(flags, np.bool_)).tobytes()


def unpack_flags(data: bytes, count: int) -> Flags:
    """Return the ``count`` flags in ``data``.

    Raises:
        RemoteProtocolError: ``schema``; another size is due, or a spare bit is set.
    """
    if len(data) != (count + 7) // 8:
        raise RemoteProtocolError("schema", f"{len(data)} bytes hold no {count} flags")
    flags = np.unpackbits(np.frombuffer(data, np.uint8)).astype(np.bool_)
    if flags[count:].any():
        raise RemoteProtocolError("schema", "a spare bit is set")
    return flags[:count]


class Given:
    """The chunks this node has sent to somebody lately, or is sending. Bounded."""

    def __init__(self) -> None:
        self._digests: dict[Digest, None] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._digests

    def note(self, digest: Digest) -> None:
        """Remember that a chunk goes out."""
        self._digests.pop(digest, None)
        self._digests[digest] = None
        if len(self._digests) > GIVEN_MAX:
            del self._digests[next(iter(self._digests))]


def make_holdings_reply(
    blob_id: Digest, encoded: bytes, has_chunk: Callable[[Digest], bool], was_given: Callable[[Digest], bool]
) -> HoldingsReply:
    """Return what a provider tells of a blob whose encoded chunk list it holds."""
    held, given = bytearray(), bytearray()
    for digests in split_digests(encoded, DIGESTS_AT_ONCE):
        held += pack_flags(map(has_chunk, digests))
        given += pack_flags(map(was_given, digests))
    return HoldingsReply(blob_id, bytes(held), bytes(given))
