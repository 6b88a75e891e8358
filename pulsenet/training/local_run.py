"""What trainers within one process share: who is live, and which masters they train."""

from __future__ import annotations

import threading
from typing import Final

from pulsenet.errors import ConfigError
from pulsenet.ids import Digest
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import ParameterTable

MEMBERS_MAX: Final = 256


class LocalRun:
    """A run whose trainers are threads.

    Args:
        member_count: Members, all live at first; their keys are told apart by one byte.

    Raises:
        ConfigError: there are none, or more than 256.
    """

    def __init__(self, member_count: int) -> None:
        if not 1 <= member_count <= MEMBERS_MAX:
            raise ConfigError(f"{member_count} members in one process: 1 to {MEMBERS_MAX} can train")
        self._changed = threading.Condition()
        self._live = set(range(member_count))
        self._table: ParameterTable | None = None

    def join(self, index: int) -> None:
        """Put a member in, new or back; rounds that are opened from now on wait for it."""
        with self._changed:
            self._live.add(index)

    def take_table(self, table: ParameterTable, self_test: Digest) -> None:
        """Accept a member's masters and self-test.

        Raises:
            ConfigError: They are not those of the run.
        """
        if self_test != SELF_TEST_DIGEST:
            raise ConfigError(f"the self-test gave {self_test.hex()}: this trainer's arithmetic would diverge")
        with self._changed:
            if self._table is None:
                self._table = table
            elif table.digest != self._table.digest:
                raise ConfigError("the run has other masters: names, shapes and frozen parameters must agree")
