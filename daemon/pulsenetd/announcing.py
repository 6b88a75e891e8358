"""What a node tells the person who started it, and leaves where others of the machine look for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from pulsenet.chain.records import JoinToken
from pulsenet.chain.token import encode_token
from pulsenet.outer.mixing.settings import ALGORITHM as GOSSIP
from pulsenetd.config import Config
from pulsenetd.engines.vllm_process import LOG_NAME
from pulsenetd.http_hosts import join_host
from pulsenetd.identity import to_libp2p_text
from pulsenetd.network import addresses
from pulsenetd.node_file import write_node_file
from pulsenetd.startup import Settled
from pulsenetd.words import say_moment

TOKEN_BOOTSTRAPS_MAX: Final = 4
"""Addresses in the token a node prints; a longer one does not fit a line of chat."""


def make_token(settled: Settled, announced: tuple[str, ...], listening: tuple[str, ...]) -> JoinToken:
    """Return the token others can join with: the node's own, with addresses of this node in it."""
    token, own = settled.token, settled.identity.peer_id
    here = [address for address in listening if not addresses.is_loopback(address)]
    mine = [addresses.join_address(address, own) for address in (*announced, *here)]
    bootstraps = tuple(dict.fromkeys((*mine, *token.bootstraps)))[:TOKEN_BOOTSTRAPS_MAX]
    return replace(token, bootstraps=bootstraps)


def announce_start(
    config: Config,
    settled: Settled,
    *,
    announced: tuple[str, ...],
    listening: tuple[str, ...],
    metrics_url: str,
    algorithm: str,
    may_publish: bool,
    say: Callable[[str], None],
) -> None:
    """Write the node's file, and say where it is and what to do next.

    Args:
        config: What the operator chose.
        settled: Run, directory and key.
        announced: Addresses that others are told.
        listening: Addresses that this machine can dial.
        metrics_url: Where the node answers.
        algorithm: The run's outer algorithm; empty without rounds.
        may_publish: Whether the run lists the node's key as an authority.
        say: Prints a line.
    """
    peer = to_libp2p_text(settled.identity.peer_id)
    node = {"pid": os.getpid(), "peer_id": peer, "metrics_url": metrics_url, "role": config.role}
    write_node_file(settled.data_directory, node)
    say(f"peer id      {peer}")
    for address in listening:
        say(f"listening    {addresses.join_address(address, settled.identity.peer_id)}")
    if not announced:
        say("announcing   nothing: a public run does not pass on private addresses; give --announce to be found")
    say(f"run          {settled.run_name} {settled.token.run_id.hex()}")
    say(f"metrics      {metrics_url}/metrics")
    say(f"status page  {metrics_url}/")
    if settled.has_token_ended and settled.token.expires_at_ms is not None:
        end = say_moment(settled.token.expires_at_ms)
        say(f"join token   ended {end}: 'pulsenet run token {settled.run_name}' makes another")
    elif settled.token.secret and not settled.is_local:
        # What is said here ends in a journal that others may read.
        say(f"join token   not said, for it holds the run's secret: 'pulsenet run show {settled.run_name}' prints it")
    elif not settled.is_local:
        say(f"join token   {encode_token(make_token(settled, announced, listening))}")
    if config.role == "inferencer" and config.engine == "files":
        current = Path(config.engine_dir or settled.data_directory / "weights", "current")
        say(f"weights      {current}" if current.exists() else f"weights      {current}, once a version is here")
    if config.role == "inferencer" and config.engine == "sglang":
        say(f"engine       SGLang at {config.engine_url}; pulsenet was never tested on SGLang itself")
    if config.role == "inferencer" and config.engine == "vllm":
        log = settled.data_directory / LOG_NAME
        say(f"engine       {config.engine_url or f'vLLM, started by this node; it writes to {log}'}")
        if config.openai_port:
            say(f"openai API   http://{join_host(config.openai_host, config.openai_port)}/v1")
    if config.role != "trainer":
        return
    if not (may_publish or algorithm):
        step = f"let its owner run 'pulsenet run promote NAME {peer}'"
        say(f"publishing   nothing: the run does not list this key; {step}")
    option = "" if settled.is_local else f'data_dir="{settled.data_directory}"'
    say("attach a training loop:")
    if algorithm == GOSSIP:
        say(f"    mixer = pulsenet.join_mixing({option})")
        say("    sync = pulsenet.GossipOptimizer(model, optimizer, mixer=mixer)")
        say("    sync.step()  # after each optimizer.step()")
    elif algorithm:
        say(f"    exchange = pulsenet.join_rounds({option})")
        say("    sync = pulsenet.OuterOptimizer(model, optimizer, exchange=exchange)")
        say("    sync.step()  # after each optimizer.step()")
    else:
        say(f"    publisher = pulsenet.attach_publisher({option})")
        say("    publisher.publish(model, step=step)")
