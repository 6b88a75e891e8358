"""What a trainer answers to a probe, and how it finds the tokens that have bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError
from pulsenet.outer.mixing.disagreement import choose_bins as choose_bins_twin
from pulsenet.outer.mixing.disagreement import js_distance
from pulsenet.outer.mixing.probe import compare_answers, name_bins, read_answer
from pulsenet.training.probe import Probe, ProbeDesk, choose_bins, unwrap_model

WORDS = 40
TOKENS = torch.arange(6).reshape(2, 3)


class Model(torch.nn.Module):
    """Words in, logits out, and noise that only training makes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(8, WORDS)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drop(self.embed(tokens))


def compute_logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).flatten(0, 1)


def move(model: torch.nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("count", [1, 3, 7, 255])
def test_bins_are_of_the_most_likely_tokens_and_of_equals_the_lowest(count: int) -> None:
    logits = torch.randint(0, 5, (30, 21), generator=torch.Generator().manual_seed(count)).float()
    expected = choose_bins_twin(logits.double().numpy(), count)
    np.testing.assert_array_equal(choose_bins(logits, count).numpy(), expected)


def test_trainers_of_one_mean_answer_in_the_same_bins_and_show_how_far_apart_they_are() -> None:
    answers = []
    for place in range(2):
        model = Model()
        desk = ProbeDesk(Probe(TOKENS, compute_logits, bin_token_count=9), model)
        move(model, by=float(place))
        desk.look()
        move(model, by=-float(place))
        answers.append(desk.answer(8))
    assert answers[0] is not None
    assert answers[1] is not None
    assert answers[0].bins == answers[1].bins
    shown = compare_answers([one for one in answers if one is not None], 8).distance
    assert shown is not None
    first, second = Model().eval(), Model().eval()
    move(second, by=1.0)
    true = [torch.softmax(compute_logits(one, TOKENS).detach().double(), dim=1).numpy() for one in (first, second)]
    assert 0.5 * js_distance(*true).mean() < shown <= js_distance(*true).mean() + 1e-3, (
        "a lower bound, and no small one"
    )


def test_what_is_looked_at_is_the_model_in_evaluation_and_left_as_it_was() -> None:
    model = Model()
    model.drop.eval()
    seen: list[tuple[bool, bool, bool]] = []

    def look(given: Any, batch: torch.Tensor) -> torch.Tensor:
        seen.append((given is model, given.training, torch.is_grad_enabled()))
        return compute_logits(given, batch)

    desk = ProbeDesk(Probe(TOKENS, look), torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    desk.look()
    first = desk.answer(0)
    assert seen == [(True, False, False)] * 2
    assert model.training
    assert not model.drop.training
    desk.look()
    again = desk.answer(0)
    assert first is not None
    assert again is not None
    assert first.data == again.data, "no noise"


def test_rows_are_whole_even_where_bins_are_few_or_all() -> None:
    for count in (1, WORDS, 255):
        desk = ProbeDesk(Probe(TOKENS, compute_logits, bin_token_count=count), Model())
        desk.look()
        found = desk.answer(3)
        assert found is not None
        rows = read_answer(found.data, 3)
        assert rows.shape == (6, min(count, WORDS) + 1)
        assert (rows[:, -1] < 1e-3).all() == (count >= WORDS)


def test_nothing_is_answered_without_a_look_or_where_logits_are_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    desk = ProbeDesk(Probe(TOKENS, compute_logits), model)
    assert desk.answer(0) is None
    desk.look()
    with torch.no_grad():
        model.embed.weight[0, 0] = float("nan")
    assert desk.answer(0) is None, "the mean is not finite"
    desk.look()
    assert "not finite" in caplog.text
    assert desk.answer(0) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model, batch: model(batch),
        lambda model, batch: compute_logits(model, batch).argmax(dim=1, keepdim=True),
        lambda model, batch: compute_logits(model, batch).numpy(),
        lambda model, batch: compute_logits(model, batch)[:0],
        lambda model, batch: compute_logits(model, batch).repeat(400, 1),
        lambda model, batch: torch.zeros(330, 255),
    ],
)
def test_logits_that_no_probe_has_are_the_users_mistake(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="probe"):
        ProbeDesk(Probe(TOKENS, wrong), Model()).look()


def test_a_probe_names_its_batch_by_its_bits() -> None:
    def name(batch: Any) -> bytes:
        return Probe(batch, compute_logits).name()

    assert name(TOKENS) == name(TOKENS.clone())
    batches = [TOKENS, TOKENS.reshape(3, 2), TOKENS.int(), TOKENS + 1, {"": TOKENS, "mask": TOKENS}, {"mask": TOKENS}]
    assert len({name(batch) for batch in batches}) == len(batches)
    assert name({"a": TOKENS, "b": TOKENS + 1}) == name({"b": TOKENS + 1, "a": TOKENS})
    assert name(TOKENS.to(torch.bfloat16)) != name(TOKENS.half())
    for batch in ([1, 2], {"a": [1]}, None):
        with pytest.raises(ConfigError, match="tensor"):
            name(batch)
    for count in (0, 256):
        with pytest.raises(ConfigError, match="bins"):
            Probe(TOKENS, compute_logits, bin_token_count=count)


def test_the_module_inside_wrappers_is_the_one_that_answers() -> None:
    model = Model()
    assert unwrap_model(model) is model
    assert unwrap_model(torch.compile(model, backend="eager")) is model  # type: ignore[arg-type]


def test_bins_of_a_mean_have_one_name_on_every_trainer() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    assert name_bins(choose_bins(logits, 255).numpy()) == name_bins(choose_bins_twin(logits.double().numpy()))
