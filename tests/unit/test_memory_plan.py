"""The memory plan, against models as transformers builds them and against what H200s took."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.plans import FUSED_KERNELS, traced
from tests.helpers.quick_config import load_config

from qlora_fsdp.common.errors import ConfigError, MemoryShortage
from qlora_fsdp.common.sizes import SLAB_BYTES
from qlora_fsdp.config.schema import Activations, ShardingStrategy
from qlora_fsdp.data.tokenizer import NO_TOKENS
from qlora_fsdp.layers.experts import grouped_products
from qlora_fsdp.memory import search
from qlora_fsdp.memory.choices import TILE_TOKENS, micro_batch_sizes, ways_to_share
from qlora_fsdp.memory.gpus import find_gpu, gpu_of_size, known_gpus, parse_hardware
from qlora_fsdp.memory.plan import EIGENVECTOR_MATRICES, GIB, PHASES, MemoryPlan, make_plan
from qlora_fsdp.memory.plan_run import Machine, plan_run, run_without_plan
from qlora_fsdp.memory.policy import Policy, describe_policies, next_smaller
from qlora_fsdp.memory.search import (
    CLOSE,
    MARGIN,
    ROOM,
    SPARE,
    Room,
    choose,
    enough_gpus,
    largest_savings,
    longest,
    smaller_runs,
    use_spare,
)
from qlora_fsdp.memory.show import describe_choice, faster_lines, remarks, waiting_lines
from qlora_fsdp.memory.speed import load_seconds, planned_tokens_per_second, step_seconds, tokens_per_second
from qlora_fsdp.memory.workload import Workload
from qlora_fsdp.model.adapters.apply import apply_adapters
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.count import count_bytes
from qlora_fsdp.model.find import ModelFiles, make_config
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.runtime.host_memory import available_bytes
from qlora_fsdp.tracing.model_tracer import Computing, ModelTracer
from qlora_fsdp.training.memory_use import SHORT_IN_A_ROW, PhasePeaks

H200 = known_gpus()["h200"]
WITHOUT_LIGER_LOSS = FUSED_KERNELS - {"cross_entropy"}


def workload(
    *overrides: str, num_ranks: int = 1, fused: frozenset[str] = FUSED_KERNELS, can_read_peers: bool = False
) -> Workload:
    """A run as most were when they were measured: kernels launched one by one, with Liger's loss. Overrides win."""
    sharding = [] if any(text.startswith("fsdp=") for text in overrides) else ["fsdp=full_shard"]
    batch = ["training.micro_batch_size=1", "training.global_batch_size=null"]
    config = load_config(["compute.cuda_graph=false", "kernels.cross_entropy=liger", *batch, *sharding, *overrides])
    size = config.training.micro_batch_size
    model = traced(config, fused)
    local, size = min(8, num_ranks), 1 if size == "auto" else size
    return Workload(model, config, num_ranks, local, size, can_read_peers=can_read_peers)


def uniform(work: Workload, policy: Policy = Policy.full) -> MemoryPlan:
    return make_plan(work, [policy] * work.num_layers)


@pytest.mark.parametrize("quant", ["nf4", "int8", "none"])
@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-72b", "qwen3-32b", "gemma3-27b", "phi4"])
def test_parameters_are_those_of_the_model(model: str, quant: str):
    """Bytes of all parameters and of a shard, and the count of the base's, against the model on meta."""
    embeddings = "int8" if model in ("llama3-8b", "phi4") else "none"
    more = [f"quant.embeddings={embeddings}", "lora.rank_pattern={down_proj: 24}"]
    config = load_config([f"model={model}", f"quant={quant}", *more])
    values = dict(config.model.config) | {"num_hidden_layers": 2}
    config.model.config = values
    built = build_model(
        ModelFiles(None, make_config(values, model)), BuildSettings(config.quant, torch.bfloat16, "sdpa")
    )
    adapted = CausalLM(apply_adapters(built.model, config.lora))
    for num_ranks in (1, 3):
        sizes = count_bytes(adapted, 0, num_ranks)
        plan = uniform(Workload(traced(config), config, num_ranks, num_ranks, 1))
        assert plan.work.parts.num_parameters == sizes.num_base
        parts = plan.phases["load"]
        assert sum(parts.values()) - parts["workspace"] - parts["gathered"] == sizes.shard_bytes


def test_rows_that_are_held_until_they_are_quantized_are_planned():
    """nvfp4 looks at a whole weight first: a rank's rows of the largest, 4,096 x 14,336, in 16 bits."""
    for num_ranks, num_rows in ((1, 4096), (3, 1366)):
        found = [
            uniform(workload("model=llama3-8b", f"quant={quant}", num_ranks=num_ranks)).phases["load"]["workspace"]
            for quant in ("mxfp4", "nvfp4")
        ]
        assert found[1] - found[0] == num_rows * 14336 * 2


def test_what_the_start_from_rounding_errors_takes_is_planned():
    """The error of the largest weight, whole, twice; eigenvectors; and four times a rank's rows: all in float32."""
    whole = 4096 * 14336 * 4
    for num_ranks in (1, 2):
        found = [
            uniform(workload("model=llama3-8b", f"lora.init_lora_weights={start}", num_ranks=num_ranks)).phases["load"][
                "workspace"
            ]
            for start in ("true", "loftq")
        ]
        assert found[1] - found[0] == (2 + EIGENVECTOR_MATRICES) * whole + 4 * whole // num_ranks


# GiB that tensors took in backward on H200s, layers fused (benchmarks/results).
MEASURED_BACKWARD = [
    (1, "llama3-8b", 512, 1, "keep", (), 7.67),
    (1, "llama3-8b", 2048, 1, "keep", (), 12.80),
    (1, "llama3-8b", 2048, 1, "recompute", (), 6.72),
    (1, "llama3-8b", 4096, 1, "keep", (), 19.64),
    (1, "llama3-8b", 1024, 8, "keep", (), 33.33),
    (1, "llama3-8b", 4096, 4, "recompute", (), 12.38),
    (1, "llama3-8b", 8192, 1, "recompute_half", (), 20.87),
    (1, "llama3-8b", 8192, 2, "offload", (), 8.77),
    (1, "llama3-8b", 4096, 1, "recompute", ("fsdp=offload",), 1.81),
    (2, "llama3-8b", 4096, 4, "keep", (), 58.04),
    (2, "llama3-8b", 1024, 4, "recompute_half", ("training.global_batch_size=16",), 10.90),
    (2, "llama3-8b", 8192, 1, "recompute", ("fsdp=offload",), 3.55),
    (2, "llama3-70b", 1024, 1, "recompute", (), 22.42),
]


@pytest.mark.parametrize(("num_ranks", "model", "length", "size", "memory", "more", "backward"), MEASURED_BACKWARD)
def test_backward_is_what_was_measured(num_ranks, model, length, size, memory, more, backward):
    settings = (f"training.max_length={length}", f"training.micro_batch_size={size}", f"memory={memory}", *more)
    settings += ("fsdp.reshard_after_forward=true",)
    plan = choose(workload(f"model={model}", *settings, num_ranks=num_ranks), Room(140 * GIB, H200)).plan
    assert plan.tensor_bytes("backward") / GIB == pytest.approx(backward, abs=0.1)


# The same of one GPU when it ran under FSDP, which copied its layers.
MEASURED_UNDER_FSDP = [
    ("llama3-8b", 1024, 8, "keep", 33.44),
    ("llama3-8b", 4096, 4, "recompute", 12.49),
    ("llama3-8b", 8192, 1, "recompute_half", 20.98),
    ("llama3-8b", 8192, 2, "offload", 8.89),
]


@pytest.mark.parametrize(("model", "length", "size", "memory", "backward"), MEASURED_UNDER_FSDP)
def test_backward_under_fsdp_is_what_was_measured(monkeypatch, model, length, size, memory, backward):
    monkeypatch.setattr(Workload, "uses_fsdp", True)
    test_backward_is_what_was_measured(1, model, length, size, memory, (), backward)


