"""Versions of small models, made from dictionaries of tensors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.codec.changes import Changes
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate, RecordsUpdate
from pulsenet.serving.safetensors_format import map_file, read_header
from pulsenet.tensors.digest import compute_region_root
from pulsenet.training.snapshot import take_snapshot

State = Mapping[str, torch.Tensor]


def make_full(state: State, version: Version) -> FullUpdate:
    """Return a whole version as the daemon hands it over: read-only, in the dense layout."""
    snapshot = take_snapshot(state, compute_dtype=None)
    region = np.zeros(snapshot.table.layout_size_bytes, dtype=np.uint8)
    for tensor_index, offset_bytes, data in snapshot.blocks():
        start = snapshot.table.offsets[tensor_index] + offset_bytes
        region[start : start + data.size] = data
    region.setflags(write=False)
    return FullUpdate(version, compute_region_root(snapshot.table, region), snapshot.table, region)


def make_records(old: FullUpdate, new: FullUpdate) -> RecordsUpdate:
    """Return what leads from one version to the next."""
    records = []
    for tensor_index, spec in enumerate(new.table.tensors):
        old_bits = old.table.view(old.region, tensor_index)
        new_bits = new.table.view(new.region, tensor_index)
        indices = np.flatnonzero(old_bits != new_bits)
        if indices.size:
            records.append(
                Changes(tensor_index, indices.astype(spec.index_dtype), old_bits[indices], new_bits[indices])
            )
    return RecordsUpdate(old.version, new.version, new.root, new.table, lambda: iter(records))


@pytest.fixture(name="make_full")
def make_full_fixture() -> Callable[[State, Version], FullUpdate]:
    return make_full


@pytest.fixture(name="make_records")
def make_records_fixture() -> Callable[[FullUpdate, FullUpdate], RecordsUpdate]:
    return make_records


class FakeSglang:
    """The part of SGLang's HTTP surface that an engine uses, as its documents and routes describe it.

    Not SGLang: it holds bytes instead of a model, so what it shows is what is asked, in which order.
    """

    def __init__(self) -> None:
        self.weights: dict[str, bytes] = {}
        self.label = "default"
        self.is_paused = False
        self.asked: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        """The Authorization header of each request."""
        self.faults: dict[str, tuple[int, bytes]] = {}
        """Answers to give by route instead of doing what is asked."""
        self.loads_in_vain = False
        """Whether a load says that it succeeded and sets no label, as releases without labels do."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size_bytes = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size_bytes)) if size_bytes else None
                fake.asked.append((self.path, body))
                fake.keys.append(self.headers.get("Authorization"))
                status, reply = fake.faults.get(self.path) or fake.answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        match path:
            case "/pause_generation":
                self.is_paused = True
                return 200, b'{"message": "Generation paused successfully.", "status": "ok"}'
            case "/continue_generation":
                self.is_paused = False
                return 200, b'{"message": "Generation continued successfully.", "status": "ok"}'
            case "/model_info":
                return 200, json.dumps({"weight_version": self.label}).encode()
            case "/update_weights_from_disk" if self.is_paused and body["flush_cache"]:
                for file in Path(body["model_path"]).glob("*.safetensors"):
                    data = memoryview(map_file(file))
                    for place in read_header(file):
                        end = place.offset_bytes + place.spec.size_bytes
                        self.weights[place.spec.name] = bytes(data[place.offset_bytes : end])
                if not self.loads_in_vain:
                    self.label = body["weight_version"]
                return 200, b'{"success": true, "message": "Succeeded to update model weights."}'
        return 404, b'{"detail": "Not Found"}'

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def sglang() -> Iterator[FakeSglang]:
    fake = FakeSglang()
    yield fake
    fake.close()
