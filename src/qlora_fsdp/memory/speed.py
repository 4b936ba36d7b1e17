"""Predicts how long an optimizer step takes: operations over the GPU's rates, with transfers overlapped as FSDP2 does.

What a layer computes and how many bytes it moves is traced (tracing/live_bytes.py), so that no kind of layer is
described here. The prediction is good enough to rank choices. It is not a promise: a GPU whose allocator has to search
for memory is slower. How much of its datasheet's rates a GPU reaches was found by fitting the first four constants
below to more than 60 runs on H200s (docs/plan-validation.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from qlora_fsdp.config.schema import Weights
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.model_bytes import sum_bytes
from qlora_fsdp.memory.plan import MemoryPlan
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import Operations
from qlora_fsdp.memory.workload import Workload, is_captured

PRODUCTS = 0.66  # share of the datasheet's FLOP/s that matrix products reach
PRODUCTS_FP8 = 0.60  # the same in fp8
ATTENTION = 0.45  # share of the datasheet's FLOP/s, in 16 bits, that attention reaches
MOVING = 0.5  # share of the memory's bandwidth that all else reaches: norms, gates, dequantization, copies of layers
DEQUANTIZING = 1.25  # bytes read and written for a byte of a dequantized 16-bit weight
LAUNCH_SECONDS = 2.4e-3  # time of Python to start the kernels of a layer's forward; backward takes twice as long
FSDP_LAUNCH_SECONDS = 0.7e-3  # added to that under FSDP
REPLAY_SECONDS = 2e-3  # to start a micro-batch that is recorded as a CUDA graph, whatever is in it
EXCHANGE_SECONDS = 0.25e-3  # per layer and micro-batch, to gather adapters and sum gradients, beyond what overlaps
RECOMPUTED_LAUNCHES = 1.6  # launch time to recompute a layer, in forwards: more than one, as autograd takes part
DISK_GB_S = 2.0  # per host
CACHED_GB_S = 13.0  # per rank, from the page cache, quantization included
RANDOM_GB_S = 15.0  # per rank, of the bfloat16 weights that are made at random and then quantized
GATHER_SECONDS = 2.3e-3  # per weight whose scales are gathered to be quantized together
PIN_GB_S = 1.0  # per rank that pins its shard to offload it
OPTIMIZER_PASSES = 8  # over trained parameters: AdamW reads four tensors and writes three, and a norm reads one
HOST_ADAM_GB_S = 10.0  # per rank whose optimizer state is in host memory


def step_seconds(work: Workload, policies: Sequence[Policy], gpu: Gpu, num_kept: int = 0) -> float:
    """Seconds of an optimizer step: what the GPU computes, or what Python takes to start it, whichever is longer."""
    computing = _gpu_seconds(work, policies, gpu) - _saved_seconds(work, num_kept, gpu)
    seconds = max(computing, _launch_seconds(work, policies)) * work.num_micro_batches
    trained = sum(sum_bytes(kind.tensors).adapters for kind in work.layers) / work.num_shards
    rate = HOST_ADAM_GB_S if work.config.fsdp.cpu_offload else gpu.memory_gb_s
    return seconds + OPTIMIZER_PASSES * trained / (rate * 1e9)


def waiting_share(work: Workload, policies: Sequence[Policy], gpu: Gpu) -> float:
    """The share of a micro-batch's time that a GPU waits for Python to start kernels: 0 to 1."""
    return max(0.0, 1 - _gpu_seconds(work, policies, gpu) / _launch_seconds(work, policies))


def tokens_per_second(work: Workload, policies: Sequence[Policy], gpu: Gpu, num_kept: int = 0) -> float:
    """Tokens per second of all GPUs together, if the dequantized weights of `num_kept` layers stay."""
    tokens = work.num_tokens * work.num_micro_batches * work.num_ranks
    return tokens / step_seconds(work, policies, gpu, num_kept)


def planned_tokens_per_second(plan: MemoryPlan, gpu: Gpu) -> float:
    """The same of a run as it is planned."""
    return tokens_per_second(plan.work, plan.policies, gpu, plan.num_kept_dequantized)


def load_seconds(plan: MemoryPlan) -> dict[str, float]:
    """Seconds to read bfloat16 files from `disk` or `page_cache` and quantize them, or to make `random` weights."""
    work = plan.work
    quant = work.config.quant
    models = [work.parts] if work.teacher is None else [work.parts, work.teacher.parts]
    num_bytes = 2 * sum(parts.num_parameters for parts in models)
    pinning = plan.host.get("parameters", 0) / (PIN_GB_S * 1e9)
    if work.config.model.weights is Weights.random:
        return {"random": num_bytes / work.num_shards / (RANDOM_GB_S * 1e9) + pinning}
    cached = num_bytes / work.num_shards / (CACHED_GB_S * 1e9)
    if work.num_shards > 1 and quant.load_in_4bit and quant.bnb_4bit_use_double_quant:
        cached += sum(parts.num_quantized for parts in models) * GATHER_SECONDS
    cached += pinning
    on_a_host = num_bytes * min(1.0, work.local_num_ranks / work.num_shards)
    return {"disk": max(cached, on_a_host / (DISK_GB_S * 1e9)), "page_cache": cached}