# GiB that tensors took in forward and backward on H200s (benchmarks/results): layers gathered once, and twice.
LAYERS_405B = "model.config.num_hidden_layers=20"
RECORDED = "compute.cuda_graph=auto", "kernels.cross_entropy=auto"
ONCE, TWICE = "fsdp.reshard_after_forward=false", "fsdp.reshard_after_forward=true"
HYBRID = "fsdp=hybrid_shard", "fsdp.hybrid_shard_size=2"
MEASURED_PHASES = [
    (1, "llama3-8b", 2048, 1, ("memory=recompute",), 6.60, 6.72),
    (1, "llama3-8b", 4096, 4, ("memory=recompute",), 11.50, 12.38),
    (1, "llama3-8b", 4096, 4, ("memory=recompute", "compute=fp8"), 11.50, 12.49),
    (4, "llama3-8b", 4096, 4, ("memory=keep", ONCE), 60.68, 59.88),
    (4, "llama3-8b", 4096, 4, ("memory=keep", TWICE), 57.17, 56.59),
    (4, "llama3-70b", 2048, 2, ("memory=keep", ONCE), 112.11, 110.63),
    (2, "llama3-70b", 2048, 1, ("memory=recompute", TWICE), 24.23, 23.93),
    (2, "llama3-70b", 2048, 1, ("memory=offload", TWICE), 21.79, 21.88),
    (2, "llama3-405b", 1024, 1, ("memory=recompute", TWICE, LAYERS_405B), 25.43, 25.68),
    (4, "llama3-405b", 1024, 1, ("memory=recompute", TWICE, LAYERS_405B), 15.54, 15.79),
]


@pytest.mark.parametrize(("num_ranks", "model", "length", "size", "more", "forward", "backward"), MEASURED_PHASES)
def test_phases_are_what_was_measured(num_ranks, model, length, size, more, forward, backward):
    settings = (
        f"training.max_length={length}",
        f"training.micro_batch_size={size}",
        "kernels.dequantize=triton",
        *more,
    )
    plan = choose(workload(f"model={model}", *settings, num_ranks=num_ranks), Room(140 * GIB, H200)).plan
    assert plan.tensor_bytes("forward") / GIB == pytest.approx(forward, abs=0.05)
    assert plan.tensor_bytes("backward") / GIB == pytest.approx(backward, abs=0.05)


# The same of GPUs that read one another's frozen weights, as a CUDA graph, and tokens/s/GPU: on H100s where layers are
# freed, with 4 x 16 x 1,024 tokens and with 70B's 1,024, the others on H200s.
MEASURED_READING_PEERS = [
    (2, "llama3-8b", 1024, 1, 32, (TWICE,), (2.95, 8.01, 6.96, 3.30), None),
    (2, "llama3-8b", 1024, 1, 32, (ONCE,), (4.87, 9.20, 9.12, 5.21), 12567),
    (2, "llama3-8b", 512, 1, 2, (ONCE,), (4.87, 7.37, 7.41, 5.21), 9819),
    (2, "llama3-8b", 4096, 4, 8, (ONCE,), (4.87, 60.30, 60.33, 5.21), 15784),
    (2, "mixtral-8x7b", 4096, 4, 8, (ONCE,), (22.90, 109.87, 111.74, 24.13), 8714),
    (2, "llama3-70b", 1024, 1, 8, (ONCE,), (35.76, 56.30, 56.34, 36.99), 1495),
    (4, "llama3-8b", 1024, 1, 64, (ONCE,), (4.56, 8.78, 8.69, 4.78), 12282),
    (4, "llama3-8b", 1024, 1, 4, (ONCE,), (4.56, 8.67, 8.58, 4.78), 11846),
    (4, "llama3-8b", 1024, 1, 64, (ONCE, *HYBRID), (4.87, 9.20, 9.12, 5.21), 11870),
    (4, "llama3-8b", 4096, 4, 16, (ONCE,), (4.56, 59.87, 59.91, 4.78), 15668),
    (4, "llama3-70b", 2048, 1, 4, (ONCE,), (34.82, 71.46, 71.50, 35.47), 1712),
    (4, "qwen3-30b-a3b", 4096, 2, 8, (ONCE,), (15.42, 46.57, 46.90, 17.28), 15274),
]


@pytest.mark.parametrize(
    ("num_ranks", "model", "length", "size", "global_size", "more", "phases", "speed"), MEASURED_READING_PEERS
)
def test_gpus_that_read_peers_take_what_was_measured(
    num_ranks, model, length, size, global_size, more, phases, speed, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grouped_products, "SLICE_FOR_ROWS", 1)  # as it was when experts were measured
    settings = [f"model={model}", f"training.max_length={length}", f"training.global_batch_size={global_size}"]
    settings += [f"training.micro_batch_size={size}", "memory=keep", "lora.r=16", *RECORDED, *more]
    settings += ["memory.keep_dequantized=false"]
    work = workload(*settings, num_ranks=num_ranks, can_read_peers=True)
    plan = use_spare(choose(work, Room(140 * GIB, H200)), 140 * GIB).plan
    measured = dict(zip(("load", "forward", "backward", "step"), phases, strict=True))
    assert {phase: plan.tensor_bytes(phase) / GIB for phase in measured} == pytest.approx(measured, abs=0.08)
    if speed is not None:
        assert tokens_per_second(plan.work, plan.policies, H200) / num_ranks == pytest.approx(speed, rel=0.12)


# The same with dequantized weights kept until backward, of as many layers as there was room for, on H100s.
MEASURED_KEEPING_DEQUANTIZED = [
    (1, "llama3-8b", 512, 1, 1, 32, (5.48, 20.81, 20.72, 6.06), 11598),
    (1, "llama3-8b", 1024, 1, 16, 32, (5.48, 22.64, 22.43, 6.06), 14168),
    (1, "llama3-8b", 2048, 1, 1, 32, (5.48, 26.05, 25.84, 6.06), 15241),
    (1, "llama3-8b", 4096, 1, 1, 32, (5.48, 32.87, 32.69, 6.06), 15579),
    (1, "llama3-8b", 4096, 4, 4, 9, (5.48, 64.49, 64.50, 6.06), 16389),
    (2, "llama3-8b", 512, 1, 2, 32, (4.87, 20.22, 20.13, 5.21), 10594),
    (2, "llama3-8b", 1024, 1, 32, 32, (4.87, 22.05, 21.84, 5.21), 13359),
    (2, "llama3-70b", 1024, 1, 8, 5, (35.76, 63.60, 63.40, 36.99), 1495),
]


@pytest.mark.parametrize(
    ("num_ranks", "model", "length", "size", "global_size", "num_kept", "phases", "speed"), MEASURED_KEEPING_DEQUANTIZED
)
def test_memory_that_is_left_over_keeps_dequantized_weights_as_was_measured(
    num_ranks, model, length, size, global_size, num_kept, phases, speed
):
    gpu = known_gpus()["h100"]
    target = gpu.gib * (1 - MARGIN) * GIB
    settings = [f"model={model}", f"training.max_length={length}", f"training.global_batch_size={global_size}"]
    settings += [f"training.micro_batch_size={size}", "memory=keep", "lora.r=16", *RECORDED]
    work = workload(*settings, num_ranks=num_ranks, can_read_peers=True)
    choice = choose(work, Room(target, gpu))
    plan = use_spare(choice, target).plan
    assert plan.num_kept_dequantized == num_kept and plan.needed <= (1 - SPARE) * target
    measured = dict(zip(("load", "forward", "backward", "step"), phases, strict=True))
    layer = work.layers[-1].dequantized / GIB  # the plan counts all weights of the layer that runs
    assert {phase: plan.tensor_bytes(phase) / GIB for phase in measured} == pytest.approx(measured, abs=layer / 3)
    assert planned_tokens_per_second(plan, gpu) / num_ranks == pytest.approx(speed, rel=0.15)
    assert tokens_per_second(plan.work, plan.policies, gpu) < planned_tokens_per_second(plan, gpu)
    if num_kept < work.num_layers:  # one more layer would not fit
        assert plan.needed + work.layers[0].dequantized > (1 - SPARE) * target
    # What would help most if memory were short all the same is to keep none.
    savings = {change.text: change for change in largest_savings(plan, gpu)}
    assert savings.pop("memory.keep_dequantized=false").saved == plan.needed - choice.plan.needed
    assert savings and all(each.saved == choice.plan.needed - each.plan.needed for each in savings.values())


