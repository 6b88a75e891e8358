"""Why p2pd cannot run here, found before it is started (A-PROC-6)."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from pulsenetd.errors import P2pdError, exit_code
from pulsenetd.network import p2pd_binary


def elf_header(machine: int, order: str = "little") -> bytes:
    return b"\x7fELF\x02" + (b"\x01" if order == "little" else b"\x02") + bytes(12) + machine.to_bytes(2, order)  # type: ignore[arg-type]


def test_the_installed_binary_is_found_and_passes() -> None:
    p2pd_binary.check(p2pd_binary.find())


def test_a_missing_hivemind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(P2pdError, match="not installed"):
        p2pd_binary.find()


def test_a_missing_binary_is_named_with_path_and_architecture(tmp_path: Path) -> None:
    path = tmp_path / "p2pd"
    with pytest.raises(P2pdError, match=f"{path} is missing.*{platform.machine()}") as caught:
        p2pd_binary.check(path)
    assert exit_code(caught.value) == 7


def test_a_binary_that_may_not_be_executed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p2pd"
    path.write_bytes(b"#!/bin/sh\n")
    path.chmod(0o600)
    with pytest.raises(P2pdError, match=rf"{path} \({platform.machine()}\) is not executable"):
        p2pd_binary.check(path)
    with pytest.raises(P2pdError, match="not executable"):
        p2pd_binary.check(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF headers")
def test_a_binary_of_another_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p2pd"
    other = 183 if platform.machine() != "aarch64" else 62
    path.write_bytes(elf_header(other))
    path.chmod(0o700)
    name = "aarch64" if other == 183 else "x86_64"
    with pytest.raises(P2pdError, match=f"built for {name}, this machine is {platform.machine()}"):
        p2pd_binary.check(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF headers")
@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"#!/bin/sh\n", None),
        (b"\xcf\xfa\xed\xfe" + bytes(16), "another system (no ELF file)"),
        (b"", "another system (no ELF file)"),
        (elf_header(62), "x86_64"),
        (elf_header(21, "big"), "ppc64"),
        (elf_header(9), "ELF machine 9"),
    ],
)
def test_headers_are_read(header: bytes, expected: str | None) -> None:
    assert p2pd_binary.describe_architecture(header) == expected
