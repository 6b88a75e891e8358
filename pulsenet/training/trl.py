"""Lets TRL's ``GRPOTrainer`` learn from samples of pulsenet's inferencers. Needs neither TRL's vLLM extra nor vLLM.

::

    publisher = pulsenet.attach_publisher()
    trainer = GRPOTrainer(
        model, rewards, args, dataset, rollout_func=TrlRollouts(publisher), callbacks=[PublishCallback(publisher)]
    )
    use_rollout_logprobs(trainer)
    trainer.train()

Nothing here imports TRL; ``docs/trl.md`` says which of its releases allow what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Literal

import torch

from pulsenet.errors import ConfigError, PulsenetError, UnavailableError
from pulsenet.local.protocol import TASKS_PER_CALL_MAX
from pulsenet.training.publisher import Publisher
from pulsenet.training.ranks import is_distributed, is_first_rank, share_object
from pulsenet.training.rollout_checks import LogprobCheck
from pulsenet.training.trl_assembly import Prompt, RolloutAssembly, to_columns

BATCHES_PER_REQUEST: Final = 16
POLL_SECONDS: Final = 5.0
"""One wait for batches; between two of them the time is looked at."""

TIMEOUT_SECONDS_DEFAULT: Final = 600.0
LEASE_SECONDS_DEFAULT: Final = 120.0
RATIO_MAX_DEFAULT: Final = 2.0

_ATTRIBUTES: Final = (
    "rollout_func",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)
_RATIO_MAX_NAMES: Final = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
"""The bound in TRL 1.6 and newer, and before."""


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """What one call of TRL's rollout function got."""

    sample_count: int
    wait_seconds: float
    staleness_max: int
    """Version numbers that the oldest token used is behind."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """What came and was not used, by reason; see :data:`pulsenet.training.trl_assembly.Drop`."""


class TrlRollouts:
    """A rollout function for ``GRPOTrainer``: prompts go to the inferencers as tasks, their samples come back.

    A task has ``prompt_tokens``, ``sample_count``, ``completion_tokens_max``, ``end_tokens``, ``temperature``,
    ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty``. An inferencer answers it by one batch of so many
    samples, whose logprobs are of the distribution it drew from, at that temperature. Samples that answer no task of
    the same call are not used.

    Under ``torch.distributed`` every rank calls it; rank 0 asks for all of them.

    Args:
        publisher: From :func:`pulsenet.attach_publisher`; the caller closes it.
        staleness_max: Samples that began with weights further behind the newest version are asked for again; ``None``
            uses all. The node's ``--max-staleness`` drops them before they are handed over.
        timeout_seconds: Gives up when no sample that can be used came for so long.
        lease_seconds: How long an inferencer has for a task; and after so long without one that can be used everything
            missing is asked for again: a batch that answered may have been dropped as stale since.
        check: Recomputes the logprobs of a few samples.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        staleness_max: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS_DEFAULT,
        lease_seconds: float = LEASE_SECONDS_DEFAULT,
        check: LogprobCheck | None = None,
    ) -> None:
        if staleness_max is not None and staleness_max < 0:
            raise ConfigError(f"staleness_max {staleness_max} is below 0: 0 takes samples of the newest version alone")
        if not (timeout_seconds > 0 and lease_seconds > 0):
            raise ConfigError(f"timeout_seconds {timeout_seconds} and lease_seconds {lease_seconds}: give both above 0")
        self._publisher = publisher
        self._staleness_max = staleness_max
        self._timeout_seconds = timeout_seconds
        self._lease_seconds = lease_seconds
        self._check = check
        self.report: RolloutReport | None = None
        """What the last call got; ``None`` before the first, and on ranks other than 0."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return a completion for each prompt, in their order, as TRL's ``rollout_func`` has to.

        Args:
            prompts: Texts or conversations; each stands as often as completions of it are wanted.
            trainer: The ``GRPOTrainer``.

        Raises:
            UnavailableError: The node is away or the samples did not come; the message says how many and what did.
            ConfigError: A prompt has images or other parts that are no text.
        """
        encoded = [encode_prompt(prompt, trainer) for prompt in prompts]
        if not is_distributed():
            return self._collect(encoded, trainer)
        ranks = torch.distributed
        gathered: list[Any] = [None] * ranks.get_world_size()
        ranks.all_gather_object(gathered, encoded)
        columns: dict[str, list[Any]] | None = None
        reason = "its own error says why"
        try:
            if is_first_rank():
                columns = self._collect([prompt for part in gathered for prompt in part], trainer)
        except PulsenetError as error:
            reason = str(error)
        finally:  # also after an error of the caller's own check: the other ranks wait for an answer
            columns, reason = share_object((columns, reason))
        if columns is None:
            raise UnavailableError(f"rank 0 has no rollouts: {reason}")
        start = sum(len(part) for part in gathered[: ranks.get_rank()])
        return {name: values[start : start + len(encoded)] for name, values in columns.items()}

    def _collect(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:
        started_at = monotonic()
        # A node that has published nothing yet has no version.
        number_newest = self._publisher.status().get("applied_version") or 0
        assembly = RolloutAssembly(
            prompts,
            completion_tokens_max=trainer.max_completion_length,
            vocabulary_size=trainer.model.config.get_text_config().vocab_size,
            number_newest=number_newest,
            staleness_max=self._staleness_max,
        )
        rules = read_sampling_rules(trainer)
        self._ask(assembly, assembly.missing, rules)
        self._wait(assembly, rules)
        columns = to_columns(assembly.samples, number_newest)
        self.report = RolloutReport(
            sample_count=len(prompts),
            wait_seconds=monotonic() - started_at,
            staleness_max=max(columns["rollout_staleness"], default=0),
            dropped={str(reason): count for reason, count in assembly.dropped.items()},
        )
        return columns

    def _wait(self, assembly: RolloutAssembly, rules: Mapping[str, Any]) -> None:
        """Take batches until no completion is missing."""
        used_at = asked_at = monotonic()
        poll_seconds = min(POLL_SECONDS, self._timeout_seconds, self._lease_seconds)
        while assembly.missing_count:
            batches = self._publisher.rollouts(
                count_max=BATCHES_PER_REQUEST, timeout_seconds=poll_seconds, check=self._check
            )
            for batch in batches:
                missing_count = assembly.missing_count
                again = assembly.add(batch)
                if assembly.missing_count < missing_count:
                    used_at = monotonic()
                if not assembly.missing_count:
                    return
                self._ask(assembly, again, rules)
                self._give_up_after(used_at, assembly)
            self._give_up_after(used_at, assembly)
            if monotonic() - max(used_at, asked_at) >= self._lease_seconds:
                self._ask(assembly, assembly.missing, rules)
                asked_at = monotonic()

    def _ask(self, assembly: RolloutAssembly, missing: Mapping[Prompt, int], rules: Mapping[str, Any]) -> None:
        """Send a task for each prompt, waiting for room at the node."""
        listed = list(missing)
        for start in range(0, len(listed), TASKS_PER_CALL_MAX):
            prompts = listed[start : start + TASKS_PER_CALL_MAX]
            task_ids = self._publisher.send_tasks(
                [{**rules, "prompt_tokens": list(prompt), "sample_count": missing[prompt]} for prompt in prompts],
                lease_seconds=self._lease_seconds,
                timeout_seconds=self._timeout_seconds,
            )
            assembly.note_tasks(task_ids, prompts)

    def _give_up_after(self, used_at: float, assembly: RolloutAssembly) -> None:
        if monotonic() - used_at < self._timeout_seconds:
            return
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(assembly.dropped.items()))
        raise UnavailableError(
            f"{assembly.missing_count} completions of {len(assembly.missing)} prompts are missing and none came for "
            f"{self._timeout_seconds:.0f} s (not used: {dropped or 'none'}): see whether an inferencer takes "
            "tasks, with `pulsenet status --json` under 'rollouts'"
        )