# The same weights kept until the run ends, on an H200 with FlashAttention-4: peaks and speed.
@pytest.mark.parametrize(("length", "peak", "speed"), [(512, 20.81, 14674), (1024, 22.64, 16410), (4096, 32.87, 16380)])
def test_dequantized_weights_that_stay_need_no_more_at_the_peak(length: int, peak: float, speed: int):
    settings = ["model=llama3-8b", f"training.max_length={length}", "memory=keep", "lora.r=16", *RECORDED]
    choices = [
        use_spare(choose(work, Room(130 * GIB, H200)), 130 * GIB)
        for work in (workload(*settings), workload(*settings, "memory.keep_dequantized=run"))
    ]
    until_backward, for_the_run = (choice.plan for choice in choices)
    assert for_the_run.num_kept_dequantized == until_backward.num_kept_dequantized == 32
    layer = for_the_run.work.layers[-1].dequantized / GIB
    found = for_the_run.tensor_bytes(for_the_run.peak_phase) / GIB
    assert found == pytest.approx(peak, abs=layer / 3) and for_the_run.needed <= until_backward.needed
    assert for_the_run.tensor_bytes("step") == until_backward.tensor_bytes("step") + 32 * layer * GIB
    assert planned_tokens_per_second(for_the_run, H200) == pytest.approx(speed, rel=0.17)
    assert planned_tokens_per_second(until_backward, H200) < planned_tokens_per_second(for_the_run, H200)
    assert "dequantized weights of 32 layers kept for the whole run" in describe_choice(for_the_run)
    assert "dequantized weights of 32 layers kept until backward" in describe_choice(until_backward)
    said = [line for line in remarks(choices[0], Room(130 * GIB, H200)) if "memory.keep_dequantized=run needs" in line]
    gain = planned_tokens_per_second(for_the_run, H200) / planned_tokens_per_second(until_backward, H200) - 1
    assert len(said) == (gain >= 0.03) and all(f"is {gain:.0%} faster" in line for line in said)
    assert not remarks(choices[1], Room(130 * GIB, H200))
    savings = {change.text: change.saved for change in largest_savings(for_the_run, H200)}
    assert savings["memory.keep_dequantized=false"] > 31 * layer * GIB


def test_a_base_that_fsdp_shards_keeps_dequantized_weights_until_backward():
    settings = ["model=llama3-8b", "training.max_length=1024", "memory=keep", *RECORDED]
    plans = [
        use_spare(choose(work, Room(75 * GIB, H200)), 75 * GIB).plan
        for more in ([], ["memory.keep_dequantized=run"])
        for work in [workload(*settings, *more, num_ranks=2)]
    ]
    assert plans[0].phases == plans[1].phases and plans[1].num_kept_dequantized == 32
    assert "kept until backward" in describe_choice(plans[1])


@pytest.mark.parametrize(
    ("gib", "more", "why"),
    [
        (75, "fsdp=full_shard", "FSDP shards the base, so they stay until backward at most"),
        (75, "compute.cuda_graph=false", "micro-batches are not recorded as a CUDA graph"),
        (75, "compute=fp8", "no weights are dequantized for products"),
        (12, "training.max_length=1024", "no memory is left over"),
    ],
)
def test_weights_that_were_to_stay_and_cannot(gib: int, more: str, why: str):
    settings = ["model=llama3-8b", "fsdp=no_shard", "memory=keep", *RECORDED, "memory.keep_dequantized=run", more]
    work = workload(*settings, num_ranks=2)
    said = remarks(use_spare(choose(work, Room(gib * GIB, H200)), gib * GIB), Room(gib * GIB, H200))
    assert f"memory.keep_dequantized=run does nothing here: {why}" in said


@pytest.mark.parametrize("more", [[], ["task=preference", "preference.precompute=false"]])
def test_what_a_kept_weight_saves(more: list[str]):
    """A forward of the policy, one of the reference and a backward read a weight; it is dequantized once, or never."""
    settings = ["model=llama3-8b", "training.max_length=1024", "memory=keep", *RECORDED, *more]
    choices = [
        choose(workload(*settings, *held), Room(75 * GIB, H200)) for held in ([], ["memory.keep_dequantized=run"])
    ]
    once, never = (use_spare(choice, 75 * GIB).plan for choice in choices)
    seconds = [step_seconds(once.work, once.policies, H200, num_kept) for num_kept in (0, 32)]
    saved = (seconds[0] - seconds[1]) / (2 if more else 1)
    assert seconds[1] - step_seconds(never.work, never.policies, H200, 32) == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize("more", ["memory=recompute", "memory=offload", "compute.cuda_graph=false", "compute=fp8"])
def test_no_dequantized_weights_are_kept_where_that_is_not_asked_for_or_gains_nothing(more: str):
    work = workload("model=llama3-8b", "training.max_length=1024", "memory=keep", *RECORDED, more)
    assert use_spare(choose(work, Room(75 * GIB, H200)), 75 * GIB).plan.num_kept_dequantized == 0


def test_codes_are_read_from_other_gpus_where_their_buffers_fit():
    """Two layers' codes of 70B take 0.8 GiB on two GPUs."""
    settings = "model=llama3-70b", "training.max_length=2048", "quant.embeddings=int8", TWICE
    settings += ("memory.head_in_pieces=false",)  # whose loss is the peak
    work = workload(*settings, num_ranks=2, can_read_peers=True)
    least = choose(replace(work, can_read_peers=False), Room(0, H200)).plan.needed
    assert not choose(work, Room(least + 0.1 * GIB, H200)).plan.work.reads_peers
    assert choose(work, Room(least + 0.1 * GIB, H200)).fits
    assert choose(work, Room(least + 1.0 * GIB, H200)).plan.work.reads_peers


# The same of one GPU, 4096 x 1, all layers kept and all recomputed: the other presets on an H100 (Phi 4: H200), and
# layers that are trained as a whole on an H200.
MEASURED_ON_ONE_GPU = [
    ("mistral-7b", (), (18.18, 18.19), (5.80, 6.02)),
    ("qwen3-8b", (), (21.97, 21.97), (7.70, 7.95)),
    ("phi4", (), (32.59, 32.77), (11.42, 11.75)),
    ("gemma3-27b", (), (61.09, 61.10), (19.47, 19.95)),
    ("qwen3-32b", (), (68.62, 68.63), (22.71, 23.16)),
    ("llama3-70b", (), None, (45.23, 45.66)),
    ("qwen2.5-72b", (), None, (46.87, 47.31)),
    ("llama3-8b", ("lora.modules_to_save=[down_proj]",), (50.00, 50.09), (30.75, 37.09)),
    ("llama3-8b", ("lora.modules_to_save=[norm]",), (21.73, 21.68), None),
    # Before `down` was a function of autograd of its own, whose gradient lives 0.1 to 0.3 GiB longer.
    ("qwen3-30b-a3b", ("training.micro_batch_size=4", *RECORDED), (77.94, 78.35), None),
    ("gpt-oss-20b", ("training.micro_batch_size=4", *RECORDED), (48.21, 48.95), None),
    ("mixtral-8x7b", ("training.micro_batch_size=4", *RECORDED), (110.48, 112.25), None),
]


@pytest.mark.parametrize(("model", "more", "kept", "recomputed"), MEASURED_ON_ONE_GPU)
def test_models_take_on_one_gpu_what_was_measured(model, more, kept, recomputed):
    work = workload(f"model={model}", "training.max_length=4096", *more)
    for policy, peaks in ((Policy.none, kept), (Policy.full, recomputed)):
        if peaks is not None:
            plan = make_plan(work, (policy,) * work.num_layers)
            found = plan.tensor_bytes("forward") / GIB, plan.tensor_bytes("backward") / GIB
            assert found == pytest.approx(peaks, rel=0.01)


def test_offloaded_parameters_are_what_was_measured():
    """Ends come from the host: the rank's own part, and the whole; FSDP2 gathers on streams of its own."""
    work = workload("model=llama3-70b", "training.max_length=2048", "fsdp=offload", num_ranks=2)
    plan = make_plan(work, (Policy.full,) * 71 + (Policy.selective,) * 9)
    assert plan.tensor_bytes("forward") / GIB == pytest.approx(8.89, abs=0.1)
    assert sum(plan.host.values()) / GIB == pytest.approx(24.97, rel=0.1)


def test_405b_is_what_was_measured():
    """On eight H200s held to 40 GiB. Its 37.09 GiB in forward were those of gathers on streams of their own."""
    work = workload("model=llama3-405b", "training.max_length=1024", num_ranks=8)
    plan = make_plan(work, (Policy.full,) * 121 + (Policy.selective,) * 5)
    assert plan.tensor_bytes("load") / GIB == pytest.approx(25.54, abs=0.1)
    assert plan.tensor_bytes("backward") / GIB == pytest.approx(36.40, abs=0.1)
    choice = choose(work, Room(40 * GIB, H200))
    assert choice.fits and choice.plan.needed <= 40 * GIB


# GiB of host memory that a rank held at most, on H200s (docs/plan-validation.md). All but 405B's wrote checkpoints.
RANDOM = "model.weights=random"
MEASURED_HOST = [
    (1, 0, "llama3-8b", 2048, (RANDOM,), 2.34),
    (2, 0, "llama3-8b", 2048, ("training.micro_batch_size=2",), 2.75),
    (2, 0, "llama3-70b", 1024, (RANDOM,), 4.00),
    (4, 0, "llama3-405b", 1024, (RANDOM,), 4.27),
    (1, 0, "llama3-405b", 1024, (RANDOM, "model.config.num_hidden_layers=60"), 2.70),
    (2, 1, "llama3-8b", 2048, ("training.micro_batch_size=2",), 2.59),
    (2, 1, "llama3-70b", 1024, (RANDOM,), 3.20),
    (2, 1, "llama3-70b", 1024, (RANDOM, "fsdp=offload"), 26.48),  # with a copy of the trained state that is gone since
]


