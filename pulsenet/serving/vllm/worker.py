"""The adapter inside each worker of vLLM: orders come by vLLM's collective calls, answers go to files.

Imported by vLLM alone. No method raises: an exception inside a collective call would leave the other ranks' replies
queued, and the call after it would return the old error.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from pulsenet.serving.vllm.limits import find_checkpoint, find_obstacle
from pulsenet.serving.vllm.rank import RankWeights
from pulsenet.serving.vllm.servant import RankServant
from pulsenet.serving.vllm.watchdog import Watchdog


class PulsenetTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Registered with vLLM as backend ``pulsenet``."""

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config

        def load_weights(weights: Any) -> object:
            with set_current_vllm_config(vllm_config):
                return model.load_weights(weights)  # type: ignore[operator]

        self._servant = RankServant(
            RankWeights(model, load_weights),
            rank=int(parallel.rank),
            world_size=int(parallel.world_size),
            boot=secrets.token_hex(8),
            monotonic=time.monotonic,
            find_obstacle=lambda: find_obstacle(vllm_config, model),
            find_checkpoint=lambda: find_checkpoint(vllm_config.model_config),
            guard=torch.inference_mode,
            synchronize=_choose_synchronize(device),
        )
        self._watchdog: Watchdog | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the order as it is; the servant checks it, where a fault can be answered."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Carry out the order ATTACH, and watch over the node from then on."""
        self._servant.take(init_info)
        if self._watchdog is None:
            self._watchdog = Watchdog(self._servant)
            self._watchdog.start()

    def start_weight_update(self) -> None:
        """Note that vLLM holds an update open."""
        self._servant.note_open(True)

    def finish_weight_update(self) -> None:
        """Note that vLLM holds no update open."""
        self._servant.note_open(False)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Carry out any other order."""
        self._servant.take(update_info)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Carry out any other order."""
        self._servant.take(update_info)

    def trainer_send_weights(self, *arguments: Any, **named: Any) -> None:
        """Weights are sent by nodes, never by an engine; releases before 0.29 ask for this method."""
        raise NotImplementedError("pulsenet's weights come from the node beside the engine")

    def shutdown(self) -> None:
        """Stop watching and let go of what is staged."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        self._servant.close()


def _choose_synchronize(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return _nothing
    return torch.accelerator.synchronize


def _nothing() -> None:
    """A CPU has finished when it returns."""
