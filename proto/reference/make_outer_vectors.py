"""Write proto/vectors/outer/*.json from the reference: ``python proto/reference/make_outer_vectors.py [FOLDER]``.

One vector a file. ``input.operation`` says what is done; see proto/vectors/outer/README.md. Values are FP32 bits.
"""

import json
import struct
import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pulse_reference_outer as reference
from blake3 import blake3
from pulse_reference_codec import encode_table

ONE, HALF, THIRD = 0x3F800000, 0x3F000000, 0x3E99999A
SPECIALS = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0xFFC00001]


def fp32(*values):
    return [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]


def vector(name, operation, fields, comment):
    output = OPERATIONS[operation](fields)
    return {
        "name": name,
        "expect": "ok",
        "input": {"operation": operation, **fields},
        "output": output,
        "comment": comment,
    }


def run_gate(fields):
    arguments = fields["theta"], fields["local"], fields["residual"]
    indices, values = reference.gate(*arguments, fields.get("parts", []), fields.get("flush_mantissa_bits", 23))
    return {"corrected": reference.correct(*arguments), "indices": indices, "values": values}


def run_flush(fields):
    return {
        "rounds": [
            reference.flushed_parts(fields["element_counts"], round_index, fields["flush_interval"])
            for round_index in fields["rounds"]
        ]
    }


def run_settle(fields):
    arguments = fields["theta"], fields["local"], fields["residual"]
    parts, mantissa_bits = fields.get("parts", []), fields.get("flush_mantissa_bits", 23)
    indices, values = reference.gate(*arguments, parts, mantissa_bits)
    residual = reference.settle(
        *arguments, indices, values, fields["scale"], fields["outcome"], keeps_rest=mantissa_bits < 23
    )
    counted = [reference.split(value, fields["scale"])[0] for value in values]
    return {"indices": indices, "counted": counted, "residual": residual}


def keyed(fields):
    return {bytes.fromhex(key): (indices, values, scale) for key, indices, values, scale in fields["contributions"]}


def run_mean(fields):
    indices, values = reference.mean(keyed(fields), fields["element_count"])
    return {"indices": indices, "values": values}


def run_trimmed(fields):
    dense = {key: values for key, (_, values, _) in keyed(fields).items()}
    return {"values": reference.trimmed(dense, fields["element_count"], fields["trim_count"])}


def run_step(fields):
    theta, momentum = reference.step(
        fields["theta"], fields["momentum"], fields["gradient"], fields["learning_rate"], fields["momentum_factor"]
    )
    return {"theta": theta, "momentum": momentum}


def run_clip(fields):
    norms = [reference.norm(values) for values in fields["contributions"]]
    (multiple,) = struct.unpack("<f", struct.pack("<I", fields["clip_norm_ratio"]))
    # FP64 as hexadecimal digits, which say every bit.
    return {"norms": [norm.hex() for norm in norms], "scales": reference.scales(norms, multiple)}


def run_state_root(fields):
    root = reference.state_root(fields["tensors"], fields["round_index"], fields["theta"], fields["momentum"])
    return {"root": root.hex()}


def run_state_anchor(fields):
    blob = reference.state_anchor(fields["tensors"], fields["round_index"], fields["theta"], fields["momentum"])
    return {"blob": blob.hex()}


def run_ddp_state(fields):
    arguments = fields["tensors"], fields["round_index"], fields["theta"], fields["slots"]
    return {
        "root": reference.ddp_state_root(*arguments).hex(),
        "blob": reference.ddp_state_anchor(*arguments).hex(),
    }


def run_history(fields):
    flush = fields.get("flush_interval", 0), fields.get("flush_mantissa_bits", 23)
    return {"rounds": reference.history(fields["tensor"], fields["rounds"], *flush)}


def run_pairs(fields):
    members = [bytes.fromhex(member) for member in fields["members"]]
    groups = reference.pairs(bytes.fromhex(fields["seed"]), fields["round_index"], fields["job"], members)
    return {"groups": [[member.hex() for member in group] for group in groups]}


