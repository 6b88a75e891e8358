"""Rounds under Hugging Face's ``Trainer`` and everything built on it, such as TRL's ``GRPOTrainer``.

::

    exchange = pulsenet.join_rounds()       # or join_mixing(), in a run that mixes
    trainer = Trainer(model, args, callbacks=[OuterCallback(exchange)], ...)
    trainer.train()

The learning rate follows the round index only through ``schedule``: give the Trainer a constant one
(``lr_scheduler_type="constant"``), because its own counts the steps of this process alone.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from pulsenet.errors import ConfigError, UnavailableError
from pulsenet.training.exchange import Exchange
from pulsenet.training.gossip_optimizer import GossipOptimizer
from pulsenet.training.mixer import Mixer
from pulsenet.training.outer_optimizer import OuterOptimizer
from pulsenet.training.ranks import is_first_rank, share_object

STATE_FILE: Final = "pulsenet_outer.safetensors"
"""Beside the Trainer's own files in each checkpoint."""

RETRY_SECONDS: Final = 5.0
"""Between two tries of a round whose exchange is away."""

_SEPARATOR: Final = "|"
"""Between the levels of a flattened state dict; no tensor name of a state dict has it."""


logger = logging.getLogger(__name__)


class OuterCallback(TrainerCallback):  # type: ignore[misc]
    """Makes an :class:`OuterOptimizer`, or a :class:`GossipOptimizer` of a mixer, when training starts, calls it after
    every optimizer step, and keeps its state in the Trainer's checkpoints.

    While the daemon or the run is away, training waits and a warning says so: a Trainer that stopped there would lose
    what it did since its checkpoint.

    Args:
        exchange: Way to the other trainers; ``None`` on ranks other than 0.
        options: Further arguments of either, such as ``schedule`` or ``momentum="host"``.
    """

    def __init__(self, exchange: Exchange | Mixer | None, **options: Any) -> None:
        self._exchange = exchange
        self._options = options
        self.sync: OuterOptimizer | GossipOptimizer | None = None
        """The rounds, from the start of training on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wrap the optimizer; go on from a checkpoint's state if the Trainer resumes from one.

        Raises:
            ConfigError: the Trainer resumes, but its checkpoint has no state of the rounds.
        """
        make: Any = OuterOptimizer
        given = {"exchange": self._exchange}
        if share_object(hasattr(self._exchange, "begin_round")):
            make, given = GossipOptimizer, {"mixer": self._exchange}
        sync: OuterOptimizer | GossipOptimizer = make(kwargs["model"], kwargs["optimizer"], **given, **self._options)
        self.sync = sync
        if state.global_step > 0:
            folder = _checkpoint_folder(args, state)
            if not (folder / STATE_FILE).exists():
                raise ConfigError(
                    f"training resumes at step {state.global_step} but {folder} has no {STATE_FILE}: resume from a "
                    "checkpoint in the Trainer's output_dir that was saved with OuterCallback"
                )
            sync.load_state_dict(load_outer_state(folder / STATE_FILE))
            _persist(sync.catch_up)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an inner step."""
        assert self.sync is not None
        _persist(self.sync.step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the rounds beside the Trainer's own."""
        assert self.sync is not None
        if is_first_rank():
            save_outer_state(self.sync.state_dict(), _checkpoint_folder(args, state) / STATE_FILE)


def _persist(act: Callable[[], object]) -> None:
    """Do something that may be done again as long as the exchange is away."""
    while True:
        try:
            act()
            return
        except UnavailableError as error:
            logger.warning("training waits for the other trainers: %s", error)
            time.sleep(RETRY_SECONDS)


def save_outer_state(saved: Mapping[str, Any], path: Path) -> None:
    """Write :meth:`OuterOptimizer.state_dict` as a safetensors file: no code in it, readable anywhere."""
    tensors: dict[str, torch.Tensor] = {}
    plain = _flatten(saved, "", tensors)
    temporary = path.with_name(path.name + ".partial")
    save_file(tensors, temporary, metadata={"pulsenet": json.dumps(plain)})
    temporary.replace(path)


def load_outer_state(path: Path) -> dict[str, Any]:
    """Return the state dict that :func:`save_outer_state` wrote.

    Raises:
        ConfigError: the file is not one of these.
    """
    with safe_open(path, framework="pt") as file:
        metadata = (file.metadata() or {}).get("pulsenet")
        if metadata is None:
            raise ConfigError(f"{path} holds no state of an OuterOptimizer")
        loaded: dict[str, Any] = json.loads(metadata)
        for name in file.keys():  # noqa: SIM118 (an opened file is no mapping)
            *path_names, leaf = name.split(_SEPARATOR)
            holder = loaded
            for one in path_names:
                holder = holder[one]
            holder[leaf] = file.get_tensor(name)
    return loaded


def _flatten(value: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Move the tensors of nested dicts into ``tensors`` by path; return the dicts without them."""
    if not isinstance(value, Mapping):
        return value
    plain = {}
    for name, one in value.items():
        if isinstance(one, torch.Tensor):
            # A file holds each byte once, and copies on a device go through the host.
            tensors[prefix + name] = one.detach().cpu().contiguous().clone()
        else:
            plain[name] = _flatten(one, prefix + name + _SEPARATOR, tensors)
    return plain


def _checkpoint_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
