"""A GPU that really runs out of memory in the middle of a run: what is said, and torch's record of it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.records.run_state import checkpoint_folders
from tests.cli.launch import SHORT_STEPS, ForkedLaunch

NUM_RANKS = torch.cuda.device_count()
RUN = ["model=tiny", "data=random", "data.max_rows=64", "training.max_length=2048", "training.max_steps=4"]
RUN += ["checkpoint.every_steps=1", "memory.snapshot=true"]
RUN += [*SHORT_STEPS, "compute.cuda_graph=false"]  # so that a forward of the model is a step


def starve() -> None:
    """From the third step on, the last rank's allocator gets nothing any more, as if others had taken the GPU."""
    if os.environ["RANK"] != str(NUM_RANKS - 1):
        return
    forward, num_calls = CausalLM.forward, 0

    def starved_forward(model: CausalLM, batch: Any) -> Tensor:
        nonlocal num_calls
        num_calls += not batch.input_ids.is_meta  # the plan's forward is no step's
        if num_calls == 3:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1e-6)
        return forward(model, batch)

    pytest.MonkeyPatch().setattr(CausalLM, "forward", starved_forward)


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> ForkedLaunch:
    command = ForkedLaunch(tmp_path_factory.mktemp("short"), NUM_RANKS, *RUN, preexec=starve, gpus=True)
    command.finish()
    return command


def test_all_ranks_end_with_one_report(starved: ForkedLaunch) -> None:
    assert [process.exitcode for process in starved.ranks.processes] == [3] * NUM_RANKS, starved.output
    (error,) = starved.errors
    assert "The GPU is out of memory: CUDA out of memory" in error and ", in forward." in error
    assert "What would help most, by the plan:" in error and "GiB less a GPU" in error
    newest = checkpoint_folders(starved.run_folder / "checkpoints")[-1]
    assert newest.name == "step-00000002", starved.output


def test_snapshot_shows_what_was_asked_for_and_by_whom(starved: ForkedLaunch) -> None:
    file = starved.run_folder / f"memory-{NUM_RANKS - 1}.pickle"
    assert f"Allocations are in {file}: open it at pytorch.org/memory_viz." in starved.output
    snapshot = pickle.loads(file.read_bytes())
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    *_, shortage = [entry for entry in entries if entry["action"] == "oom"]
    files = {Path(frame["filename"]).name for frame in shortage["frames"]}
    assert "causal_lm.py" in files, files
    assert {"alloc", "free_completed"} <= {entry["action"] for entry in entries}
    assert snapshot["segments"], "what was held is there"
