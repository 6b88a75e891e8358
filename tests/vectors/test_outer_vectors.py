"""proto/vectors/outer both ways: pulsenet agrees with the reference on every bit."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pulsenet.ids import Digest, PeerId
from pulsenet.outer.checks import compute_norm, compute_scales
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.flush import FlushPlan, TensorFlush
from pulsenet.outer.gate import correct_delta, gate_entries
from pulsenet.outer.inner_state import Slot, decode_slots, encode_slots
from pulsenet.outer.mixing.disagreement import choose_bins, encode_probe, fill_bins
from pulsenet.outer.mixing.mean import mean_entries
from pulsenet.outer.mixing.pairing import match_members
from pulsenet.outer.mixing.payload import MixingHeader, decode_part, encode_part, make_job_table
from pulsenet.outer.mixing.probe import name_bins, read_answer
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings, MixingVariant
from pulsenet.outer.mixing.step import compute_gradient, step_mixed
from pulsenet.outer.mixing.subset import adapt_subset, choose_default_subset
from pulsenet.outer.optimizer import step_nesterov
from pulsenet.outer.reduce import Counted, combine, reduce_mean, reduce_trimmed
from pulsenet.outer.residual import settle_counted, split_scaled
from pulsenet.outer.self_test import SELF_TEST_DIGEST, make_self_test_input, run_self_test
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings
from pulsenet.outer.state import compute_state_root
from pulsenet.outer.state_anchor import StateHeader, decode_state, encode_state
from pulsenet.tensors.digest import hash_tensor
from pulsenet.tensors.params import ParameterTable, TensorSpec

PROTO = Path(__file__).parents[2] / "proto"
FILES = sorted((PROTO / "vectors" / "outer").glob("*.json"))
Json = dict[str, Any]


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def bits(values: np.ndarray) -> list[int]:
    return values.view(np.uint32).tolist()


def make_flush(parts: Any, mantissa_bits: int) -> TensorFlush:
    return TensorFlush(tuple(slice(*part) for part in parts), mantissa_bits)


def run_gate(theta: Any, local: Any, residual: Any, parts: Any = (), flush_mantissa_bits: int = 23) -> Json:
    arguments = floats(theta), floats(local), floats(residual)
    found = gate_entries(*arguments, tensor_index=0, flush=make_flush(parts, flush_mantissa_bits))
    assert found.indices is not None
    corrected = correct_delta(*arguments)
    return {"corrected": bits(corrected), "indices": found.indices.tolist(), "values": bits(found.values)}


def run_flush(element_counts: Any, flush_interval: int, rounds: Any) -> Json:
    specs = (TensorSpec(f"t{index}", "F32", (count,)) for index, count in enumerate(element_counts))
    table = ParameterTable(tuple(specs))
    plan = FlushPlan(table, OuterSettings(flush_interval=flush_interval))
    return {
        "rounds": [
            [
                [index, part.start, part.stop]
                for index in range(len(table.tensors))
                for part in plan.of(index, round_index).parts
            ]
            for round_index in rounds
        ]
    }


def run_settle(
    theta: Any,
    local: Any,
    residual: Any,
    scale: int,
    outcome: str,
    parts: Any = (),
    flush_mantissa_bits: int = 23,
) -> Json:
    before, now, held = floats(theta), floats(local), floats(residual)
    (factor,) = floats([scale])
    sent = gate_entries(before, now, held, tensor_index=0, flush=make_flush(parts, flush_mantissa_bits))
    assert sent.indices is not None
    if outcome == "counted":
        settle_counted(held, before, now, sent, scale=factor, keeps_rest=flush_mantissa_bits < 23)
    elif outcome == "missed":
        correct_delta(before, now, held, out=held)
    counted = bits(split_scaled(sent.values, factor)[0])
    return {"indices": sent.indices.tolist(), "counted": counted, "residual": bits(held)}


def gather(contributions: Any) -> dict[bytes, Counted]:
    return {
        bytes.fromhex(key): Counted(
            Entries(0, None if indices is None else np.array(indices, np.uint32), floats(values)), floats([scale])[0]
        )
        for key, indices, values, scale in contributions
    }


def run_mean(element_count: int, contributions: Any) -> Json:
    mean = reduce_mean(gather(contributions), tensor_index=0, element_count=element_count)
    return {"indices": None if mean.indices is None else mean.indices.tolist(), "values": bits(mean.values)}


def run_trimmed(element_count: int, trim_count: int, contributions: Any) -> Json:
    parts = gather(contributions)
    found = reduce_trimmed(parts, tensor_index=0, element_count=element_count, trim_count=trim_count)
    if len(parts) == 4:
        median = OuterSettings(algorithm=Algorithm.DILOCO, combination=Combination.MEDIAN)
        assert combine(parts, median, tensor_index=0, element_count=element_count).same_as(found)
    return {"values": bits(found.values)}


def run_step(theta: Any, momentum: Any, gradient: Any, learning_rate: int, momentum_factor: int) -> Json:
    stepped, moved = floats(theta), floats(momentum)
    rate, factor = floats([learning_rate, momentum_factor])
    step_nesterov(stepped, moved, floats(gradient), learning_rate=rate, momentum_factor=factor)
    return {"theta": bits(stepped), "momentum": bits(moved)}


def run_clip(contributions: Any, clip_norm_ratio: int) -> Json:
    norms = [
        compute_norm(Contribution(0, Digest(bytes(32)), 1, (Entries(0, None, floats(values)),)))
        for values in contributions
    ]
    scales = compute_scales(norms, clip_norm_ratio=float(floats([clip_norm_ratio])[0]))
    return {"norms": [norm.hex() for norm in norms], "scales": bits(np.array(scales, np.float32))}


def run_state_root(tensors: Any, round_index: int, theta: Any, momentum: Any) -> Json:
    table = ParameterTable(tuple(TensorSpec(name, "F32", tuple(shape)) for name, shape in tensors))
    hashes = [
        (hash_tensor(floats(one)), hash_tensor(floats(other))) for one, other in zip(theta, momentum, strict=True)
    ]
    return {"root": compute_state_root(table, round_index=round_index, hashes=hashes).hex()}


def run_state_anchor(tensors: Any, round_index: int, theta: Any, momentum: Any) -> Json:
    table = ParameterTable(tuple(TensorSpec(name, "F32", tuple(shape)) for name, shape in tensors))
    state_root = Digest(bytes.fromhex(run_state_root(tensors, round_index, theta, momentum)["root"]))
    header = StateHeader(state_root, round_index)
    pieces = encode_state(table, header, lambda index: (floats(theta[index]), floats(momentum[index])))
    blob = b"".join(bytes(piece) for piece in pieces)
    read = [(bits(one), bits(other)) for _, one, other in decode_state([blob], table, header)]
    assert read == list(zip(theta, momentum, strict=True))
    return {"blob": blob.hex()}


def run_ddp_state(tensors: Any, round_index: int, theta: Any, slots: Any) -> Json:
    table = ParameterTable(tuple(TensorSpec(name, "F32", tuple(shape)) for name, shape in tensors))
    inner = [encode_slots([Slot(name, tuple(shape), floats(values)) for name, shape, values in each]) for each in slots]
    hashes = [(hash_tensor(floats(one)), hash_tensor(other)) for one, other in zip(theta, inner, strict=True)]
    root = compute_state_root(table, round_index=round_index, hashes=hashes)
    header = StateHeader(root, round_index, has_inner_state=True)
    blob = b"".join(bytes(piece) for piece in encode_state(table, header, lambda i: (floats(theta[i]), inner[i])))
    for index, values, state in decode_state([blob], table, header):
        found = {slot.name: [slot.name, list(slot.shape), bits(slot.values)] for slot in decode_slots(state, 4)}
        assert (bits(values), found) == (theta[index], {slot[0]: slot for slot in slots[index]})
    return {"root": root.hex(), "blob": blob.hex()}


def run_history(tensor: Any, rounds: Any, flush_interval: int = 0, flush_mantissa_bits: int = 23) -> Json:
    table = ParameterTable((TensorSpec(tensor[0], "F32", tuple(tensor[1])),))
    settings = OuterSettings(flush_interval=flush_interval, flush_mantissa_bits=flush_mantissa_bits)
    plan = FlushPlan(table, settings)
    count = table.element_count
    theta, momentum = np.ones(count, np.float32), np.zeros(count, np.float32)
    residuals: dict[str, np.ndarray] = {}
    found = []
    rates = {"learning_rate": np.float32(0.7), "momentum_factor": np.float32(0.9)}
    for round_index, trainers in enumerate(rounds):
        contributions = {}
        for key, delta, scale, outcome in trainers:
            residual = residuals.setdefault(key, np.zeros(count, np.float32))
            local = theta - floats(delta)
            sent = gate_entries(theta, local, residual, tensor_index=0, flush=plan.of(0, round_index))
            if outcome == "counted":
                scaled = floats([scale])[0]
                settle_counted(residual, theta, local, sent, scale=scaled, keeps_rest=settings.cuts_values)
                contributions[bytes.fromhex(key)] = Counted(sent, floats([scale])[0])
            elif outcome == "missed":
                correct_delta(theta, local, residual, out=residual)
        if contributions:
            gradient = np.zeros(count, np.float32)
            mean = reduce_mean(contributions, tensor_index=0, element_count=count)
            gradient[mean.indices] = mean.values
            step_nesterov(theta, momentum, gradient, **rates)
        root = compute_state_root(
            table, round_index=round_index + 1, hashes=[(hash_tensor(theta), hash_tensor(momentum))]
        )
        found.append([root.hex(), [bits(residuals[key]) for key in sorted(residuals)]])
    return {"rounds": found}


def run_pairs(seed: str, round_index: int, job: int, members: Any) -> Json:
    keys = [PeerId(bytes.fromhex(member)) for member in members]
    groups = match_members(bytes.fromhex(seed), round_index, Job(job), keys)
    return {"groups": [[member.hex() for member in group] for group in groups]}


def run_mixing(variant: str, seed: str, members: Any, rounds: Any) -> Json:
    chosen, keys = MixingVariant(variant), [PeerId(bytes.fromhex(member)) for member in members]
    count = len(rounds[0][0])
    iterates = {key: np.ones(count, np.float32) for key in keys}
    momenta = {key: np.zeros(count, np.float32) for key in keys}

    def mix(job: Job, round_index: int, vectors: dict[PeerId, np.ndarray]) -> dict[PeerId, np.ndarray]:
        groups: Any = [keys]
        if chosen.kind(job) is MixingKind.NONE:
            return vectors
        if chosen.kind(job) is MixingKind.PAIR:
            groups = match_members(bytes.fromhex(seed), round_index, job, keys)
        mixed = {}
        for group in groups:
            parts = {key: Entries(0, None, vectors[key]) for key in group}
            mixed.update(dict.fromkeys(group, mean_entries(parts, tensor_index=0, element_count=count).values))
        return mixed

    found = []
    rates = {"learning_rate": np.float32(0.7), "momentum_factor": np.float32(0.9)}
    for round_index, deltas in enumerate(rounds):
        mixed = mix(Job.MIX1, round_index, iterates)
        gradients = {
            key: compute_gradient(iterates[key], iterates[key] - floats(delta))
            for key, delta in zip(keys, deltas, strict=True)
        }
        gradients = mix(Job.MIX2, round_index, gradients)
        iterates = {key: step_mixed(mixed[key], momenta[key], gradients[key], **rates) for key in keys}
        found.append([[bits(iterates[key]), bits(momenta[key])] for key in keys])
    return {"rounds": found}


def run_mixing_blob(
    tensors: Any,
    vectors: Any,
    job: int,
    base_root: str,
    round_index: int,
    contributor_count: int,
    values: Any,
    slice_index: int = 0,
    slice_count: int = 1,
) -> Json:
    table = ParameterTable(tuple(TensorSpec(name, "F32", tuple(shape)) for name, shape in tensors))
    job_table = make_job_table(table, MixingSettings(mixes_momentum=True), Job(job), round_index=round_index)
    assert job_table is not None
    assert [vector.value for vector in job_table.vectors] == vectors
    header = MixingHeader(
        job_table.digest,
        Job(job),
        round_index,
        Digest(bytes.fromhex(base_root)),
        slice_index,
        slice_count,
        contributor_count,
    )
    entries = [Entries(place, None, floats(tensor)) for place, tensor in enumerate(values)]
    blob = b"".join(encode_part(job_table, entries, header=header))
    own = [values[place] for place, _, _ in job_table.list_blocks(slice_index, slice_count)]
    assert [part.value_bits.tolist() for part in decode_part([blob], job_table, header=header)] == own
    return {"blob": blob.hex()}


def run_probe(common: Any, own: Any, token_count: int, round_index: int) -> Json:
    rows, mine = (np.array([floats(row) for row in given], np.float64) for given in (common, own))
    bins = choose_bins(rows, token_count)
    answer = encode_probe(fill_bins(mine, bins), round_index=round_index)
    assert read_answer(answer, round_index).shape == (len(common), token_count + 1)
    return {"bins": name_bins(bins).hex(), "answer": answer.hex()}


def run_subset(tensors: Any, subset: Any, scores: Any, distance: int, distance_max: int, ratio: int) -> Json:
    table = ParameterTable(tuple(TensorSpec(name, "F32", (count,)) for name, count in tensors))
    far, most, share = (float(value) for value in floats([distance, distance_max, ratio]))
    if not subset:
        return {"subset": list(choose_default_subset(table, share))}
    told = {place: float(floats([score])[0]) for place, score in scores}
    return {"subset": list(adapt_subset(table, subset, told, distance=far, distance_max=most, ratio=share))}


def check_self_test() -> Json:
    names = ("theta", "momentum", "residual", "delta")
    packed = {name: values.tobytes().hex() for name, values in zip(names, make_self_test_input(), strict=True)}
    assert run_self_test() == SELF_TEST_DIGEST
    return {**packed, "digest": SELF_TEST_DIGEST.hex()}


OPERATIONS: dict[str, Callable[..., Json]] = {
    "gate": run_gate,
    "flush": run_flush,
    "settle": run_settle,
    "mean": run_mean,
    "trimmed": run_trimmed,
    "step": run_step,
    "clip": run_clip,
    "state-root": run_state_root,
    "state-anchor": run_state_anchor,
    "ddp-state": run_ddp_state,
    "history": run_history,
    "pairs": run_pairs,
    "mixing": run_mixing,
    "mixing-blob": run_mixing_blob,
    "probe": run_probe,
    "subset": run_subset,
    "self-test": check_self_test,
}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_outer_vectors", PROTO / "reference" / "make_outer_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(PROTO / "reference"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_there_are_vectors_for_every_operation() -> None:
    assert {json.loads(file.read_text())["input"]["operation"] for file in FILES} == set(OPERATIONS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_vector_holds_in_pulsenet(file: Path) -> None:
    vector = json.loads(file.read_text())
    assert set(vector) == {"name", "expect", "input", "output", "comment"}
    assert (vector["name"], vector["expect"]) == (file.stem, "ok")
    # An operation's function takes exactly the vector's fields, so an unknown one is a TypeError.
    fields = dict(vector["input"])
    assert OPERATIONS[fields.pop("operation")](**fields) == vector["output"], vector["comment"]


def test_regenerating_the_vectors_changes_nothing(tmp_path: Path) -> None:
    load_generator().main(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.glob("*.json")} == {
        file.name: file.read_text() for file in FILES
    }
