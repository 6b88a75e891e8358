"""Many readers or one writer."""

from __future__ import annotations

import threading

import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.serving.weights_lock import WeightsLock

WAIT_SECONDS = 10.0


def in_thread(function: object) -> threading.Thread:
    thread = threading.Thread(target=function)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_readers_share_and_a_writer_waits_for_all_of_them() -> None:
    lock, first_in, release, written = WeightsLock(), threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with lock.reading():
            first_in.set()
            assert release.wait(WAIT_SECONDS)

    def write() -> None:
        with lock.writing():
            written.set()

    reader = in_thread(read)
    assert first_in.wait(WAIT_SECONDS)
    with lock.reading():
        writer = in_thread(write)
        assert not written.wait(0.05)
    assert not written.wait(0.05)
    release.set()
    assert written.wait(WAIT_SECONDS)
    reader.join()
    writer.join()


def test_a_reader_may_enter_again_while_a_writer_waits() -> None:
    lock, written = WeightsLock(), threading.Event()

    def write() -> None:
        with lock.writing():
            written.set()

    with lock.reading():
        writer = in_thread(write)
        while lock._waiting_writer_count == 0:
            assert writer.is_alive()
        with lock.reading():
            assert not written.is_set()
        assert not written.is_set()
    assert written.wait(WAIT_SECONDS)
    writer.join()


def test_new_readers_wait_behind_a_waiting_writer() -> None:
    lock, order = WeightsLock(), []

    def write() -> None:
        with lock.writing():
            order.append("writer")

    def read() -> None:
        with lock.reading():
            order.append("reader")

    with lock.reading():
        writer = in_thread(write)
        while lock._waiting_writer_count == 0:
            assert writer.is_alive()
        reader = in_thread(read)
        reader.join(0.05)
        assert order == []
    writer.join(WAIT_SECONDS)
    reader.join(WAIT_SECONDS)
    assert order == ["writer", "reader"]


def test_a_thread_never_waits_for_itself() -> None:
    """An update asked for under ``engine.weights()``, or a reader in ``on_applied``, would stand still for ever."""
    lock, refusals = WeightsLock(), []

    def try_all() -> None:
        with (
            lock.reading(),
            pytest.raises(LocalProtocolError, match=r"inside engine\.weights") as caught,
            lock.writing(),
        ):
            pass
        refusals.append(caught)
        for other in (lock.reading, lock.writing):
            with lock.writing(), pytest.raises(LocalProtocolError, match="wait for itself") as caught, other():
                pass
            refusals.append(caught)

    thread = threading.Thread(target=try_all, daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert len(refusals) == 3
    with lock.writing():
        pass


def test_an_error_inside_lets_the_next_one_in() -> None:
    lock = WeightsLock()
    with pytest.raises(ValueError, match="write"), lock.writing():
        raise ValueError("write")
    with pytest.raises(ValueError, match="read"), lock.reading():
        raise ValueError("read")
    with lock.writing():
        pass