def run_mixing(fields):
    members = [bytes.fromhex(member) for member in fields["members"]]
    seed = bytes.fromhex(fields["seed"])
    return {
        "rounds": reference.mixing_history(*reference.MIXING_KINDS[fields["variant"]], seed, members, fields["rounds"])
    }


def run_mixing_blob(fields):
    joint = [[f"{digit}/{name}", "F32", shape] for digit in fields["vectors"] for name, shape in fields["tensors"]]
    blob = reference.mixing_blob(
        blake3(encode_table(joint)).digest(),
        fields["job"],
        bytes.fromhex(fields["base_root"]),
        fields["round_index"],
        fields["contributor_count"],
        fields["values"],
        fields.get("slice_index", 0),
        fields.get("slice_count", 1),
    )
    return {"blob": blob.hex()}


def run_self_test(fields):
    theta, momentum, residual, delta = reference.self_test_input()
    packed = {
        name: reference.pack(values).hex()
        for name, values in (("theta", theta), ("momentum", momentum), ("residual", residual), ("delta", delta))
    }
    return {**packed, "digest": reference.self_test().hex()}


def run_probe(fields):
    bins, answer = reference.probe_answer(fields["common"], fields["own"], fields["token_count"], fields["round_index"])
    return {"bins": bins.hex(), "answer": answer.hex()}


def run_subset(fields):
    distance, distance_max, ratio = (
        Fraction(reference.unpack(fields[name])) for name in ("distance", "distance_max", "ratio")
    )
    scores = [(place, Fraction(reference.unpack(score))) for place, score in fields["scores"]]
    return {"subset": reference.next_subset(fields["tensors"], fields["subset"], scores, distance, distance_max, ratio)}


OPERATIONS = {
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
    "self-test": run_self_test,
}


def gate_vectors():
    def accumulated(step, count):
        total = 0
        (addend,) = fp32(step)
        for _ in range(count):
            total = reference.add(total, addend)
        return total

    for name, step, count, comment in (
        ("gate-held-down", 3e-6, 651, "A-LOC-1: 651 steps of -3e-6 leave bf16(1) as it is."),
        ("gate-sent-down", 3e-6, 652, "A-LOC-1: the 652nd passes half a step below 1."),
        ("gate-held-up", -3e-6, 1302, "A-LOC-1: steps above 1 are twice as wide."),
        ("gate-sent-up", -3e-6, 1303, "A-LOC-1: the 1303rd passes."),
    ):
        fields = {"theta": [ONE], "local": [ONE], "residual": [accumulated(step, count)]}
        yield vector(name, "gate", fields, comment)
    ties = fp32(1.00390625, 1.01171875, 1.0, 1.0)
    moved = fp32(2.0**-24, 2.0**-24, -(2.0**-8), -(2.0**-8) - 2.0**-20)
    yield vector(
        "gate-ties", "gate", {"theta": ties, "local": ties, "residual": moved}, "Ties go to even before and after."
    )
    zeros = {"theta": [0, 0x80000000], "local": [0, 0], "residual": [0x80000000, 0x80000000]}
    yield vector("gate-zero-sign", "gate", zeros, "The cast changes only in its sign: sent.")
    grid = [(theta, local) for theta in SPECIALS for local in SPECIALS]
    fields = {
        "theta": [theta for theta, _ in grid],
        "local": [local for _, local in grid],
        "residual": [SPECIALS[index % len(SPECIALS)] for index in range(len(grid))],
    }
    yield vector("gate-specials", "gate", fields, "Every special value meets every other; NaN results are 0x7fc00000.")


