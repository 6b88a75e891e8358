"""The training process's end of mixing: one connection, requests and blobs over it.

As :mod:`pulsenet.local.rounds_client`: everything blocks, and after any error the connection is closed.
"""

from __future__ import annotations

from typing import Final, TypeVar

from pulsenet.ids import Digest
from pulsenet.local import mixing_protocol as local
from pulsenet.local.handover import REPLY_SECONDS_MAX
from pulsenet.local.protocol import LocalMessage
from pulsenet.local.rounds_client import RoundsConnection
from pulsenet.local.rounds_protocol import NoOrder, as_code
from pulsenet.tensors.params import ParameterTable

WAIT_SECONDS_MAX: Final = 60.0
"""Asked for at once."""

Answer = TypeVar("Answer")


class MixingConnection(RoundsConnection):
    """Speaks :mod:`pulsenet.local.mixing_protocol` with the daemon. Settings, blobs and errors as with rounds."""

    def open_mixing(self, table: ParameterTable, self_test: Digest) -> None:
        """Take part (``no-mixing``, ``table``, ``self-test``, ``not-listed``, ``busy``)."""
        self._ask(local.OpenMixing(table.encode(), self_test), local.MixingOpened)

    def locate(self, round_index: int | None, wait_seconds: float) -> local.Begin | None:
        """Return where to begin; ``None`` if nobody knew in time."""
        return self._await(local.Locate(round_index, _to_ms(wait_seconds)), local.Begin, wait_seconds)

    def refuse_state(self, reason: str, wait_seconds: float) -> local.Begin | None:
        """Say that the state offered cannot be read, and return where else to begin."""
        return self._await(local.RefuseState(as_code(reason), _to_ms(wait_seconds)), local.Begin, wait_seconds)

    def want_round(self, round_index: int, wait_seconds: float) -> local.RoundOpened | None:
        """Open a round; ``None`` if the daemon did not do it in time."""
        return self._await(local.WantRound(round_index, _to_ms(wait_seconds)), local.RoundOpened, wait_seconds)

    def await_mix(self, round_index: int, job: int, wait_seconds: float) -> local.MixDone | None:
        """Return the result of a job; ``None`` if it is not there yet."""
        return self._await(local.AwaitMix(round_index, job, _to_ms(wait_seconds)), local.MixDone, wait_seconds)

    def is_open(self) -> bool:
        """Return whether the daemon still holds its end."""
        return self._channel.is_open()

    def abort(self) -> None:
        """Make a call that waits in another thread fail; that thread closes the connection."""
        self._channel.abort()

    def _await(self, request: LocalMessage, kind: type[Answer], wait_seconds: float) -> Answer | None:
        message = self._receive(request, wait_seconds + REPLY_SECONDS_MAX).message
        return None if isinstance(message, NoOrder) else self._expect(message, kind)


def _to_ms(seconds: float) -> int:
    return max(0, int(min(seconds, WAIT_SECONDS_MAX) * 1000))
