"""Decoders of what peers send: every message, record and token, by walking their registries."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import zstandard
from samples import make_sample
from targets import Target, require

from pulsenet.chain import records, rules
from pulsenet.chain.records import RolloutBatch, SignedRecord
from pulsenet.chain.rollouts import RolloutArrays, pack_rollouts, unpack_rollouts
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest, signed_bytes
from pulsenet.chain.token import decode_token, encode_token
from pulsenet.chain.trust import Trust
from pulsenet.errors import IntegrityError, RemoteProtocolError, TrustError, UsageError
from pulsenet.ids import Digest, PeerId, RunId
from pulsenet.node.holdings import unpack_flags
from pulsenet.wire.chunks import ChunkList, open_chunk_list
from pulsenet.wire.framing import LENGTH_SIZE_BYTES, FrameDecoder, decode_message, encode_message
from pulsenet.wire.messages import MESSAGE_TYPES
from pulsenet.wire.schema import decode_value, encode_value
from pulsenetd.identity import from_libp2p_bytes, from_libp2p_text, to_libp2p_bytes, to_libp2p_text
from pulsenetd.network import addresses, dial_back
from pulsenetd.network.directory_keys import DirectoryKeys, get_key_id, get_shard, get_slot
from pulsenetd.network.validator import RecordValidator, get_expiry, unpack_value

SAMPLES = 6
RECORD_TYPES: tuple[type[Any], ...] = typing.get_args(rules.Signable)


@functools.cache
def load_small_run() -> ModuleType:
    """The run with real keys that the tests of the chain use."""
    path = Path(__file__).parents[1] / "unit" / "chain" / "conftest.py"
    spec = importlib.util.spec_from_file_location("small_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_seeds(cls: type[Any]) -> list[Any]:
    draw = random.Random(cls.__name__)
    return [make_sample(cls, draw) for _ in range(SAMPLES)]


def _decode_and_compare(cls: type[Any], data: bytes) -> None:
    value = decode_value(cls, data)
    again = decode_value(cls, encode_value(value))
    require(again == value, f"{cls.__name__} changes when it is written again")


def _message_targets() -> Iterator[Target]:
    for number, cls in MESSAGE_TYPES.items():
        seeds = tuple(encode_message(value)[LENGTH_SIZE_BYTES:] for value in make_seeds(cls))

        def decode(data: bytes) -> None:
            message = decode_message(data)
            require(decode_message(encode_message(message)[LENGTH_SIZE_BYTES:]) == message, "another message")

        yield Target(
            f"message-{number:02}-{cls.__name__}", decode, (RemoteProtocolError,), seeds, True, has_spec_codes=True
        )


def _feed_stream(data: bytes) -> None:
    """All at once, and again in pieces: the same messages, or the same refusal."""
    outcomes = []
    for step in (len(data) or 1, 7):
        decoder = FrameDecoder()
        received: list[Any] = []
        code = ""
        try:
            for start in range(0, len(data), step):
                received += decoder.feed(data[start : start + step])
            decoder.eof()
        except RemoteProtocolError as error:
            code = error.code
        outcomes.append((code, received if not code else None))
    require(outcomes[0] == outcomes[1], f"how a stream is cut changes what comes of it: {outcomes}")
    if outcomes[0][0]:
        raise RemoteProtocolError(outcomes[0][0])


def _stream_target() -> Target:
    streams = [b"".join(encode_message(make_seeds(cls)[0]) for cls in MESSAGE_TYPES.values())]
    streams += [encode_message(value) * 2 for cls in list(MESSAGE_TYPES.values())[:6] for value in make_seeds(cls)[:2]]
    return Target("stream", _feed_stream, (RemoteProtocolError,), tuple(streams), True, has_spec_codes=True)


def _record_targets() -> Iterator[Target]:
    for cls in (*RECORD_TYPES, SignedRecord, records.JoinToken, dial_back.DialBackRequest):
        seeds = tuple(map(encode_value, make_seeds(cls)))
        decode = functools.partial(_decode_and_compare, cls)
        yield Target(f"record-{cls.__name__}", decode, (RemoteProtocolError,), seeds, True, has_spec_codes=True)
        if cls in RECORD_TYPES:

            def check(data: bytes, cls: type[Any] = cls) -> None:
                rules.check_record(decode_value(cls, data))

            def is_kept(data: bytes, check: Any = check) -> bool:
                try:
                    check(data)
                except RemoteProtocolError:
                    return False
                return True

            # A record whose vectors are not written yet starts from what only its schema allows.
            good = tuple(filter(is_kept, (*seeds, *_vector_payloads(cls.TYPE)))) or seeds
            yield Target(f"rules-{cls.__name__}", check, (RemoteProtocolError,), good, True, has_spec_codes=True)


@functools.cache
def _vectors() -> tuple[SignedRecord, ...]:
    """The signed records of the vectors that are well-formed."""
    folder = Path(__file__).parents[2] / "proto" / "vectors" / "wire"
    vectors = (json.loads(path.read_text()) for path in sorted(folder.glob("record-*.json")))
    good = (vector for vector in vectors if vector["expect"] == "ok")
    return tuple(decode_signed(bytes.fromhex(vector["input"]["signed"])) for vector in good)


def _vector_payloads(record_type: str) -> list[bytes]:
    return [signed.payload for signed in _vectors() if signed.type == record_type]


# What is believed


class TrustTarget:
    """A node's beliefs, offered records that were changed on the way, or by whoever signed them."""

    def __init__(self) -> None:
        self._module = module = load_small_run()
        self._run = run = module.Run()
        self.run_id: RunId = run.run_id
        manifests = [run.manifest(number) for number in (1, 2, 3)]
        catalogue = run.catalogue(*manifests)
        signed_catalogue = run.sign(catalogue, run.publisher)
        newest = record_digest(run.sign(manifests[-1], run.publisher))
        head = run.head(3, manifest_digest=newest, catalogue_digest=record_digest(signed_catalogue))
        trainer = run.trainer
        revision = run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,))
        batch = dataclasses.replace(_rollout_batches()[0], run_id=run.run_id)
        vote = records.Vote(run.run_id, 0, 1, run.publisher.peer_id, None)
        contribution = records.Contribution(
            run.run_id, 0, trainer.peer_id, 0, Digest(bytes(32)), Digest(bytes(32)), 30, 3, 1000, 0x3F80_0000, 1
        )
        have = records.Have(run.run_id, "seed", 0, 1, 3, (1,), ("/ip4/1.2.3.4/tcp/1",), module.NOW_MS)
        signed = [
            run.genesis,
            revision,
            run.sign(run.epoch(1, 9), run.owner),
            run.sign(run.epoch(1, 9), run.publisher, run.second),
            run.sign(head, run.publisher),
            run.signed_head(4),
            run.signed_head(2),
            signed_catalogue,
            *(run.sign(manifest, run.publisher) for manifest in manifests),
            run.sign(have, run.inferencer),
            run.sign(batch, run.inferencer),
            run.sign(vote, run.second),
            run.sign(contribution, trainer),
        ]
        self._known = {(each.type, each.payload) for each in signed}
        self._keys = (run.owner, run.publisher, run.second, run.trainer, run.inferencer, run.stranger)
        trust = run.trust()
        trust.accept_head(run.sign(head, run.publisher), module.NOW_MS)
        trust.accept_catalogue(signed_catalogue)
        self.saved = trust.save()
        self._restore()
        self.saved = self._trust.save()
        self.seeds = tuple(map(encode_signed, signed))

    def decode_stranger(self, data: bytes) -> None:
        """Whatever came: what is believed afterwards was signed as it stands."""
        signed = decode_signed(data)
        self._offer(signed, may_be_new=False)

    def decode_resigned(self, data: bytes) -> None:
        """The payload was changed and signed again, by a key that is chosen by its bytes."""
        signed = decode_signed(data)
        key = self._keys[sum(data) % len(self._keys)]
        signature = key.sign(signed_bytes(signed.type, signed.payload))
        resigned = dataclasses.replace(signed, signatures=(signature,), signers=(key.peer_id,))
        self._offer(resigned, may_be_new=key is not self._run.stranger)

    def _offer(self, signed: SignedRecord, *, may_be_new: bool) -> None:
        trust, now_ms = self._trust, self._module.NOW_MS
        accept = {
            "descriptor": lambda: trust.accept_descriptor(signed),
            "epoch": lambda: trust.accept_epoch(signed),
            "head": lambda: trust.accept_head(signed, now_ms),
            "catalogue": lambda: trust.accept_catalogue(signed),
            "manifest": lambda: trust.accept_manifest(signed),
            "have": lambda: trust.accept_have(signed, now_ms),
            "rollouts": lambda: trust.accept_rollouts(signed),
            "vote": lambda: trust.accept_vote(signed),
            "contribution": lambda: trust.accept_contribution(signed),
            "receipt": lambda: trust.accept_receipt(signed),
            "stateanchor": lambda: trust.accept_state_anchor(signed),
            "aggregate": lambda: trust.accept_aggregate(signed),
        }.get(signed.type, lambda: trust.accept_head(signed, now_ms))
        was_forked = trust.fork is not None
        try:
            accept()
        except (RemoteProtocolError, TrustError):
            if trust.fork is not None and not was_forked:
                self._restore()
            else:
                require(may_be_new or trust.save() == self.saved, "a refused record changed what is believed")
            raise
        # A have record speaks for its own signer, whoever that is; everything else needs the run's word.
        if not may_be_new and signed.type != "have":
            require((signed.type, signed.payload) in self._known, f"a {signed.type} that nobody signed was believed")
        self._restore()

    def _restore(self) -> None:
        self._trust = Trust.restore(self.saved, self._run.run_id, self._module.verify)


