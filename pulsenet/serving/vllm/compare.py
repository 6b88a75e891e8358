"""Compares a whole running engine with a model directory, bit by bit, beside the node that looks after it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pulsenet.errors import IntegrityError, UnavailableError
from pulsenet.serving.vllm.control import Control
from pulsenet.serving.vllm.exchange import Order, UpdateInfo, read_answer
from pulsenet.serving.vllm.transaction import find_fault

COMPARE_SECONDS_MAX: Final = 600.0
"""A large model is read from disk."""
POLL_SECONDS: Final = 0.01


def compare_engine(
    control: Control,
    directory: Path,
    checkpoint: Path,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Let every rank compare all its weights with a checkpoint, while the engine serves; return how many ranks did.

    An update of the node that begins meanwhile fails, and is tried again by itself: ask when none is due.

    Args:
        control: vLLM's control routes.
        directory: The private one of the node that attached the engine.
        checkpoint: Directory with the safetensors of the version that the engine should hold.
        monotonic: Monotonic seconds.
        sleep: Sleeps.

    Raises:
        IntegrityError: A rank holds other bits; the message names the tensors.
        UnavailableError: A rank did not answer, or was never attached.
    """
    rank_count = control.count_ranks()
    transaction = secrets.token_hex(8)
    control.open()
    try:
        order = UpdateInfo(Order.COMPARE, transaction, str(directory), checkpoint=str(checkpoint))
        control.order(order.to_json())
        give_up_at = monotonic() + COMPARE_SECONDS_MAX
        while True:
            faults = [
                find_fault(rank, read_answer(directory, rank), Order.COMPARE, transaction) for rank in range(rank_count)
            ]
            is_silent = any(fault is not None and fault.code == "silent" for fault in faults)
            if not is_silent or monotonic() >= give_up_at:
                break
            sleep(POLL_SECONDS)
    finally:
        control.close(None)
    for fault in faults:
        if fault is not None:
            raise (IntegrityError if fault.code == "root_mismatch" else UnavailableError)(fault.reason)
    return rank_count
