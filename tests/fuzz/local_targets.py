"""Decoders of what other processes and files of this machine hold: the local socket, saved state, settings, models."""

from __future__ import annotations

import atexit
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from samples import make_sample
from targets import Target, require
from wire_targets import TrustTarget, load_small_run, make_seeds

from pulsenet.chain.ballot import Ballot
from pulsenet.chain.records import JoinToken
from pulsenet.chain.replay import ReplayWindow
from pulsenet.chain.signing import encode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError, UsageError
from pulsenet.ids import Digest, PeerId, Version, compute_digest
from pulsenet.local.changed_parts import ChangedPartWriter, read_changed_part
from pulsenet.local.framing import FrameReader, encode_frame
from pulsenet.local.parts import PartLayout
from pulsenet.local.protocol import MESSAGE_TYPES, GivenTask
from pulsenet.local.tasks import read_task
from pulsenet.node.address_book import AddressBook
from pulsenet.node.candidacy import decode_ballot, encode_ballot
from pulsenet.serving.safetensors_format import read_header
from pulsenet.serving.vllm.exchange import Answer, Order, Outcome, State, decode_answer, encode_answer
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.config import resolve
from pulsenetd.files.patch_files import PatchFileHeader, open_patch, write_patch
from pulsenetd.runs import RunFile, load_descriptors, read_run_file, write_run_file
from pulsenetd.storage.rebuild import HeldVersion

TABLE = make_table([TensorSpec("a", "BF16", (300,)), TensorSpec("b", "F32", (7, 3)), TensorSpec("c", "I64", ())])
LAYOUT = PartLayout(TABLE, 0, 3)


def _feed(data: bytes) -> None:
    """As the socket would: at most what is wanted at a time, and no memory comes with it."""
    reader = FrameReader()
    start = 0
    while start < len(data):
        taken = data[start : start + min(reader.wanted_size_bytes, 1 << 16)]
        start += len(taken)
        reader.feed(taken, [])


def _frame_targets() -> Iterator[Target]:
    for number, cls in MESSAGE_TYPES.items():
        seeds = tuple(encode_frame(value) for value in make_seeds(cls))
        yield Target(f"local-{number:02}-{cls.__name__}", _feed, (RemoteProtocolError,), seeds, True)


def _part_target() -> Target:
    writer = ChangedPartWriter(LAYOUT)
    writer.write_listed(0, np.arange(0, 20, 2, dtype=TABLE.tensors[0].index_dtype), np.ones(10, np.uint16))
    writer.write_whole(1, [np.zeros(84, np.uint8)])
    writer.write_whole(2, [np.zeros(8, np.uint8)])
    descriptor, size_bytes = writer.seal()
    seed = os.pread(descriptor, size_bytes, 0)
    os.close(descriptor)

    def read(data: bytes) -> None:
        for content in read_changed_part(LAYOUT, np.frombuffer(data, np.uint8)):
            count = TABLE.tensors[content.tensor_index].element_count
            require(content.bits.size <= count, "more than the tensor has")

    return Target("local-changed-part", read, (RemoteProtocolError,), (seed,))


def _task_target() -> Target:
    draw = random.Random(5)

    def read(data: bytes) -> None:
        read_task(GivenTask(make_sample(PeerId, draw), bytes(16), data.decode("utf-8", "replace"), 5))

    return Target("local-task", read, (), (b'{"prompt": "2 + 2"}', b"[1]", b'{"a": {"b": [1e5, null]}}'))


# State that was saved by this node, and may have been damaged since


def _saved_targets() -> Iterator[Target]:
    module = load_small_run()
    trust = TrustTarget()
    yield Target(
        "saved-trust",
        lambda data: Trust.restore(data, trust.run_id, module.verify),
        (StorageError,),
        (trust.saved,),
        True,
    )
    ballots = (encode_ballot(Ballot()), encode_ballot(Ballot(3, module.Run.second.peer_id, None)))
    yield Target("saved-ballot", decode_ballot, (StorageError,), ballots, True)
    window = ReplayWindow().take(5).take(9)
    yield Target("saved-replay-window", ReplayWindow.decode, (StorageError,), (window.encode(),))
    held = HeldVersion(Version(0, 3), Digest(bytes(32)), Digest(bytes(32)))
    yield Target("saved-held-version", HeldVersion.decode, (RemoteProtocolError,), (held.encode(),), True)
    book = AddressBook(PeerId(bytes(32)), (), None, random.Random(1).randrange)
    book.confirm(PeerId(bytes([1]) * 32), ("/ip4/1.2.3.4/tcp/5",))

    def read_book(data: bytes) -> None:
        AddressBook(PeerId(bytes(32)), (), data, random.Random(1).randrange)

    yield Target("saved-peers", read_book, (StorageError,), (book.encode(),), True)


# Files that somebody may have been handed


class _Files:
    """Puts bytes into a file of a private directory, and has them read."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fuzz-"))
        atexit.register(shutil.rmtree, self.path, ignore_errors=True)

    def reader(self, name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)

        def decode(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        return decode


FILES = _Files()

WINDOWS = ((0, 5, (2, 3), (3, 1)),)

SETTINGS = (
    b'role = "trainer"\nupload_limit = "5M"\nlisten = "/ip4/1.2.3.4/tcp/5"\n',
    b'metrics_port = 0\nstart_timeout_seconds = 15.5\nallow_uid = ["5"]\nwait = true\n',
    b"",
)


def _file_targets() -> Iterator[Target]:
    yield Target(
        "config-toml",
        FILES.reader("config.toml", lambda path: resolve({}, {}, path)),
        (ConfigError, UsageError),
        SETTINGS,
    )
    module = load_small_run()
    run = module.Run()
    path = FILES.path / "run.json"
    write_run_file(path, RunFile("name", make_seeds(JoinToken)[0], ("/ip4/1.2.3.4/tcp/5",)))
    yield Target("run-file", FILES.reader("run.json", read_run_file), (ConfigError,), (path.read_bytes(),))

    yield Target(
        "descriptor-file",
        FILES.reader("descriptors/000000.record", lambda path: load_descriptors(path.parent.parent)),
        (StorageError,),
        (encode_signed(run.genesis),),
        True,
    )
    yield from _model_targets()
    answer = Answer(
        0, 2, "boot", "transaction", next(iter(Order)), Outcome.DONE, State.READY, False, "0.3", "ab", windows=WINDOWS
    )
    yield Target("vllm-answer", decode_answer, (StorageError,), (encode_answer(answer),))


def _write_patch() -> bytes:
    table = TABLE.encode()
    blob = b"PLSP" + bytes(40)
    header = PatchFileHeader(table, Digest(bytes(32)), Digest(bytes(32)), 0, 0, len(blob), compute_digest(blob))
    file = io.BytesIO()
    write_patch(file, header, [blob])
    return file.getvalue()


def _model_targets() -> Iterator[Target]:
    header = json.dumps(
        {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"format": "pt"}}
    ).encode()
    model = len(header).to_bytes(8, "little") + header + bytes(12)
    yield Target("safetensors", FILES.reader("m.safetensors", read_header), (StorageError,), (model,))
    yield Target("patch-file", FILES.reader("a.patch", open_patch), (StorageError, UsageError), (_write_patch(),), True)


def make_targets() -> list[Target]:
    return [*_frame_targets(), _part_target(), _task_target(), *_saved_targets(), *_file_targets()]