def _gpu_seconds(work: Workload, policies: Sequence[Policy], gpu: Gpu) -> float:
    """Seconds of a micro-batch if the GPU never waits for Python."""
    seconds: dict[tuple[int, Policy, bool], float] = {}
    for index, key in enumerate(work.keys(policies)):
        if key not in seconds:
            seconds[key] = _layer_seconds(work, index, key[1], gpu)
    teaching = 0.0 if work.teacher is None else _pass_seconds(work.teacher, gpu)
    return sum(seconds[key] for key in work.keys(policies)) + _ends_seconds(work, gpu) + teaching


def _pass_seconds(work: Workload, gpu: Gpu) -> float:
    """Seconds of a forward without gradient, of a teacher that is a model of its own."""
    seconds = _ends_seconds(work, gpu) / 2  # without a gradient it is half of the products
    for kind, use in zip(work.layers, work.layer_uses([Policy.full] * work.num_layers), strict=True):
        transfer = _transfer_seconds(work, sum_bytes(kind.tensors).total, gpu)
        seconds += max(_compute_seconds(use.in_forward, gpu), transfer)
    return seconds


def _saved_seconds(work: Workload, num_kept: int, gpu: Gpu) -> float:
    """Seconds that a micro-batch does not need to dequantize the weights of the last layers again, or at all."""
    num_passes = 1 + int(work.modules.task.computes_reference) + int(work.holds_dequantized)
    num_bytes = num_passes * sum(layer.dequantized for layer in work.layers[work.num_layers - num_kept :])
    return DEQUANTIZING * num_bytes / (gpu.memory_gb_s * 1e9 * MOVING)


def _launch_seconds(work: Workload, policies: Sequence[Policy]) -> float:
    """Seconds that Python takes to start the kernels of a micro-batch."""
    num_extra = work.modules.task.num_extra_forwards
    num_recomputed = sum(policy.recomputes for policy in policies)
    of_layer = LAUNCH_SECONDS + (FSDP_LAUNCH_SECONDS if work.uses_fsdp else 0.0)
    of_forward = len(policies) * of_layer
    teaching = 0.0 if work.teacher is None else work.teacher.num_layers * of_layer
    if is_captured(work, policies):  # but for what KTO does before the step
        num_launched = num_extra - int(work.modules.task.computes_reference)
        return REPLAY_SECONDS + num_launched * of_forward
    return (3 + num_extra + RECOMPUTED_LAUNCHES * num_recomputed / len(policies)) * of_forward + teaching


def _layer_seconds(work: Workload, index: int, policy: Policy, gpu: Gpu) -> float:
    """Seconds of a layer's forward and backward, with its recomputation. Transfers run at the same time."""
    kind, use = work.layers[index], work.layer_use(index, policy)
    forward, backward = _compute_seconds(use.in_forward, gpu), _compute_seconds(use.in_backward, gpu)
    num_bytes = sum_bytes(kind.tensors).total
    gathered = num_bytes - sum(work.read_codes(kind.tensors))  # by FSDP; codes that stay are read once for all steps
    transfer = _transfer_seconds(work, num_bytes if work.reshards else gathered, gpu)
    transfer += sum(use.host) / (gpu.host_gb_s * 1e9)
    back = transfer if work.reshards or policy.offloads else 0.0
    if work.num_shards > 1:  # the shard into the flat buffer, and all of that out again; each is read and written
        copies = 2.0 * gathered * (1 + 1 / work.num_shards) / (gpu.memory_gb_s * 1e9 * MOVING)
        forward += EXCHANGE_SECONDS / 2 + copies
        backward += EXCHANGE_SECONDS / 2 + (copies if work.reshards else 0.0)
    return (1 + work.modules.task.num_extra_forwards) * max(forward, transfer) + max(backward, back)


def _compute_seconds(operations: Operations, gpu: Gpu) -> float:
    """Seconds in which a GPU computes and moves bytes, one after the other."""
    fp8 = gpu.fp8_tflops * PRODUCTS_FP8 or gpu.tflops * PRODUCTS
    tera_seconds = operations.products / (gpu.tflops * PRODUCTS) + operations.fp8 / fp8
    tera_seconds += operations.attention / (gpu.tflops * ATTENTION)
    return tera_seconds / 1e12 + operations.moved / (gpu.memory_gb_s * 1e9 * MOVING)


def _ends_seconds(work: Workload, gpu: Gpu) -> float:
    """Seconds of embeddings and head. Nothing overlaps their transfers; the head's gradient is made with the loss."""
    gathered = [tensors for name, tensors in work.parts.ends.items() if not work.reads_end(name)]
    tables = sum_bytes(tensor for tensors in gathered for tensor in tensors).embeddings
    once = _compute_seconds(work.ends.operations, gpu) + _transfer_seconds(work, tables, gpu)
    return once * (1 + work.modules.task.num_extra_forwards / 2)  # without a gradient it is half of the products


def _transfer_seconds(work: Workload, num_bytes: int, gpu: Gpu) -> float:
    """Seconds to gather a unit of `num_bytes`, with the way from host memory if its shards are there."""
    shards = work.num_shards
    seconds = num_bytes * (shards - 1) / shards / (gpu.link_gb_s * 1e9)
    if work.config.fsdp.cpu_offload:
        seconds += num_bytes / shards / (gpu.host_gb_s * 1e9)
    return seconds
