"""The training process's connection for rounds, against a daemon that may do anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.local import protocol
from pulsenet.local import rounds_protocol as local
from pulsenet.local.client import Client
from pulsenet.local.rounds_client import RoundsConnection
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import ParameterTable, TensorSpec

TABLE = ParameterTable((TensorSpec("w", "F32", (3,)),))
Daemon = Any
MakeDaemon = Callable[..., Daemon]


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> Daemon:
    return make_daemon()


@pytest.fixture
def connection(daemon: Daemon) -> Iterator[RoundsConnection]:
    with Client(daemon.directory) as client, closing(RoundsConnection.connect(client, 5.0)) as connection:
        yield connection


def test_it_asks_what_the_run_says_and_takes_part(daemon: Daemon, connection: RoundsConnection) -> None:
    reply = connection.get_settings()
    assert (reply.algorithm, reply.peer_id) == ("pulseloco", daemon.peer_id)
    assert dict(reply.constants)["inner_steps"] == 3
    connection.open(TABLE, SELF_TEST_DIGEST)
    connection.tell(local.HoldState(0, SELF_TEST_DIGEST))
    assert daemon.said[1:] == [
        local.OpenRounds(TABLE.encode(), SELF_TEST_DIGEST),
        local.HoldState(0, SELF_TEST_DIGEST),
    ]


@pytest.mark.parametrize("piece_size_bytes", [1, 7, 100])
def test_a_blob_crosses_in_parts_both_ways(
    daemon: Daemon, connection: RoundsConnection, monkeypatch: pytest.MonkeyPatch, piece_size_bytes: int
) -> None:
    monkeypatch.setattr(local, "PART_SIZE_BYTES_MAX", 16)
    data = bytes(range(40))
    buffer = bytearray(piece_size_bytes)

    def pieces() -> Any:
        # One buffer for all pieces, as an encoder may have.
        for start in range(0, len(data), piece_size_bytes):
            part = data[start : start + piece_size_bytes]
            buffer[: len(part)] = part
            yield memoryview(buffer)[: len(part)]

    blob = connection.put_blob(pieces())
    assert (blob.blob_id, blob.size_bytes) == (daemon.put(data), 40)
    sizes = [(m.size_bytes, m.is_last) for m in daemon.said if isinstance(m, local.PutBlobPart)]
    assert sizes == [(16, False), (16, False), (8, True)]
    assert b"".join(connection.fetch_blob(blob.blob_id, 40)) == data
    asked = [(m.offset_bytes, m.size_bytes_max) for m in daemon.said if isinstance(m, local.FetchBlobPart)]
    assert asked == [(0, 16), (16, 16), (32, 8)]
    assert connection.await_order(0.0) is None


def test_a_full_disk_and_a_lost_blob_leave_the_connection_open(daemon: Daemon, connection: RoundsConnection) -> None:
    daemon.answers[local.PutBlobPart] = lambda message: local.BlobRefused("enospc")
    with pytest.raises(StorageError) as caught:
        connection.put_blob([b"data"])
    assert caught.value.reason == "enospc"
    with pytest.raises(StorageError) as caught:
        list(connection.fetch_blob(Digest(bytes(32)), 4))
    assert caught.value.reason == "not-found"
    daemon.order(local.GoOn(4))
    assert connection.await_order(1.0) == local.GoOn(4)


def test_a_reader_that_stops_early_leaves_the_connection_open(daemon: Daemon, connection: RoundsConnection) -> None:
    blob_id = daemon.put(bytes(100))
    pieces = connection.fetch_blob(blob_id, 100)
    assert bytes(next(pieces)) == bytes(100)
    pieces.close()
    assert connection.await_order(0.0) is None


@pytest.mark.parametrize(
    ("kind", "answer", "act", "code"),
    [
        (local.OpenRounds, protocol.LocalRefusal("busy", "why"), lambda c: c.open(TABLE, SELF_TEST_DIGEST), "busy"),
        (local.HoldState, local.NoOrder(), lambda c: c.tell(local.HoldState(None, None)), "message-unexpected"),
        (local.AwaitOrder, local.Waiting(), lambda c: c.await_order(0.0), "message-unexpected"),
        (local.AwaitOrder, protocol.LocalRefusal("decode", ""), lambda c: c.await_order(0.0), "decode"),
        (local.PutBlobPart, local.BlobTaken(None, 4), lambda c: c.put_blob([b"data"]), "schema"),
        (local.PutBlobPart, local.Waiting(), lambda c: c.put_blob([b"data"]), "message-unexpected"),
        (local.FetchBlobPart, local.BlobPart(3, True), lambda c: list(c.fetch_blob(BLOB, 4)), "handoff-size"),
        (local.FetchBlobPart, local.BlobPart(5, True), lambda c: list(c.fetch_blob(BLOB, 4)), "handoff-size"),
        (local.FetchBlobPart, local.BlobPart(0, False), lambda c: list(c.fetch_blob(BLOB, 4)), "handoff-size"),
        (local.FetchBlobPart, local.BlobPart(4, False), lambda c: list(c.fetch_blob(BLOB, 4)), "handoff-size"),
        (local.FetchBlobPart, local.BlobPart(4, True), lambda c: list(c.fetch_blob(BLOB, 4)), "handoff-descriptor"),
        (local.FetchBlobPart, local.Waiting(), lambda c: list(c.fetch_blob(BLOB, 4)), "message-unexpected"),
    ],
)
def test_what_does_not_belong_there_closes_the_connection(
    daemon: Daemon, connection: RoundsConnection, kind: type, answer: Any, act: Any, code: str
) -> None:
    daemon.answers[kind] = lambda message: answer
    with pytest.raises(RemoteProtocolError) as caught:
        act(connection)
    assert caught.value.code == code
    with pytest.raises(UnavailableError):
        connection.await_order(0.0)


BLOB = Digest(bytes(32))


def test_a_daemon_that_dies_is_unavailable(daemon: Daemon, connection: RoundsConnection) -> None:
    daemon.stop()
    with pytest.raises(UnavailableError):
        connection.await_order(5.0)
    connection.close()
    connection.close()


def test_a_wait_that_is_interrupted_ends_the_connection(
    connection: RoundsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(timeout_seconds: float) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(connection._channel, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        connection.await_order(1.0)
    monkeypatch.undo()
    with pytest.raises(UnavailableError):
        connection.await_order(0.0)
