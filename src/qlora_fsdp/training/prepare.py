"""The first half of a run: the model with its adapters on meta, the plan of its memory, the data, the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.text import count, show_size
from qlora_fsdp.config.schema import Activations, Config, DataFormat, Kernel, MatmulKind, TaskName
from qlora_fsdp.data.prepare import PreparedData, prepare_data
from qlora_fsdp.data.sequences import TrainingData
from qlora_fsdp.data.stream import open_stream
from qlora_fsdp.data.tokenizer import AddedTokens, add_tokens, byte_tokenizer, load_tokenizer
from qlora_fsdp.layers.attention import check_packing, choose_attention
from qlora_fsdp.layers.fuse import fuse_layers
from qlora_fsdp.layers.liger import use_fused_kernels
from qlora_fsdp.layers.quantized_linear import use_fp8
from qlora_fsdp.memory.plan_run import Decision, Machine, decide
from qlora_fsdp.model.activations import Relief, set_activation_policy
from qlora_fsdp.model.adapters import trainable_names
from qlora_fsdp.model.assemble import adapt_model
from qlora_fsdp.model.build import BuiltModel, build_configured, quant_settings
from qlora_fsdp.model.classifier import Classifier
from qlora_fsdp.model.count import BatchSplit, FlopCounter, Sizes, count_bytes, count_flops, dtype_name, split_batches
from qlora_fsdp.model.find import ModelFiles, find_model
from qlora_fsdp.model.positions import check_positions
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.runtime.fallbacks import replace_missing
from qlora_fsdp.runtime.hardware import choose_dtype, find_machine, hold_to, is_shortage
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.memory_use import PhasePeaks, explain_early_shortage, start_snapshot
from qlora_fsdp.training.resume import describe_base
from qlora_fsdp.weights.quantized_cache import use_cache


@dataclass(frozen=True)
class Prepared:
    """A run whose weights do not exist yet: the model is on meta, the data is tokenized; `base` is its fingerprint."""

    built: BuiltModel
    base: str | None
    model: TaskModel
    dtype: torch.dtype
    num_shards: int
    sizes: Sizes
    flops: FlopCounter
    tokenizer: PreTrainedTokenizerBase
    tokens: AddedTokens
    data: PreparedData[TrainingData]
    split: BatchSplit
    machine: Machine
    memory: Decision
    peaks: PhasePeaks


def prepare(config: Config, processes: Processes, folder: Path, first_step: int = 0) -> Prepared:
    """Everything that can be found out before anything large exists.

    Args:
        config: of the run.
        processes: all ranks take part.
        folder: the run folder.
        first_step: optimizer steps that a checkpoint has done already.

    Raises:
        UserError: the model, the data, the settings or the hardware do not go together; a MemoryShortage where what
            is tried out or written to a cache finds no room.
    """
    try:
        return _prepare(config, processes, folder, first_step)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise explain_early_shortage(error, config.model.cache_quantized) from error


def _prepare(config: Config, processes: Processes, folder: Path, first_step: int) -> Prepared:
    device, dtype = processes.device, choose_dtype(config.training.precision, processes.device)
    ranks = f"{count(processes.num_ranks, 'rank')} on {device.type}"
    log.info(f"Run {config.run.name}: {ranks}, {dtype_name(dtype)}, in {folder}")
    missing = replace_missing(config, device)
    files = find_model(config.model, processes.is_local_main, processes.first_error)
    text_config = files.config.get_text_config()
    tokenizer = _find_tokenizer(config, files)
    tokens = add_tokens(tokenizer, config.tokenizer)
    predicts_tokens = config.task.name is TaskName.causal_lm
    check_packing(config.training.packing, files.config)
    attention, slower = choose_attention(
        config.model.attn_implementation.value, files.config, device, dtype, is_causal=predicts_tokens
    )
    fused = use_fused_kernels(config.kernels, text_config.model_type, device)
    built = build_configured(files, config, config.lora, dtype, attention, tokenizer)
    base = describe_base(built.assignments, processes)
    if config.model.cache_quantized:
        built.assignments = use_cache(built.assignments, base, config.model.cache_folder, dtype, processes)
    model = adapt_model(built, config.lora, config.task, tokens, liger_loss="cross_entropy" in fused)
    num_fp8 = use_fp8(model) if config.compute.matmul is MatmulKind.fp8 else 0
    fuses_norms = config.kernels.rms_norm is Kernel.auto
    num_groups = fuse_layers(model, fuses_norms) if config.kernels.fuse_layers else 0
    machine = find_machine(config.memory.target_gib, processes)
    memory: Decision = processes.share(  # by the rates of rank 0's GPU, and its words where nothing fits
        decide(
            config,
            files.config.to_dict(),
            len(model.layers),
            quant_settings(built.format, config.quant),
            dtype.itemsize,
            frozenset(fused),
            machine,
        )
        if processes.is_main
        else None
    )
    set_activation_policy(model.layers, memory.policies)
    if config.memory.target_gib is not None:
        hold_to(machine.target, memory.plan.libraries if memory.plan is not None else 0, device)
    if config.memory.snapshot:
        start_snapshot(device)
    num_shards = config.fsdp.num_shards(processes.num_ranks, processes.local_num_ranks)
    sizes = count_bytes(model, processes.rank % num_shards, num_shards)
    for note in (*missing, *([slower] if slower else []), *built.notes):
        log.info(f"Note: {note}")
    log.info(
        f"Model: {built.model.name_or_path}, {show_size(sizes.num_base)} parameters, {built.kind}, "
        f"{attention} attention, Liger kernels: {', '.join(fused) or 'none'}; {num_groups} groups of layers fused"
        f"{f', {num_fp8} layers in fp8' if num_fp8 else ''}; "
        f"training {show_size(sizes.num_trainable)} in {len(trainable_names(model))} tensors"
    )
    for line in memory.lines:
        log.info(f"Memory: {line}")
    training = replace(config.training, micro_batch_size=memory.micro_batch_size)
    data: PreparedData[TrainingData]
    if config.data.streaming:
        split = split_batches(training, processes.num_ranks, 0)  # training.max_steps tells the end
        data = open_stream(config, tokenizer, split, processes, folder, first_step, model.vocab_size)
    else:
        data = prepare_data(
            config,
            tokenizer,
            is_main=processes.is_local_main,
            wait=processes.first_error,
            vocab_size=model.vocab_size,
        )
        split = split_batches(training, processes.num_ranks, len(data.train))
    beyond = check_positions(built.model, text_config, data)
    if isinstance(model, Classifier):
        model.weigh_classes(data.train, device)
    for line in str(data.report).splitlines():
        log.info(f"Data: {line}")
    if beyond is not None:
        log.info(f"Note: {beyond}")
    log.info(f"Steps: {split.num_steps} of {config.training.max_length} tokens a sequence at most")
    flops = count_flops(model, text_config)
    is_auto = config.memory.activations is Activations.auto
    peaks = PhasePeaks(device, Relief(model.layers, memory.policies) if is_auto else None)
    return Prepared(
        built, base, model, dtype, num_shards, sizes, flops, tokenizer, tokens, data, split, machine, memory, peaks
    )


def _find_tokenizer(config: Config, files: ModelFiles) -> PreTrainedTokenizerBase:
    """The model's tokenizer; random tokens need none, and get the built-in one for its padding."""
    if config.data.format is DataFormat.random:
        return byte_tokenizer()
    path = str(files.folder) if files.folder is not None else config.model.path
    return load_tokenizer(replace(config.model, path=path), config.data)
