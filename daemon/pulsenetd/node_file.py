"""The file in a data directory that says to other commands of this machine where its node is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pulsenetd.storage.disk import Disk, read_regular, write_durably

NODE_FILE: Final = "node.json"
"""Where a running node says how to reach it."""
NODE_FILE_SIZE_BYTES_MAX: Final = 65_536


def write_node_file(data_directory: Path, node: Mapping[str, object]) -> None:
    """Write it; what had its name is replaced, and a link there is not followed.

    Raises:
        StorageError: It cannot be written.
    """
    write_durably(Disk(), data_directory / NODE_FILE, json.dumps(node).encode())


def read_metrics_url(data_directory: Path) -> Any:
    """Return the address that the file names, unchecked.

    Raises:
        OSError: There is no such file.
        ValueError: It is no such file, or names no address.
    """
    data = read_regular(data_directory / NODE_FILE, NODE_FILE_SIZE_BYTES_MAX)
    try:
        return json.loads(data)["metrics_url"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{data_directory / NODE_FILE} names no address") from error