@pytest.mark.parametrize(("num_ranks", "rank", "model", "length", "more", "host"), MEASURED_HOST)
def test_host_memory_is_what_was_measured(num_ranks, rank, model, length, more, host):
    plan = uniform(workload(f"model={model}", f"training.max_length={length}", *more, num_ranks=num_ranks))
    parts = dict(plan.host)
    if rank > 0:
        del parts["adapter"]
    if "405b" in model:
        del parts["checkpoint"]
    assert sum(parts.values()) / GIB == pytest.approx(host, rel=0.1)


# GiB that tensors took on H200s (benchmarks/results): of the load, where it was measured, and of the steps. Layers were
# not fused then, and FSDP gathered the head, which took a buffer of its size more.
MEASURED = [
    (4, "llama3-70b", 2048, 2, Policy.full, (), frozenset(), 9.46, 19.8),
    (4, "llama3-70b", 2048, 2, Policy.none, (), frozenset(), 9.46, 126.0),
    (4, "llama3-70b", 2048, 2, Policy.full, ("fsdp=offload",), frozenset(), 0.06, 10.0),
    (2, "llama3-8b", 4096, 4, Policy.full, (), WITHOUT_LIGER_LOSS, 2.8, 10.0),
    (2, "llama3-8b", 4096, 4, Policy.none, (), WITHOUT_LIGER_LOSS, None, 74.1),
    (2, "llama3-8b", 4096, 4, Policy.none, (), frozenset(), None, 96.1),
    (2, "llama3-8b", 4096, 4, Policy.none, ("quant=int8",), WITHOUT_LIGER_LOSS, None, 75.7),
    (2, "llama3-8b", 4096, 4, Policy.full, ("fsdp=offload",), WITHOUT_LIGER_LOSS, None, 7.1),
    (1, "llama3-8b", 4096, 4, Policy.full, (), FUSED_KERNELS, None, 12.6),
    (1, "llama3-8b", 4096, 4, Policy.none, (), FUSED_KERNELS, None, 75.4),
    (1, "llama3-8b", 4096, 4, Policy.none, (), WITHOUT_LIGER_LOSS, None, 76.0),
]


@pytest.mark.parametrize(("num_ranks", "model", "length", "size", "policy", "more", "fused", "load", "step"), MEASURED)
def test_plan_is_what_was_measured(num_ranks, model, length, size, policy, more, fused, load, step):
    settings = (f"model={model}", f"training.max_length={length}", f"training.micro_batch_size={size}", *more)
    settings += ("kernels.fuse_layers=false",)
    plan = uniform(workload(*settings, num_ranks=num_ranks, fused=fused), policy)
    head = 2 * plan.work.config.model.config["vocab_size"] * plan.work.config.model.config["hidden_size"]
    if plan.work.config.fsdp.cpu_offload:  # FSDP brings the rank's own part into the flat buffer
        head -= head // num_ranks
    peak = max(plan.tensor_bytes("forward") + head, plan.tensor_bytes("backward")) / GIB
    assert peak == pytest.approx(step, rel=0.05, abs=0.5)
    if load is not None:
        assert plan.tensor_bytes("load") / GIB == pytest.approx(load, rel=0.02, abs=0.1)


# Tokens/s/GPU on H200s (benchmarks/results); `plain`: layers each by itself.
RESHARDS, PLAIN = "fsdp.reshard_after_forward=true", "kernels.fuse_layers=false"
MEASURED_SPEEDS = [
    (1, "llama3-8b", 4096, 4, ("memory=keep",), 16371),
    (1, "llama3-8b", 4096, 4, ("memory=keep", "compute=fp8"), 21989),
    (1, "llama3-8b", 4096, 4, ("memory=keep", PLAIN), 15401),
    (1, "llama3-8b", 4096, 4, ("memory=recompute",), 12330),
    (1, "llama3-8b", 4096, 4, ("memory=recompute_half",), 14068),
    (1, "llama3-8b", 4096, 4, ("memory=offload",), 12053),
    (1, "llama3-8b", 4096, 4, ("memory.target_gib=24",), 13128),
    (1, "llama3-8b", 4096, 4, ("memory.target_gib=40",), 14546),
    (2, "llama3-8b", 4096, 4, ("memory=keep", RESHARDS), 15457),
    (2, "llama3-8b", 4096, 4, ("memory=keep", "fsdp=no_shard"), 15845),
    (2, "llama3-8b", 4096, 4, ("memory=keep", RESHARDS, "compute=fp8"), 21342),
    (2, "llama3-8b", 4096, 4, ("memory=keep", RESHARDS, "quant=int8"), 14619),
    (2, "llama3-8b", 4096, 4, ("memory=recompute", "fsdp=offload"), 11297),
    (1, "llama3-8b", 2048, 1, ("memory=recompute",), 5538),  # these seven wait for Python
    (1, "llama3-8b", 2048, 1, ("memory.target_gib=10",), 6347),
    (1, "llama3-8b", 2048, 1, ("memory.target_gib=12",), 8185),
    (1, "llama3-8b", 2048, 1, ("memory.target_gib=16",), 8088),
    (1, "llama3-8b", 512, 1, ("memory=keep",), 2014),
    (1, "llama3-8b", 1024, 1, ("memory=keep",), 4093),
    (1, "llama3-8b", 2048, 1, ("memory=keep",), 10296),
    (1, "llama3-8b", 4096, 1, ("memory=keep",), 14898),
    (1, "llama3-8b", 1024, 8, ("memory=keep",), 16616),
    (1, "llama3-8b", 4096, 4, ("memory=selective",), 15992),
    (1, "llama3-8b", 8192, 1, ("memory=recompute_half",), 11935),
    (1, "llama3-8b", 8192, 2, ("memory=offload",), 10762),
    (1, "llama3-8b", 4096, 4, ("memory=recompute", "compute=fp8"), 17262),
    (4, "llama3-8b", 4096, 4, ("memory=keep",), 15643),
    (4, "llama3-8b", 4096, 4, ("memory=keep", RESHARDS), 15430),
    (4, "llama3-8b", 4096, 4, ("memory=keep", "fsdp=no_shard"), 15949),
    (8, "llama3-8b", 4096, 4, ("memory=keep",), 15501),
    (8, "llama3-8b", 4096, 4, ("memory=keep", RESHARDS), 15213),
    (8, "llama3-8b", 4096, 4, ("memory=keep", "fsdp=no_shard"), 16073),
    (2, "llama3-70b", 2048, 1, ("memory.target_gib=24",), 1168),
    (2, "llama3-70b", 2048, 1, ("memory=recompute", RESHARDS), 1183),
    (4, "llama3-70b", 2048, 2, ("memory=keep",), 1872),
    (4, "llama3-70b", 2048, 2, ("memory=keep", "fsdp=no_shard"), 1991),
    (8, "llama3-70b", 2048, 2, ("memory=keep",), 1858),
    (8, "llama3-405b", 2048, 1, ("memory=keep", "distributed.context_parallel=1"), 291),
    (4, "llama3-405b", 1024, 1, ("memory.target_gib=66",), 178),
    (4, "llama3-405b", 2048, 1, ("memory=keep", RESHARDS, LAYERS_405B), 1790),
    (4, "llama3-405b", 1024, 1, ("memory=recompute", RESHARDS, LAYERS_405B), 1141),
    (2, "llama3-405b", 1024, 1, ("memory=recompute", RESHARDS, LAYERS_405B), 1168),
    (4, "llama3-70b", 2048, 2, ("memory=keep", "compute=fp8"), 2838),
    (4, "llama3-70b", 2048, 2, ("memory.target_gib=40",), 1496),
    (4, "llama3-70b", 8192, 1, ("memory.target_gib=40",), 1357),
    (4, "llama3-70b", 8192, 1, ("memory=recompute",), 1336),
    (4, "llama3-70b", 2048, 2, ("memory=recompute", RESHARDS, PLAIN), 1259),
    (4, "llama3-70b", 2048, 2, ("memory=recompute", "fsdp=offload", PLAIN), 1201),
    (1, "qwen3-30b-a3b", 4096, 4, ("memory=keep", "training.packing=false"), 18678),
    (1, "qwen3-30b-a3b", 4096, 4, ("memory=keep", *RECORDED), 19701),
    (1, "qwen3-30b-a3b", 4096, 4, ("memory=keep", *RECORDED, "compute=fp8"), 20319),
    (1, "qwen3-30b-a3b", 4096, 1, ("memory=keep", *RECORDED), 14091),
    (1, "gpt-oss-20b", 4096, 4, ("memory=keep", *RECORDED), 23192),
    (1, "mixtral-8x7b", 4096, 4, ("memory=keep", *RECORDED), 8976),
    (1, "mixtral-8x7b", 4096, 4, ("memory=recompute", "kernels.cross_entropy=auto"), 6170),
]


