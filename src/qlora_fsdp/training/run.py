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
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from qlora_fsdp.common.errors import UserError
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.text import show_bytes
from qlora_fsdp.config.commands import saved_settings
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.world import World
from qlora_fsdp.memory.show import as_json
from qlora_fsdp.model.adapters import initialize_adapters
from qlora_fsdp.model.prove import prove_shards
from qlora_fsdp.model.save_adapter import adapter_keys, save_adapter, write_adapter
from qlora_fsdp.model.shard import place_model, shard_model
from qlora_fsdp.records.check_run_folder import check
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.run_folder import check_room, close_run_folder, log, open_run_folder, writing
from qlora_fsdp.report.page import write_report
from qlora_fsdp.runtime.hardware import host_rss_gib, host_rss_now_gib, is_shortage
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes
from qlora_fsdp.runtime.watch import Watch
from qlora_fsdp.training.bad_steps import NUM_NORMS, BadSteps
from qlora_fsdp.training.checkpoint import Checkpoint, load_checkpoint, verify_files
from qlora_fsdp.training.generations import Generations
from qlora_fsdp.training.loop import TrainResult, describe, train
from qlora_fsdp.training.memory_use import explain_shortage
from qlora_fsdp.training.optim import make_optimizer
from qlora_fsdp.training.prepare import Prepared, prepare
from qlora_fsdp.training.resume import (
    begin_attempt,
    check_base,
    check_changes,
    check_data,
    describe_kept,
    find_checkpoint,
    is_own,
    settings_of,
)
from qlora_fsdp.training.saver import Saver
from qlora_fsdp.weights.fill import fill


def run(config: Config, world: World) -> dict[str, Any]:
    """Train an adapter as `config` says.

    Returns:
        What summary.json holds.

    Raises:
        UserError: anything the user can mend; the same on every rank, before the first step wherever possible.
    """
    processes = start_processes(config.distributed.timeout_seconds)
    watch = Watch(processes)
    watch.kept = partial(describe_kept, config)
    summary: dict[str, Any] = {"status": "running", "num_ranks": processes.num_ranks}
    try:
        check(config, _complete(world, processes))
        checkpoint = processes.share(find_checkpoint(config) if processes.is_main else None)
        changes = check_changes(checkpoint, config, processes.num_ranks) if checkpoint is not None else []
        folder = open_run_folder(config, processes, keep_records=is_own(checkpoint, config))
        watch.record = partial(_record_failure, folder, summary)
        if checkpoint is not None:
            log.info(f"Going on from step {checkpoint.step}, {checkpoint.folder}; changed: {', '.join(changes) or '-'}")
            started = time.perf_counter()
            verify_files(checkpoint, processes)
            summary["resume_seconds"] = time.perf_counter() - started
        _run(config, processes, watch, folder, checkpoint, summary)
        processes.wait(patiently=True)  # rank 0 writes its report: a rank that ended before would look lost
        watch.stop()
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


def _run(
    config: Config,
    processes: Processes,
    watch: Watch,
    folder: Path,
    checkpoint: Checkpoint | None,
    summary: dict[str, Any],
) -> None:
    started = time.perf_counter()
    prepared = prepare(config, processes, folder, 0 if checkpoint is None else checkpoint.step)
    check_room(folder, prepared.sizes.num_trainable * 4, processes)  # float32
    if checkpoint is not None:
        check_data(checkpoint, prepared.data.train, config)
        check_base(checkpoint, prepared.base, config)
    try:
        units = shard_model(prepared.model, config.fsdp, processes, prepared.memory.reshard_after_forward)
        summary |= _load_and_prove(prepared, units, config, processes)
        summary["setup_seconds"] = time.perf_counter() - started
        result = _train(prepared, config, processes, watch, folder, checkpoint, summary)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
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


