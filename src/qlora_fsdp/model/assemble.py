"""Assemble a model on the meta device: find its files, build transformers' model, add adapters and a loss, rewire.

Training and the commands that use an adapter assemble their models here, so that both compute with the same modules.
What differs between them is an argument of `assemble`. `sharding/materialize.py` then gives the model its weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import assert_never

from qlora_fsdp.common.errors import AdapterError, ConfigError, Problem
from qlora_fsdp.config.schema import Config, LoraConfig, TaskName
from qlora_fsdp.config.written import public_value, with_values
from qlora_fsdp.data.tokenizer import NO_TOKENS, AddedTokens, add_tokens, find_tokenizer
from qlora_fsdp.layers.attention.choose import choose_attention, describe_wide_heads
from qlora_fsdp.layers.attention.sliced import slice_attention
from qlora_fsdp.layers.head_loss import UNCHANGED, LogitTransform, LossKernel
from qlora_fsdp.layers.liger import choose_loss_kernel, use_fused_kernels
from qlora_fsdp.layers.recurrent.replace import wants_one_sequence
from qlora_fsdp.layers.rewire import Rewired, rewire
from qlora_fsdp.model.adapters.apply import apply_adapters, check_no_experts_are_trained_whole, describe_idle_patterns
from qlora_fsdp.model.adapters.targets import describe_left_out, find_left_out
from qlora_fsdp.model.adapters.write import describe_lost_keys
from qlora_fsdp.model.build import BuildSettings, MetaModel, build_model
from qlora_fsdp.model.chat_rows import check_chat_rows
from qlora_fsdp.model.find import ModelFiles, find_model
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.model.tasks.classifier import Classifier
from qlora_fsdp.model.tasks.preference import PreferenceLM
from qlora_fsdp.model.tasks.reward import RewardModel
from qlora_fsdp.model.tasks.router_loss import RouterLoss, describe_router_loss
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.model.trials.packing import (
    RECURRENT_KERNELS,
    Traits,
    check_causal,
    find_traits,
    sees_no_padding,
    settle_packing,
)
from qlora_fsdp.model.trials.slices import check_slices, whole_attention
from qlora_fsdp.runtime.hardware import choose_dtype
from qlora_fsdp.runtime.mesh import join_context_group
from qlora_fsdp.runtime.processes import Processes


@dataclass(frozen=True)
class AssembledModel:
    """A model, and what it was assembled from. Its parameters are on meta until `materialize` fills them.

    Attributes:
        model: PEFT's model in the wrapper of its task (`TaskModel`). This is the module that is sharded and called.
        meta: the base model inside it, and the assignments that say what fills the base's parameters.
        files: the base model's files.
        tokenizer: the model's tokenizer, with the tokens that the settings add.
        tokens: the tokens that `tokenizer` settings or a saved adapter name; their rows in embeddings and head are
            trained.
        dtype: the compute dtype: of base parameters that are not quantized, and of the matrix products.
        attention: name of the attention implementation. It sees whole sequences: if ranks share them,
            `share_sequences` wraps it.
        packs_rows: whether several rows share a sequence.
        unreached: linear layers that no gradient reaches, see `Traits`.
        liger_kernels: the settings (`rms_norm`, `rotary`, `glu`, `cross_entropy`) whose kernels are Liger's.
        loss_kernel: what computes the loss of a frozen head.
        num_fp8_layers: layers that multiply in fp8.
        num_fused_groups: groups of linear layers that are computed together.
        notes: what the user should know, one clause each, for the log.
    """

    model: TaskModel
    meta: MetaModel
    files: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    tokens: AddedTokens
    dtype: torch.dtype
    attention: str
    packs_rows: bool
    unreached: frozenset[str]
    liger_kernels: list[str]
    loss_kernel: LossKernel
    num_fp8_layers: int
    num_fused_groups: int
    notes: list[str]

    def settle(self, config: Config) -> Config:
        """The settings, with `training.packing` decided."""
        return with_values(config, {"training.packing": self.packs_rows})


# Longer than other functions: the stages of assembling a model are read in one place.
def assemble(
    config: Config,
    lora: LoraConfig,
    processes: Processes,
    *,
    trains: bool,
    generates: bool = False,
    tokenizer_folder: Path | None = None,
    saved_tokens: AddedTokens = NO_TOKENS,
) -> AssembledModel:
    """Find the model files, build the base model, add adapters, and put in faster layers. Collective.

    Args:
        config: `model`, `tokenizer`, `data`, `quant`, `task`, `training.precision`, `kernels` and `compute` are used.
            Training takes `distributed.context_parallel` too: where ranks are to share sequences, attention is one
            that `share_sequences` can use.
        lora: the adapter's settings: `config.lora` in training; those saved with the adapter when it is used.
        processes: all ranks take part; the model will compute on their device.
        trains: whether the model is trained. Only then fp8 products and fused layers are used, as the settings say.
        generates: choose an attention implementation that works with a cache and with padding on the left. Liger's
            kernels are used as in training: in a step of one token, most of the time goes into starting kernels.
        tokenizer_folder: the folder of a saved adapter, whose tokenizer is preferred to the model's if it has one.
        saved_tokens: the tokens whose trained rows a saved adapter has; used if the settings name none.

    Raises:
        UserError: the model, the adapter, the settings or the device do not go together.
    """
    device, dtype = processes.device, choose_dtype(config.training.precision, processes.device)
    files = find_model(config.model, processes.is_local_main, processes.first_error)
    tokenizer = find_tokenizer(config, files.folder, tokenizer_folder, trains)
    added = add_tokens(tokenizer, config.tokenizer)
    tokens = added if added.ids else saved_tokens
    # A small model is tried before Liger's kernels for GPUs are put into transformers' classes, which it has too.
    slices = trains and config.distributed.num_slices > 1
    config, traits, attention, notes = _try_small_model(config, files, dtype, processes, generates, slices)
    if trains:
        check_causal(files.config, traits)
    liger_kernels = use_fused_kernels(config.kernels, files.config, device) if trains or generates else []
    loss_kernel = choose_loss_kernel(config.kernels.cross_entropy, device) if trains else "torch"
    meta = _build(config, lora, files, tokenizer, dtype, attention)
    if trains and config.training.deterministic and device.type == "cuda":
        _refuse_recurrent_kernels(meta)
    _check_token_rows(meta, tokens, len(tokenizer), files.folder)
    notes += [*meta.notes, *describe_left_out(meta.model, find_left_out(meta.model, lora, traits.unreached))]
    settings = replace(config, lora=lora)
    model = adapt_model(meta, settings, tokens, loss_kernel, traits.transform, traits.unreached)
    rewired = Rewired(num_fp8=0, num_groups=0)
    if trains:
        check_no_experts_are_trained_whole(model)
        notes += [*describe_idle_patterns(model, lora), *describe_lost_keys(model.model)]
        rewired = rewire(model, config.compute, config.kernels)
        notes += add_router_loss(model, config.training.router_aux_loss_coef)
        notes += check_chat_rows(files.tensors, tokenizer, config)
    return AssembledModel(
        model=model,
        meta=meta,
        files=files,
        tokenizer=tokenizer,
        tokens=tokens,
        dtype=dtype,
        attention=attention,
        packs_rows=config.training.packing is True,
        unreached=traits.unreached,
        liger_kernels=liger_kernels,
        loss_kernel=loss_kernel,
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
        assembled.meta.model.set_attn_implementation(slice_attention(assembled.attention, num_slices, group))


def add_router_loss(model: TaskModel, coef: float) -> list[str]:
    """Let a causal language model add the load-balancing loss of its experts. Returns notes for the user."""
    if isinstance(model, CausalLM) and coef:
        model.router_loss = RouterLoss(model.base, coef)
    return describe_router_loss(model.base, coef)


def _refuse_recurrent_kernels(meta: MetaModel) -> None:
    """Refuse the kernels of recurrent layers in a deterministic run: their backward adds with atomics, in any order.

    Raises:
        ConfigError: the model has such layers, and transformers would use the kernels that are installed for them.
    """
    installed = [name for name in RECURRENT_KERNELS if find_spec(name) is not None]
    if installed and wants_one_sequence(meta.model):
        reason = f"can't be kept: {' and '.join(installed)}, whose kernels this model uses, add in any order."
        fix = "Set training.deterministic=false, or uninstall them: torch computes in their place (slower)."
        raise ConfigError([Problem("training.deterministic=true", reason, fix)])


def _try_small_model(
    config: Config, files: ModelFiles, dtype: torch.dtype, processes: Processes, generates: bool, slices: bool
) -> tuple[Config, Traits, str, list[str]]:
    """Choose the attention and decide `training.packing=auto`, from what a small model shows. Collective.

    If ranks are to share sequences (`slices`), a model that can't be cut is refused.

    Returns:
        The settings with packing decided, what was found, the name of the attention, and notes.
    """
    traits = find_traits(files.config, config, processes)
    is_causal = sees_no_padding(config, traits) and not generates
    wanted, device = config.model.attn_implementation.value, processes.device
    attention, slower = choose_attention(
        *(wanted, files.config, device, dtype, is_causal, traits.why_not_by_starts),
        deterministic=config.training.deterministic and not generates,
    )
    notes = [slower] if slower else []
    notes += describe_wide_heads(attention, files.config)
    if slices:
        check_slices(files.config, config, traits)
        attention = whole_attention(attention, slower, files.config, config, device)
    if not generates:
        config, padded = settle_packing(config, files.config, attention, processes)
        notes += padded
    return config, traits, attention, notes


def _build(
    config: Config,
    lora: LoraConfig,
    files: ModelFiles,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    attention: str,
) -> MetaModel:
    settings = BuildSettings(
        config.quant,
        dtype,
        attention,
        config.task,
        keep=list(lora.modules_to_save or []),
        pad_token_id=tokenizer.pad_token_id,
        trust_remote_code=config.model.trust_remote_code,
    )
    meta = build_model(files, settings)
    # An adapter remembers its base by this name.
    meta.model.name_or_path = public_value(config, "model.path") or public_value(config, "model.name")
    return meta


def adapt_model(
    meta: MetaModel,
    config: Config,
    tokens: AddedTokens,
    loss_kernel: LossKernel = "torch",
    transform: LogitTransform | None = UNCHANGED,
    unreached: Collection[str] = (),
) -> TaskModel:
    """Add the adapters to the model, in place, and wrap it in the `TaskModel` of its task.

    Args:
        meta: the base model. A classifier's new head (`meta.head`) is trained in full, without an adapter.
        config: `lora`, `task` and `preference` are used.
        tokens: the tokens whose rows in embeddings and head are trained.
        loss_kernel: what computes the loss of a frozen head.
        transform: see `CausalLM`.
        unreached: linear layers that no gradient reaches, which `all-linear` leaves out.
    """
    lora, task = config.lora, config.task
    if meta.head:
        lora = replace(lora, modules_to_save=[*(lora.modules_to_save or []), *meta.head])
    adapted = apply_adapters(meta.model, lora, task.name, tokens, unreached)
    match task.name:
        case TaskName.causal_lm:
            return CausalLM(adapted, loss_kernel, transform)
        case TaskName.preference:
            return PreferenceLM(adapted, config.preference, loss_kernel, transform)
        case TaskName.reward:
            return RewardModel(adapted)
        case TaskName.sequence_classification | TaskName.token_classification:
            return Classifier(adapted, task)
        case _:
            assert_never(task.name)