@pytest.mark.parametrize(("num_ranks", "model", "length", "size", "more", "speed"), MEASURED_SPEEDS)
def test_speed_is_what_was_measured(num_ranks, model, length, size, more, speed):
    settings = (f"model={model}", f"training.max_length={length}", f"training.micro_batch_size={size}", *more)
    work = workload(*settings, num_ranks=num_ranks)
    plan = choose(work, Room((work.config.memory.target_gib or 133) * GIB, H200)).plan
    assert tokens_per_second(plan.work, plan.policies, H200) / num_ranks == pytest.approx(speed, rel=0.15)


# Tokens per second and GPU of micro-batches that are recorded as CUDA graphs, activations kept, on H200s.
MEASURED_SPEEDS_RECORDED = [
    (1, 512, (), 10773),
    (1, 1024, (), 13632),
    (1, 2048, (), 15624),
    (1, 4096, (), 15533),
    (1, 1024, ("memory=recompute",), 10386),
    (1, 1024, ("compute=fp8",), 17340),
    (2, 1024, (), 11316),
    (2, 4096, (), 14722),
]


@pytest.mark.parametrize(("num_ranks", "length", "more", "speed"), MEASURED_SPEEDS_RECORDED)
def test_speed_of_recorded_micro_batches_is_what_was_measured(num_ranks, length, more, speed):
    settings = ("memory=keep", *RECORDED, *more)
    test_speed_is_what_was_measured(num_ranks, "llama3-8b", length, 1, settings, speed)


def test_slots_of_generations_are_counted_beside_a_recorded_micro_batch():
    """Llama 3 8B: 32 layers with 8 key heads of 128, bfloat16. Five texts take eight slots of 1,152 tokens."""
    settings = ("model=llama3-8b", "training.max_length=1024", "training.micro_batch_size=1", "data.eval_fraction=0.1")
    settings += ("compute.cuda_graph=auto", "kernels.cross_entropy=auto", "memory=keep")
    more = ("tracking.num_generations=5", "tracking.generation_tokens=100")
    slots = 8 * 1152 * (32 * 8 * 2 * 128) * 2

    def beside(num_ranks: int, *more: str) -> int:
        return uniform(workload(*settings, *more, num_ranks=num_ranks), Policy.none).beside_graph

    assert beside(1, *more) - beside(1) == slots
    assert beside(4, "fsdp=no_shard", *more) - beside(4, "fsdp=no_shard") == slots / 4  # two texts a rank
    assert beside(2, *more) == beside(2)  # a model in shards has none


# The same of one GPU when it ran under FSDP: all but the first waited for Python.
MEASURED_SPEEDS_UNDER_FSDP = [
    ("llama3-8b", 4096, 4, ("memory=keep",), 16088),
    ("llama3-8b", 512, 1, ("memory=keep",), 1571),
    ("llama3-8b", 1024, 1, ("memory=keep",), 3535),
    ("llama3-8b", 2048, 1, ("memory=keep",), 6669),
    ("llama3-8b", 2048, 1, ("memory=recompute",), 4542),
    ("llama3-8b", 2048, 1, ("memory.target_gib=10",), 5802),
    ("llama3-8b", 4096, 1, ("memory=keep",), 14167),
]


@pytest.mark.parametrize(("model", "length", "size", "more", "speed"), MEASURED_SPEEDS_UNDER_FSDP)
def test_speed_under_fsdp_is_what_was_measured(monkeypatch, model, length, size, more, speed):
    monkeypatch.setattr(Workload, "uses_fsdp", True)
    test_speed_is_what_was_measured(1, model, length, size, more, speed)


# Seconds to load on H200s from files in the page cache (benchmarks/results).
MEASURED_LOADS = [
    (1, "llama3-8b", (), 1.2),
    (2, "llama3-8b", (), 1.3),
    (2, "llama3-8b", ("quant=int8",), 0.8),
    (2, "llama3-8b", ("fsdp=offload",), 3.4),
    (4, "llama3-70b", (), 4.05),
    (4, "llama3-70b", ("fsdp=offload",), 15.66),
    (4, "llama3-70b", ("fsdp=no_shard",), 10.81),
]


@pytest.mark.parametrize(("num_ranks", "model", "more", "seconds"), MEASURED_LOADS)
def test_load_takes_as_long_as_was_measured(num_ranks, model, more, seconds):
    plan = uniform(workload(f"model={model}", *more, num_ranks=num_ranks))
    assert load_seconds(plan)["page_cache"] == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize(("num_ranks", "model", "seconds"), [(4, "llama3-70b", 2.0), (8, "llama3-405b", 7.5)])
def test_random_weights_are_made_as_fast_as_was_measured(num_ranks, model, seconds):
    plan = uniform(workload(f"model={model}", "model.weights=random", num_ranks=num_ranks))
    assert load_seconds(plan) == {"random": pytest.approx(seconds, rel=0.2)}


def test_ranks_that_share_sequences_keep_a_slice_each():
    """As much as a sequence of a slice's length, and the outputs of attention twice: for its backward, by heads, and
    for the next layer's, by tokens. Attention takes as many times as long as there are slices."""
    length = 8192
    alone = workload("model=llama3-8b", f"training.max_length={length}")
    more = (f"training.max_length={2 * length}", "distributed.context_parallel=2")
    shared = workload("model=llama3-8b", *more, num_ranks=2)
    assert (shared.num_tokens, shared.num_micro_batches) == (alone.num_tokens, alone.num_micro_batches)
    for policy, twice in ((Policy.none, 2 * length * 4096), (Policy.full, 0)):
        ours, theirs = shared.layer_use(1, policy), alone.layer_use(1, policy)
        assert ours.saved == theirs.saved + twice
        assert ours.in_forward.attention == 2 * theirs.in_forward.attention
        assert ours.in_forward.products == theirs.in_forward.products
    assert (shared.ends.hidden, shared.ends.loss) == (alone.ends.hidden, alone.ends.loss)
    assert choose(replace(shared, num_ranks=8), Room(76 * GIB, H200)).fits
    one_each, one_for_two = (longest(replace(work, num_ranks=2), 76 * GIB) for work in (alone, shared))
    assert 1.8 < one_for_two.work.config.training.max_length / one_each.work.config.training.max_length < 2.2


def test_auto_lets_as_few_ranks_share_sequences_as_must():
    """One GPU where a sequence fits on one; two, of which each offloads half as much, where the host has too little.

    Attention's results are offloaded with the inputs, as far as there is room: a host of half the size is enough.
    """
    run = ("model=llama3-8b", "training.global_batch_size=4", "training.max_length=524288")
    alone = choose(workload(*run, num_ranks=4), Room(76 * GIB, H200))
    assert alone.fits and alone.sharing is None and alone.plan.work.config.distributed.num_slices == 1
    for more, target, host in ((run[2:], 76, alone.plan.host_needed / 2.5), (["training.max_length=1048576"], 76, inf)):
        work = workload(*run[:2], *more, num_ranks=4)
        shared = choose(work, Room(target * GIB, H200, host))
        assert shared.fits and shared.plan.work.config.distributed.num_slices == 2
        assert "2 GPUs share each sequence" in shared.sharing
    closed = ("distributed.context_parallel=1", "training.micro_batch_size=2", "model.attn_implementation=sdpa")
    for more in closed:  # what is set is kept, and what needs whole sequences gets them
        closed_run = workload(*run, "training.max_length=1048576", more, num_ranks=4)
        assert list(ways_to_share(closed_run)) == []
    open_run = workload(*run, num_ranks=12)
    found = [each.config.distributed.num_slices for each in ways_to_share(replace(open_run, local_num_ranks=12))]
    assert found == [2, 4]  # of 32 heads and 12 ranks
    assert list(ways_to_share(replace(open_run, local_num_ranks=1))) == []  # they share a host


def test_who_waits_for_python_is_told():
    """Profiled on an H200: 8B, 2048 x 1 had kernels running 36 % of a step."""
    for size, hints in ((1, 1), (4, 0)):
        plan = uniform(workload("model=llama3-8b", "training.max_length=2048", f"training.micro_batch_size={size}"))
        lines = waiting_lines(plan, H200)
        assert len(lines) == hints
    assert not waiting_lines(plan, known_gpus()["rtx4090"])