def flush_vectors():
    # Blocks of a million elements, numbered through the table; an empty tensor has none.
    fields = {
        "element_counts": [7, 0, 2_500_000, 1 << 20, 1],
        "flush_interval": 4,
        "rounds": [0, 1, 2, 3, 4, 1_000_003],
    }
    yield vector("flush-turns", "flush", fields, "Six blocks take turns, four rounds a cycle.")
    fields = {"element_counts": [7, 9], "flush_interval": 1, "rounds": [5]}
    yield vector("flush-always", "flush", fields, "Every block in every round.")
    fields = {"element_counts": [7, 9], "flush_interval": 0, "rounds": [0, 5]}
    yield vector("flush-never", "flush", fields, "No flush.")
    specials = {"theta": SPECIALS, "local": reference.roll(SPECIALS, 4), "residual": reference.roll(SPECIALS, 7)}
    yield vector("gate-flush-specials", "gate", {**specials, "parts": [[0, 9]], "flush_mantissa_bits": 1}, "All pass.")
    values = {
        "theta": fp32(1.0, 1.0, -0.5, 0.03125, 2.0**-126, 1.0),
        "local": fp32(1.01, 1.0, -0.5000001, 0.03, 0.0, 1.0),
        "residual": fp32(1e-3, 1e-7, 0.0, -1e-9, 2.0**-149, 3e-6),
    }
    for name, parts, mantissa_bits in (("whole", [[0, 6]], 23), ("cut", [[1, 3], [4, 6]], 2), ("power", [[0, 6]], 0)):
        fields = {**values, "parts": parts, "flush_mantissa_bits": mantissa_bits}
        yield vector(f"gate-flush-{name}", "gate", fields, "Parts pass whole, zeros too; the gate decides of the rest.")
        for scale in (ONE, THIRD):
            suffix = "" if scale == ONE else "-clipped"
            settled = {**fields, "scale": scale, "outcome": "counted"}
            yield vector(f"settle-flush-{name}{suffix}", "settle", settled, "What is cut off a value stays.")


def settle_vectors():
    theta = fp32(1.0, 1.0, -0.5, 0.03125, 2.0**-126)
    local = fp32(1.01, 1.0, -0.5000001, 0.03, 0.0)
    residual = fp32(1e-3, 1e-7, 0.0, -1e-9, 2.0**-149)
    for outcome, scale in (("counted", ONE), ("counted", THIRD), ("missed", ONE), ("rejected", ONE)):
        name = f"settle-{outcome}" + ("-clipped" if scale != ONE else "")
        fields = {"theta": theta, "local": local, "residual": residual, "scale": scale, "outcome": outcome}
        comment = "Counted plus residual is the corrected pseudo-gradient." if outcome == "counted" else outcome
        yield vector(name, "settle", fields, comment)


def reduce_vectors():
    order = [["02", [0], fp32(1.0), ONE], ["03", [0], fp32(-1e8), ONE], ["01", [0], fp32(1e8), ONE]]
    yield vector(
        "mean-order",
        "mean",
        {"element_count": 1, "contributions": order},
        "A-LOC-5: summed by key, listed in another order.",
    )
    swapped = [["03", [0], fp32(1.0), ONE], ["02", [0], fp32(-1e8), ONE], ["01", [0], fp32(1e8), ONE]]
    yield vector(
        "mean-other-keys", "mean", {"element_count": 1, "contributions": swapped}, "Other keys, another sum: 1 / 3."
    )
    union = [["aa", [1, 5], fp32(0.1, 0.2), ONE], ["bb", [5, 6], fp32(0.3, -7.0), THIRD], ["cc", [], [], ONE]]
    yield vector(
        "mean-union", "mean", {"element_count": 8, "contributions": union}, "Divided by three; the second is clipped."
    )
    mixed = [["aa", None, fp32(1.0, -0.0, 3.0), ONE], ["bb", [1], fp32(2.0), ONE]]
    yield vector("mean-dense", "mean", {"element_count": 3, "contributions": mixed}, "One dense makes all dense.")
    tiny = [[f"{key:02x}", [0, 1], [0x00000003, 0x7F000000], ONE] for key in range(3)]
    yield vector("mean-subnormal", "mean", {"element_count": 2, "contributions": tiny}, "Subnormals stay.")
    dense = [[f"{key:02x}", None, fp32(*row), ONE] for key, row in enumerate([(1e30, -0.0), (1e8, 0.0), (1.0, -0.0)])]
    for trim_count in (0, 1):
        fields = {"element_count": 2, "trim_count": trim_count, "contributions": dense}
        yield vector(f"trimmed-{trim_count}", "trimmed", fields, "By value; zeros of either sign are one.")
    even = [[f"{key:02x}", None, fp32(value), ONE] for key, value in enumerate([4.0, 1.0, 2.0, 100.0])]
    fields = {"element_count": 1, "trim_count": 1, "contributions": even}
    yield vector("trimmed-median", "trimmed", fields, "Median of four: the mean of the middle two.")