def _load_and_prove(
    prepared: Prepared, units: list[FSDPModule], config: Config, processes: Processes
) -> dict[str, Any]:
    """Fill every shard, and check what FSDP makes of them; figures for summary.json."""
    device, model, started = processes.device, prepared.model, time.perf_counter()
    place_model(model, torch.device("cpu") if config.fsdp.cpu_offload else device, device)
    num_read = _load(prepared, config, processes)
    initialize_adapters(model.model, config.lora.init_lora_weights, config.training.seed, prepared.tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    load_seconds = time.perf_counter() - started
    prepared.peaks.enter("proof")
    proof = prove_shards(model, units, processes, int(os.environ.get("WORLD_SIZE", 1)))
    proof_seconds = time.perf_counter() - started - load_seconds
    proved = f"proved {show_bytes(proof.num_bytes)} in {proof.num_tensors} gathered tensors, 0 bytes differ, "
    log.info(
        f"Loaded {show_bytes(num_read)} a rank in {load_seconds:.1f} s ({num_read / load_seconds / 1e9:.2f} GB/s); "
        f"{f'{proved}in {proof_seconds:.1f} s' if units else 'nothing is sharded: each rank has the whole base'}"
    )
    return {
        "load_seconds": load_seconds,
        "load_gpu_peak_gib": prepared.peaks.peak_gib("load"),
        "load_host_gib": host_rss_now_gib(),
        "proof_seconds": proof_seconds,
        "proved_bytes": proof.num_bytes,
        "shard_bytes": prepared.sizes.shard_bytes,
    }


def _load(prepared: Prepared, config: Config, processes: Processes) -> int:
    """Fill the shards, with a bar where there is a terminal; the bytes that this rank read."""
    assignments, dtype = prepared.built.assignments, prepared.dtype
    total = sum(a.num_bytes(dtype) for a in assignments) // prepared.num_shards
    shows = processes.is_main and sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=not shows, leave=False) as bar:
        fill(assignments, processes.device, dtype, prepared.built.std, config.training.seed, bar.update)
    return total


def _train(
    prepared: Prepared,
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
        started = time.perf_counter()
        load_checkpoint(checkpoint, model.model, optimizer, processes)
        summary["resume_seconds"] += time.perf_counter() - started
        done = TrainResult(checkpoint.step, eval_losses=checkpoint.eval_losses)
    if processes.is_main:
        with writing(folder):
            begin_attempt(checkpoint, folder)
    card = f"LoRA r={config.lora.r} on {prepared.built.kind} weights, {split.num_steps} steps"
    weights = getattr(model, "class_weights", None)
    settings = saved_settings(config, None if weights is None else weights.tolist())

    keys = adapter_keys(model.model)

    def write_adapter_to(target: Path, state: dict[str, Tensor]) -> None:
        write_adapter(model.model, state, keys, target, prepared.tokenizer, card, settings)

    content = Checkpoint(
        folder / "checkpoints",
        done.num_steps,
        processes.num_ranks,
        settings_of(config, processes.num_ranks),
        data.train.describe(),
        prepared.base,
        done.eval_losses,
    )
    journal = Journal(folder, config, split.num_steps, processes.is_main, done.num_steps)
    saver = Saver(config.checkpoint, content, model.model, optimizer, write_adapter_to, processes, watch, journal)
    before = processes.share(journal.good_steps(NUM_NORMS) if processes.is_main else None)
    done.last_loss = before[-1]["loss"] if before else None
    bad_steps = BadSteps(
        config.training,
        folder,
        data.train,
        split,
        lambda tokens: str(prepared.tokenizer.decode(list(tokens))),
        [line["grad_norm"] for line in before],
        saver,
        processes,
    )
    figures = dict(summary)
    try:
        watch.be_patient(
            "the run saves and stops at the end of this step, or finishes if that is the last; another Ctrl-C stops it "
            "at once"
        )
        with saver:
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
                Generations(config.tracking, data.eval, prepared.tokenizer, processes),
                done,
            )
        watch.be_patient("all steps are done, and the run finishes; another Ctrl-C stops it at once")
        save_adapter(model.model, folder / "adapter", prepared.tokenizer, card, settings, processes)
        figures |= {"status": "finished"} | describe(result)
    finally:
        summary["checkpoints"] = saver.describe()
        journal.close(figures)
    return result


def _write_report(folder: Path) -> None:
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # the run itself has finished, whatever is wrong with its report
        log.warning(f"No report: {error!r}")


def _record_failure(folder: Path, summary: dict[str, Any], error: BaseException) -> None:
    status = "interrupted" if getattr(error, "exit_code", 1) > 128 else "failed"  # by a signal, to whichever rank
    text = str(error) if isinstance(error, UserError) else repr(error)
    with suppress(OSError):  # the folder may be what failed
        write_json(folder / "summary.json", summary | {"status": status, "error": text})


def _compare_memory(prepared: Prepared) -> dict[str, Any]:
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
