"""Finds hivemind's p2pd and says within milliseconds why it cannot run here (A-PROC-6)."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Final

from pulsenetd.errors import P2pdError

_ELF_MACHINES: Final = {
    3: "i686",
    21: "ppc64le",
    22: "s390x",
    40: "armv7l",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
}
"""Architectures by the ``e_machine`` number of an ELF header, named as ``platform.machine()`` names them."""

_HEADER_SIZE_BYTES: Final = 20


def find() -> Path:
    """Return where the installed hivemind keeps p2pd, without importing hivemind.

    Raises:
        P2pdError: hivemind is not installed.
    """
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise P2pdError("p2pd cannot run: hivemind is not installed; install pulsenet[daemon]")
    return Path(spec.origin).parent / "hivemind_cli" / "p2pd"


def check(binary: Path) -> None:
    """Check that the binary exists, may be executed and was built for this machine.

    Raises:
        P2pdError: naming path and architecture.
    """
    here = platform.machine()
    if not binary.exists():
        raise P2pdError(f"p2pd cannot run: {binary} is missing; reinstall hivemind for {here}")
    if not binary.is_file() or not os.access(binary, os.X_OK):
        raise P2pdError(f"p2pd cannot run: {binary} ({here}) is not executable; run chmod +x {binary}")
    try:
        with binary.open("rb") as file:
            header = file.read(_HEADER_SIZE_BYTES)
    except OSError as error:
        raise P2pdError(f"p2pd cannot run: {binary} ({here}) cannot be read: {error.strerror}") from error
    built_for = describe_architecture(header)
    if built_for is not None and built_for != here:
        raise P2pdError(f"p2pd cannot run: {binary} is built for {built_for}, this machine is {here}")


def describe_architecture(header: bytes) -> str | None:
    """Return what a program file was built for, from its first 20 bytes; ``None`` if that cannot be told."""
    if header.startswith(b"#!"):
        return None
    if sys.platform != "linux":
        return None
    if not header.startswith(b"\x7fELF") or len(header) < _HEADER_SIZE_BYTES:
        return "another system (no ELF file)"
    order = "little" if header[5] == 1 else "big"
    number = int.from_bytes(header[18:20], "little" if order == "little" else "big")
    name = _ELF_MACHINES.get(number, f"ELF machine {number}")
    if name == "ppc64le" and order == "big":
        return "ppc64"
    return name
