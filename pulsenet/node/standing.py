"""Strikes lead somewhere: who breaks the specification often is left alone, and answered nothing, for a time.

Only what no honest peer sends is a strike. Strikes are forgiven with time, and nobody is shut out for good: a peer that
was mended is one that serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.ids import PeerId

STRIKES_MAX = 5.0
"""Strikes in a short time at which a peer is shut out."""

FORGIVE_SECONDS = 60.0
"""One strike is forgiven after so long."""

SHUT_OUT_SECONDS_MIN = 60.0
SHUT_OUT_SECONDS_MAX = 1_800.0
"""How long a peer is shut out at first, and at most; each time twice as long as before."""

PEERS_MAX = 1_024
"""Peers remembered; beyond, one that is not shut out is forgotten first, the one struck longest ago."""


@dataclass(slots=True)
class _Record:
    strikes: float
    struck_at: float
    shut_out_until: float = 0.0
    shut_out_seconds: float = SHUT_OUT_SECONDS_MIN
    """The next time."""


class Standing:
    """How peers behaved. Time is monotonic seconds; each call may name any peer."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def strike(self, peer_id: PeerId, now: float) -> bool:
        """Count a strike; return whether the peer is shut out from now on, and was not before."""
        record = self._records.pop(peer_id, None) or _Record(0.0, now)
        was_out = record.shut_out_until > now
        self._forgive(record, now)
        record.strikes = min(record.strikes + 1.0, STRIKES_MAX)
        self._records[peer_id] = record
        if len(self._records) > PEERS_MAX:
            self._forget_one(peer_id, now)
        # The time between the strikes forgave a little of them.
        if was_out or record.strikes <= STRIKES_MAX - 1.0:
            return False
        record.shut_out_until = now + record.shut_out_seconds
        record.shut_out_seconds = min(2 * record.shut_out_seconds, SHUT_OUT_SECONDS_MAX)
        # The next strike after the time is over shuts it out again, unless it behaved meanwhile.
        record.strikes = STRIKES_MAX - 1.0
        return True

    def wait_seconds(self, peer_id: PeerId, now: float) -> float:
        """Return for how long the peer is still shut out; 0 if it is not."""
        record = self._records.get(peer_id)
        return 0.0 if record is None else max(0.0, record.shut_out_until - now)

    def _forgive(self, record: _Record, now: float) -> None:
        """Take off what time forgave: it runs while nothing else is held against the peer."""
        since = max(record.struck_at, record.shut_out_until)
        if now > since:
            forgiven = (now - since) / FORGIVE_SECONDS
            if forgiven >= record.strikes:
                record.shut_out_seconds = SHUT_OUT_SECONDS_MIN
            record.strikes = max(0.0, record.strikes - forgiven)
        record.struck_at = max(record.struck_at, now)

    def _forget_one(self, kept: PeerId, now: float) -> None:
        free = (peer_id for peer_id, record in self._records.items() if record.shut_out_until <= now)
        gone = next((peer_id for peer_id in free if peer_id != kept), None)
        del self._records[next(iter(self._records)) if gone is None else gone]
