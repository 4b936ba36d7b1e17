"""Settle what a model is and how it computes: from settings, which leave it open, to a `ModelSpec`, which does not.

Its files, its tokenizer, the device and a small model of its class decide: the dtype, the attention, the packing of
rows and the kernel of the loss. `assemble.py` builds the model that the spec describes. Only this module of model/
sees the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.recorded import public_value
from qlora_fsdp.config.schema import Config, LoraConfig
from qlora_fsdp.config.specs import ModuleSpec
from qlora_fsdp.data.tokenizer import NO_TOKENS, AddedTokens, extend_tokenizer, find_tokenizer
from qlora_fsdp.layers.attention.choose import choose_attention, describe_wide_heads
from qlora_fsdp.layers.head_loss import LogitTransform, LossKernel
from qlora_fsdp.layers.liger import choose_loss_kernel
from qlora_fsdp.model.find import ModelFiles, find_model
from qlora_fsdp.model.trials.packing import TrialSpec, check_causal, find_traits, sees_no_padding, settle_packing
from qlora_fsdp.model.trials.slices import check_slices, whole_attention
from qlora_fsdp.runtime.hardware import choose_dtype
from qlora_fsdp.runtime.processes import Processes


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be built: all that it is made of, and how it computes.

    Attributes:
        files: the base model's files.
        base_name: the base's path or name, by which an adapter remembers it; without what the environment gave.
        trust_remote_code: run model code that comes with the files.
        tokenizer: the model's tokenizer, with the tokens that the settings add.
        tokens: the tokens that `tokenizer` settings or a saved adapter name; their rows in embeddings and head are
            trained.
        added_tokens: the tokens that `tokenizer` settings name.
        modules: quantization, adapters, task and kernels.
        dtype: the compute dtype: of base parameters that are not quantized, and of the matrix products.
        attention: name of the attention implementation. It sees whole sequences: if ranks share them,
            `share_sequences` wraps it.
        packs_rows: whether several rows share a sequence.
        transform: what makes the logits of the head's output, see `Traits`.
        unreached: linear layers that no gradient reaches, see `Traits`.
        loss_kernel: what computes the loss of a frozen head.
        trains: whether the model is trained. Only then fp8 products and fused layers are used.
        generates: whether it writes text with a cache, and with padding on the left.
        notes: what the user should know about these choices, one clause each.
    """

    files: ModelFiles
    base_name: str
    trust_remote_code: bool
    tokenizer: PreTrainedTokenizerBase
    tokens: AddedTokens
    added_tokens: tuple[str, ...]
    modules: ModuleSpec
    dtype: torch.dtype
    attention: str
    packs_rows: bool
    transform: LogitTransform | None
    unreached: frozenset[str]
    loss_kernel: LossKernel
    trains: bool
    generates: bool
    notes: tuple[str, ...]


def settle_model(
    config: Config,
    lora: LoraConfig,
    processes: Processes,
    *,
    trains: bool,
    generates: bool = False,
    tokenizer_folder: Path | None = None,
    saved_tokens: AddedTokens = NO_TOKENS,
) -> ModelSpec:
    """Find the model's files and its tokenizer, try a small model, and decide what the settings leave open. Collective.

    Args:
        config: the settings of a run, or those that are saved with an adapter. Where ranks are to share sequences
            (`distributed.context_parallel`), attention is one that `share_sequences` can use.
        lora: the adapter's settings: `config.lora` in training; those saved with the adapter when it is used.
        processes: all ranks take part; the model will compute on their device.
        trains: whether the model is trained.
        generates: choose an attention implementation that works with a cache and with padding on the left.
        tokenizer_folder: the folder of a saved adapter, whose tokenizer is preferred to the model's if it has one.
        saved_tokens: the tokens whose trained rows a saved adapter has; used if the settings name none.

    Raises:
        UserError: the model, the settings or the device do not go together.
    """
    device = processes.device
    dtype = choose_dtype(config.training.precision, device)
    files = find_model(config.model, processes.is_local_main, processes.first_error)
    tokenizer = find_tokenizer(config.model, config.data, files.folder, tokenizer_folder, trains)
    added = extend_tokenizer(tokenizer, config.tokenizer)
    num_slices = config.distributed.num_slices if trains else 1
    trial = TrialSpec(
        task=config.task,
        max_length=config.training.max_length,
        slices=config.distributed.num_slices > 1,
        trust_remote_code=config.model.trust_remote_code,
        deterministic=config.training.deterministic,
    )
    # A small model is tried before Liger's kernels for GPUs are put into transformers' classes, which it has too.
    traits = find_traits(files.config, trial, processes)
    attention, slower = choose_attention(
        config.model.attn_implementation.value,
        files.config,
        device,
        dtype,
        sees_no_padding(config.task, traits) and not generates,
        traits.why_not_by_starts,
        deterministic=config.training.deterministic and not generates,
    )
    notes = [slower] if slower else []
    notes += describe_wide_heads(attention, files.config)
    if traits.recurrent_by is not None:
        notes.append(f"layers that carry a state are computed by {traits.recurrent_by}")
    if num_slices > 1:
        check_slices(files.config, num_slices, config.training.max_length, traits)
        attention = whole_attention(attention, slower, files.config, num_slices, device)
    packs_rows = config.training.packing is True
    if not generates:
        packs_rows, padded = settle_packing(config.training.packing, files.config, trial, attention, processes)
        notes += padded
    if trains:
        check_causal(files.config, traits)
    return ModelSpec(
        files=files,
        base_name=public_value(config, "model.path") or public_value(config, "model.name"),
        trust_remote_code=config.model.trust_remote_code,
        tokenizer=tokenizer,
        tokens=added if added.ids else saved_tokens,
        added_tokens=(*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens),
        modules=replace(ModuleSpec.of(config), lora=lora),
        dtype=dtype,
        attention=attention,
        packs_rows=packs_rows,
        transform=traits.transform,
        unreached=traits.unreached,
        loss_kernel=choose_loss_kernel(config.kernels.cross_entropy, device) if trains else "torch",
        trains=trains,
        generates=generates,
        notes=tuple(notes),
    )