@pytest.mark.parametrize(
    ("model", "gpu", "more", "is_told"),
    [
        ("llama3-8b", "rtx4090", (), True),
        ("llama3-8b", "rtx4090", ("fsdp=no_shard",), False),
        ("llama3-8b", "rtx4090", ("fsdp=offload",), False),
        ("llama3-8b", "h200", ("training.max_length=4096", "training.micro_batch_size=4"), False),  # gains 0.3 %
        ("llama3-70b", "rtx4090", (), False),  # has no room
    ],
)
def test_room_for_the_whole_base_is_told_where_it_is_faster(model, gpu, more, is_told):
    known = known_gpus()[gpu]
    target = known.gib * 0.95 * GIB
    choice = choose(workload(f"model={model}", *more, num_ranks=4), Room(target, known))
    lines = faster_lines(choice, Room(target, known))
    assert ["fsdp=no_shard needs" in line for line in lines] == [True] * is_told


@pytest.mark.parametrize(
    ("num_ranks", "model", "gib", "more", "strategy"),
    [
        (2, "llama3-8b", 80, (), "NO_SHARD"),
        (4, "llama3-8b", 24, (), "NO_SHARD"),  # recomputes a few layers, and is faster all the same
        (4, "llama3-8b", 8, (), "FULL_SHARD"),
        (2, "llama3-70b", 80, ("training.max_length=1024",), "NO_SHARD"),
        (4, "llama3-70b", 40, ("training.max_length=1024",), "FULL_SHARD"),
        (1, "llama3-8b", 80, (), "FULL_SHARD"),  # which is nothing for one rank
        (2, "llama3-8b", 80, ("fsdp.cpu_offload=true",), "FULL_SHARD"),
        (2, "llama3-8b", 80, ("fsdp.reshard_after_forward=true",), "FULL_SHARD"),
        (2, "llama3-8b", 80, ("fsdp=full_shard",), "FULL_SHARD"),
        (2, "llama3-8b", 80, ("fsdp=shard_grad_op",), "SHARD_GRAD_OP"),
        (4, "llama3-70b", 40, ("fsdp=no_shard", "training.max_length=1024"), "NO_SHARD"),
    ],
)
def test_whole_copies_are_chosen_where_there_is_room_to_spare(num_ranks, model, gib, more, strategy):
    more = more if any("fsdp=" in text for text in more) else ("fsdp=auto", *more)
    work = workload(f"model={model}", "compute.cuda_graph=auto", *more, num_ranks=num_ranks)
    choice = choose(work, Room(gib * GIB, H200))
    fsdp = choice.plan.work.config.fsdp
    assert fsdp.sharding_strategy.name == strategy
    if choice.sharding is None:
        assert num_ranks == 1 or "fsdp=auto" not in more or not work.config.fsdp.may_be_whole
        return
    assert f"auto is {strategy}" in choice.sharding and faster_lines(choice, Room(gib * GIB, H200)) == [choice.sharding]
    other = ShardingStrategy.FULL_SHARD if strategy == "NO_SHARD" else ShardingStrategy.NO_SHARD
    by_hand = {
        each: choose(work.with_values({"fsdp.sharding_strategy": each}), Room(gib * GIB, H200))
        for each in (other, fsdp.sharding_strategy)
    }
    if strategy == "NO_SHARD":
        assert choice.plan.needed <= gib * GIB * (1 - SPARE)
        speeds = [tokens_per_second(each.plan.work, each.plan.policies, H200) for each in by_hand.values()]
        assert speeds[1] >= speeds[0] or not by_hand[other].fits
    else:
        assert by_hand[other].plan.needed > gib * GIB * (1 - SPARE)
        assert (choice.plan, choice.fits) == (
            by_hand[fsdp.sharding_strategy].plan,
            by_hand[fsdp.sharding_strategy].fits,
        )


def test_the_graphs_of_padded_sequences_are_counted():
    """One for each length. 8B had 24 of them, which took 318 MiB outside torch's allocator (one H200)."""
    run = ("model=llama3-8b", "compute.cuda_graph=auto", "kernels.cross_entropy=auto", "training.max_length=512")
    work = {
        padded: workload(*run, f"training.packing={packing}") for padded, packing in ((True, "false"), (False, "true"))
    }
    plans = {padded: uniform(each, Policy.none) for padded, each in work.items()}
    counted = plans[True].library_bytes - plans[False].library_bytes
    assert counted == plans[True].graph_bytes and counted / 31 == pytest.approx(318 * 2**20 / 24, rel=0.1)
    launched = uniform(workload(*run, "training.packing=false", "compute.cuda_graph=false"), Policy.none)
    assert launched.graph_bytes == plans[False].graph_bytes == 0


def test_on_a_cpu_the_base_is_split():
    work = replace(workload("model=llama3-8b", "fsdp=auto", num_ranks=2), is_cuda=False)
    choice = choose(work, Room(1000 * GIB, H200))
    assert choice.plan.work.num_shards == 2 and choice.sharding is None


def test_auto_fills_the_card_and_no_more():
    work = workload("model=llama3-8b", "training.max_length=4096", "training.micro_batch_size=4")
    needed, speeds = [], []
    for gib in (12, 24, 40, 80, 140):
        choice = choose(work, Room(gib * GIB, H200))
        assert choice.fits and choice.plan.needed <= gib * GIB
        needed.append(choice.plan.needed / GIB)
        speeds.append(tokens_per_second(work, choice.plan.policies, H200))
    assert speeds == sorted(speeds)
    assert needed[1] > 21 and needed[2] > 37, "a layer more would not fit"
    assert set(choice.plan.policies) == {Policy.none}
    mixed = choose(work, Room(40 * GIB, H200)).plan.policies
    assert list(mixed) == sorted(mixed, key=[Policy.full, Policy.selective, Policy.none].index), (
        "recomputed layers come first"
    )


@pytest.mark.parametrize(
    ("length", "gib", "expected"),
    [
        (2048, 10, {Policy.full, Policy.selective}),  # as if attention could not be kept
        (2048, 76, {Policy.none}),
        (131_072, 76, {Policy.attention, Policy.offload_attention}),
        (131_072, 134, {Policy.attention, Policy.selective}),
        (400_000, 76, {Policy.attention, Policy.offload_attention}),
    ],
)
def test_attention_is_kept_where_that_is_faster(monkeypatch: pytest.MonkeyPatch, length: int, gib: int, expected):
    """In long rows; and never is a plan slower than the best without it."""
    more = ("compute.cuda_graph=auto", "kernels.cross_entropy=auto", "training.global_batch_size=1")
    work = workload("model=llama3-8b", f"training.max_length={length}", *more)
    found = choose(work, Room(gib * GIB, H200))
    assert found.fits and set(found.plan.policies) == expected
    monkeypatch.setattr(search, "LADDERS", search.LADDERS[:1])
    without = choose(work, Room(gib * GIB, H200))
    speeds = [tokens_per_second(each.plan.work, each.plan.policies, H200) for each in (found, without)]
    assert speeds[0] > 1.05 * speeds[1] if Policy.attention in expected else found == without


def test_layers_stay_gathered_where_there_is_room():
    """For 8B they take 4 GiB more; to remake norms for that is the cheaper, to recompute layers the dearer."""
    settings = ("model=llama3-8b", "training.max_length=4096", "training.micro_batch_size=4")
    work = workload(*settings, num_ranks=2)
    assert not choose(work, Room(80 * GIB, H200)).plan.work.reshards
    kept = choose(workload(*settings, "fsdp.reshard_after_forward=true", num_ranks=2), Room(80 * GIB, H200)).plan
    assert 3 < (choose(work, Room(80 * GIB, H200)).plan.needed - kept.needed) / GIB < 5
    short = choose(work, Room(kept.needed / (1 - ROOM) + GIB, H200)).plan
    assert not short.work.reshards and set(short.policies) == {Policy.selective, Policy.none}
    shorter = choose(work, Room(56 * GIB, H200)).plan
    assert shorter.work.reshards and Policy.full not in shorter.policies
    for more, reshards in (
        ("fsdp.reshard_after_forward=false", False),
        ("fsdp=shard_grad_op", False),
        ("fsdp=no_shard", True),
    ):
        assert choose(workload(*settings, more, num_ranks=2), Room(24 * GIB, H200)).plan.work.reshards is reshards


