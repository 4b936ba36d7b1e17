"""Does the configuration fit itself, the files it names, and the launch? Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.schema import AttnImplementation, Config, Dtype, MatmulKind, QuantStorage, ShardingStrategy
from qlora_fsdp.config.settings import problem_with
from qlora_fsdp.config.world import World


def check_world(config: Config, world: World) -> list[Problem]:
    """Returns what is wrong with the configuration on this number of processes, this device and this torch."""
    return [*check_split(config, world), *_device(config, world)]


def check_split(config: Config, world: World) -> list[Problem]:
    """Returns what is wrong with the configuration on this number of processes, whatever the device."""
    return [*_batch(config, world), *_shard_groups(config, world)]


def _batch(config: Config, world: World) -> Iterator[Problem]:
    micro, total = config.training.micro_batch_size, config.training.global_batch_size
    unit = (micro if isinstance(micro, int) else 1) * world.num_ranks  # auto divides what is left
    if total is None or unit < 1 or total < 1 or total % unit == 0:
        return
    nearest = unit * max(1, round(total / unit))
    reason = f"is not a multiple of micro_batch_size {micro} x {world.num_ranks} ranks = {unit}."
    if micro == "auto":
        reason = f"is not a multiple of {world.num_ranks} ranks."
    yield problem_with(config, "training.global_batch_size", reason, f"Set training.global_batch_size={nearest}.")


def _shard_groups(config: Config, world: World) -> Iterator[Problem]:
    if config.fsdp.sharding_strategy is not ShardingStrategy.HYBRID_SHARD:
        return
    size = config.fsdp.num_shards(world.num_ranks, world.local_num_ranks)
    if size < 1 or world.num_ranks % size == 0:
        return
    divisors = [d for d in range(1, world.num_ranks + 1) if world.num_ranks % d == 0]
    nearest = min(divisors, key=lambda d: (abs(d - size), -d))
    reason = f"(groups of {size}) does not divide {world.num_ranks} ranks."
    yield problem_with(config, "fsdp.hybrid_shard_size", reason, f"Set fsdp.hybrid_shard_size={nearest}.")


def _device(config: Config, world: World) -> Iterator[Problem]:
    version = ".".join(map(str, world.torch_version))
    if config.training.precision is Dtype.bfloat16 and not world.has_bf16:
        reason = f"can't be used: this {'GPU' if world.device_type == 'cuda' else 'CPU'} does not compute in bfloat16."
        yield problem_with(config, "training.precision", reason, "Set training.precision=float32, or auto.")
    if config.compute.matmul is MatmulKind.fp8 and not world.has_fp8:
        reason = "can't be used: only Ada, Hopper and later GPUs multiply in fp8."
        yield problem_with(config, "compute.matmul", reason, "Set compute=dequantized.")
    storage = config.quant.bnb_4bit_quant_storage
    if config.quant.load_in_4bit and storage is QuantStorage.uint8 and world.torch_version < (2, 13):
        reason = f"can't be sharded: FSDP2 of torch {version} takes floating-point parameters only, before 2.13."
        yield problem_with(config, "quant.bnb_4bit_quant_storage", reason, "Set quant.bnb_4bit_quant_storage=auto.")
    kernels = AttnImplementation
    gpu_kernels = (kernels.flash_attention_2, kernels.flash_attention_4, kernels.varlen)
    if config.model.attn_implementation in gpu_kernels and world.device_type == "cpu":
        yield problem_with(
            config, "model.attn_implementation", "runs on GPUs only.", "Set model.attn_implementation=auto."
        )
