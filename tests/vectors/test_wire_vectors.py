"""proto/vectors/wire both ways: pulsenet agrees with the reference on every byte and every refusal."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pulsenet.chain import records
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.rollouts import unpack_rollouts
from pulsenet.chain.signing import decode_signed, open_record, record_digest
from pulsenet.chain.token import decode_token, encode_token
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.wire.canonical import CanonicalReader
from pulsenet.wire.chunks import ChunkCutter, ChunkList
from pulsenet.wire.framing import FrameDecoder, encode_message
from pulsenet.wire.messages import MESSAGE_TYPES
from pulsenet.wire.schema import decode_value, encode_value

PROTO = Path(__file__).parents[2] / "proto"
FILES = sorted((PROTO / "vectors" / "wire").glob("*.json"))
Json = dict[str, Any]
NUMBERS = {message_type: number for number, message_type in MESSAGE_TYPES.items()}
RECORD_TYPES: dict[str, Any] = {
    cls.TYPE: cls
    for cls in (
        records.Descriptor,
        records.EpochRecord,
        records.Manifest,
        records.Catalogue,
        records.Head,
        records.Have,
        records.RolloutBatch,
        records.Vote,
        records.Contribution,
        records.Receipt,
        records.Aggregate,
        records.StateAnchor,
        records.Roster,
        records.Probe,
        records.Share,
    )
}


def plain(value: Any) -> Any:
    """The JSON form that the vectors use."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, Version):
        return [value.epoch, value.number]
    if isinstance(value, StrEnum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(peer_id).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def run_canonical(given: Json) -> Json:
    reader = CanonicalReader(bytes.fromhex(given["data"]))
    reader.skip()
    reader.finish()
    return {}


def run_frames(given: Json) -> Json:
    decoder = FrameDecoder()
    messages = []
    for byte in bytes.fromhex(given["stream"]):
        messages += decoder.feed(bytes([byte]))
    decoder.eof()
    return {
        "messages": [[NUMBERS[type(message)], plain(message)] for message in messages],
        "encoded": b"".join(map(encode_message, messages)).hex(),
    }


def run_record(given: Json) -> Json:
    signed = decode_signed(bytes.fromhex(given["signed"]))
    run_id = RunId(bytes.fromhex(given["run_id"]))
    record = open_record(RECORD_TYPES[given["type"]], signed, verify, run_id=run_id)
    return {
        "fields": plain(record),
        "digest": record_digest(signed).hex(),
        "encoded": encode_value(record).hex(),
        "signers": [signer.hex() for signer in signed.signers],
    }


def run_outcome(given: Json) -> Json:
    signed = decode_signed(bytes.fromhex(given["signed"]))
    return {"outcome": outcome_of(decode_value(records.Receipt, signed.payload)).hex()}


def run_chunk_list(given: Json) -> Json:
    chunk_list = ChunkList.decode(bytes.fromhex(given["data"]))
    assert chunk_list.encode().hex() == given["data"]
    return {
        "entries": [[size, digest.hex()] for size, digest in chunk_list.entries],
        "size_bytes": chunk_list.size_bytes,
        "blob_id": chunk_list.blob_id.hex(),
    }


def run_cut(given: Json) -> Json:
    cutter = ChunkCutter(given["chunk_size_bytes"])
    for segment in given["segments"]:
        cutter.boundary()
        for byte in bytes.fromhex(segment):
            cutter.feed(bytes([byte]))
    cutter.finish()
    return {"chunk_list": cutter.chunk_list.encode().hex(), "blob_id": cutter.chunk_list.blob_id.hex()}


def run_token(given: Json) -> Json:
    token = decode_token(given["text"])
    return {"fields": plain(token), "text": encode_token(token)}


def run_trust(given: Json) -> Json:
    run_id = RunId(bytes.fromhex(given["run_id"]))
    trust = Trust(run_id, verify, given["revision_min"])
    codes = []
    for step in given["steps"]:
        assert set(step) == {"accept", "records", "now_ms"}
        signed = [decode_signed(bytes.fromhex(data)) for data in step["records"]]
        arguments = [*signed, step["now_ms"]] if step["accept"] in ("head", "last_head") else signed
        try:
            if step["accept"] == "roster":
                vote, roster = signed
                mandate = trust.accept_vote(vote)
                trust.accept_roster(roster, term=mandate.term, coordinator=mandate.candidate)
            elif step["accept"] in ("share", "probe"):
                roster, said = signed
                accept = trust.accept_share if step["accept"] == "share" else trust.accept_probe
                accept(said, decode_value(records.Roster, roster.payload), record_digest(roster))
            else:
                getattr(trust, f"accept_{step['accept']}")(*arguments)
            codes.append("ok")
        except (TrustError, RemoteProtocolError) as error:
            codes.append(error.code)
        trust = Trust.restore(trust.save(), run_id, verify)  # a restart after every step changes nothing
    assert codes == given["expected"]
    return {
        "forked": trust.fork is not None,
        "epoch": trust.epoch,
        "version": None if trust.head is None else plain(trust.head.version),
    }


def run_rollouts(given: Json) -> Json:
    signed = decode_signed(bytes.fromhex(given["signed"]))
    arrays = unpack_rollouts(decode_value(records.RolloutBatch, signed.payload))
    columns = zip(
        arrays.versions_first,
        arrays.versions_last,
        arrays.prompts(),
        arrays.completions(),
        arrays.completion_logprobs(),
        arrays.rewards.view(np.uint32).tolist(),
        np.ascontiguousarray(arrays.reward_parts.T).view(np.uint32).tolist(),
        strict=True,
    )
    return {
        "samples": [
            {
                "version_first": plain(first),
                "version_last": plain(last),
                "prompt": prompt.tolist(),
                "completion": completion.tolist(),
                "logprobs": logprobs.view(f"u{logprobs.dtype.itemsize}").tolist(),
                "reward": reward,
                "reward_parts": parts,
            }
            for first, last, prompt, completion, logprobs, reward, parts in columns
        ]
    }


OPERATIONS: dict[str, tuple[set[str], Callable[[Json], Json]]] = {
    "canonical": ({"data"}, run_canonical),
    "frames": ({"stream"}, run_frames),
    "record": ({"type", "run_id", "signed"}, run_record),
    "chunk-list": ({"data"}, run_chunk_list),
    "cut": ({"segments", "chunk_size_bytes"}, run_cut),
    "outcome": ({"signed"}, run_outcome),
    "rollouts": ({"signed"}, run_rollouts),
    "token": ({"text"}, run_token),
    "trust": ({"run_id", "revision_min", "steps", "expected"}, run_trust),
}


def check_vector(vector: Json, file_name: str) -> None:
    assert set(vector) == {"name", "expect", "input", "output", "comment"}
    assert f"{vector['name']}.json" == file_name
    given = dict(vector["input"])
    known, operate = OPERATIONS[given.pop("operation")]
    assert set(given) == known
    try:
        output, code = operate(given), "ok"
    except (RemoteProtocolError, TrustError) as error:
        output, code = None, error.code
    assert code == vector["expect"]
    assert output == vector["output"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pulsenet_agrees_with_the_vector(file: Path) -> None:
    check_vector(json.loads(file.read_text(encoding="utf-8")), file.name)


def test_a_vector_with_an_unknown_field_fails() -> None:
    vector = json.loads(FILES[0].read_text(encoding="utf-8"))
    with pytest.raises(AssertionError):
        check_vector({**vector, "hint": ""}, FILES[0].name)
    with pytest.raises(AssertionError):
        check_vector({**vector, "input": {**vector["input"], "hint": ""}}, FILES[0].name)
    with pytest.raises(AssertionError):
        check_vector({**vector, "expect": "no-such-code"}, FILES[0].name)


def load_generator() -> ModuleType:
    path = PROTO / "reference" / "make_wire_vectors.py"
    spec = importlib.util.spec_from_file_location("make_wire_vectors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def test_the_reference_makes_the_same_vectors_again() -> None:
    made = load_generator().make_all()
    assert {file.name: file.read_text(encoding="utf-8") for file in FILES} == made


def test_the_reference_imports_nothing_of_ours() -> None:
    for file in (PROTO / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("pulsenet", "pulsenetd")], file
