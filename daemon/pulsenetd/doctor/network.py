"""Checks of the network: the port, each bootstrap, and what running nodes know of their peers."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pulsenet import limits
from pulsenet.errors import UnavailableError, UsageError
from pulsenetd.commands.status import read_status
from pulsenetd.doctor.findings import SECONDS_MAX, Finding, Subject, fail, ok, split_step, warn
from pulsenetd.network import addresses
from pulsenetd.network.dial_back import GREETING
from pulsenetd.network.knock import CLOSED, knock
from pulsenetd.node_file import NODE_FILE
from pulsenetd.words import say_count

Ask = Callable[[Path], dict[str, Any]]


def look_at_port(subject: Subject) -> Sequence[Finding]:
    """Say whether the ports a node is to listen on are free, and whether the one for peers stays the same."""
    found = []
    if not subject.listen and any((node / NODE_FILE).exists() for node in subject.nodes):
        found.append(ok("none given to check; whether peers reach the nodes that run stands below"))
    elif not subject.listen:
        found.append(
            warn(
                "none chosen: a new one at each start, which no router can forward",
                "join with --listen /ip4/0.0.0.0/tcp/4001 if others shall dial this machine",
            )
        )
    else:
        addresses.check_address(subject.listen)
        host, port = addresses.get_host(subject.listen), addresses.get_port(subject.listen)
        if port == 0 or subject.listen.split("/")[3] != "tcp":
            found.append(ok(f"{subject.listen}: nothing to check"))
        else:
            found.append(_try_port(subject, host, port, "--listen"))
    if subject.metrics_port:
        found.append(_try_port(subject, subject.metrics_host, subject.metrics_port, "--metrics-port"))
    return found


def _try_port(subject: Subject, host: str, port: int, flag: str) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            running = [node for node in subject.nodes if (node / NODE_FILE).exists()]
            return _explain_bind(error, host, port, running, flag)
    return ok(f"{port} is free")


def _explain_bind(error: OSError, host: str, port: int, running: Sequence[Path], flag: str) -> Finding:
    if error.errno == errno.EADDRINUSE and running:
        nodes = " or ".join(str(node) for node in running)
        return warn(f"{port} is in use, perhaps by the node in {nodes}", "fine if it is that one")
    if error.errno == errno.EADDRINUSE:
        return fail(f"{port} is in use by another program", f"choose another with {flag}")
    if error.errno == errno.EACCES:
        return fail(f"{port} is for root only", f"choose one above 1023 with {flag}")
    return fail(f"{host} port {port}: {error.strerror}", "give an address of this machine, or 0.0.0.0")


def look_at_bootstraps(subject: Subject) -> Sequence[Finding]:
    """Knock at each bootstrap; each has its own line, after what is wrong with the run or its token."""
    trouble = [] if subject.run_trouble is None else [subject.run_trouble]
    if not subject.bootstraps:
        return trouble or [
            ok("none given: nodes of this machine are enough, or give --run, --token or --bootstrap to check some")
        ]

    async def knock_at_all() -> list[str | None]:
        return await asyncio.gather(*(_knock_at(text) for text in subject.bootstraps))

    answers = asyncio.run(knock_at_all())
    is_one_alive = None in answers
    grade = warn if is_one_alive else fail
    step = "one that answers is enough" if is_one_alive else "is it running, and the address right? Ask for a new token"
    return trouble + [
        ok(f"{text}: a libp2p node answers") if answer is None else grade(f"{text}: {answer}", step)
        for text, answer in zip(subject.bootstraps, answers, strict=True)
    ]


async def _knock_at(text: str) -> str | None:
    try:
        address, _ = addresses.split_address(text)
    except UsageError as error:
        return str(error)
    if address.split("/")[3] != "tcp":
        return "only TCP can be checked from here"
    if await knock(address, SECONDS_MAX, greeting=GREETING) is None:
        return None
    answer = await knock(address, SECONDS_MAX)
    return "something answers that is no libp2p node" if answer is None else CLOSED[answer]


def look_at_nodes(subject: Subject, ask: Ask = read_status) -> Sequence[Finding]:
    """Pass on what running nodes learned from their peers: can they be dialled, is their clock right."""
    found: list[Finding] = []
    for node in subject.nodes:
        if not (node / NODE_FILE).exists():
            continue
        try:
            found += _judge_node(node, ask(node))
        except UnavailableError as error:
            cause, step = split_step(error)
            found.append(warn(cause, step))
    return found or [
        warn("none is running, so nobody can say whether peers reach this machine", "start one, then look again")
    ]


def _judge_node(node: Path, status: dict[str, Any]) -> list[Finding]:
    name = f"{status.get('run', '?')}/{node.name}"
    found: list[Finding] = []
    peers = status.get("peers", 0)
    found.append(
        ok(f"{name}: {say_count(peers, 'peer')}")
        if peers
        else warn(f"{name}: no peers", "is another node of the run up? Look at 'bootstraps' above")
    )
    reachability = status.get("reachability")
    if isinstance(reachability, dict) and reachability.get("reachable") is not None:
        text, _, step = str(reachability.get("advice", "")).partition(". ")
        found.append(ok(f"{name}: {text}") if reachability["reachable"] else warn(f"{name}: {text}", step))
    offset = status.get("clock_offset_seconds")
    if isinstance(offset, int | float) and abs(offset) > limits.CLOCK_OFFSET_SECONDS_MAX:
        way = "ahead of" if offset > 0 else "behind"
        found.append(
            warn(f"{name}: the clock is {abs(offset):.1f} s {way} its peers", "run 'timedatectl set-ntp true'")
        )
    return found
