"""A small Hugging Face Trainer in rounds; as a script it trains beside a daemon until somebody kills it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from pulsenet.local.client import Client
from pulsenet.training.callback import OuterCallback
from pulsenet.training.daemon_exchange import DaemonExchange


def make_trainer(folder: Path, callback: OuterCallback, *, steps: int = 12, save_steps: int = 6) -> Any:
    """Return a Trainer whose data and weights are always the same, and which saves every so many steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    data = [{"input_ids": torch.arange(8) % 7 + i % 5, "labels": torch.arange(8) % 7 + i % 5} for i in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=save_steps,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        seed=1,
    )
    return transformers.Trainer(
        transformers.LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[callback]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    exchange = DaemonExchange(Client.connect(Path(sys.argv[1])), linger_seconds=0.0)
    make_trainer(Path(sys.argv[2]), OuterCallback(exchange)).train()
