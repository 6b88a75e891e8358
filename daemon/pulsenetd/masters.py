"""Whether a training process may take part in a run with these masters, and which ones this node trained before."""

from __future__ import annotations

import asyncio
from typing import Final

from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import ParameterTable
from pulsenetd.identity import to_libp2p_text
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.store import Store

MASTERS_KEY: Final = "rounds/masters"
"""Digest of the table of masters that this node trains, among its durable state."""


async def check_masters(
    store: Store,
    trust: Trust,
    peer_id: PeerId,
    table: ParameterTable,
    self_test: Digest,
    *,
    has_rounds: bool,
    metrics: Metrics,
) -> None:
    """Refuse masters or arithmetic that the run does not have, and remember the masters.

    Args:
        store: Where they are remembered.
        trust: The run's rules; its descriptor is known.
        peer_id: This node's key.
        table: The masters.
        self_test: What the process's arithmetic gave.
        has_rounds: Whether anything rests on the masters that are remembered.
        metrics: Where trouble with the disk is counted.

    Raises:
        RemoteProtocolError: ``self-test``, ``not-listed`` or ``table``.
    """
    if self_test != SELF_TEST_DIGEST:
        text = f"the self-test of the training process gave {self_test.hex()}: its arithmetic would diverge"
        raise RemoteProtocolError("self-test", text)
    descriptor = trust.descriptor
    assert descriptor is not None
    if not descriptor.open_trainers_max and peer_id not in (*descriptor.trainers, *descriptor.authorities):
        key = to_libp2p_text(peer_id)
        text = f"the run's owner lists it with 'pulsenet run admit {descriptor.name} {key} --role trainer'"
        raise RemoteProtocolError("not-listed", text)
    known, digest = await asyncio.to_thread(store.state, MASTERS_KEY), bytes(table.digest)
    if known is not None and known != digest and has_rounds:
        text = "this node trained other masters in this run: names, shapes and frozen parameters must agree"
        raise RemoteProtocolError("table", text)
    if known == digest:
        return
    try:
        await asyncio.to_thread(store.save_state, MASTERS_KEY, digest)
    except StorageError as error:
        # The process comes first: what it makes waits for room as well, and says so itself.
        metrics.count("rejected", error.reason)
        logger.warning("%s: which masters this node trains is not remembered", error)