def history_vectors():
    state, rounds = 1, []
    outcomes = {(1, "b2"): "missed", (2, "b2"): "missed", (3, "a1"): "rejected", (5, "c3"): "rejected"}
    for round_index in range(8):
        trainers = []
        for key in ("c3", "a1", "b2"):
            delta = []
            for _ in range(6):
                # A linear congruential generator; the deltas are around a quarter of a BF16 step of 1.
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                delta += fp32(((state >> 40) - 2**22) * 2.0**-33)
            outcome = "missed" if round_index == 6 else outcomes.get((round_index, key), "counted")
            scale = THIRD if (round_index, key) == (4, "b2") else ONE
            trainers.append([key, delta, scale, outcome])
        rounds.append(trainers)
    fields = {"tensor": ["w", [2, 3]], "rounds": rounds}
    yield vector(
        "history", "history", fields, "A golden history: late, rejected, clipped, and a round that counts nobody."
    )
    fields = {**fields, "flush_interval": 2, "flush_mantissa_bits": 1}
    yield vector("history-flush", "history", fields, "The same, and in even rounds all of it passes, cut.")


def mixing_vectors():
    members = [f"{17 * key % 256:02x}" * 32 for key in range(1, 8)]
    for job, count, round_index in ((1, 7, 0), (2, 7, 0), (1, 6, 0), (1, 6, 1), (2, 1, 5), (2, 2, 2**40)):
        fields = {"seed": "5a" * 32, "round_index": round_index, "job": job, "members": members[:count]}
        odd = "Of an odd number one is alone." if count % 2 else "Everybody has a partner."
        yield vector(f"pairs-{count}-job{job}-round{round_index}", "pairs", fields, odd)
    state, rounds = 7, []
    for _ in range(4):
        deltas = []
        for _ in range(3):
            row = []
            for _ in range(4):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                row += fp32(((state >> 40) - 2**23) * 2.0**-26)
            deltas.append(row)
        rounds.append(deltas)
    for variant in reference.MIXING_KINDS:
        fields = {"variant": variant, "seed": "c3" * 32, "members": members[:3], "rounds": rounds}
        yield vector(
            f"mixing-{variant.replace('_', '-')}", "mixing", fields, "Three trainers, so one is alone in pairs."
        )
    fields = {
        "tensors": [["a", [2, 2]], ["b", []]],
        "vectors": [2, 3],
        "job": 2,
        "base_root": "00" * 32,
        "round_index": 9,
        "contributor_count": 3,
        "values": [fp32(1.0, -0.0, 0.1, -3e-40), fp32(2.5), fp32(0.5, 0.0, -0.3, 7.0), fp32(-1.0)],
    }
    yield vector("mixing-blob", "mixing-blob", fields, "A mean of three: pseudo-gradients, then momenta.")
    for name, index, count, comment in (
        ("slice", 1, 3, "The end of one vector and the start of the other."),
        ("nothing", 3, 5, "There are more slices than blocks: one without any."),
    ):
        fields = {**fields, "slice_index": index, "slice_count": count}
        yield vector(f"mixing-blob-{name}", "mixing-blob", fields, comment)


