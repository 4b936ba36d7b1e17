"""On a GPU: what the memory plan predicts is what is allocated, and no activation policy and no tile changes a loss."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import qlora_fsdp.training.run as pipeline
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.world import World
from qlora_fsdp.model.activations import pinned_buffer
from tests.helpers.ranks import Meeting, once, run_ranks

POLICIES = ("none", "selective", "attention", "full", "offload_attention", "offload", "auto", "tiled")
TILED = ["memory.activations=offload", "memory.tile_tokens=1024"]
TARGET_GIB = 6  # of auto, which has to mix policies to fit
MODEL = ["model=llama3-8b", "model.weights=random", "model.config.num_hidden_layers=6", "data=random"]
STEPS = ["data.max_rows=16", "training.max_steps=3", "training.max_length=2048", "training.micro_batch_size=4"]


def run_policies(folder: Path) -> dict[str, dict[str, Any]]:
    """Summary and losses of a run under each policy, and of one in tiles, and whether torch's segments grow."""
    found = {}
    for policy in POLICIES:
        Meeting.new_port()
        run_folder = folder / policy
        memory = TILED if policy == "tiled" else [f"memory.activations={policy}"]
        arguments = [*MODEL, *STEPS, *memory, f"run.folder={run_folder}"]
        arguments += [f"memory.target_gib={TARGET_GIB}"] if policy == "auto" else []
        torch.cuda.set_per_process_memory_fraction(1.0)
        summary = pipeline.run(load_config(arguments), World.from_environment(os.environ))
        lines = (run_folder / "metrics.jsonl").read_text().splitlines()
        losses = [figures["loss"] for figures in map(json.loads, lines) if "loss" in figures]
        grows = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
        found[policy] = {"memory": summary["memory"], "losses": losses, "grows": grows}
        gc.collect()
        torch.cuda.empty_cache()
    return found


run_once = once(lambda folder: run_ranks(1, run_policies, folder, gpu=True)[0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_once(tmp_path_factory.mktemp("memory"))
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("phase", ["load", "forward", "backward"])
def test_plan_is_what_is_allocated(runs: dict[str, dict[str, Any]], policy: str, phase: str):
    memory = runs[policy]["memory"]
    measured = memory["measured"]["tensors_gib"][phase]
    assert memory["predicted"]["tensors_gib"][phase] == pytest.approx(measured, rel=0.05, abs=0.5)


def test_policies_change_no_loss(runs: dict[str, dict[str, Any]]):
    for policy in POLICIES[1:]:
        assert runs[policy]["losses"] == pytest.approx(runs["none"]["losses"], abs=1e-3), policy


def test_auto_keeps_to_its_target(runs: dict[str, dict[str, Any]]):
    """With several policies, and no gaps that grow: what is reserved stays within the target too."""
    memory = runs["auto"]["memory"]
    assert "recomputed" in memory["predicted"]["activations"] and "kept" in memory["predicted"]["activations"]
    assert max(memory["measured"]["reserved_gib"].values()) <= TARGET_GIB
    assert runs["auto"]["grows"], "expandable segments are on"


def test_pinned_buffers_are_of_any_size_and_the_gpu_copies_to_them_by_itself():
    buffer = pinned_buffer(3 * 2**20 + 5)
    assert buffer.is_pinned() and buffer.nbytes == 3 * 2**20 + 5
    values = torch.arange(2**19, device="cuda", dtype=torch.int32)
    buffer[: values.nbytes].view(torch.int32).copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer[: values.nbytes].view(torch.int32), values.cpu())
