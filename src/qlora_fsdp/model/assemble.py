"""Assemble a model on the meta device: build transformers' model, add adapters and a loss, rewire.

Training and the commands that use an adapter assemble their models here, so that both compute with the same modules.
What differs between them is in the `ModelSpec`. `sharding/materialize.py` then gives the model its weights.

The files that a model is filled from have a fingerprint, by which a run knows its base again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import assert_never

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.config.schema import LoraConfig, TaskName
from qlora_fsdp.config.specs import TaskSpec
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers.attention.sliced import slice_attention
from qlora_fsdp.layers.head_loss import UNCHANGED, LogitTransform, LossKernel
from qlora_fsdp.layers.liger import use_fused_kernels
from qlora_fsdp.layers.rewire import Rewired, rewire
from qlora_fsdp.model.adapters.apply import apply_adapters, check_no_experts_are_trained_whole, describe_idle_patterns
from qlora_fsdp.model.adapters.rounding_error import check_can_correct
from qlora_fsdp.model.adapters.targets import describe_left_out, find_left_out
from qlora_fsdp.model.adapters.write_adapter import describe_lost_keys
from qlora_fsdp.model.build import BuildSettings, MetaModel, build_model
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.model.settle import ModelSpec
from qlora_fsdp.model.tasks.causal_lm import CausalLM, RouterLoss, describe_router_loss
from qlora_fsdp.model.tasks.classifier import Classifier, RewardModel
from qlora_fsdp.model.tasks.distill_lm import DistillLM
from qlora_fsdp.model.tasks.policy_lm import PolicyLM
from qlora_fsdp.model.tasks.preference import PreferenceLM
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes, join_context_group
from qlora_fsdp.weights.composed import Assignment
from qlora_fsdp.weights.safetensors_files import fingerprint_files


@dataclass(frozen=True)
class AssembledModel:
    """A model, and what it was assembled from. Its parameters are on meta until `materialize` fills them.

    Attributes:
        spec: what the model is made of, and how it computes.
        model: PEFT's model in the wrapper of its task (`TaskModel`). This is the module that is sharded and called.
        meta: the base model inside it, and the assignments that say what fills the base's parameters.
        liger_kernels: the settings (`rms_norm`, `rotary`, `glu`, `cross_entropy`) whose kernels are Liger's.
        num_fp8_layers: layers that multiply in fp8.
        num_fused_groups: groups of linear layers that are computed together.
        notes: what the user should know, one clause each, for the log.
    """

    spec: ModelSpec
    model: TaskModel
    meta: MetaModel
    liger_kernels: list[str]
    num_fp8_layers: int
    num_fused_groups: int
    notes: list[str]

    @property
    def files(self) -> ModelFiles:
        """The base model's files."""
        return self.spec.files

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with the tokens that the settings add."""
        return self.spec.tokenizer

    @property
    def tokens(self) -> AddedTokens:
        """The tokens whose rows in embeddings and head are trained."""
        return self.spec.tokens

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.spec.dtype


def assemble(spec: ModelSpec, device: torch.device) -> AssembledModel:
    """Build the base model, add adapters, and put in faster layers.

    Args:
        spec: what the model is made of. Where it generates, Liger's kernels are used as in training: in a step of one
            token, most of the time goes into starting kernels.
        device: where the model will compute.

    Raises:
        UserError: the model, the adapter, the settings or the device do not go together.
    """
    modules = spec.modules
    liger_kernels = []
    if spec.trains or spec.generates:
        liger_kernels = use_fused_kernels(modules.kernels, spec.files.config, device)
    meta = _build(spec)
    _check_token_rows(meta, spec.tokens, len(spec.tokenizer), spec.files.folder)
    left_out = find_left_out(meta.model, modules.lora, spec.unreached)
    notes = [*spec.notes, *meta.notes, *describe_left_out(meta.model, left_out)]
    model = adapt_model(
        meta,
        modules.lora,
        modules.task,
        spec.tokens,
        spec.loss_kernel,
        spec.transform,
        spec.unreached,
    )
    rewired = Rewired(num_fp8=0, num_groups=0)
    if spec.trains:
        check_no_experts_are_trained_whole(model)
        if modules.lora.corrects_rounding:
            check_can_correct(model.model, meta.assignments)
        notes += [*describe_idle_patterns(model, modules.lora), *describe_lost_keys(model.model)]
        rewired = rewire(model, modules.compute, modules.kernels)
        notes += add_router_loss(model, modules.router_aux_loss_coef)
    return AssembledModel(
        spec=spec,
        model=model,
        meta=meta,
        liger_kernels=liger_kernels,
        num_fp8_layers=rewired.num_fp8,
        num_fused_groups=rewired.num_groups,
        notes=notes,
    )


def _check_token_rows(meta: MetaModel, tokens: AddedTokens, tokenizer_size: int, folder: Path | None) -> None:
    """Refuse a token whose id is far beyond the last row of the embeddings.

    The embeddings get a row for every id up to that of an added token. So a few bytes in a saved adapter could ask for
    any amount of memory.

    Raises:
        AdapterError: the highest token is beyond the model's, the tokenizer's and the added tokens together.
    """
    num_rows = count_tokens(meta.model)[1] if tokens.ids else 0
    if tokens.vocab_size > num_rows + tokenizer_size + len(tokens.ids):
        raise AdapterError(
            f"token {tokens.vocab_size - 1} can't get a row: {folder} has {num_rows} tokens. Correct the tokenizer, or "
            "trainable_token_indices in the adapter's adapter_config.json."
        )


def share_sequences(assembled: AssembledModel, num_slices: int, processes: Processes) -> None:
    """Let ranks share sequences (context parallelism): from now on each computes a slice of them. Collective.

    Args:
        assembled: its attention is wrapped, in place.
        num_slices: ranks that share a sequence; with 1 nothing is changed.
        processes: all ranks take part.
    """
    if num_slices > 1:
        group = join_context_group(processes, num_slices)
        assembled.meta.model.set_attn_implementation(slice_attention(assembled.spec.attention, num_slices, group))


def add_router_loss(model: TaskModel, coef: float) -> list[str]:
    """Let a causal language model add the load-balancing loss of its experts. Returns notes for the user."""
    if isinstance(model, CausalLM) and coef:
        model.router_loss = RouterLoss(model.base, coef)
    return describe_router_loss(model.base, coef)


def _build(spec: ModelSpec) -> MetaModel:
    modules = spec.modules
    settings = BuildSettings(
        modules.quant,
        spec.dtype,
        spec.attention,
        modules.task.settings,
        keep=list(modules.lora.modules_to_save or []),
        pad_token_id=spec.tokenizer.pad_token_id,
        trust_remote_code=spec.trust_remote_code,
    )
    meta = build_model(spec.files, settings)
    meta.model.name_or_path = spec.base_name  # an adapter remembers its base by this name
    return meta


def adapt_model(
    meta: MetaModel,
    lora: LoraConfig,
    task: TaskSpec,
    tokens: AddedTokens,
    loss_kernel: LossKernel = "torch",
    transform: LogitTransform | None = UNCHANGED,
    unreached: Collection[str] = (),
) -> TaskModel:
    """Add the adapters to the model, in place, and wrap it in the `TaskModel` of its task.

    Args:
        meta: the base model. A classifier's new head (`meta.head`) is trained in full, without an adapter.
        lora: the adapters.
        task: what the model learns.
        tokens: the tokens whose rows in embeddings and head are trained.
        loss_kernel: what computes the loss of a frozen head.
        transform: see `CausalLM`.
        unreached: linear layers that no gradient reaches, which `all-linear` leaves out.
    """
    if meta.head:
        lora = replace(lora, modules_to_save=[*(lora.modules_to_save or []), *meta.head])
    adapted = apply_adapters(meta.model, lora, task.name, tokens, unreached)
    match task.name:
        case TaskName.causal_lm:
            return CausalLM(adapted, loss_kernel, transform, task.settings)
        case TaskName.preference:
            return PreferenceLM(adapted, task.preference, loss_kernel, transform)
        case TaskName.grpo:
            return PolicyLM(adapted, task.grpo, task.rollout, loss_kernel, transform)
        case TaskName.distill:
            return DistillLM(adapted, task.distill, task.rollout, transform)
        case TaskName.reward:
            return RewardModel(adapted)
        case TaskName.sequence_classification | TaskName.token_classification:
            return Classifier(adapted, task.settings)
        case _:
            assert_never(task.name)


def describe_layers(assembled: AssembledModel, processes: Processes) -> str | None:
    """Fingerprint of the files that fill the transformer layers; None if their weights are random. Collective.

    Embeddings and heads are left out, so that it is the same whatever a model of these layers is trained for.
    """
    inside = {module for layer in assembled.model.layers for module in layer.modules()}
    return describe_base([a for a in assembled.meta.assignments if a.module in inside], processes)


def describe_base(assignments: Sequence[Assignment], processes: Processes) -> str | None:
    """Fingerprint of the files that fill the model; None if all weights are random.

    Rank 0 reads the files, and all ranks get the result. Collective.
    """
    result = None
    if processes.is_main:
        stored = {tensor.key: tensor for a in assignments for tensor in a.stored_tensors}  # one may fill several
        result = fingerprint_files(stored.values()) if stored else None
    shared: str | None = processes.share(result, str | None)
    return shared


def check_fingerprint(
    assembled: AssembledModel, fingerprint: str | None, processes: Processes, *, base: str, adapter: str, fix: str
) -> None:
    """Refuse a base with other weights than an adapter was trained on, whatever its folder is called. Collective.

    A model and what was made of it, such as a base and its instruct version, have weights of the same shapes. So an
    adapter that fits is no proof that it belongs there.

    Args:
        assembled: the base with the adapter's layers, before anything else fills them than its files.
        fingerprint: `describe_layers` of the base in training; None if it is unknown, and nothing is compared.
        processes: all ranks take part.
        base: the setting that names the base, with its value.
        adapter: the same of the adapter.
        fix: what to do about it.

    Raises:
        AdapterError: the weights are others.
    """
    if fingerprint is not None and describe_layers(assembled, processes) != fingerprint:
        raise AdapterError(f"{base} holds other weights than those that {adapter} was trained on{fix}")