def encode_prompt(prompt: Any, trainer: Any) -> Prompt:
    """Return the token ids of a prompt as TRL makes them: plain text, or a conversation by the chat template.

    Raises:
        ConfigError: It has parts that are no text.
    """
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return tuple(tokenizer(text=[prompt])["input_ids"][0])
    if not all(isinstance(message.get("content"), str) for message in prompt):
        raise ConfigError("a prompt with images or other parts that are no text: inferencers are sent token ids alone")
    # A list of one, because processors of models with images give lists in any case.
    encoded = tokenizer.apply_chat_template(
        [list(prompt)],
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )
    return tuple(encoded["input_ids"][0])


def read_sampling_rules(trainer: Any) -> dict[str, Any]:
    """Return how the trainer wants to be sampled for, as it stands in each task."""
    end_tokens = getattr(trainer, "eos_token_ids", None) or [trainer.processing_class.eos_token_id]
    return {
        "completion_tokens_max": trainer.max_completion_length,
        "end_tokens": [int(token) for token in end_tokens],
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
    }


def use_rollout_logprobs(
    trainer: Any,
    *,
    mode: Literal["token_truncate", "sequence_truncate"] = "token_truncate",
    ratio_max: float = RATIO_MAX_DEFAULT,
) -> None:
    """Weigh each token's loss by min(p_trainer / p_rollout, ``ratio_max``): truncated importance sampling.

    ``p_rollout`` is what the inferencer reported with the sample, ``p_trainer`` what the trainer's weights give the
    token when the batch arrives: the ratio makes up for samples of older weights and for another engine's arithmetic,
    and the bound keeps its variance finite (Ionides, "Truncated Importance Sampling", Journal of Computational and
    Graphical Statistics 17(2), 2008).

    TRL has this for samples of its own vLLM, and its code is what runs; its metrics are logged as
    ``sampling/importance_sampling_ratio/*``. It is behind ``use_vllm``, which this sets on the finished trainer: that
    starts no vLLM. TRL's own weight sync, which hangs on the same attribute, is replaced by nothing.

    Args:
        trainer: A ``GRPOTrainer`` with a rollout function, made without ``use_vllm``.
        mode: One ratio for each token, or the product over a sample's tokens for all of them.
        ratio_max: The bound.

    Raises:
        ConfigError: The trainer is another, has tools, or is of a TRL release that keeps these settings elsewhere.
    """
    ratio_names = [name for name in _RATIO_MAX_NAMES if hasattr(trainer, name)]
    missing = [name for name in _ATTRIBUTES if not hasattr(trainer, name)]
    if missing or not ratio_names:
        named = ", ".join(missing or _RATIO_MAX_NAMES[:1])
        raise ConfigError(f"{type(trainer).__name__} has no {named}: docs/trl.md names the releases of TRL that do")
    if trainer.rollout_func is None:
        raise ConfigError("the trainer samples by itself: give GRPOTrainer rollout_func=TrlRollouts(publisher)")
    if trainer.use_vllm:
        raise ConfigError("the trainer has a vLLM and a weight sync of its own: make it without use_vllm")
    if getattr(trainer, "tools", None):
        raise ConfigError("the trainer has tools: TRL samples between their calls itself, inferencers cannot")
    if mode not in ("token_truncate", "sequence_truncate"):
        raise ConfigError(f"mode {mode!r}: token_truncate or sequence_truncate")
    if not ratio_max > 0:
        raise ConfigError(f"ratio_max {ratio_max!r} is not above 0")
    if mode == "sequence_truncate" and getattr(trainer, "loss_type", None) == "vespo":
        raise ConfigError("the loss vespo multiplies over the sequence itself: take token_truncate")
    setattr(trainer, ratio_names[0], ratio_max)
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_correction = True
    trainer.vllm_generation = _NoSync()
    trainer._last_loaded_step = -1
    trainer.use_vllm = True


class _NoSync:
    """Stands where TRL keeps its own vLLM: the inferencers get their weights from the node."""

    def sync_weights(self) -> None:
        """Do nothing."""
