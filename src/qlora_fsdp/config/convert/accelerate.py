"""Files of `accelerate config`, as PEFT's fsdp_config_qlora.yaml: how ranks are started, and FSDP's settings."""

from __future__ import annotations

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.convert.common_settings import SHARDED_HERE, TheirSettings, convert_fsdp
from qlora_fsdp.config.schema import Activations

ENGINES = {
    "DEEPSPEED": SHARDED_HERE,
    "MEGATRON_LM": SHARDED_HERE,
}
TPUS = ("TPU", "XLA")
REASONS = {
    "compute_environment": "nothing to set",
    "debug": "nothing to set",
    "main_training_function": "nothing to set",
    "rdzv_backend": "nothing to set",
    "same_network": "nothing to set",
    "downcast_bf16": "of TPUs",
    "use_cpu": "the ranks are on the CPU where no GPU is visible",
    "main_process_port": "any free one",
    "main_process_ip": "type --main_process_ip to the launcher (docs/launching.md)",
    "machine_rank": "type --machine_rank to the launcher (docs/launching.md)",
    "tpu_env": "of TPUs",
    "tpu_use_cluster": "of TPUs",
    "tpu_use_sudo": "of TPUs",
    "tpu_name": "of TPUs",
    "tpu_zone": "of TPUs",
    "deepspeed_config": SHARDED_HERE,
    "megatron_lm_config": SHARDED_HERE,
    "dynamo_config": "steps are CUDA graphs (compute.cuda_graph)",
    "gpu_ids": "export CUDA_VISIBLE_DEVICES",
    "enable_cpu_affinity": "nothing to set",
}


def convert_accelerate(theirs: TheirSettings) -> None:
    """Converts a file of accelerate's, which names neither a model nor data.

    Raises:
        ConfigError: it is for TPUs.
    """
    kind = str(theirs.take("distributed_type", "NO")).upper()
    if kind in TPUS:
        fix = "Run `accelerate config` for GPUs, or leave it out: qlora-fsdp starts a rank for each GPU by itself."
        raise ConfigError(
            [Problem(f"distributed_type: {kind}", "is for TPUs, and qlora-fsdp runs on NVIDIA GPUs.", fix)]
        )
    if kind in ENGINES:
        theirs.leave_out("distributed_type", kind, ENGINES[kind])
    machines = int(theirs.take("num_machines", 1))
    number = theirs.take("num_processes")
    if machines > 1:
        reason = "several hosts are started by launch.config_file, SLURM or a launcher on each (docs/clusters.md)"
        theirs.leave_out("num_machines", machines, reason)
    elif isinstance(number, int) and kind not in ENGINES:
        theirs.put("launch.num_processes", number)
    precision = str(theirs.take("mixed_precision", "no"))
    if precision == "bf16":
        theirs.put("training.precision", "bfloat16")
    elif precision not in ("no", "False"):
        theirs.leave_out("mixed_precision", precision, "bfloat16 is taken where the GPU has it; compute=fp8 is another")
    rest = convert_fsdp(theirs)
    if rest.pop("activation_checkpointing", False):
        theirs.put("memory.activations", Activations.full.value, "auto keeps what there is room for, and is faster")
    if rest:
        theirs.leave_out("fsdp_config", rest, SHARDED_HERE)
    theirs.drop(REASONS)
    theirs.finish()
