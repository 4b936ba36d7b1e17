"""A run, stage by stage. Every stage is a module; they meet only here."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.adapters import apply_adapters, initialize_adapters, trainable_names
from qlora_fsdp.attention import check_packing, choose_attention
from qlora_fsdp.build import BuiltModel, ModelFiles, build_model, find_model
from qlora_fsdp.causal_lm import CausalLM, checkpoint_activations
from qlora_fsdp.checkpoint import Checkpoint, load_checkpoint, verify_files
from qlora_fsdp.config.schema import Config, DataFormat, Weights
from qlora_fsdp.config.validate import check
from qlora_fsdp.config.world import World
from qlora_fsdp.data.prepare import PreparedData, prepare_data
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from qlora_fsdp.distributed import Processes, start_processes, stop_processes
from qlora_fsdp.errors import DeviceError, Interrupted, UserError
from qlora_fsdp.export import gather_trainable, save_adapter, write_adapter
from qlora_fsdp.hardware import choose_dtype, gpu_peak_gib, host_rss_now_gib
from qlora_fsdp.journal import Journal
from qlora_fsdp.kernels import use_fused_kernels
from qlora_fsdp.load.fill import fill_from_files, fill_randomly
from qlora_fsdp.loop import TrainResult, describe, train
from qlora_fsdp.optim import make_optimizer
from qlora_fsdp.plan import count_bytes, count_flops, dtype_name, split_batches
from qlora_fsdp.prove import prove_shards
from qlora_fsdp.resume import (
    check_changes,
    check_data,
    describe_data,
    find_checkpoint,
    is_own,
    plain_settings,
    remove_later_checkpoints,
)
from qlora_fsdp.run_folder import log, open_run_folder, write_json, writing
from qlora_fsdp.saver import Saver
from qlora_fsdp.shard import count_shards, place_model, shard_model
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
        reason = watch.explain(_with_advice(error))
        if reason is error:
            raise
        raise reason from error
    finally:
        stop_processes()
        watch.stop()
    return summary


def _run(
    config: Config,
    processes: Processes,
    watch: Watch,
    folder: Path,
    checkpoint: Checkpoint | None,
    summary: dict[str, Any],
) -> None:
    device, started = processes.device, time.perf_counter()
    dtype = choose_dtype(config.training.precision, device)
    log.info(f"Run {config.run.name}: {processes.num_ranks} ranks on {device.type}, {dtype_name(dtype)}, in {folder}")

    # What is to be trained, on meta: nothing large exists yet.
    files = find_model(config.model, processes.is_local_main, lambda: processes.wait(patiently=True))
    tokenizer = _find_tokenizer(config, files)
    check_packing(config.training.packing, files.config)
    attention = choose_attention(config.model.attn_implementation.value, files.config, device, dtype)
    fused = use_fused_kernels(config.kernels, files.config.get_text_config().model_type, device)
    built = build_model(
        files,
        config.quant,
        dtype,
        attention,
        trust_remote_code=config.model.trust_remote_code,
        keep=list(config.lora.modules_to_save or []),
    )
    built.model.name_or_path = config.model.path or config.model.name
    model = CausalLM(apply_adapters(built.model, config.lora), liger_loss="cross_entropy" in fused)
    num_recomputed = checkpoint_activations(model, config.memory)
    num_shards = count_shards(config.fsdp, processes)
    sizes = count_bytes(model, processes.rank % num_shards, num_shards)
    flops = count_flops(model, files.config.get_text_config())
    for note in built.notes:
        log.info(f"Note: {note}")
    log.info(
        f"Model: {config.model.path or config.model.name}, {_count(sizes.num_base)} parameters, "
        f"{built.format.quant_type if built.format else 'not quantized'}, {attention} attention, "
        f"Liger kernels: {', '.join(fused) or 'none'}; "
        f"training {_count(sizes.num_trainable)} in {len(trainable_names(model))} tensors, "
        f"recomputing {num_recomputed} of {len(model.layers)} layers"
    )

    # Data first: it is cheap to find out that there is none.
    data = prepare_data(
        config,
        tokenizer,
        is_main=processes.is_local_main,
        wait=lambda error: next((e for e in processes.gather(error, patiently=True) if e is not None), None),
        vocab_size=files.config.get_text_config().vocab_size,
    )
    if checkpoint is not None:
        check_data(checkpoint, data.train, config)
    split = split_batches(config.training, processes.num_ranks, len(data.train))
    _log_data(data, split.num_steps, config)

    # The weights, each rank its own rows.
    units = shard_model(model, config.fsdp, processes)
    load_started = time.perf_counter()
    place_model(model, torch.device("cpu") if config.fsdp.cpu_offload else device, device)
    num_read = _load(built, config, processes, dtype, num_shards)
    initialize_adapters(model.model, config.lora.init_lora_weights, config.training.seed)
    _synchronize(device)
    load_seconds, load_peak = time.perf_counter() - load_started, gpu_peak_gib(device)
    proof_started = time.perf_counter()
    proof = prove_shards(model, units, processes, int(os.environ.get("WORLD_SIZE", 1)))
    proof_seconds = time.perf_counter() - proof_started
    log.info(
        f"Loaded {_bytes(num_read)} a rank in {load_seconds:.1f} s ({num_read / load_seconds / 1e9:.2f} GB/s); "
        f"proved {_bytes(proof.num_bytes)} in {proof.num_tensors} gathered tensors, 0 bytes differ, "
        f"in {proof_seconds:.1f} s"
    )

    summary |= {
        "load_seconds": load_seconds,
        "load_gpu_peak_gib": load_peak,
        "load_host_gib": host_rss_now_gib(),
        "proof_seconds": proof_seconds,
        "proved_bytes": proof.num_bytes,
        "shard_bytes": sizes.shard_bytes,
        "setup_seconds": time.perf_counter() - started,
    }
    kind = built.format.quant_type if built.format else "unquantized"
    settings = f"LoRA r={config.lora.r} on {kind} weights, {split.num_steps} steps"

    def write_adapter_to(target: Path) -> None:
        state = gather_trainable(model.model, processes)
        if processes.is_main:
            write_adapter(model.model, state, target, tokenizer, settings)

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
    content = Checkpoint(
        folder / "checkpoints",
        done.num_steps,
        processes.num_ranks,
        plain_settings(config, processes.num_ranks),
        describe_data(data.train),
    )
    saver = Saver(config.checkpoint, content, model.model, optimizer, write_adapter_to, processes, watch)
    journal = Journal(folder, config, split.num_steps, processes.is_main, done.num_steps)
    try:
        with watch.patience():
            result = train(
                model, optimizer, data.train, data.eval, config, split, flops, processes, journal, saver, done
            )
        save_adapter(model.model, folder / "adapter", tokenizer, settings, processes)
        summary |= {"status": "finished"} | describe(result) | {"seconds": time.perf_counter() - started}
    finally:
        journal.close(summary)
    if processes.is_main:
        with writing(folder):
            write_json(folder / "summary.json", summary)
    log.info(f"Finished in {summary['seconds']:.1f} s. The adapter is in {folder / 'adapter'}")


def _record_failure(folder: Path, summary: dict[str, Any], error: BaseException) -> None:
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    text = str(error) if isinstance(error, UserError) else repr(error)
    with suppress(OSError):  # the folder may be what failed
        write_json(folder / "summary.json", summary | {"status": status, "error": text})


def _with_advice(error: BaseException) -> BaseException:
    """Errors of libraries that a setting can cure, as ours."""
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            f"The GPU is out of memory: {str(error).partition('. ')[0]}. Set training.micro_batch_size or "
            "training.max_length lower, memory=recompute, or fsdp=offload; or use more GPUs."
        )
    return error


def _complete(world: World, processes: Processes) -> World:
    """The world with what only torch can tell."""
    cuda = processes.device.type == "cuda"
    has_bf16 = not cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    return replace(world, device_type="cuda" if cuda else "cpu", has_bf16=has_bf16)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**29 else f"{number / 2**20:.1f} MiB"


def _find_tokenizer(config: Config, files: ModelFiles) -> PreTrainedTokenizerBase:
    """The model's tokenizer; random tokens need none, and get the built-in one for its padding."""
    if config.data.format is DataFormat.random:
        return byte_tokenizer()
    path = str(files.folder) if files.folder is not None else config.model.path
    return load_tokenizer(replace(config.model, path=path), config.data)


def _log_data(data: PreparedData, num_steps: int, config: Config) -> None:
    for line in str(data.report).splitlines():
        log.info(f"Data: {line}")
    log.info(f"Steps: {num_steps} of {config.training.max_length} tokens a sequence at most")


def _load(built: BuiltModel, config: Config, processes: Processes, dtype: torch.dtype, num_shards: int) -> int:
    """Fill the shards, with a bar where there is a terminal; the bytes that this rank read."""
    total = sum(a.num_bytes(dtype) for a in built.assignments) // num_shards
    shows = processes.is_main and sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=not shows, leave=False) as bar:
        if config.model.weights is Weights.random:
            std = getattr(built.model.config, "initializer_range", 0.02)
            fill_randomly(built.assignments, processes.device, dtype, std, config.training.seed, bar.update)
        else:
            fill_from_files(built.assignments, processes.device, dtype, bar.update)
    return total


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
