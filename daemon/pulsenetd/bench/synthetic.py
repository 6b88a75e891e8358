"""A synthetic step of training whose BF16 views change as recorded ones do.

In recorded GRPO runs the chance that a BF16 weight changes in a step is 0.29 learning rates / its ulp, so it halves
with each binade (measured over 13 binades, within 10 %), and nothing else about a weight matters. FP32 masters that
lie anywhere in their rounding cells and move by a normal step of that mean size have exactly this law, and the
recorded shares of steps beyond +-1 come out too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.bf16 import cast_to_bf16_bits
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.bench.pairs import Pair

WEIGHT_DEVIATION: Final = 0.18
"""Standard deviation of the weights: that of the recorded model's layers."""

STEP_DEVIATION: Final = 3e-6 * 0.29 / 0.798
"""Standard deviation of an update at learning rate 3e-6. A normal value's mean size is 0.798 deviations."""

CHUNK_ELEMENTS: Final = 1 << 20

Bits = npt.NDArray[np.uint16]


def make_synthetic_pair(*, seed: int, element_count: int) -> Pair:
    """Return two versions of a small made-up language model of about ``element_count`` BF16 weights.

    The same seed gives the same bits with the same numpy.
    """
    table = make_model_table(element_count)
    generator = np.random.default_rng(seed)
    old, new = np.zeros(table.layout_size_bytes, np.uint8), np.zeros(table.layout_size_bytes, np.uint8)
    for tensor_index in range(len(table.tensors)):
        old_view, new_view = table.view(old, tensor_index), table.view(new, tensor_index)
        for start in range(0, old_view.size, CHUNK_ELEMENTS):
            chunk = slice(start, start + CHUNK_ELEMENTS)
            old_view[chunk], new_view[chunk] = draw_step(generator, old_view[chunk].size)
    return Pair(table, old, new)


def draw_step(generator: np.random.Generator, element_count: int) -> tuple[Bits, Bits]:
    """Return the BF16 bits of random weights before and after one step."""
    masters = generator.standard_normal(element_count, dtype=np.float32) * np.float32(WEIGHT_DEVIATION)
    steps = generator.standard_normal(element_count, dtype=np.float32) * np.float32(STEP_DEVIATION)
    return cast_to_bf16_bits(masters), cast_to_bf16_bits(masters - steps)


def make_model_table(element_count: int) -> ParameterTable:
    """Return the tensors of a language model of about so many BF16 weights, a fifth of them in the embedding."""
    # A layer of width w has 4 w^2 weights in attention and 8 w^2 in the MLP; the embedding 4 layers' worth.
    layer_count = 16
    width = max(8, round((element_count / (12 * layer_count + 48)) ** 0.5) // 8 * 8)
    specs = [
        TensorSpec("embed_tokens.weight", "BF16", (48 * width, width)),
        TensorSpec("norm.weight", "BF16", (width,)),
    ]
    for layer in range(layer_count):
        prefix = f"layers.{layer:02d}"
        specs += [TensorSpec(f"{prefix}.self_attn.{name}_proj.weight", "BF16", (width, width)) for name in "qkvo"]
        specs += [
            TensorSpec(f"{prefix}.mlp.up_proj.weight", "BF16", (4 * width, width)),
            TensorSpec(f"{prefix}.mlp.down_proj.weight", "BF16", (width, 4 * width)),
            TensorSpec(f"{prefix}.norm.weight", "BF16", (width,)),
        ]
    return make_table(specs)
