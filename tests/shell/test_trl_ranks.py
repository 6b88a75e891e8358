"""The rollout function of one trainer with several ranks: rank 0 asks for all, and each gets its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAKES = Path(__file__).resolve().parents[1] / "unit" / "training"

RANK = """
import json, os, sys
import torch
sys.path.insert(0, sys.argv[3])
from test_trl import Desk, answer_well, make_trainer
from pulsenet.errors import UnavailableError
from pulsenet.training.trl import TrlRollouts

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
# A group may lie across ranks, and ranks may have different numbers of prompts.
prompts = [["ab", "ab", "c"], ["c", "c"]][rank]
desk = Desk() if rank == 0 else None
columns = TrlRollouts(desk)(prompts, make_trainer())
silent = Desk(answer=lambda task: []) if rank == 0 else None
try:
    TrlRollouts(silent, timeout_seconds=0.01)(prompts, make_trainer())
except UnavailableError as error:
    columns["error"] = str(error)
def fail(task):
    raise ValueError("of the caller's own check")
try:
    TrlRollouts(Desk(answer=fail) if rank == 0 else None)(prompts, make_trainer())
except (UnavailableError, ValueError) as error:
    columns["other_error"] = str(error)
columns["task_count"] = len(desk.sent) if rank == 0 else 0
print(json.dumps(columns), flush=True)
torch.distributed.barrier()
os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which aborts the process
"""


def test_rank_0_asks_for_all_ranks_and_its_error_reaches_them(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(FAKES)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = (json.loads(output) for output in outputs)
    assert first["prompt_ids"] == [[1, 2], [1, 2], [3]]
    assert second["prompt_ids"] == [[3], [3]]
    assert first["completion_ids"] + second["completion_ids"] == [[1, 0], [1, 1], [3, 0], [3, 1], [3, 2]]
    assert first["task_count"] == 2
    assert "5 completions of 2 prompts are missing" in first["error"]
    assert second["error"] == first["error"]
    assert first["other_error"] == "of the caller's own check"
    assert second["other_error"] == "rank 0 has no rollouts: its own error says why"
