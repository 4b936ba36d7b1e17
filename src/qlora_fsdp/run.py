"""A run, stage by stage. Every stage is a module; they meet only here."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.adapters import apply_adapters, initialize_adapters, trainable_names
from qlora_fsdp.attention import check_packing, choose_attention
from qlora_fsdp.bad_steps import NUM_NORMS, BadSteps
from qlora_fsdp.build import BuiltModel, ModelFiles, build_model, find_model, quant_settings
from qlora_fsdp.causal_lm import CausalLM
from qlora_fsdp.checkpoint import Checkpoint, load_checkpoint, verify_files
from qlora_fsdp.classifier import SequenceClassifier
from qlora_fsdp.config.commands import saved_settings
from qlora_fsdp.config.schema import Config, DataFormat, MatmulKind, TaskName
from qlora_fsdp.config.validate import check
from qlora_fsdp.config.world import World
from qlora_fsdp.data.prepare import PreparedData, prepare_data
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from qlora_fsdp.distributed import Processes, start_processes, stop_processes
from qlora_fsdp.errors import Interrupted, UserError
from qlora_fsdp.export import gather_trainable, save_adapter, write_adapter
from qlora_fsdp.files import write_json
from qlora_fsdp.hardware import choose_dtype, find_machine, hold_to, host_rss_gib, host_rss_now_gib
from qlora_fsdp.journal import Journal
from qlora_fsdp.kernels import use_fused_kernels
from qlora_fsdp.load.fill import fill_from_files, fill_randomly
from qlora_fsdp.loop import TrainResult, describe, train
from qlora_fsdp.memory.decide import Decision, Machine, decide
from qlora_fsdp.memory.measure import PhasePeaks, explain_shortage, start_snapshot
from qlora_fsdp.memory.recompute import set_activation_policy
from qlora_fsdp.memory.report import as_json
from qlora_fsdp.optim import make_optimizer
from qlora_fsdp.plan import BatchSplit, FlopCounter, Sizes, count_bytes, count_flops, dtype_name, split_batches
from qlora_fsdp.prove import prove_shards
from qlora_fsdp.quantized.fuse import fuse_layers
from qlora_fsdp.quantized.linear import use_fp8
from qlora_fsdp.report.write import write_report
from qlora_fsdp.resume import (
    check_changes,
    check_data,
    describe_data,
    find_checkpoint,
    is_own,
    remove_later_checkpoints,
    settings_of,
)
from qlora_fsdp.run_folder import close_run_folder, log, open_run_folder, writing
from qlora_fsdp.saver import Saver
from qlora_fsdp.shard import count_shards, place_model, shard_model
from qlora_fsdp.task_model import TaskModel
from qlora_fsdp.watch import Watch


def run(config: Config, world: World) -> dict[str, Any]:
    """Train an adapter as `config` says.

    Returns:
        What summary.json holds.

    Raises:
        UserError: anything the user can mend; the same on every rank, before the first step wherever possible.
    """
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    processes = start_processes(config.distributed.timeout_seconds, use_cpu)
    watch = Watch(processes)
    summary: dict[str, Any] = {"status": "running", "num_ranks": processes.num_ranks}
    try:
        check(config, _complete(world, processes))
        checkpoint = processes.share(find_checkpoint(config) if processes.is_main else None)
        changes = check_changes(checkpoint, config, processes.num_ranks) if checkpoint is not None else []
        folder = open_run_folder(config, processes, keep_records=is_own(checkpoint, config))
        watch.record = partial(_record_failure, folder, summary)
        if checkpoint is not None:
            log.info(f"Going on from step {checkpoint.step}, {checkpoint.folder}; changed: {', '.join(changes) or '-'}")
            verify_files(checkpoint, processes)
        _run(config, processes, watch, folder, checkpoint, summary)
    except BaseException as error:
        reason = watch.explain(error)
        if reason is error:
            raise
        raise reason from error
    finally:
        stop_processes()
        watch.stop()
        close_run_folder()
    return summary


@dataclass(frozen=True)
class _Prepared:
    """A run whose weights do not exist yet: the model is on meta, the data is tokenized."""

    built: BuiltModel
    model: TaskModel
    dtype: torch.dtype
    num_shards: int
    sizes: Sizes
    flops: FlopCounter
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    split: BatchSplit
    machine: Machine
    memory: Decision
    peaks: PhasePeaks


def _run(
    config: Config,
    processes: Processes,
    watch: Watch,
    folder: Path,
    checkpoint: Checkpoint | None,
    summary: dict[str, Any],
) -> None:
    started = time.perf_counter()
    prepared = _prepare(config, processes, folder)
    if checkpoint is not None:
        check_data(checkpoint, prepared.data.train, config)
    try:
        units = shard_model(prepared.model, config.fsdp, processes)
        summary |= _load_and_prove(prepared, units, config, processes)
        summary["setup_seconds"] = time.perf_counter() - started
        result = _train(prepared, config, processes, watch, folder, checkpoint, summary)
    except torch.OutOfMemoryError as error:
        snapshot = folder / f"memory-{processes.rank}.pickle" if config.memory.snapshot else None
        raise explain_shortage(error, prepared.memory.plan, prepared.machine.gpu, prepared.peaks, snapshot) from error
    finally:
        with suppress(RuntimeError):  # the GPU may be what failed
            summary["memory"] = _compare_memory(prepared)
    summary |= {"status": "finished"} | describe(result) | {"seconds": time.perf_counter() - started}
    if processes.is_main:
        with writing(folder):
            write_json(folder / "summary.json", summary)
        _write_report(folder)
    log.info(f"Finished in {summary['seconds']:.1f} s. The adapter is in {folder / 'adapter'}")


def _prepare(config: Config, processes: Processes, folder: Path) -> _Prepared:
    """Everything that can be found out before anything large exists."""
    device, dtype = processes.device, choose_dtype(config.training.precision, processes.device)
    log.info(f"Run {config.run.name}: {processes.num_ranks} ranks on {device.type}, {dtype_name(dtype)}, in {folder}")
    files = find_model(config.model, processes.is_local_main, lambda: processes.wait(patiently=True))
    text_config = files.config.get_text_config()
    tokenizer = _find_tokenizer(config, files)
    predicts_tokens = config.task.name is TaskName.causal_lm
    check_packing(config.training.packing, files.config)
    attention = choose_attention(
        config.model.attn_implementation.value, files.config, device, dtype, is_causal=predicts_tokens
    )
    fused = use_fused_kernels(config.kernels, text_config.model_type, device)
    built = build_model(
        files,
        config.quant,
        dtype,
        attention,
        trust_remote_code=config.model.trust_remote_code,
        keep=list(config.lora.modules_to_save or []),
        task=config.task,
        pad_token_id=tokenizer.pad_token_id,
    )
    built.model.name_or_path = config.model.path or config.model.name
    model = _add_adapters(built, config, liger_loss="cross_entropy" in fused)
    num_fp8 = use_fp8(model) if config.compute.matmul is MatmulKind.fp8 else 0
    num_groups = fuse_layers(model) if config.kernels.fuse_layers else 0
    machine = find_machine(config.memory.target_gib, processes)
    memory = decide(
        config,
        files.config.to_dict(),
        len(model.layers),
        quant_settings(built.format, config.quant),
        dtype.itemsize,
        frozenset(fused),
        machine,
    )
    set_activation_policy(model.layers, memory.policies)
    if config.memory.target_gib is not None:
        hold_to(machine.target, memory.plan.libraries if memory.plan is not None else 0, device)
    if config.memory.snapshot:
        start_snapshot(device)
    num_shards = count_shards(config.fsdp, processes)
    sizes = count_bytes(model, processes.rank % num_shards, num_shards)
    for note in built.notes:
        log.info(f"Note: {note}")
    log.info(
        f"Model: {built.model.name_or_path}, {_count(sizes.num_base)} parameters, {_kind(built)}, "
        f"{attention} attention, Liger kernels: {', '.join(fused) or 'none'}; {num_groups} groups of layers fused"
        f"{f', {num_fp8} layers in fp8' if num_fp8 else ''}; "
        f"training {_count(sizes.num_trainable)} in {len(trainable_names(model))} tensors"
    )
    for line in memory.lines:
        log.info(f"Memory: {line}")
    data = prepare_data(
        config,
        tokenizer,
        is_main=processes.is_local_main,
        wait=lambda error: next((e for e in processes.gather(error, patiently=True) if e is not None), None),
        vocab_size=text_config.vocab_size,
    )
    if isinstance(model, SequenceClassifier):
        model.weigh_classes(data.train.labels_of(np.arange(len(data.train))))
    training = replace(config.training, micro_batch_size=memory.micro_batch_size)
    split = split_batches(training, processes.num_ranks, len(data.train))
    for line in str(data.report).splitlines():
        log.info(f"Data: {line}")
    log.info(f"Steps: {split.num_steps} of {config.training.max_length} tokens a sequence at most")
    flops = count_flops(model, text_config)
    peaks = PhasePeaks(device)
    return _Prepared(built, model, dtype, num_shards, sizes, flops, tokenizer, data, split, machine, memory, peaks)


def _add_adapters(built: BuiltModel, config: Config, liger_loss: bool) -> TaskModel:
    """The model with adapters and the loss of its task."""
    if config.task.name is TaskName.causal_lm:
        return CausalLM(apply_adapters(built.model, config.lora), liger_loss)
    lora = replace(config.lora, modules_to_save=[*(config.lora.modules_to_save or []), *built.head])
    return SequenceClassifier(apply_adapters(built.model, lora, task_type="SEQ_CLS"), config.task)


def _load_and_prove(
    prepared: _Prepared, units: list[FSDPModule], config: Config, processes: Processes
) -> dict[str, Any]:
    """Fill every shard, and check what FSDP makes of them; figures for summary.json."""
    device, model, started = processes.device, prepared.model, time.perf_counter()
    place_model(model, torch.device("cpu") if config.fsdp.cpu_offload else device, device)
    num_read = _load(prepared, config, processes)
    initialize_adapters(model.model, config.lora.init_lora_weights, config.training.seed)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    load_seconds = time.perf_counter() - started
    prepared.peaks.enter("proof")
    proof = prove_shards(model, units, processes, int(os.environ.get("WORLD_SIZE", 1)))
    proof_seconds = time.perf_counter() - started - load_seconds
    log.info(
        f"Loaded {_bytes(num_read)} a rank in {load_seconds:.1f} s ({num_read / load_seconds / 1e9:.2f} GB/s); "
        f"proved {_bytes(proof.num_bytes)} in {proof.num_tensors} gathered tensors, 0 bytes differ, "
        f"in {proof_seconds:.1f} s"
    )
    return {
        "load_seconds": load_seconds,
        "load_gpu_peak_gib": prepared.peaks.peak_gib("load"),
        "load_host_gib": host_rss_now_gib(),
        "proof_seconds": proof_seconds,
        "proved_bytes": proof.num_bytes,
        "shard_bytes": prepared.sizes.shard_bytes,
    }


def _load(prepared: _Prepared, config: Config, processes: Processes) -> int:
    """Fill the shards, with a bar where there is a terminal; the bytes that this rank read."""
    assignments, dtype = prepared.built.assignments, prepared.dtype
    total = sum(a.num_bytes(dtype) for a in assignments) // prepared.num_shards
    shows = processes.is_main and sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=not shows, leave=False) as bar:
        std = getattr(prepared.built.model.config, "initializer_range", 0.02)
        made_up = [a for a in assignments if a.stored is None]  # all, or a new head
        fill_randomly(made_up, processes.device, dtype, std, config.training.seed, bar.update)
        fill_from_files([a for a in assignments if a.stored is not None], processes.device, dtype, bar.update)
    return total


def _train(
    prepared: _Prepared,
    config: Config,
    processes: Processes,
    watch: Watch,
    folder: Path,
    checkpoint: Checkpoint | None,
    summary: dict[str, Any],
) -> TrainResult:
    """From the first step, or the one after the checkpoint's, to the adapter."""
    model, data, split = prepared.model, prepared.data, prepared.split
    optimizer = make_optimizer(
        [p for p in model.parameters() if p.requires_grad], config.optim, config.training.learning_rate
    )
    done = TrainResult()
    if checkpoint is not None:
        load_checkpoint(checkpoint, model.model, optimizer, processes)
        done = TrainResult(checkpoint.step, eval_losses=checkpoint.eval_losses)
    if processes.is_main:
        with writing(folder):
            remove_later_checkpoints(checkpoint, folder / "checkpoints")
    card = f"LoRA r={config.lora.r} on {_kind(prepared.built)} weights, {split.num_steps} steps"

    settings = saved_settings(config)

    def write_adapter_to(target: Path) -> None:
        state = gather_trainable(model.model, processes)
        if processes.is_main:
            write_adapter(model.model, state, target, prepared.tokenizer, card, settings)

    content = Checkpoint(
        folder / "checkpoints",
        done.num_steps,
        processes.num_ranks,
        settings_of(config, processes.num_ranks),
        describe_data(data.train),
        done.eval_losses,
    )
    saver = Saver(config.checkpoint, content, model.model, optimizer, write_adapter_to, processes, watch)
    journal = Journal(folder, config, split.num_steps, processes.is_main, done.num_steps)
    norms = processes.share(journal.good_norms(NUM_NORMS) if processes.is_main else None)
    bad_steps = BadSteps(
        config.training,
        folder,
        data.train,
        split,
        lambda tokens: str(prepared.tokenizer.decode(list(tokens))),
        norms,
        saver,
        processes,
    )
    figures = dict(summary)
    try:
        with watch.patience():
            result = train(
                model,
                optimizer,
                data.train,
                data.eval,
                config,
                split,
                prepared.flops,
                processes,
                journal,
                saver,
                bad_steps,
                prepared.peaks,
                done,
            )
        save_adapter(model.model, folder / "adapter", prepared.tokenizer, card, settings, processes)
        figures |= {"status": "finished"} | describe(result)
    finally:
        journal.close(figures)
    return result


