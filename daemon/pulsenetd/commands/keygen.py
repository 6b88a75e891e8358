"""``pulsenet keygen``: make a node's key before the node exists."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pulsenet.errors import UsageError

_EXAMPLES = (("pulsenet keygen ~/trainer/identity.key", "the key of the node that will live in ~/trainer"),)


def add_parser(commands: Any) -> None:
    """Add ``keygen`` to the command line."""
    parser = commands.add_parser("keygen", help="make a key and print its peer id", examples=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="key file to write, mode 0600; a node's is DATA_DIR/identity.key")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_command=_keygen)


def _keygen(arguments: argparse.Namespace) -> int:
    from pulsenetd import identity
    from pulsenetd.storage.disk import Disk, make_directory

    path = Path(arguments.file)
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file, and what is there is never overwritten: name another file")
    if path.exists():
        held = identity.to_libp2p_text(identity.load(path).peer_id)
        raise UsageError(f"{path} holds {held} already; a key is never overwritten: use that one, or name another file")
    make_directory(Disk(), path.parent)
    made = identity.load_or_create(path)
    text = identity.to_libp2p_text(made.peer_id)
    print(
        json.dumps({"peer_id": text, "public_key": made.peer_id.hex(), "file": str(path)}) if arguments.json else text
    )
    return 0