def test_short_memory_is_relieved_step_by_step(monkeypatch: pytest.MonkeyPatch):
    """Several micro-batches in a row that had to look for memory: another eighth of the layers keeps less."""
    policies: tuple[Policy, ...] | None = (Policy.full,) * 3 + (Policy.none,) * 13
    steps = []
    while policies is not None:
        steps.append(policies)
        policies = next_smaller(policies)
    assert steps[1] == (Policy.full,) * 3 + (Policy.selective,) * 2 + (Policy.none,) * 11
    assert steps[-1] == (Policy.offload,) * 16
    assert next_smaller((Policy.attention,) * 8) == (Policy.full,) + (Policy.attention,) * 7
    on_host = (Policy.offload_attention,) * 2 + (Policy.attention,) * 6
    assert next_smaller(on_host) == (Policy.offload_attention,) * 3 + (Policy.attention,) * 5

    num_retries = 0
    stats = {name: {"all": {"peak": 0}} for name in ("allocated_bytes", "reserved_bytes")}
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda _: {**stats, "num_alloc_retries": num_retries}
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    relieved = []
    peaks = PhasePeaks(torch.device("cuda"), lambda: relieved.append(micro))
    short = [0, 1, 5, 6, 8, 9, 10]
    for micro in range(12):
        peaks.enter("forward")
        num_retries += micro in short
        peaks.enter("backward")
    assert SHORT_IN_A_ROW == 3 and relieved == [11]


def test_micro_batch_is_chosen_with_the_policy():
    settings = ("model=llama3-8b", "training.max_length=1024", "training.global_batch_size=24")

    def chosen(size: int | str) -> MemoryPlan:
        return choose(workload(*settings, f"training.micro_batch_size={size}", num_ranks=2), Room(70 * GIB, H200)).plan

    by_hand = {size: chosen(size) for size in (1, 2, 4)}  # the powers of two that divide 12 sequences a rank
    best = max(by_hand, key=lambda size: tokens_per_second(by_hand[size].work, by_hand[size].policies, H200))
    speeds = {size: tokens_per_second(plan.work, plan.policies, H200) for size, plan in by_hand.items()}
    smallest = min(size for size, speed in speeds.items() if speed >= (1 - CLOSE) * speeds[best])
    auto = chosen("auto")
    assert (auto.work.micro_batch_size, auto.policies) == (smallest, by_hand[smallest].policies)


@pytest.mark.parametrize(
    ("length", "num_ranks", "more", "is_cuda", "sizes"),
    [
        (2048, 1, (), True, [1, 2, 4, 8, 16]),
        (2048, 2, (), True, [1, 2, 4, 8]),
        (8192, 1, (), True, [1, 2, 4]),  # more than 32,768 tokens gain nothing
        (65536, 1, (), True, [1]),
        (2048, 1, ("training.global_batch_size=12",), True, [1, 2, 4]),
        (256, 2, (), False, [8, 4, 2, 1]),  # on a CPU some 2,048 tokens, or fewer if its memory has no room
        (512, 1, (), False, [4, 2, 1]),
        (8192, 1, (), False, [1]),
        (2048, 1, ("training.micro_batch_size=8",), True, [8]),
    ],
)
def test_micro_batches_to_choose_from(length, num_ranks, more, is_cuda, sizes):
    config = load_config([f"training.max_length={length}", *more])
    size = config.training.micro_batch_size
    model: Any = None
    work = Workload(model, config, num_ranks, num_ranks, 1 if size == "auto" else size, is_cuda=is_cuda)
    assert micro_batch_sizes(work) == sizes


def test_what_would_fit_fits():
    work = workload("model=llama3-70b", "training.max_length=2048", num_ranks=2)
    target = 24 * 0.95 * GIB
    assert not choose(work, Room(target, H200)).fits
    changes = smaller_runs(work, Room(target, H200))
    assert changes and all(change.plan.needed <= target for change in changes)
    assert {"fsdp=offload", "quant.embeddings=int8"} <= {change.text for change in changes}
    gpus = enough_gpus(work, Room(target, H200))
    assert gpus is not None and gpus.text == "4 GPUs" and gpus.plan.needed <= target
    long = workload("model=llama3-8b", "training.max_length=131072", "training.micro_batch_size=2")
    (one, *_) = smaller_runs(long, Room(9.5 * GIB, H200))
    assert "training.max_length=65536" in one.text and one.plan.needed <= 9.5 * GIB
    plan = uniform(work, Policy.none)
    savings = largest_savings(plan, H200)
    assert [c.plan.needed for c in savings] == sorted(c.plan.needed for c in savings)
    assert savings[0].plan.needed < plan.needed


def test_hardware_by_name_and_by_size():
    assert (parse_hardware("8xh200").count, parse_hardware("8xh200").gpu.gib) == (8, H200.gib)
    assert parse_hardware("2x24gib").gpu.gib == 24 and parse_hardware("h100").count == 1
    assert parse_hardware("16xh100").local_count == 8
    with pytest.raises(ConfigError, match=r"hardware=4xh20 is no GPU known.*Did you mean 4xh200"):
        parse_hardware("4xh20")
    with pytest.raises(ConfigError):
        parse_hardware("0xh200")
    for device, name in (
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ):
        found = find_gpu(device)
        assert found is not None and found.name == name
    assert find_gpu("Quadro K600") is None


def machine(target_gib: float, host_gib: float = 1000, num_ranks: int = 2) -> Machine:
    return Machine(num_ranks, num_ranks, target_gib * GIB, H200, True, int(host_gib * GIB))


def decide_for(target: Machine, *overrides: str):
    batch = ["training.micro_batch_size=1", "training.global_batch_size=null"]
    config = load_config(["model=llama3-70b", *batch, *overrides])
    return plan_run(config, traced(config), config.quant, target)


def test_target_smaller_than_the_weights():
    """By how much, and the number of GPUs that would do."""
    with pytest.raises(ConfigError) as found:
        decide_for(machine(16), "memory.target_gib=16")
    message = str(found.value)
    match = re.match(r"memory.target_gib=16.0 is (.*) GiB less than a rank's weights take, (.*) GiB with", message)
    assert match is not None
    missing, share = map(float, match.groups())
    assert share - 16 == pytest.approx(missing, abs=0.011) and 18 < share < 22
    assert "Use 4 GPUs, or set fsdp=offload." in message
    with pytest.raises(MemoryShortage, match="The free memory"):
        decide_for(machine(16))


def test_host_memory_is_checked():
    with pytest.raises(
        MemoryShortage, match=r"The 2 ranks of a host need 5\d\.\d GiB.*4\d\.\d GiB of it pinned"
    ) as found:
        decide_for(machine(100, host_gib=20), "fsdp=offload")
    assert "30.0 GiB" not in str(found.value) and "20.0 GiB can be had" in str(found.value)
    assert decide_for(machine(100, host_gib=20)).policies == (Policy.none,) * 80


LONG = ("training.micro_batch_size=1", "training.global_batch_size=1", "training.max_length=400000")


def test_tiles_are_chosen_for_long_rows_alone():
    """Where layers must be computed again or would not fit. One layer's memory then grows far less with the length."""
    work = workload("model=llama3-8b", *LONG)
    chosen = choose(work, Room(80 * GIB, H200))
    assert chosen.fits and chosen.plan.work.config.memory.num_tile_tokens == TILE_TOKENS
    assert f"MLPs in tiles of {TILE_TOKENS:,} tokens" in describe_choice(chosen.plan)
    assert choose(work, Room(2000 * GIB, H200)).plan.work.config.memory.num_tile_tokens is None
    for more in ("training.max_length=16384", "memory.tile_tokens=null", "lora.lora_dropout=0.1"):
        assert choose(
            workload("model=llama3-8b", *LONG, more), Room(80 * GIB, H200)
        ).plan.work.config.memory.tile_tokens in (*("auto", None),)
    whole, tiled = (
        make_plan(workload("model=llama3-8b", *LONG, f"memory.tile_tokens={size}"), [Policy.offload] * 32)
        for size in ("null", TILE_TOKENS)
    )
    assert tiled.needed < 0.65 * whole.needed
    gate_and_up = 400_000 * 2 * 14_336 * 2  # bytes of one tensor in bfloat16
    assert whole.phases["backward"]["activations"] - tiled.phases["backward"]["activations"] > gate_and_up
    speeds = [tokens_per_second(plan.work, plan.policies, H200) for plan in (whole, tiled)]
    assert speeds[1] == pytest.approx(speeds[0], rel=0.01), "a tile is computed again once, as the layer was before"


def test_offloaded_inputs_take_what_they_are_long_and_no_more_than_the_host_has():
    plan = make_plan(workload("model=llama3-8b", *LONG), [Policy.offload] * 32)
    assert plan.host["activations"] == pytest.approx(32 * 400_000 * 4096 * 2, rel=0.001)
    # One H200: 400,000 tokens, 22 of 32 layers offloaded, in tiles of 8,192: 71.44 GiB of tensors.
    mixed = make_plan(
        workload("model=llama3-8b", *LONG, "memory.tile_tokens=8192", "kernels.cross_entropy=auto"),
        [Policy.offload] * 22 + [Policy.full] * 10,
    )
    assert mixed.tensor_bytes("backward") / GIB == pytest.approx(71.44, rel=0.01)
    with pytest.raises(MemoryShortage, match=r"GiB of it pinned, .* Set a smaller training.max_length, or give"):
        decide_for(machine(80, host_gib=40, num_ranks=1), "model=llama3-8b", *LONG)
    found = decide_for(machine(80, host_gib=100, num_ranks=1), "model=llama3-8b", *LONG)
    assert found.plan is not None and found.plan.host_needed < 100 * GIB and Policy.attention in found.policies
    assert Policy.offload in found.policies, "the host has no room for all results"
    assert "memory.activations and memory.tile_tokens for the best speed" in found.lines[1]


