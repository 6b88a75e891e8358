"""Publishes a small model again and again, so that there is something to look at; not a training loop to copy.

Usage: python toy_trainer.py DATA_DIR SECONDS [VERSIONS]
"""

from __future__ import annotations

import sys
import time

import torch

import pulsenet


def main(data_dir: str, seconds: float, versions: int) -> None:
    """Change about one weight in a hundred, publish, wait; ``versions`` times, or for ever if that is 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(8)))
    publisher = pulsenet.attach_publisher(data_dir=data_dir)
    step = 0
    while not versions or step < versions:
        step += 1
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.0 + 0.01 * (torch.rand_like(weight) < 0.01))
        publisher.publish(model, step=step, blocking=True)
        print(f"published step {step}", flush=True)
        time.sleep(seconds)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
