"""Every setting, its type, its default and its bounds. YAML under conf/ only chooses other values.

Each section of the settings is a dataclass, and `Config` has them all. Names follow `BitsAndBytesConfig` (quant),
`LoraConfig` (lora) and FSDP (fsdp) wherever these have one. The comment above a field is its documentation:
docs/configuration.md is generated from it. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qlora_fsdp.config.schema.data import (
    CHAT_TEMPLATES,
    DEFAULT_CACHE_FOLDER,
    DEFAULT_DATA,
    SHORTEST,
    BadRows,
    DataConfig,
    DataFormat,
    LossOn,
    Thoughts,
)
from qlora_fsdp.config.schema.distill import DistillConfig
from qlora_fsdp.config.schema.facets import Bounds, Facets, Files, Hosts, Owner, Run, When, find_undecided
from qlora_fsdp.config.schema.grpo import (
    GrpoConfig,
    PolicyLoss,
    RewardConfig,
    RolloutConfig,
    SamplingLevel,
    ScaleRewards,
)
from qlora_fsdp.config.schema.model import (
    AttnImplementation,
    CompressedFormat,
    Dtype,
    EmbeddingStorage,
    LoraConfig,
    ModelConfig,
    QuantConfig,
    QuantType4bit,
    TokenizerConfig,
    Weights,
)
from qlora_fsdp.config.schema.sharding import (
    SIGNAL_SECONDS,
    Activations,
    ComputeConfig,
    Dequantizer,
    DistributedConfig,
    FsdpConfig,
    Kernel,
    KernelsConfig,
    KubernetesConfig,
    KubernetesKind,
    LaunchConfig,
    MatmulKind,
    MemoryConfig,
    ShardingStrategy,
    SkypilotConfig,
    SlurmConfig,
)
from qlora_fsdp.config.schema.task import (
    LossType,
    PreferenceConfig,
    PreferenceLoss,
    ProblemType,
    RunConfig,
    TaskConfig,
    TaskName,
)
from qlora_fsdp.config.schema.training import (
    DEFAULT_GLOBAL_BATCH,
    CheckpointConfig,
    HubConfig,
    LrScheduler,
    OnBadStep,
    OptimConfig,
    Optimizer,
    Pruner,
    TrackerName,
    TrackingConfig,
    TrainingConfig,
    WandbMode,
)

__all__ = [
    "CHAT_TEMPLATES",
    "DEFAULT_CACHE_FOLDER",
    "DEFAULT_DATA",
    "DEFAULT_GLOBAL_BATCH",
    "SHORTEST",
    "SIGNAL_SECONDS",
    "Activations",
    "AttnImplementation",
    "BadRows",
    "Bounds",
    "CheckpointConfig",
    "CompressedFormat",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "DataFormat",
    "Dequantizer",
    "DistillConfig",
    "DistributedConfig",
    "Dtype",
    "EmbeddingStorage",
    "Facets",
    "Files",
    "FsdpConfig",
    "GrpoConfig",
    "Hosts",
    "HubConfig",
    "Kernel",
    "KernelsConfig",
    "KubernetesConfig",
    "KubernetesKind",
    "LaunchConfig",
    "LoraConfig",
    "LossOn",
    "LossType",
    "LrScheduler",
    "MatmulKind",
    "MemoryConfig",
    "ModelConfig",
    "OnBadStep",
    "OptimConfig",
    "Optimizer",
    "Owner",
    "PolicyLoss",
    "PreferenceConfig",
    "PreferenceLoss",
    "ProblemType",
    "Pruner",
    "QuantConfig",
    "QuantType4bit",
    "RewardConfig",
    "RolloutConfig",
    "Run",
    "RunConfig",
    "SamplingLevel",
    "ScaleRewards",
    "ShardingStrategy",
    "SkypilotConfig",
    "SlurmConfig",
    "TaskConfig",
    "TaskName",
    "Thoughts",
    "TokenizerConfig",
    "TrackerName",
    "TrackingConfig",
    "TrainingConfig",
    "WandbMode",
    "Weights",
    "When",
    "find_undecided",
]


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    skypilot: SkypilotConfig = field(default_factory=SkypilotConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def __post_init__(self) -> None:
        """Add `written`: by key, the text of settings that contained a `${...}` (see `recorded.py`).

        And `replaced`: what was typed and then typed again, each with what counts.
        """
        self.written: dict[str, Any] = {}
        self.replaced: list[tuple[str, str]] = []

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values, by their keys. It still knows what was written for the others."""
        changed = self
        for key, value in values.items():
            section, _, name = key.partition(".")
            group = replace(getattr(changed, section), **{name: value})
            changed = replace(changed, **{section: group})
        changed.written = self.written
        changed.replaced = self.replaced
        return changed

    @property
    def is_padded(self) -> bool:
        """Whether each row is sure to be a sequence of its own; with training.packing=auto a trial decides later."""
        return self.training.packing is False or not self.task.is_causal