def _trust_targets() -> Iterator[Target]:
    target, again = TrustTarget(), TrustTarget()
    errors = (RemoteProtocolError, TrustError)
    yield Target("trust-changed", target.decode_stranger, errors, target.seeds, True, has_spec_codes=True)
    yield Target("trust-signed-again", again.decode_resigned, errors, again.seeds, True, has_spec_codes=True)


def _rollout_targets() -> Iterator[Target]:
    bodies = _rollout_batches()

    def read(data: bytes, batch: RolloutBatch) -> None:
        arrays = unpack_rollouts(dataclasses.replace(batch, body=data))
        require(arrays.sample_count == batch.sample_count, "another number of samples")

    batch = bodies[0]
    packed = tuple(each.body for each in bodies)
    raw = tuple(zstandard.decompress(each.body) for each in bodies)
    yield Target(
        "rollouts-frame", functools.partial(read, batch=batch), (RemoteProtocolError,), packed, has_spec_codes=True
    )
    yield Target(
        "rollouts-arrays",
        lambda data: read(zstandard.compress(data), batch),
        (RemoteProtocolError,),
        raw,
        has_spec_codes=True,
    )
    texts = tuple(text.encode() for text in ('{"a": [1, {"b": null}]}', "{}", '{"x": 1e400}', '{"deep": [[[[[[]]]]]]}'))

    def read_text(data: bytes) -> None:
        unpack_rollouts(dataclasses.replace(batch, metadata=data.decode("utf-8", "replace")))

    yield Target("rollouts-metadata", read_text, (RemoteProtocolError,), texts, has_spec_codes=True)


