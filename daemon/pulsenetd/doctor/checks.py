"""The checks, in the order they are shown, how they are run, and what is done about what they find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pulsenet.errors import PulsenetError
from pulsenetd.doctor import engines, installation, leftovers, machine, network, stores
from pulsenetd.doctor.findings import Check, Finding, Grade, Subject, fail

CHECKS: Final = (
    Check("packages", installation.look_at_packages),
    Check("p2pd", installation.look_at_p2pd),
    Check("keys", installation.look_at_keys),
    Check("clock", machine.look_at_clock),
    Check("disk", machine.look_at_disk),
    Check("stores", stores.look_at_stores),
    Check("leftovers", leftovers.look_at_leftovers),
    Check("memory", machine.look_at_memory),
    Check("files", machine.look_at_files),
    Check("congestion", machine.look_at_congestion_control),
    Check("gpu", engines.look_at_gpu),
    Check("engine", engines.look_at_engine),
    Check("port", network.look_at_port),
    Check("bootstraps", network.look_at_bootstraps),
    Check("node", network.look_at_nodes),
)


def examine(subject: Subject, checks: Sequence[Check] = CHECKS) -> Iterator[tuple[str, Finding]]:
    """Yield every finding with its check's name; a check that fails itself is a finding too."""
    for check in checks:
        try:
            findings = check.look(subject)
        except (OSError, PulsenetError) as error:
            findings = [fail(f"cannot be checked: {error}", "look at the cause, then run this again")]
        for finding in findings:
            yield check.name, finding


def repair(findings: Sequence[tuple[str, Finding]]) -> Iterator[tuple[str, bool, str]]:
    """Put right what can be put right safely; yield the check, whether it worked, and what was done or why not."""
    for name, finding in findings:
        if finding.repair is None:
            continue
        try:
            yield name, True, finding.repair()
        except (OSError, PulsenetError) as error:
            yield name, False, f"{finding.text}: cannot be repaired: {error}"


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if a node could not work as things are, else 0: a warning is no failure."""
    return int(any(finding.grade is Grade.FAIL for finding in findings))
