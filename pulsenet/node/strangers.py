"""Trainers that the run does not list, and that a round waits for: who contributed lately (SPEC section 6.12).

Whom the run lists is expected because it is connected. Of anybody else a connection says nothing, and a contribution
does: whoever trains as fast as the others would miss every round that does not wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from pulsenet import limits
from pulsenet.ids import PeerId

SEEN_MAX: Final = limits.ROUND_MEMBERS_MAX
"""Keys remembered; the one seen longest ago is forgotten beyond."""


class Strangers:
    """The unlisted keys whose contributions came lately, in time or not."""

    def __init__(self) -> None:
        self._seen: dict[PeerId, int] = {}

    def note(self, peer_id: PeerId, round_index: int) -> None:
        """An unlisted key sent its contribution to a round."""
        self._seen.pop(peer_id, None)
        self._seen[peer_id] = round_index
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def expect(
        self,
        round_index: int,
        *,
        counted: Iterable[PeerId],
        reachable: Collection[PeerId],
        here: Collection[PeerId],
        places: int,
    ) -> set[PeerId]:
        """Return the unlisted keys that a round waits for.

        Args:
            round_index: The round.
            counted: Unlisted keys that the round before counted.
            reachable: Keys of which a contribution can come.
            here: Unlisted keys that contributed to it already.
            places: Unlisted keys that it takes.
        """
        late = [peer_id for peer_id, index in self._seen.items() if index >= round_index - 1]
        awaited = [
            peer_id for peer_id in dict.fromkeys((*counted, *late)) if peer_id in reachable and peer_id not in here
        ]
        return set(awaited[: max(places - len(here), 0)])
