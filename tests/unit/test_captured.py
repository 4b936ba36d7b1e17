"""Which micro-batches share a recorded CUDA graph, and which runs record them at all; without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.helpers.one_process import one_process
from tests.helpers.plans import traced
from tests.helpers.quick_config import load_config

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.specs import ModuleSpec
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import Workload, check_graph, is_captured, why_not_captured
from qlora_fsdp.training.capture.graphs import Graphs, Recorded
from qlora_fsdp.training.capture.passes import Key, fill, with_room

STEPS = ("training.max_steps=1", "training.max_length=2048")


def batch(lengths: list[list[int]], length: int) -> Batch:
    """Sequences of rows of these lengths, which fill them."""
    ids = torch.zeros(len(lengths), length, dtype=torch.int64)
    ends = torch.tensor([0, *(n for rows in lengths for n in rows)]).cumsum(0).to(torch.int32)
    assert ends[-1] == ids.numel()
    return Batch(ids, ids, ids, ends, max_row_length=max(n for rows in lengths for n in rows))


def test_micro_batches_share_a_graph_if_their_rows_are_alike():
    few, more = batch([[100, 156], [256]], 256), batch([[90] * 2 + [76], [200, 56]], 256)
    assert Key.of(few) == Key.of(more) == Key(2, 256, 16, 256)
    assert Key.of(batch([[8] * 32], 256)) == Key(1, 256, 64, 128)
    assert Key.of(batch([[256], [256]], 256)) == Key(2, 256, 0, 256)  # no rows within sequences: another kernel


def test_a_micro_batch_without_memory_for_a_graph_is_launched():
    def record(key: Key, batch: Batch) -> Recorded:
        raise torch.OutOfMemoryError("CUDA out of memory.\nOf the allocated memory ...")

    graphs = Graphs("Step", record, one_process(), is_sharded=False)
    assert graphs.of(batch([[256]], 256)) is None and graphs.reason == "CUDA out of memory."


def test_the_rest_of_the_starts_are_rows_without_tokens():
    first = batch([[8] * 32, [8] * 32], 256)
    roomy = with_room(first, Key(2, 256, 64, 256), torch.device("cpu"))
    fill(roomy, batch([[100, 156], [256]], 256))
    assert roomy.sequence_starts.tolist() == [0, 100, 256, 512] + [512] * 61


def test_labels_have_room():
    """A token with a label for each of two rows, and for each of three words."""
    alone = replace(batch([[8], [8]], 8), num_tokens=torch.tensor([8, 5]))
    two, three = (
        replace(alone, labels=torch.arange(float(n)).view(n, 1) + 1, label_positions=torch.arange(n) + 3)
        for n in (2, 3)
    )
    assert Key.of(two) == Key.of(three) == Key(2, 8, 0, 8, num_labels=16)
    roomy = with_room(two, Key.of(two), torch.device("cpu"))
    fill(roomy, three)
    assert roomy.is_label.tolist() == [True] * 3 + [False] * 13
    assert roomy.labels[:3].equal(three.labels) and roomy.label_positions[:3].equal(three.label_positions)
    assert len(roomy.labels) == len(roomy.label_positions) == 16


@pytest.mark.parametrize(
    ("model", "setting", "expected"),
    [
        ("qwen3-30b-a3b", "fsdp.sharding_strategy=FULL_SHARD", True),
        ("qwen3-8b", "fsdp.sharding_strategy=FULL_SHARD", True),
        ("qwen3-8b", "distributed.context_parallel=2", False),
    ],
)
def test_the_plan_knows_which_runs_record(model: str, setting: str, expected: bool):
    config = load_config([f"model={model}", setting, "data=random", *STEPS])
    work = Workload(traced(config), config, num_ranks=2, local_num_ranks=2, micro_batch_size=1)
    assert is_captured(work, [Policy.none] * work.num_layers) is expected


@pytest.mark.parametrize(
    ("settings", "policy", "reason"),
    [
        ([], Policy.none, None),
        (["lora.lora_dropout=0.1"], Policy.selective, None),
        ([], Policy.full, None),
        (["compute.cuda_graph=false"], Policy.none, "compute.cuda_graph=false"),
        (["fsdp=offload"], Policy.none, "host memory"),
        ([], Policy.attention, None),
        ([], Policy.offload, "host memory"),
        ([], Policy.offload_attention, "host memory"),
        (["task=sequence_classification", "task.labels=[a,b]"], Policy.none, None),
        (["kernels.cross_entropy=liger"], Policy.none, "liger"),
        (["training=padded"], Policy.none, None),
        (["lora.lora_dropout=0.1"], Policy.full, "random numbers"),
        (["task=preference"], Policy.none, None),
        (["task=preference", "preference.precompute=false"], Policy.none, None),
        (["task=reward"], Policy.none, None),
    ],
)
def test_which_runs_record(settings: list[str], policy: Policy, reason: str | None):
    config = load_config(["model=tiny", "data=random", "training.max_steps=1", *settings])
    has_dropout = config.lora.lora_dropout > 0
    modules, cpu_offload = ModuleSpec.of(config), config.fsdp.cpu_offload
    found = why_not_captured(modules, cpu_offload, [Policy.none, policy], has_dropout)
    assert (found is None) if reason is None else reason in (found or "")


def test_a_run_that_is_to_record_and_cannot_is_refused():
    config = load_config(["model=tiny", "data=random", "training.max_steps=1", "compute.cuda_graph=true"])
    check_graph(ModuleSpec.of(config), False, [Policy.none], has_dropout=False, is_cuda=True)
    with pytest.raises(ConfigError, match=r"compute.cuda_graph=true can't be had: what comes from host memory"):
        check_graph(ModuleSpec.of(config), False, [Policy.offload], has_dropout=False, is_cuda=True)
    with pytest.raises(ConfigError, match=r"compute.cuda_graph=true can't be had: there is no GPU"):
        check_graph(ModuleSpec.of(config), False, [Policy.none], has_dropout=False, is_cuda=False)
    config.compute.cuda_graph = "auto"
    check_graph(ModuleSpec.of(config), False, [Policy.offload], has_dropout=False, is_cuda=True)


def test_an_adapter_as_the_reference_in_the_step_is_launched():
    config = load_config(
        ["model=tiny", "data=random", "training.max_steps=1", "task=preference", "preference.precompute=false"]
    )
    config.lora.start = "adapter"
    found = why_not_captured(ModuleSpec.of(config), False, [Policy.none], has_dropout=False)
    assert "changes places" in (found or "")
