"""An engine's thread that ends by an error takes its node with it, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pulsenetd.config import Config
from pulsenetd.engines import own, vllm
from pulsenetd.engines.own import DiskEngine
from pulsenetd.engines.thread import EngineThread
from pulsenetd.engines.vllm import VllmRunner
from pulsenetd.engines.vllm_server import AttachedServer


async def test_an_error_that_nobody_expected_reaches_who_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise KeyError("layer.1")

    thread = EngineThread(fail, name="files-engine")
    thread.start()
    with pytest.raises(KeyError, match=r"layer\.1"):
        await asyncio.wait_for(asyncio.wrap_future(thread.failure), 60)
    assert "files-engine ended by an error of pulsenet's own (KeyError('layer.1')): the node ends too" in caplog.text


async def test_who_stops_waiting_leaves_the_thread_as_it_is() -> None:
    thread = EngineThread(lambda: None, name="files-engine")
    waiting = asyncio.ensure_future(asyncio.wrap_future(thread.failure))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not thread.failure.cancelled()
    thread.start()
    await asyncio.to_thread(thread.join)
    assert not thread.failure.done()


async def test_both_engines_of_a_node_pass_on_what_ended_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(own, "FilesEngine", break_down)
    monkeypatch.setattr(vllm, "VllmEngine", break_down)
    files = DiskEngine(Config(role="inferencer", engine="files"), tmp_path)
    runner = VllmRunner(
        tmp_path,
        AttachedServer("http://127.0.0.1:1"),
        on_times=lambda times: None,
        on_ready=lambda is_ready: None,
        on_lost=lambda reason: None,
    )
    for engine in (files, runner):
        engine.start()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.wrap_future(engine.failure), 60)
        await asyncio.to_thread(engine.stop)
