import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.training.state_dict import Counters, pack_state

Lone = Callable[..., Any]


def test_a_state_dict_is_plain_data(lone: Lone) -> None:
    trainer = lone()
    trainer.run_rounds(1)
    trainer.sync.begin_round()
    buffer = io.BytesIO()
    torch.save(trainer.sync.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded["numbers"]["round_index"] == 1
    assert set(loaded["theta"]) == {"0.bias", "0.weight", "2.bias", "2.weight"}
    other = lone()
    other.sync.load_state_dict(loaded)
    assert other.sync.state_root == trainer.sync.state_root
    assert other.sync._pending.same_as(trainer.sync._pending)
    assert other.sync.counters == trainer.sync.counters


def test_dense_pending_contributions_come_back(lone: Lone) -> None:
    trainer = lone()
    table, state = trainer.sync.state.table, trainer.sync.state
    entries = tuple(
        Entries(index, None, np.arange(spec.element_count, dtype=np.float32))
        for index, spec in enumerate(table.tensors)
    )
    pending = Contribution(0, trainer.sync.state_root, 3, entries)
    numbers = {"round_index": 0, "inner_step": 3, "extra_inner_steps": 0, "warmup_left": 0}
    saved = pack_state(
        table=table, state=state, masters=(), pending=pending, numbers=numbers, counters=Counters(missed=2)
    )
    other = lone()
    other.sync.load_state_dict(saved)
    assert other.sync._pending.same_as(pending)
    assert other.sync.counters.missed == 2


def test_a_state_of_something_else_is_refused_and_changes_nothing(lone: Lone) -> None:
    trainer = lone()
    saved = trainer.sync.state_dict()
    before = trainer.bits()
    missing = {**saved, "theta": {}}
    for wrong, message in (
        ({**saved, "format": 9}, "format 9"),
        ({**saved, "table_digest": "00"}, "other masters"),
        (missing, "holds no theta"),
        ({name: value for name, value in saved.items() if name != "counters"}, "lacks counters"),
        ({**saved, "momentum": {**saved["momentum"], "2.bias": torch.zeros(1)}}, "momentum of 2.bias"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.sync.load_state_dict(wrong)
    assert trainer.bits() == before
