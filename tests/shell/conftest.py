"""A run with real keys, stores on disk and a small model: what the tests of a node's parts are built from."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from pulsenet.chain.records import (
    Catalogue,
    Descriptor,
    Have,
    Head,
    JoinToken,
    Kind,
    Manifest,
    RolloutBatch,
    SignedRecord,
)
from pulsenet.chain.rollouts import RolloutArrays, pack_rollouts
from pulsenet.chain.rules import entry_key
from pulsenet.chain.signing import add_signature, encode_signed, record_digest, seal
from pulsenet.chain.trust import Trust, entry_of
from pulsenet.ids import Digest, RunId, Version, compute_digest
from pulsenet.local.shared_memory import Bytes, Region, SnapshotWriter
from pulsenet.node.events import Event
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd import runs
from pulsenetd.identity import Identity, load_or_create, verify
from pulsenetd.logs import logger
from pulsenetd.storage.parts import PartQueue
from pulsenetd.storage.store import Store

# Tests are no package: helpers of several files are found by their directory.
sys.path.insert(0, str(Path(__file__).parent))

NOW_MS = 1_800_000_000_000

TABLE = make_table(
    [
        TensorSpec("model.embed.weight", "BF16", (300, 40)),
        TensorSpec("model.layer.weight", "BF16", (64, 50)),
        TensorSpec("model.norm.weight", "F32", (50,)),
    ]
)

Answer = TypeVar("Answer")


class Model:
    """Weights that change a little at each step."""

    def __init__(self, seed: int = 0) -> None:
        self.table = TABLE
        self._draw = np.random.default_rng(seed)
        self.bytes: Bytes = np.zeros(TABLE.layout_size_bytes, np.uint8)
        for index, spec in enumerate(TABLE.tensors):
            view = TABLE.view(self.bytes, index)
            view[:] = self._draw.integers(0, 1 << 15, spec.element_count).astype(view.dtype)

    def step(self) -> None:
        for index, spec in enumerate(TABLE.tensors):
            self.table.view(self.bytes, index)[self._draw.random(spec.element_count) < 0.01] += 1

    def parts(self) -> PartQueue:
        """The whole model, in one part for each tensor."""
        queue = PartQueue(TABLE)
        for index in range(len(TABLE.tensors)):
            layout = queue.next_layout(1)
            writer = SnapshotWriter(TABLE, layout)
            writer.write_block(index, 0, TABLE.view(self.bytes, index).tobytes())
            queue.put(layout, Region.open_snapshot(writer.seal(), layout.size_bytes))
        return queue


class Run:
    """Owner, publisher, second authority, a listed inferencer and a stranger, each with a key on disk."""

    now_ms = NOW_MS

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.directory = directory
        self.owner = self.key("owner")
        self.publisher = self.key("publisher")
        self.second = self.key("second")
        self.inferencer = self.key("inferencer")
        self.stranger = self.key("stranger")
        genesis = runs.genesis(
            "mine",
            nonce=bytes(16),
            owner=self.owner.peer_id,
            authorities=[self.publisher.peer_id, self.second.peer_id],
            trainers=[self.publisher.peer_id],
            inferencers=[self.inferencer.peer_id],
            open_inferencers_max=0,
            private=False,
            anchor_interval=10,
            publish_interval_min_ms=0,
        )
        self.descriptor = replace(genesis, **changes)
        self.genesis = self.sign(self.descriptor, self.owner)
        self.run_id = RunId(record_digest(self.genesis))
        self.token = JoinToken(self.run_id, 0, (), b"", None)

    def key(self, name: str) -> Identity:
        self.directory.mkdir(parents=True, exist_ok=True)
        return load_or_create(self.directory / f"{name}.key")

    def trust(self) -> Trust:
        """What a node believes that knows the genesis and nothing else."""
        trust = Trust(self.run_id, verify)
        trust.accept_descriptor(self.genesis)
        return trust

    @staticmethod
    def sign(record: Any, *signers: Identity) -> SignedRecord:
        signed = seal(record, signers[0].sign, signers[0].peer_id)
        for key in signers[1:]:
            signed = add_signature(signed, key.sign, key.peer_id)
        return signed

    def revise(self, before: SignedRecord, descriptor: Descriptor, *signers: Identity, **changes: Any) -> SignedRecord:
        """The revision after ``descriptor``."""
        revised = replace(descriptor, revision=descriptor.revision + 1, previous=record_digest(before), **changes)
        return self.sign(revised, *(signers or (self.owner,)))

    def manifest(self, number: int, **changes: Any) -> Manifest:
        """The anchor of a version of epoch 0."""
        fields = Manifest(
            run_id=self.run_id,
            revision=0,
            term=0,
            kind=Kind.ANCHOR,
            base_version=None,
            version=Version(0, number),
            base_root=None,
            root=compute_digest(f"root {number}".encode()),
            table_digest=TABLE.digest,
            blob_id=compute_digest(f"blob {number}".encode()),
            raw_size_bytes=TABLE.size_bytes,
            encoded_size_bytes=1000,
            changed_count=TABLE.element_count,
            element_count=TABLE.element_count,
            codec_id=anchor_codec_id(),
            trainer_step=number,
            previous=None,
        )
        return replace(fields, **changes)

    def news(self, number: int) -> SimpleNamespace:
        """A whole publish: signed manifest, catalogue and head."""
        manifest = self.sign(self.manifest(number), self.publisher)
        entries = [entry_of(self.manifest(number), record_digest(manifest))]
        catalogue = self.sign(Catalogue(self.run_id, 0, tuple(sorted(entries, key=entry_key))), self.publisher)
        head = Head(
            run_id=self.run_id,
            revision=0,
            term=0,
            version=Version(0, number),
            root=self.manifest(number).root,
            manifest_digest=record_digest(manifest),
            catalogue_digest=record_digest(catalogue),
            epoch_digest=None,
            issued_at_ms=NOW_MS,
            valid_until_ms=NOW_MS + 300_000,
        )
        return SimpleNamespace(manifest=manifest, catalogue=catalogue, head=self.sign(head, self.publisher))

    def have(self, key: Identity) -> bytes:
        """An encoded signed have record."""
        have = Have(self.run_id, "inferencer", 0, 1, 1, (1,), (), NOW_MS)
        return encode_signed(self.sign(have, key))

    def batch(self, number: int, versions: Sequence[int] = (1, 1), **changes: Any) -> RolloutBatch:
        """A sound rollout batch of two samples, each wholly of one version."""
        arrays = RolloutArrays(
            versions=np.array([[0, 0], versions, [0, 0], versions], np.uint64),
            prompt_lengths=np.array([2, 1], np.uint32),
            completion_lengths=np.array([1, 2], np.uint32),
            prompt_tokens=np.array([1, 2, 3], np.int32),
            completion_tokens=np.array([4, 5, 6], np.int32),
            logprobs=np.array([-1, -2, -3], np.float32),
            rewards=np.array([0, 1], np.float32),
            reward_parts=np.zeros((0, 2), np.float32),
        )
        batch = pack_rollouts(arrays, run_id=self.run_id, sequence=number)
        return replace(batch, **changes)

    def signed_batch(self, number: int, key: Identity | None = None, **changes: Any) -> bytes:
        return encode_signed(self.sign(self.batch(number, **changes), key or self.inferencer))


def anchor_codec_id() -> int:
    from pulsenet.codec import anchor

    return anchor.CODEC_ID


def execute(table: Any, effect: Any) -> list[Event]:
    """Have a handler table execute one effect in a loop of its own; return what it posted."""
    posted: list[Event] = []
    asyncio.run(table[type(effect)](effect, posted.append))
    return posted


def copy_blob(source: Store, target: Store, blob_id: Digest) -> None:
    """Do what a fetch does."""
    data = source.chunk_list(blob_id)
    assert data is not None
    target.put_chunk_list(blob_id, data)
    for _, digest in target.missing_chunks(blob_id):
        chunk = source.chunk(digest)
        assert chunk is not None
        target.put_chunks({digest: chunk})


def run_quickly(work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Run a coroutine in a loop whose waits take no time: its clock jumps to the next timer."""

    class JumpingLoop(asyncio.SelectorEventLoop):
        ahead_seconds = 0.0

        def time(self) -> float:
            return super().time() + self.ahead_seconds

    loop = JumpingLoop()
    selector: Any = loop._selector  # type: ignore[attr-defined]
    select = selector.select

    def jump(timeout: float | None = None) -> Any:
        ready = select(0)
        if not ready and timeout:
            loop.ahead_seconds += timeout
        return ready

    selector.select = jump

    async def started() -> Answer:
        return await work()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(started())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Let each test begin with an unconfigured logger: commands set the process-wide one up."""
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    logger.handlers[:] = []
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


class InlineExecutor(Executor):
    """Does what it is given at once, in the caller's thread: loops whose time jumps wait for no thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "keys")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda **changes: Run(tmp_path / "keys", **changes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def hands() -> Any:
    """The functions and classes above: test folders are no packages, so tests cannot import them."""
    return SimpleNamespace(
        Model=Model,
        TABLE=TABLE,
        copy_blob=copy_blob,
        execute=execute,
        run_quickly=run_quickly,
        InlineExecutor=InlineExecutor,
    )
