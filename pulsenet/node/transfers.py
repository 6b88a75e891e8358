"""Requests for chunks on their way: who owes what, and since when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import CancelRequest
from pulsenet.node.sources import Sources

STALL_SECONDS_MIN = 8.0
"""A request without a reply for this long is hedged: its chunks may be asked of somebody else too."""

STALL_RATIO = 4.0
WAIT_RATIO = 2.0
"""Where chunks come slowly the limit is so many times what passes between two, or between asking and coming."""

END_GAME_SECONDS_MIN = 2.0
"""The least limit where nothing is left to ask for: the last chunks wait for no slow provider."""

CHUNK_TIMEOUT_SECONDS = limits.READ_STALL_SECONDS_MAX
"""Allowance of a request per chunk, on top of opening it: about 50 KB/s is the least rate worth waiting for."""

SLACK_MAX = 8.0
"""On links that are slower still the allowance doubles with each request that ran out of it, up to this."""


class Patience:
    """How long to wait for chunks, by how long they usually take. Pure."""

    __slots__ = ("_chunk_seconds", "_slack", "_wait_seconds")

    def __init__(self) -> None:
        self._chunk_seconds = 0.0
        self._wait_seconds = 0.0
        self._slack = 1.0

    def note_chunk(self, seconds: float, wait_seconds: float) -> None:
        """A chunk came so long after its request or the chunk before it, and so long after its request."""
        self._chunk_seconds += (seconds - self._chunk_seconds) / (8 if self._chunk_seconds else 1)
        self._wait_seconds += (wait_seconds - self._wait_seconds) / (8 if self._wait_seconds else 1)

    def note_success(self) -> None:
        """A request was served within its time."""
        self._slack = max(self._slack / 2, 1.0)

    def note_timeout(self) -> None:
        """A request ran out of time: allow the next more, or a link below the least rate never finishes a chunk."""
        self._slack = min(self._slack * 2, SLACK_MAX)

    def stall_seconds(self, *, is_end: bool = False) -> float:
        """Return how long a request may stand still; less where nothing is left to ask for."""
        usual = max(STALL_RATIO * self._chunk_seconds, WAIT_RATIO * self._wait_seconds)
        return max(usual, END_GAME_SECONDS_MIN if is_end else STALL_SECONDS_MIN)

    def timeout_seconds(self, chunk_count: int, owed_count: int = 0) -> float:
        """Return the limit of a request for so many chunks, which come behind those that its provider owes already."""
        usual = min(STALL_RATIO * self._chunk_seconds or CHUNK_TIMEOUT_SECONDS, CHUNK_TIMEOUT_SECONDS)
        seconds = limits.REQUEST_OPEN_SECONDS_MAX + CHUNK_TIMEOUT_SECONDS * chunk_count + usual * owed_count
        return seconds * self._slack


@dataclass(slots=True, eq=False)
class Transfer:
    """One request for chunks."""

    peer_id: PeerId
    blob_id: Digest
    asked: frozenset[Digest]
    awaited: set[Digest]
    began_at: float
    progress_at: float
    gives_up_at: float
    is_stalled: bool = False
    """Whether it stood still for so long that its chunks may be asked of others too."""
    good_count: int = 0
    bad_count: int = 0


class Transfers:
    """Every request in flight, by id and by chunk; keeps the sources' counts. Pure."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._by_id: dict[int, Transfer] = {}
        self._by_chunk: dict[Digest, list[Transfer]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: int) -> Transfer:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._by_id.values())

    def items(self) -> tuple[tuple[int, Transfer], ...]:
        """Return ids and requests, safe against changes while they are looked at."""
        return tuple(self._by_id.items())

    @property
    def chunk_count(self) -> int:
        """Distinct chunks asked for."""
        return len(self._by_chunk)

    def of_chunk(self, digest: Digest) -> list[Transfer]:
        """Return the requests that may still bring this chunk."""
        return self._by_chunk.get(digest, [])

    def of_peer(self, peer_id: PeerId) -> list[int]:
        """Return the ids of the requests to one peer."""
        return [request_id for request_id, transfer in self._by_id.items() if transfer.peer_id == peer_id]

    def call_back(self, request_id: int) -> CancelRequest:
        """Return the order to end a request: the shell would send what waits again over the peer's next connection."""
        transfer = self._by_id[request_id]
        return CancelRequest(request_id, transfer.peer_id, transfer.blob_id)

    def is_due(self, digest: Digest) -> bool:
        """Say whether a request that makes progress will bring this chunk."""
        return any(not transfer.is_stalled for transfer in self.of_chunk(digest))

    def start(self, request_id: int, transfer: Transfer) -> None:
        """Account for a request that is sent."""
        self._by_id[request_id] = transfer
        for digest in transfer.awaited:
            self._by_chunk.setdefault(digest, []).append(transfer)
        source = self._sources.get(transfer.peer_id)
        if source is not None:
            if not source.chunks_in_flight:
                source.window.begin(transfer.began_at)
            source.requests_in_flight += 1
            source.chunks_in_flight += len(transfer.awaited)

    def stop_awaiting(self, transfer: Transfer, digest: Digest) -> None:
        """The chunk came, or will not."""
        transfer.awaited.discard(digest)
        transfers = self._by_chunk[digest]
        transfers.remove(transfer)
        if not transfers:
            del self._by_chunk[digest]
        source = self._sources.get(transfer.peer_id)
        if source is not None:
            source.chunks_in_flight = max(source.chunks_in_flight - 1, 0)

    def end(self, request_id: int) -> tuple[Transfer, tuple[Digest, ...]]:
        """Take a request off every account; return it and the chunks it did not bring, in a fixed order."""
        transfer = self._by_id.pop(request_id)
        missing = tuple(sorted(transfer.awaited))
        for digest in missing:
            self.stop_awaiting(transfer, digest)
        self._sources.note_ended(transfer.peer_id)
        return transfer, missing
