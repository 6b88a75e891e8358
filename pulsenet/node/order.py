"""In which order the machines of a node hear of an event that is for all of them.

The daemon and the simulator share it, so that what seeds tell is what nodes do. The mesh comes first: it judges what
peers say, and the others rest on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pulsenet.node.authority import Authority
from pulsenet.node.inferencer import Inferencer
from pulsenet.node.listener import Listener
from pulsenet.node.machine import Machine
from pulsenet.node.mender import Mender
from pulsenet.node.mesh import Mesh
from pulsenet.node.mixing.machine import Mixing
from pulsenet.node.onlooker import Onlooker
from pulsenet.node.rounds import Rounds
from pulsenet.node.trainer import Trainer

ORDER: Final = (Mesh, Trainer, Inferencer, Mender, Mixing, Authority, Rounds, Onlooker, Listener)


def arrange(machines: Mapping[str, Machine]) -> dict[str, Machine]:
    """Return a node's machines in the order in which they hear of events."""
    return dict(sorted(machines.items(), key=lambda item: _rank(item[1])))


def _rank(machine: Machine) -> int:
    return [isinstance(machine, kind) for kind in ORDER].index(True)
