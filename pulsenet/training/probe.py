"""A probe: the same tokens answered by every trainer, so that a run sees how far apart their predictions are.

::

    probe = Probe(batch, lambda model, batch: model(**batch).logits.flatten(0, 1))
    sync = GossipOptimizer(model, optimizer, mixer=mixer, probe=probe)

What leaves the machine is, for each token, the probabilities of a few bins (SPEC outer, "Probe").
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from pulsenet import limits
from pulsenet.errors import ConfigError
from pulsenet.ids import Digest, compute_digest
from pulsenet.outer.mixing.disagreement import (
    BIN_TOKENS_MAX,
    PROBE_HEADER_SIZE_BYTES,
    PROBE_TOKENS_MAX,
    encode_probe,
)
from pulsenet.outer.mixing.probe import Answer, name_bins

logger = logging.getLogger(__name__)

_DOMAIN: Final = b"pulsenet probe batch 1"

Batch = torch.Tensor | Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What a trainer answers; the same for all trainers of a run (SPEC 6.16, docs/gossip.md).

    Raises:
        ConfigError: a batch of anything but tensors, or a number of bins out of range.
    """

    batch: Batch
    """A tensor, or tensors by name, on the model's device. Only answers to the same bits are compared."""
    compute_logits: Callable[[Any, Any], torch.Tensor]
    """Called with the model (unwrapped, in evaluation mode, without gradients) and the batch; returns the logits of
    each token of the probe, (tokens, vocabulary), in any floating-point type."""
    bin_token_count: int = BIN_TOKENS_MAX
    """Tokens of the vocabulary with bins of their own, 1 to 255."""

    def __post_init__(self) -> None:
        if not 1 <= self.bin_token_count <= BIN_TOKENS_MAX:
            raise ConfigError(f"a probe of {self.bin_token_count} bins: 1 to {BIN_TOKENS_MAX}")
        self.name()

    def name(self) -> Digest:
        """Return the digest of the batch: names, types, shapes and bits of its tensors.

        Raises:
            ConfigError: It is anything but tensors.
        """
        parts = {"": self.batch} if isinstance(self.batch, torch.Tensor) else self.batch
        if not isinstance(parts, Mapping) or not all(isinstance(one, torch.Tensor) for one in parts.values()):
            raise ConfigError("the batch of a probe is a tensor, or tensors by name")
        written = [_DOMAIN]
        for key, tensor in sorted(parts.items()):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            head = f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{len(data)}\0".encode()
            written += [head, data]
        return compute_digest(b"".join(written))


class ProbeDesk:
    """Answers the probe of a round: first what the inner steps led to, then in which bins.

    Args:
        probe: Of the user.
        model: As the user trains it.
    """

    def __init__(self, probe: Probe, model: torch.nn.Module) -> None:
        self._probe = probe
        self._model = unwrap_model(model)
        self._batch_name = probe.name()
        self._own: torch.Tensor | None = None

    def look(self) -> None:
        """Predict with the model as it is now: after the inner steps.

        Raises:
            ConfigError: the callable returns no logits that a probe may have.
        """
        logits = self._predict()
        self._own = torch.softmax(logits, dim=1) if bool(torch.isfinite(logits).all()) else None
        if self._own is None:
            logger.warning("the probe is not answered: the model's logits are not finite")

    def answer(self, round_index: int) -> Answer | None:
        """Return what :meth:`look` saw, in bins of what the model predicts now: with the mean that others hold as well.

        Returns:
            ``None`` where there was nothing to see, or logits are not finite.
        """
        own, self._own = self._own, None
        if own is None:
            return None
        common = self._predict()
        if not bool(torch.isfinite(common).all()):
            return None
        bins = choose_bins(common, self._probe.bin_token_count)
        taken = torch.gather(own, 1, bins)
        rest = (1.0 - taken.sum(dim=1, keepdim=True, dtype=torch.float64)).clamp(min=0.0)
        binned = torch.cat([taken.double(), rest], dim=1).cpu().numpy()
        data = encode_probe(binned, round_index=round_index)
        return Answer(self._batch_name, name_bins(bins.cpu().numpy().astype(np.int64)), data)

    def _predict(self) -> torch.Tensor:
        """Return FP32 logits, (tokens, vocabulary)."""
        with torch.no_grad(), _evaluating(self._model):
            logits = self._probe.compute_logits(self._model, self._probe.batch)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or not logits.dtype.is_floating_point:
            raise ConfigError("compute_logits of the probe returns a floating-point tensor (tokens, vocabulary)")
        rows, words = logits.shape
        bins = min(self._probe.bin_token_count, words) + 1
        size_bytes = PROBE_HEADER_SIZE_BYTES + 2 * rows * bins
        if not 1 <= rows <= PROBE_TOKENS_MAX or words < 1 or size_bytes > limits.PROBE_ANSWER_SIZE_BYTES_MAX:
            raise ConfigError(
                f"a probe of {rows} tokens and {bins} bins is {size_bytes} bytes, beyond "
                f"{limits.PROBE_ANSWER_SIZE_BYTES_MAX}: give it fewer tokens, or a smaller bin_token_count"
            )
        return logits.detach().float()


def choose_bins(logits: torch.Tensor, token_count: int) -> torch.Tensor:
    """Return each row's most likely tokens, of equals the lowest ids, ascending: (rows, tokens).

    The rule of :func:`pulsenet.outer.mixing.disagreement.choose_bins` without sorting a vocabulary.
    """
    count = min(token_count, logits.shape[1])
    least = torch.topk(logits, count, dim=1).values[:, -1:]
    above, equal = logits > least, logits == least
    room = count - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(logits.shape[0], count)


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside ``torch.compile`` and DistributedDataParallel: only one rank answers a probe."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner: Any = model.module
        else:
            inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