def _rollout_batches() -> list[RolloutBatch]:
    """Batches of one shape, so that the bodies can be told by one record."""
    found = []
    for seed in range(4):
        draw = np.random.default_rng(seed)
        arrays = RolloutArrays(
            versions=np.array([[0, 0], [1, 1], [0, 0], [1, 1]], np.uint64),
            prompt_lengths=np.array([3, 2], np.uint32),
            completion_lengths=np.array([4, 1], np.uint32),
            prompt_tokens=draw.integers(0, 50_000, 5, dtype=np.int32),
            completion_tokens=draw.integers(0, 50_000, 5, dtype=np.int32),
            logprobs=-draw.random(5, dtype=np.float32),
            rewards=draw.random(2, dtype=np.float32),
            reward_parts=draw.random((1, 2), dtype=np.float32),
        )
        found.append(pack_rollouts(arrays, run_id=RunId(bytes(32)), sequence=1, part_names=("style",)))
    return found


# Chunk lists, tokens, names


def _chunk_targets() -> Iterator[Target]:
    lists = [
        ChunkList(tuple((size, Digest(bytes([index]) * 32)) for index, size in enumerate(sizes)))
        for sizes in ((), (1,), (1 << 20, 5), (1 << 20,) * 3 + (77,), tuple(range(1, 60)))
    ]
    seeds = tuple(each.encode() for each in lists)

    def decode(data: bytes) -> None:
        require(ChunkList.decode(data).encode() == data, "a chunk list with two encodings")

    def open_named(data: bytes) -> None:
        wanted = lists[3]
        opened = open_chunk_list(data, blob_id=wanted.blob_id, size_bytes=wanted.size_bytes)
        require(opened == wanted, "another list than the one named")

    yield Target("chunk-list", decode, (RemoteProtocolError,), seeds, has_spec_codes=True)
    yield Target("chunk-list-named", open_named, (RemoteProtocolError, IntegrityError), (seeds[3],))
    flags = (b"\xff\x80", bytes(2), b"\x55\x00")
    yield Target("holdings", lambda data: unpack_flags(data, 9), (RemoteProtocolError,), flags, has_spec_codes=True)


