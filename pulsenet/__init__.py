"""pulsenet: peer-to-peer transport for reinforcement-learning post-training of language models.

What a training loop or an engine needs of it stands here, and nothing else is promised to stay as it is. Each talks to
the node on its machine, which ``pulsenet join`` starts.

| beside | names |
| --- | --- |
| a trainer's node | `attach_publisher`, `Publisher`, `PublishResult`, `PublishCallback`, `LogprobCheck` |
| trainers in rounds | `join_rounds`, `OuterOptimizer`, `OuterCallback` |
| trainers that mix | `join_mixing`, `GossipOptimizer`, `Probe`, `OuterCallback` |
| an inferencer's node | `attach_engine`, `Subscriber`, `Engine`, `InProcessEngine`, `FilesEngine`, `Sample` |
| all of them | `PulsenetError`, root of what is raised on purpose (`pulsenet.errors` has the tree) |

A name is imported when it is asked for: ``import pulsenet`` takes milliseconds, and torch is loaded by the names that
compute with it. Engines of one's own find the rest in `pulsenet.serving`, and rarer parts of training are in
`pulsenet.training`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsenet.errors import PulsenetError
    from pulsenet.local.client import PublishResult
    from pulsenet.local.rollouts import Sample
    from pulsenet.serving.engine import Engine
    from pulsenet.serving.files import FilesEngine
    from pulsenet.serving.in_process import InProcessEngine
    from pulsenet.serving.subscriber import Subscriber, attach_engine
    from pulsenet.training.callback import OuterCallback
    from pulsenet.training.daemon_exchange import join_rounds
    from pulsenet.training.daemon_mixer import join_mixing
    from pulsenet.training.gossip_optimizer import GossipOptimizer
    from pulsenet.training.outer_optimizer import OuterOptimizer
    from pulsenet.training.probe import Probe
    from pulsenet.training.publish_callback import PublishCallback
    from pulsenet.training.publisher import Publisher, attach_publisher
    from pulsenet.training.rollout_checks import LogprobCheck
else:  # a type checker would take any name to be there

    def __getattr__(name: str) -> Any:
        """Import a name when it is asked for."""
        if name in _PLACES:
            try:
                return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
            except ModuleNotFoundError as error:
                if error.name not in _EXTRAS:
                    raise
                step = f"pip install 'pulsenet[{_EXTRAS[error.name]}]'"
                text = f"pulsenet.{name} needs {error.name}, which is not installed: {step}"
                raise ModuleNotFoundError(text, name=error.name) from None
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "attach_publisher",
    "Publisher",
    "PublishResult",
    "PublishCallback",
    "LogprobCheck",
    "join_rounds",
    "OuterOptimizer",
    "join_mixing",
    "GossipOptimizer",
    "Probe",
    "OuterCallback",
    "attach_engine",
    "Subscriber",
    "Engine",
    "InProcessEngine",
    "FilesEngine",
    "Sample",
    "PulsenetError",
]

_PLACES = {
    "PulsenetError": "errors",
    "PublishResult": "local.client",
    "Sample": "local.rollouts",
    "Engine": "serving.engine",
    "FilesEngine": "serving.files",
    "InProcessEngine": "serving.in_process",
    "Subscriber": "serving.subscriber",
    "attach_engine": "serving.subscriber",
    "OuterCallback": "training.callback",
    "join_rounds": "training.daemon_exchange",
    "join_mixing": "training.daemon_mixer",
    "GossipOptimizer": "training.gossip_optimizer",
    "OuterOptimizer": "training.outer_optimizer",
    "Probe": "training.probe",
    "PublishCallback": "training.publish_callback",
    "Publisher": "training.publisher",
    "attach_publisher": "training.publisher",
    "LogprobCheck": "training.rollout_checks",
}

_EXTRAS = {"torch": "training", "transformers": "transformers"}
"""Packages that come with an extra of ours, and which one."""


def __dir__() -> list[str]:
    """List the names that are there for others."""
    return sorted(__all__)
