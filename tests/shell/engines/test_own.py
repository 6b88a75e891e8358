"""The engine of a node itself: what cannot be started says why, and is taken down like any other."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from pulsenetd.config import Config
from pulsenetd.engines.own import VllmEngine
from pulsenetd.errors import AddressInUseError
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.metrics import Metrics


def test_an_openai_port_that_is_taken_is_said_and_leaves_nothing_that_could_not_be_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        metrics = Metrics()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            config = Config(role="inferencer", engine="vllm", engine_url="http://127.0.0.1:9", openai_port=port)
            engine = VllmEngine(config, tmp_path, Ledger(metrics, time.monotonic), metrics, on_lost=lambda reason: None)
            with pytest.raises(AddressInUseError, match=f"OpenAI port {port}"):
                engine.start()
            engine.stop()

    asyncio.run(main())