def _text_targets() -> Iterator[Target]:
    tokens = [encode_token(value) for value in make_seeds(records.JoinToken)]
    known = [decode_token(text) for text in tokens]

    def decode(data: bytes) -> None:
        require(decode_token(data.decode("utf-8", "replace")) in known, "a token that nobody wrote")

    yield Target("token", decode, (RemoteProtocolError,), tuple(text.encode() for text in tokens), has_spec_codes=True)
    peer = PeerId(bytes(range(32)))
    yield Target(
        "peer-id-text",
        lambda data: from_libp2p_text(data.decode("utf-8", "replace")),
        (RemoteProtocolError,),
        (to_libp2p_text(peer).encode(),),
    )
    yield Target("peer-id", from_libp2p_bytes, (RemoteProtocolError,), (to_libp2p_bytes(peer),))
    texts = tuple(
        f"{address}/p2p/{to_libp2p_text(peer)}".encode()
        for address in ("/ip4/1.2.3.4/tcp/4001", "/ip6/::1/tcp/1", "/dns4/example.org/tcp/443")
    )
    yield Target("address", lambda data: addresses.split_address(data.decode("utf-8", "replace")), (UsageError,), texts)


# The directory and the way back


@dataclasses.dataclass(frozen=True)
class _DhtRecord:
    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def _directory_targets() -> Iterator[Target]:
    module = load_small_run()
    run = module.Run()
    now = module.NOW_MS / 1000
    validator = RecordValidator(DirectoryKeys(run.run_id), module.verify, lambda: now)
    validator.set_authorities((run.publisher.peer_id, run.second.peer_id))
    keys = DirectoryKeys(run.run_id)
    head = run.head(3)
    have = records.Have(run.run_id, "seed", 0, 1, 3, (1,), ("/ip4/1.2.3.4/tcp/1",), module.NOW_MS)
    no_subkey = bytes(msgpack.packb(None))
    true = [
        (get_key_id(keys.get_head_key(run.publisher.peer_id, get_slot(now))), no_subkey, run.sign(head, run.publisher)),
        (
            get_key_id(keys.get_have_key(get_shard(run.trainer.peer_id), get_slot(now))),
            bytes(msgpack.packb(run.trainer.peer_id)),
            run.sign(have, run.trainer),
        ),
    ]
    seeds = tuple(
        bytes(msgpack.packb([key, subkey, msgpack.packb(encode_signed(signed)), int(module.NOW_MS)]))
        for key, subkey, signed in true
    )
    known = {(key, subkey, encode_signed(signed)) for key, subkey, signed in true}
    expiry = get_expiry(module.NOW_MS)

    def judge(data: bytes) -> None:
        """A record as the DHT hands it over: any key, subkey, value and expiry."""
        try:
            row = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException, RecursionError):
            row = [data[:20], no_subkey, data, 0]
        fits = isinstance(row, list) and len(row) == 4 and all(isinstance(each, bytes) for each in row[:3])
        key, subkey, value, moved = row if fits else (true[0][0], no_subkey, data, module.NOW_MS)
        moved_seconds = (moved - module.NOW_MS) / 1000 if isinstance(moved, int | float) else 0.0
        record = _DhtRecord(key, subkey, value, expiry + moved_seconds)
        reason = validator.judge(record)
        if reason is not None:
            raise RemoteProtocolError(reason)
        signed = decode_signed(unpack_value(value))
        originals = [each for each in known if each[:2] == (key, subkey)]
        require(
            any(decode_signed(each[2]).payload == signed.payload for each in originals),
            "a directory entry that nobody signed",
        )
        require(abs(moved_seconds) <= 0.002, "an entry outlives what its signed time allows")

    yield Target("directory-record", judge, (RemoteProtocolError,), seeds, True)
    values = tuple(bytes(msgpack.packb(encode_signed(signed))) for _, _, signed in true)
    yield Target("directory-value", unpack_value, (RemoteProtocolError,), values, True)

    def read_reply(data: bytes) -> None:
        dial_back._check_reply(decode_value(dial_back.DialBackReply, data))

    replies = (
        dial_back.DialBackReply("1.2.3.4", ("open", "refused")),
        dial_back.DialBackReply("", ("busy",)),
        dial_back.DialBackReply("::1", ("timed-out",)),
    )
    yield Target(
        "dial-back-reply",
        read_reply,
        (RemoteProtocolError,),
        tuple(map(encode_value, replies)),
        True,
        has_spec_codes=True,
    )


def make_targets() -> list[Target]:
    return [
        *_message_targets(),
        _stream_target(),
        *_record_targets(),
        *_trust_targets(),
        *_rollout_targets(),
        *_chunk_targets(),
        *_text_targets(),
        *_directory_targets(),
    ]
