"""What the demonstration asks its nodes: are they up, and how long did the stages of an update take?"""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pulsenetd.node_file import read_metrics_url

ANSWER_SECONDS_MAX: Final = 2.0
ANSWER_SIZE_BYTES_MAX: Final = 1 << 20

_STAGE_SUM: Final = re.compile(r'^pulsenet_update_seconds_sum\{stage="(\w+)"\} (\S+)$', re.MULTILINE)
_RECEIVED: Final = re.compile(r'^pulsenet_bytes_total\{direction="received",kind="[\w-]+"\} (\S+)$', re.MULTILINE)


@dataclass(slots=True)
class NodeWatch:
    """Reads one node's metrics; the seconds of a stage are what its sum grew by since the last reading."""

    data_directory: Path
    _sums: dict[str, float] = field(default_factory=dict)

    def is_up(self) -> bool:
        """Return whether the node answers."""
        return bool(self._read_metrics())

    def read_stage_seconds(self) -> dict[str, float]:
        """Return the seconds each stage took since the last call; nothing when the node does not answer now."""
        sums = {stage: float(value) for stage, value in _STAGE_SUM.findall(self._read_metrics())}
        grown = {stage: value - self._sums.get(stage, 0.0) for stage, value in sums.items()}
        self._sums |= sums
        return {stage: seconds for stage, seconds in grown.items() if seconds > 0}

    def read_received_bytes(self) -> int:
        """Return the payload bytes this node received from peers so far; 0 when it does not answer."""
        return sum(int(float(value)) for value in _RECEIVED.findall(self._read_metrics()))

    def _read_metrics(self) -> str:
        """Return the exposition text, or nothing while the node cannot be reached."""
        try:
            url = f"{read_metrics_url(self.data_directory)}/metrics"
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS_MAX) as answer:  # noqa: S310 - the node's own address
                text: str = answer.read(ANSWER_SIZE_BYTES_MAX).decode(errors="replace")
                return text
        except (OSError, ValueError):
            return ""
