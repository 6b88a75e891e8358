"""Prints plans: one line for each algorithm, or plain values for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TextIO

from pulsenet.outer.plan import WITH_ROUNDS, Plan, Workload
from pulsenet.outer.plan_link import Link

HEADINGS: Final = ("algorithm", "payload", "received", "sent", "waits", "utilization", "for 90 %", "joiner")

GOSSIP: Final = "*"
"""Marks the variants of gossip."""


def as_json(plan: Plan, workload: Workload) -> dict[str, Any]:
    """Return the figures of one algorithm; bytes are whole, what does not exist is ``None``."""
    return {
        "algorithm": str(plan.variant),
        "bytes_per_round": round(plan.received_bytes),
        "payload_bytes_per_round": round(plan.payload_bytes),
        "received_bytes_per_round": round(plan.received_bytes),
        "sent_bytes_per_round": round(plan.sent_bytes),
        "authority_received_bytes_per_round": round(plan.authority_received_bytes),
        "compute_seconds": workload.compute_seconds,
        "overlapped_seconds": plan.overlapped_seconds,
        "blocking_seconds": plan.blocking_seconds,
        "round_seconds": plan.round_seconds,
        "utilization": plan.utilization,
        "mbps_for_90_percent": plan.mbps_for_target,
        "joiner_can_catch_up": plan.joiner_can_catch_up,
        "joiner_catch_up_seconds": plan.catch_up_seconds,
    }


def print_report(plans: Sequence[Plan], workload: Workload, link: Link, stream: TextIO) -> None:
    """Write the table."""
    stream.write(f"{describe_workload(workload)}, {describe_link(link)}\n\n")
    lines = [HEADINGS, *(_row(plan) for plan in plans)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        stream.write("  ".join(cells) + "\n")
    stream.write(
        "\nbytes of one trainer and round; 'for 90 %': download at which 90 % of the time goes into inner steps;\n"
        "'joiner': time to the run's state at worst, 'no' where the run is faster or drops what is needed before\n"
        f"{GOSSIP} variant of gossip: run create --algorithm gossip --variant NAME\n"
    )


def describe_workload(workload: Workload) -> str:
    """Return what is trained, in one line."""
    return (
        f"{workload.params:.4g} parameters, {workload.peer_count} trainers"
        f"{', all of them authorities' if workload.are_authorities else ''}, "
        f"{workload.inner_steps} inner steps in {_seconds(workload.compute_seconds)}"
    )


def describe_link(link: Link) -> str:
    """Return over which link, in one line."""
    text = f"{link.down_mbps:.4g} Mbit/s down and {link.up_mbps:.4g} up"
    if link.loss_ratio or link.rtt_seconds:
        text += f", {100 * link.loss_ratio:.3g} % loss, {1000 * link.rtt_seconds:.4g} ms, {link.congestion}"
    return text


def _row(plan: Plan) -> tuple[str, ...]:
    catch_up = plan.catch_up_seconds
    return (
        f"{plan.variant}{'' if plan.variant in WITH_ROUNDS else GOSSIP}",
        _size(plan.payload_bytes),
        _size(plan.received_bytes),
        _size(plan.sent_bytes),
        _seconds(plan.blocking_seconds),
        f"{100 * plan.utilization:.1f} %",
        "never" if plan.mbps_for_target is None else _speed(plan.mbps_for_target),
        _seconds(catch_up) if plan.joiner_can_catch_up and catch_up is not None else "no",
    )


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} EB"


def _speed(mbps: float) -> str:
    for unit in ("Mbit/s", "Gbit/s"):
        if mbps < 999.5:
            return f"{mbps:.3g} {unit}"
        mbps /= 1000
    return f"{mbps:.3g} Tbit/s"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 86_400:.0f} d"