def _write_report(folder: Path) -> None:
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # the run itself has finished, whatever is wrong with its report
        log.warning(f"No report: {error!r}")


def _record_failure(folder: Path, summary: dict[str, Any], error: BaseException) -> None:
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    text = str(error) if isinstance(error, UserError) else repr(error)
    with suppress(OSError):  # the folder may be what failed
        write_json(folder / "summary.json", summary | {"status": status, "error": text})


def _compare_memory(prepared: _Prepared) -> dict[str, Any]:
    """The plan beside what was measured so far, for summary.json."""
    plan = prepared.memory.plan
    measured = prepared.peaks.as_json() | {"host_gib": round(host_rss_gib(), 3)}
    return {"predicted": None if plan is None else as_json(plan), "measured": measured}


def _complete(world: World, processes: Processes) -> World:
    """The world with what only torch can tell."""
    cuda = processes.device.type == "cuda"
    has_bf16 = not cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    has_fp8 = cuda and torch.cuda.get_device_capability() >= (8, 9)
    return replace(world, device_type="cuda" if cuda else "cpu", has_bf16=has_bf16, has_fp8=has_fp8)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _kind(built: BuiltModel) -> str:
    return built.format.quant_type if built.format else "unquantized"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**29 else f"{number / 2**20:.1f} MiB"


def _find_tokenizer(config: Config, files: ModelFiles) -> PreTrainedTokenizerBase:
    """The model's tokenizer; random tokens need none, and get the built-in one for its padding."""
    if config.data.format is DataFormat.random:
        return byte_tokenizer()
    path = str(files.folder) if files.folder is not None else config.model.path
    return load_tokenizer(replace(config.model, path=path), config.data)