def probe_vectors():
    common = [
        fp32(0.25, 0.25, 0.125, 0.25, 0.125),
        fp32(0.0, 0.0, 1.0, 0.0, 0.0),
        fp32(0.0625, 0.5, 0.25, 0.125, 0.0625),
    ]
    own = [fp32(0.5, 0.25, 0.125, 0.0625, 0.0625), fp32(0.25, 0.0, 0.5, 0.25, 0.0), fp32(0.2, 0.3, 0.1, 0.15, 0.25)]
    fields = {"common": common, "own": own, "token_count": 2, "round_index": 1 << 33}
    yield vector("probe", "probe", fields, "Two tokens with bins of their own in each row, of equals the lowest.")
    yield vector("probe-all", "probe", {**fields, "token_count": 5}, "Every token has one: nothing is left.")
    tensors = [["head.0.w", 20], ["layers.10.w", 20], ["layers.2.w", 20], ["lm_head", 10], ["norm", 4], ["wte", 10]]
    scores = [[place, fp32(score)[0]] for place, score in ((2, 3.0), (3, 1.0), (5, 1.0))]
    for name, subset, distance, comment in (
        ("first", [], 0.0, "Nothing was measured: by name, as near to the share as tensors allow."),
        ("wider", [2, 3, 5], 0.3, "Above the limit: tensors that nobody has seen, by name."),
        ("wider-one", [0, 1, 2, 3, 5], 0.9, "At least one more, however small or large."),
        ("whole", [0, 1, 2, 3, 4, 5], 0.9, "There is no more to take."),
        ("between", [2, 3, 5], 0.25, "At the limit it stays."),
        ("narrower", [0, 2, 3, 5], 0.0625, "Below half of it: what was scored highest, as many as the share lets."),
        ("small", [2], 0.0, "It is no larger than a first choice."),
    ):
        limits = {"distance": fp32(distance)[0], "distance_max": fp32(0.25)[0], "ratio": fp32(0.375)[0]}
        fields = {"tensors": tensors, "subset": subset, "scores": scores, **limits}
        yield vector(f"subset-{name}", "subset", fields, comment)


def other_vectors():
    rates = {"learning_rate": reference.LEARNING_RATE, "momentum_factor": reference.MOMENTUM_FACTOR}
    values = {
        "theta": fp32(1.0, 0.1, 0.0, -3.0, 0.7),
        "momentum": fp32(0.0, 1e-3, 1e-3, 0.3, 2.0**-149),
        "gradient": fp32(0.1, -1e-3, 0.0, 0.7, 0.0),
    }
    yield vector("step", "step", {**values, **rates}, "Each multiplication and addition is rounded by itself.")
    specials = [reference.roll(SPECIALS, turn) for turn in (0, 3, 5)]
    fields = {"theta": specials[0], "momentum": specials[1], "gradient": specials[2], **rates}
    yield vector("step-specials", "step", fields, "Subnormals stay; NaN results are 0x7fc00000.")
    lists = [fp32(3.0, 4.0), fp32(1e-3, 2e-3, 3e-3), [], fp32(60.0, 80.0), fp32(6.0, 8.0)]
    for name, multiple in (("clip", fp32(1.5)[0]), ("clip-none", 0)):
        yield vector(
            name, "clip", {"contributions": lists, "clip_norm_ratio": multiple}, "Norms in FP64, scales in FP32."
        )
    fields = {
        "tensors": [["a.scalar", []], ["b.weight", [2, 2]], ["é.empty", [0, 3]]],
        "round_index": 7,
        "theta": [fp32(1.0), fp32(0.0, -0.0, 1.5, 2.5), []],
        "momentum": [fp32(0.5), fp32(0.1, 0.2, 0.3, 0.4), []],
    }
    yield vector("state-root", "state-root", fields, "Over the round index and the hashes of theta and momentum.")
    yield vector("state-anchor", "state-anchor", fields, "The same state, whole.")
    adam = [["step", [], fp32(7.0)], ["exp_avg", [2, 2], fp32(0.1, -0.0, 3e-40, 0.4)]]
    slots = [[], [*adam, ["exp_avg_sq", [2, 2], fp32(1.0, 2.0, 3.0, 4.0)]], [["step", [], fp32(7.0)]]]
    fields = {"tensors": fields["tensors"], "round_index": 7, "theta": fields["theta"], "slots": slots}
    yield vector("ddp-state", "ddp-state", fields, "Root and anchor with the inner optimizer's state of each tensor.")
    yield vector("self-test", "self-test", {}, "What every trainer computes when it joins.")


def main(folder):
    vectors = [
        *gate_vectors(),
        *flush_vectors(),
        *settle_vectors(),
        *reduce_vectors(),
        *history_vectors(),
        *mixing_vectors(),
        *probe_vectors(),
        *other_vectors(),
    ]
    names = [item["name"] for item in vectors]
    assert len(set(names)) == len(names), "a name is used twice"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    for item in vectors:
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in item.items())
        (folder / f"{item['name']}.json").write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(vectors)} vectors in {folder}")


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "vectors" / "outer"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