def test_on_a_cpu_tensors_are_host_memory():
    """Refused where they can't fit, with changes that do; room that is short by the 5 % left free is not refused."""
    batch = ["training.micro_batch_size=1000", "training.global_batch_size=null"]
    config = load_config(["model=tiny", "data=random", *batch, "memory=recompute"])
    computing = Computing(torch.float32, "sdpa", (), "torch", is_cuda=False)
    model = ModelTracer(ModelFiles(None, make_config(config.model.config, "tiny")), computing, NO_TOKENS)

    def decide_on_cpu(host_gib: float, num_ranks: int = 1, **training: Any):
        changed = replace(config, training=replace(config.training, **training))
        room = host_gib * GIB / num_ranks
        host = Machine(num_ranks, num_ranks, 0.95 * room, gpu_of_size(room / GIB), False, int(host_gib * GIB))
        return plan_run(changed, model, config.quant, host)

    needed = decide_on_cpu(1000).plan.needed / GIB
    assert decide_on_cpu(1.01 * needed).plan.needed / GIB == needed
    for num_ranks in (1, 2):
        with pytest.raises(MemoryShortage, match="1,000 x 2,048 tokens, and") as found:
            decide_on_cpu(0.5 * needed, num_ranks)
        changes = re.findall(r"\n  training\.micro_batch_size=(\d+)$", str(found.value), re.MULTILINE)
        assert changes and "GPU" not in str(found.value) and "offload" not in str(found.value)
        decide_on_cpu(0.5 * needed, num_ranks, micro_batch_size=int(changes[0]))
    with pytest.raises(MemoryShortage, match="Set model to a smaller one, or use a host"):
        decide_on_cpu(0.001)

    # `auto` takes the largest micro-batch that fits, and no smaller one than that.
    chosen = decide_on_cpu(1000, micro_batch_size="auto", max_length=128, global_batch_size=16)
    assert chosen.micro_batch_size == 16
    smaller = decide_on_cpu(
        0.9 * chosen.plan.needed / GIB, micro_batch_size="auto", max_length=128, global_batch_size=16
    )
    assert 1 <= smaller.micro_batch_size < 16 and smaller.fits


def test_host_memory_has_the_copy_of_a_checkpoint():
    """Of fp32 adapters and their two moments, split; and rank 0's whole adapter. The copy is pinned."""
    alone, split = (uniform(workload("model=llama3-70b", num_ranks=n), Policy.none) for n in (1, 4))
    adapters = 4 * 207_093_760  # r=16 on all linear layers of Llama 3 70B
    for plan, num_ranks in ((alone, 1), (split, 4)):
        copied = plan.host["checkpoint"]
        assert plan.host["adapter"] == adapters
        others = sum(plan.host.values()) - adapters
        assert plan.host_needed == others * num_ranks + adapters
        assert 0 <= copied - 3 * adapters / num_ranks < SLAB_BYTES
        assert plan.pinned == plan.host["reading"] + copied
        made = uniform(workload("model=llama3-70b", "model.weights=random", num_ranks=num_ranks), Policy.none)
        assert made.host == plan.host | {"reading": 0} and made.pinned == copied


def test_a_run_starts_with_the_whole_plan():
    """By part and phase, each column summed up, as preflight prints it."""
    found = decide_for(machine(80))
    title, head, *rows = found.lines[0].splitlines()
    assert (title, head.split()[-4:]) == ("the plan", list(PHASES))
    table = {row[:-40].strip(): [float(cell) for cell in row[-40:].split()] for row in rows[:-2]}
    assert found.plan is not None
    needed = [found.plan.needed_in(phase) / GIB for phase in PHASES]
    assert table.pop("needed") == pytest.approx(needed, abs=0.005)
    del table["all tensors"]
    assert [sum(column) for column in zip(*table.values(), strict=True)] == pytest.approx(needed, abs=0.1)
    assert rows[-2].startswith("Host memory: ") and rows[-1].startswith("Speed: ")


def test_models_without_a_plan():
    """Code that meta tensors can't run: what is open takes the least memory, and all layers are recomputed."""
    found = run_without_plan(load_config(["model=llama3-8b"]), 12, "a reason")
    assert found.plan is None and found.policies == (Policy.full,) * 12 and "a reason" in found.lines[0]
    config = load_config(["model=llama3-8b", "training.micro_batch_size=auto", "training.global_batch_size=8"])
    found = run_without_plan(config, 12, "a reason")
    assert (found.micro_batch_size, found.sharding_strategy) == (1, ShardingStrategy.FULL_SHARD)
    assert "micro-batch 1, FULL_SHARD, activations of 12 layers recomputed" in found.lines[0]
    config = load_config(["fsdp=no_shard", "training.micro_batch_size=2", "distributed.context_parallel=1"])
    assert run_without_plan(config, 12, "a reason").chosen == {
        "training.micro_batch_size": 2,
        "distributed.context_parallel": 1,
        "fsdp.sharding_strategy": "NO_SHARD",
    }


@pytest.mark.parametrize("activations", list(Activations))
def test_every_policy_can_be_planned(activations: Activations):
    found = decide_for(machine(100), f"memory.activations={activations.name}")
    assert len(found.policies) == 80 and found.plan is not None
    if activations is Activations.half:
        assert found.policies.count(Policy.full) == 40 and found.policies[0] is Policy.full


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_limits_count(tmp_path: Path, version: int):
    """The limit of a group above this process's own, less what is used, page cache given back."""
    base = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    inner = base / "slurm/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    controllers = "4:memory" if version == 1 else "0:"
    (tmp_path / "proc/self/cgroup").write_text(f"7:cpu:/other\n{controllers}:/slurm/job/step\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for folder, limit in ((inner, "max" if version == 2 else str(2**62)), (inner.parent, str(8 * GIB))):
        for name, value in zip(names, (limit, str(7 * GIB)), strict=True):
            (folder / name).write_text(value + "\n")
        (folder / "memory.stat").write_text(f"cache {3 * GIB}\ninactive_file {GIB // 2}\n")
    assert available_bytes(tmp_path) == GIB + GIB // 2


def test_plans_agree_about_what_every_policy_takes():
    """From one policy to the next the GPU holds less; offload moves the inputs to the host."""
    work = workload("model=llama3-8b", "training.max_length=8192", "training.micro_batch_size=2", num_ranks=2)
    plans = [uniform(work, policy) for policy in Policy]
    for more, less in itertools.pairwise(plans):
        assert less.needed < more.needed
    assert [plan.host.get("activations", 0) // (16384 * 4096 * 2) for plan in plans] == [0, 0, 0, 0, 64, 32]
    full, offload = (uniform(work, each).phases["forward"]["activations"] for each in (Policy.full, Policy.offload))
    assert full - offload == pytest.approx(30 * 16384 * 4096 * 2, rel=0.01)


def test_a_model_whose_layers_are_not_known_is_described():
    assert describe_policies(()) == "kept"


def test_experts_of_30b_train_in_24_gib():
    """As a CUDA graph where the target is 24 GiB, and launched kernel by kernel on a GPU of which 22.8 can be had."""
    small = ("memory=recompute", "optim=adamw_8bit", "quant.embeddings=int8", *RECORDED)
    work = workload("model=qwen3-30b-a3b", "training.max_length=2048", *small)
    recorded, launched = choose(work, Room(24 * GIB, H200)), choose(work, Room(22.8 * GIB, H200))
    assert recorded.fits and not recorded.gives_up_graph
    assert launched.fits and launched.gives_up_graph and launched.plan.needed < recorded.plan.needed
    assert tokens_per_second(recorded.plan.work, recorded.plan.policies, H200) > 6000
    assert not choose(work, Room(21 * GIB, H200)).fits


def test_gradients_of_a_recorded_step_count_once():
    for settings in (RECORDED, ("training.global_batch_size=4",)):
        plan = uniform(workload("model=llama3-8b", *settings))
        adapters = plan.phases["load"]["adapters"]
        layer = adapters // plan.work.num_layers
        assert plan.phases["step"]["gradients"] == adapters
        assert plan.phases["backward"]["gradients"] <= adapters + layer
