"""Starting and asking p2pd, and its private socket directory."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import ConfigError, StorageError, UnavailableError
from pulsenet.ids import PeerId
from pulsenetd.errors import P2pdError
from pulsenetd.identity import load_or_create
from pulsenetd.network import hivemind_repairs, p2pd
from pulsenetd.network.p2pd import P2pdSettings, prepare_socket_directory, remove_sockets


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets; pytest's own may be too deep for them."""
    with tempfile.TemporaryDirectory(prefix="p2pd-", dir="/tmp") as directory:
        yield Path(directory)


async def ping_until_it_fails(running: p2pd.P2pd) -> None:
    """Ping until one goes unanswered: the kernel may take a while to stop every thread."""
    for _ in range(100):
        await running.ping(0.3)
        await asyncio.sleep(0.05)


def make_settings(tmp_path: Path, **options: Any) -> P2pdSettings:
    identity = load_or_create(tmp_path / "key")
    return P2pdSettings(identity_path=identity.path, socket_directory=tmp_path / "sockets", **options)


def test_the_socket_directory_is_private_and_emptied_of_a_killed_predecessors(short_path: Path) -> None:
    """A-PROC-3."""
    wanted = short_path / "deep" / "sockets"
    directory = prepare_socket_directory(wanted)
    assert directory == wanted
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in ("p2pd-x.sock", "p2pclient-x.sock", "local.sock"):
        (directory / name).touch()
    prepare_socket_directory(wanted)
    assert [path.name for path in directory.iterdir()] == ["local.sock"]


def test_a_directory_too_deep_for_sockets_gets_a_short_private_stand_in(tmp_path: Path) -> None:
    wanted = tmp_path / ("x" * 90)
    directory = prepare_socket_directory(wanted)
    try:
        assert directory != wanted
        assert len(str(directory)) < 60
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert prepare_socket_directory(wanted) == directory
        other = prepare_socket_directory(tmp_path / ("y" * 90))
        other.rmdir()
        assert other != directory
    finally:
        directory.rmdir()


def test_a_socket_directory_others_could_enter_is_refused(short_path: Path) -> None:
    directory = short_path / "sockets"
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        prepare_socket_directory(directory)
    (short_path / "link").symlink_to(directory)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        prepare_socket_directory(short_path / "link")
    (short_path / "file").touch()
    with pytest.raises(StorageError, match="cannot make"):
        prepare_socket_directory(short_path / "file" / "below")


def test_removing_sockets_twice_is_fine(tmp_path: Path) -> None:
    (tmp_path / "p2pd-x.sock").touch()
    remove_sockets(tmp_path)
    remove_sockets(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_key_file_that_is_gone_is_never_replaced_by_another_key(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    settings.identity_path.unlink()
    with pytest.raises(ConfigError, match=r"key is gone: restore it"):
        await p2pd.start(settings)
    assert not settings.identity_path.exists()


async def test_a_slow_start_is_told_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-PROC-5."""
    monkeypatch.setattr(p2pd, "_PROGRESS_SECONDS", 0.2)
    hivemind_repairs.load_now()
    binary = tmp_path / "p2pd"
    binary.write_text("#!/bin/sh\nexec sleep 30\n")
    binary.chmod(0o700)
    told: list[str] = []

    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"within 1 s.*--start-timeout"):
        await p2pd.start(make_settings(tmp_path, binary=binary, start_timeout_seconds=1.0), told.append)
    assert time.monotonic() - started < 5
    assert told
    assert told[0].startswith("waiting for p2pd to start")


async def test_a_p2pd_that_ends_at_once_is_named_with_its_last_words(tmp_path: Path) -> None:
    hivemind_repairs.load_now()
    binary = tmp_path / "p2pd"
    binary.write_text("#!/bin/sh\necho no such flag\nexit 2\n")
    binary.chmod(0o700)

    with pytest.raises(P2pdError, match="no such flag"):
        await p2pd.start(make_settings(tmp_path, binary=binary))


async def test_calls_to_a_dead_p2pd_fail_at_once_and_to_a_stopped_one_in_time(tmp_path: Path) -> None:
    running = await p2pd.start(make_settings(tmp_path))
    try:
        await running.ping(5)
        assert await running.list_peers(5) == []
        os.kill(running.process_id, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match=r"timed out after 0\.3 s"):
            await ping_until_it_fails(running)
        os.kill(running.process_id, signal.SIGKILL)
        assert await running.wait_exit() == -signal.SIGKILL
        with pytest.raises(UnavailableError):
            await running.ping(5)
        with pytest.raises(UnavailableError):
            await running.open_stream(PeerId(bytes(32)), "/x", 5)
    finally:
        await running.close()


async def test_waiting_for_a_turn_counts_against_the_time_of_a_call(tmp_path: Path) -> None:
    """Where 64 calls hang, the next would have waited for one of them, whatever time it was given."""
    running = await p2pd.start(make_settings(tmp_path))
    try:
        running._call_slots = asyncio.Semaphore(0)
        for call in (running.ping(0.1), running.open_stream(PeerId(bytes(32)), "/x", 0.1)):
            with pytest.raises(UnavailableError, match=r"timed out after 0\.1 s"):
                await asyncio.wait_for(call, 5)
    finally:
        await running.close()


async def test_a_connection_to_the_stream_socket_without_a_sender_is_dropped(tmp_path: Path) -> None:
    running = await p2pd.start(make_settings(tmp_path))
    served: list[bytes] = []

    async def handler(peer: bytes, _reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        served.append(peer)

    try:
        await running.serve("/test/1", handler)
        (path,) = (tmp_path / "sockets").glob("p2pclient-*.sock")
        for junk in (b"", b"\xff" * 12, b"\xff\xff\xff\x7f", b"\x02\xff\xff"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(junk)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        assert served == []
    finally:
        await running.close()
