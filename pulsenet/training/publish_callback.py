"""Publishing under Hugging Face's ``Trainer`` and everything built on it, such as TRL's ``GRPOTrainer``.

::

    publisher = pulsenet.attach_publisher()
    trainer = Trainer(model, args, callbacks=[PublishCallback(publisher)], ...)

In a run with rounds the coordinator publishes: take :class:`pulsenet.OuterCallback` there.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from transformers import TrainerCallback

from pulsenet.local.protocol import PublishStatus
from pulsenet.training.publisher import Publisher
from pulsenet.training.ranks import is_first_rank

FIRST_SECONDS_MAX: Final = 600.0
"""For the version that training starts from: nobody can sample before it is there."""

_LOST: Final = (PublishStatus.FAILED, PublishStatus.NOT_PUBLISHER)

logger = logging.getLogger(__name__)


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the weights that training starts from, and those after every optimizer step.

    A version that could not be published is a warning: the next one holds all that changed. Every rank needs the
    callback, because every rank takes part in gathering sharded weights.

    Args:
        publisher: From :func:`pulsenet.attach_publisher`; the caller closes it.
        wait: Train on only when a version is committed. Without it the inferencers may sample a step longer from the
            weights before, and a version that was not begun when the next one comes is left out.
        timeout_seconds: With ``wait``, how long at most.
    """

    def __init__(self, publisher: Publisher, *, wait: bool = False, timeout_seconds: float = FIRST_SECONDS_MAX) -> None:
        self._publisher = publisher
        self._wait = wait
        self._timeout_seconds = timeout_seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish what training starts from."""
        self._publish(kwargs["model"], state.global_step, wait=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish what the step made."""
        self._publish(kwargs["model"], state.global_step, wait=self._wait)

    def _publish(self, model: Any, step: int, *, wait: bool) -> None:
        result = self._publisher.publish(
            model, step=step, wait=wait, timeout_seconds=self._timeout_seconds if wait else None
        )
        if result.status in _LOST and is_first_rank():
            logger.warning("the weights of step %d are not published: %s (%s)", step, result.status, result.reason)
