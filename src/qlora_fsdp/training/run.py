"""A training run, from the settings to the adapter. Every rank calls `run`, which calls one stage after another."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from typing_extensions import assert_never

from qlora_fsdp.common.errors import ConfigError, HubError, Problem, refuse
from qlora_fsdp.common.sizes import SLAB_BYTES
from qlora_fsdp.common.text import plural, show_bytes
from qlora_fsdp.config.adapter.lora_start import SETTING
from qlora_fsdp.config.checks.check_settings import check_world
from qlora_fsdp.config.reading.commands import saved_settings
from qlora_fsdp.config.reading.compose import to_yaml
from qlora_fsdp.config.recorded import plain_settings, public_value
from qlora_fsdp.config.schema import Config, DataFormat, Hosts, HubConfig, Weights
from qlora_fsdp.config.settings import all_settings, show
from qlora_fsdp.config.world import World, round_default
from qlora_fsdp.data.read import find_form
from qlora_fsdp.data.report_rows import ReportRows, choose_rows, write_report_rows
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.layers.kernels.launch import starting_triton
from qlora_fsdp.memory.show import as_json
from qlora_fsdp.model.adapters.initialize import initialize_adapters
from qlora_fsdp.model.adapters.rounding_error import RoundingErrors
from qlora_fsdp.model.settle import ModelSpec
from qlora_fsdp.model.tasks.distill_lm import DistillLM
from qlora_fsdp.records.journal import note_missing_key
from qlora_fsdp.records.record_files import find_holder, records_in
from qlora_fsdp.records.run_folder import check_room, close_run_folder, hold_run_folder, log, open_run_folder
from qlora_fsdp.records.run_state import REPORT_FILE, REPORT_ROWS_FILE
from qlora_fsdp.records.run_summary import RunSummary, describe_end
from qlora_fsdp.records.start_folder import find_start
from qlora_fsdp.records.upload import prepare_repo, push_result
from qlora_fsdp.report.page import write_report
from qlora_fsdp.runtime.hardware import has_bfloat16, host_rss_gib, host_rss_now_gib, is_shortage
from qlora_fsdp.runtime.processes import Processes, start_processes
from qlora_fsdp.runtime.watch import Watch, ending_together
from qlora_fsdp.sharding.materialize import materialize
from qlora_fsdp.training.checkpoints.checkpoint import Checkpoint, verify_files
from qlora_fsdp.training.checkpoints.resume import (
    check_base,
    check_changes,
    check_data,
    check_step,
    choices_of,
    describe_kept,
    find_checkpoint,
    is_own,
    settings_of,
)
from qlora_fsdp.training.describe_adapter import corrected_format, serving_of
from qlora_fsdp.training.memory_use import explain_early_shortage, explain_shortage
from qlora_fsdp.training.prepare import Prepared, prepare
from qlora_fsdp.training.reference import add_reference
from qlora_fsdp.training.start_adapter import open_start
from qlora_fsdp.training.teacher import load_teacher
from qlora_fsdp.training.train_adapter import AdapterSettings, train_adapter
from qlora_fsdp.weights.observe import NO_OBSERVERS

# Libraries read these when they start: cuBLAS with its first handle, NCCL with its first communicator.
VARIABLES: Mapping[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NCCL_NVLS_ENABLE": "0",
}
_NO_KERNEL = re.compile(r"^(\S+) does not have a deterministic implementation")
_FIX = "Type the same command on every host, with the same files of settings and variables."


def run(config: Config, world: World) -> dict[str, Any]:
    """Train an adapter as `config` says. Every rank calls this.

    Args:
        config: the settings, which the command line has checked as far as is possible without torch.
        world: the number of ranks and the software, as the environment shows them.

    Returns:
        What summary.json holds.

    Raises:
        UserError: anything the user can mend; the same on every rank, before the first step wherever possible.
    """
    kept = partial(describe_kept, config.run, config.checkpoint)
    joined = _joined_ranks(config.distributed.timeout_seconds, kept)
    with joined as (processes, watch, summary), repeatable(config.training.deterministic):
        # First: can the settings be used on this hardware? Then the run folder is this run's, and what is in it stays
        # as it is. Is there a checkpoint to resume from?
        check_same_settings(plain_settings(config), processes)
        refuse(check_world(config, _complete(world, processes)))
        config, rounded = round_default(config, processes.num_ranks)
        _check_hub(config.hub, processes)
        folder = hold_run_folder(config.run, processes)
        checkpoint = processes.share(
            find_checkpoint(config.run, config.checkpoint) if processes.is_main else None, Checkpoint | None
        )
        choices: dict[str, Any] = {}
        changes = []
        if checkpoint is not None:
            choices = choices_of(checkpoint, processes.num_ranks, config.training, config.distributed, config.fsdp)
            settings = settings_of(plain_settings(config.with_values(choices)), processes.num_ranks)
            changes = check_changes(checkpoint, settings, config.optim.name, processes.num_ranks)
        open_run_folder(
            folder, to_yaml(config, as_written=True), processes, keep_records=is_own(checkpoint, config.run)
        )
        summary.open(folder, processes.share(find_holder(folder) if processes.is_main else None, str | None))
        note_missing_key(config.tracking)
        for first, last in config.replaced:
            log.info(f"Note: {first} has no effect: {last} is typed behind it")
        if rounded is not None:
            log.info(f"Note: {rounded}")
        if checkpoint is not None:
            log.info(f"Going on from step {checkpoint.step}, {checkpoint.folder}; changed: {', '.join(changes) or '-'}")
            with summary.resuming():
                verify_files(checkpoint, processes)

        start = None
        if config.lora.start is not None:
            place = find_start(config.lora.start, config.run, config.checkpoint) if processes.is_main else None
            start = open_start(place, folder, processes)
            summary.starts_from(str(public_value(config, SETTING)), start.digest)

        # Second: the model without weights, the memory plan and the data. Most errors are found here, before anything
        # large is allocated.
        started = time.perf_counter()
        first_step = 0 if checkpoint is None else checkpoint.step
        with _explained_early_shortage(config.model.cache_quantized):
            prepared = prepare(config, processes, folder, first_step, start, choices)
        adapter_bytes = prepared.sizes.num_trainable * 4  # float32
        plan = prepared.run_plan.plan
        rank_bytes = 0 if plan is None else plan.host["checkpoint"] - SLAB_BYTES  # the plan rounds up to whole slabs
        check_room(folder, adapter_bytes, max(adapter_bytes, rank_bytes), processes)
        if checkpoint is not None:
            packing, allowed = config.training.packing, config.checkpoint.allow_changes
            check_data(checkpoint, prepared.data.train, config.data, packing, allowed)
            check_step(checkpoint, prepared.split.num_steps)
            check_base(checkpoint, prepared.base, config.model.path, allowed)

        # Third: load the weights, prove them, and train.
        with _explained_shortage(prepared, config.memory.snapshot, processes, folder, summary):
            loaded = _load_and_prove(prepared, processes, is_new=checkpoint is None)
            mix = {part.path: part.often for part in prepared.data.report.mix}
            summary.loaded(loaded | ({"mix": mix} if mix else {}), setup_seconds=time.perf_counter() - started)
            prepared = add_reference(prepared, processes)
            serving = serving_of(prepared)
            summary.served(serving.export, serving.merge)
            adapter_settings = _adapter_settings(prepared, config, folder, processes)
            result = train_adapter(prepared, adapter_settings, processes, watch, folder, checkpoint, summary)

        seconds = time.perf_counter() - started
        summary.finished(result.describe(), seconds)
        if processes.is_main:
            _write_results(config.hub, prepared.assembled.spec, config.model.weights, folder, summary)
    return summary.figures


@contextmanager
def _joined_ranks(timeout_seconds: int, kept: Callable[[], str]) -> Iterator[tuple[Processes, Watch, RunSummary]]:
    """A context in which the ranks work together: they meet at its beginning and part at its end.

    An error on one rank ends the run on all. It is recorded in summary.json and printed once.
    """
    processes = start_processes(timeout_seconds)
    summary = RunSummary(processes.num_ranks)
    watch = Watch(processes, record=summary.failed, kept=kept)
    try:
        with ending_together(watch):
            yield processes, watch, summary
    finally:
        close_run_folder()


@contextmanager
def _explained_early_shortage(writes_cache: bool) -> Iterator[None]:
    """A context for what comes before the plan: the small model that is tried, or a cache that is written.

    Raises:
        MemoryShortage: torch ran out of memory in it.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        raise explain_early_shortage(error, writes_cache) from error


@contextmanager
def _explained_shortage(
    prepared: Prepared, writes_snapshot: bool, processes: Processes, folder: Path, summary: RunSummary
) -> Iterator[None]:
    """A context for loading and training, which need the planned memory.

    At its end the summary gets the planned and the measured memory.

    Raises:
        MemoryShortage: torch ran out of memory in it. The message compares the plan with what was allocated.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        snapshot = folder / f"memory-{processes.rank}.pickle" if writes_snapshot else None
        raise explain_shortage(error, prepared.run_plan.plan, prepared.machine.gpu, prepared.peaks, snapshot) from error
    finally:
        plan = prepared.run_plan.plan
        with suppress(RuntimeError):  # the GPU may be what failed
            measured = prepared.peaks.as_json() | {"host_gib": round(host_rss_gib(), 3)}
            summary.measured(None if plan is None else as_json(plan), measured)


def _load_and_prove(prepared: Prepared, processes: Processes, is_new: bool) -> dict[str, Any]:
    """Shard the model, fill and prove every shard, and return figures for summary.json.

    Args:
        prepared: the run.
        processes: all ranks take part.
        is_new: whether the adapters keep the values that they start from: those of no checkpoint follow.
    """
    spec = prepared.spec
    seed = spec.steps.seed
    lora = spec.modules.lora
    errors = RoundingErrors(prepared.model.model, seed, processes) if lora.corrects_rounding and is_new else None

    def fill_adapters(model: peft.PeftModel) -> None:
        filled: Collection[LoraLayer] = ()
        if errors is not None:
            errors.finish()
            filled = errors.layers.values()
        initialize_adapters(model, lora.init_lora_weights, seed, prepared.assembled.tokens, filled)
        if prepared.start is not None:
            prepared.start.load(model)

    with starting_triton(processes.device):
        loaded = materialize(
            prepared.assembled,
            spec.shards,
            seed,
            processes,
            fill_adapters,
            shows_progress=True,
            before_proof=lambda: prepared.peaks.enter("proof"),
            observers=NO_OBSERVERS if errors is None else errors.observers(),
        )
    if errors is not None:
        kind = prepared.assembled.meta.kind
        log.info(f"LoftQ: {plural(len(errors.layers), 'adapter')} started from what {kind} rounds away")
    teacher = prepared.teacher
    if teacher is not None:
        assert isinstance(prepared.model, DistillLM)
        prepared.model.teacher = load_teacher(teacher, spec.shards, seed, processes)
    num_read = loaded.num_bytes_read
    seconds = loaded.load_seconds
    proof = loaded.proof
    proved = f"proved {show_bytes(proof.num_bytes)} in {proof.num_tensors} gathered tensors, 0 bytes differ, "
    proved += f"in {loaded.proof_seconds:.1f} s"
    log.info(
        f"Loaded {show_bytes(num_read)} a rank in {seconds:.1f} s ({num_read / seconds / 1e9:.2f} GB/s); "
        f"{proved if loaded.units else 'nothing is sharded: each rank has the whole base'}"
    )
    return {
        "load_seconds": seconds,
        "load_gpu_peak_gib": prepared.peaks.peak_gib("load"),
        "load_host_gib": host_rss_now_gib(),
        "proof_seconds": loaded.proof_seconds,
        "proved_bytes": proof.num_bytes,
        "shard_bytes": prepared.sizes.shard_bytes,
    }


def _adapter_settings(prepared: Prepared, config: Config, folder: Path, processes: Processes) -> AdapterSettings:
    """What is saved with the adapter, at checkpoints and at the end: as the user gave it, not as the plan decided."""
    form = find_form(prepared.spec.data) if processes.is_main else None
    kept = _keep_report_rows(prepared, folder) if processes.is_main else None
    weights = getattr(prepared.model, "class_weights", None)
    text = saved_settings(
        config,
        None if weights is None else weights.tolist(),
        form,
        prepared.base_layers,
        None if prepared.start is None else prepared.start.digest,
        kept,
        corrected_format(prepared),
    )
    return AdapterSettings(text, form)


def _keep_report_rows(prepared: Prepared, folder: Path) -> str | None:
    """Keep rows in the run folder for `merge`, which reports on them how much of what was learned its result keeps.

    Returns:
        The SHA-256 of the file; None where there are no such rows: of classifiers, of prompts alone, of random tokens,
        of a stream without held-out rows, or on a full disk.
    """
    task = prepared.spec.modules.task
    train = prepared.data.train
    held_out = prepared.data.eval
    source = train if held_out is None else held_out
    is_random = prepared.spec.data.settings.format is DataFormat.random
    if not task.is_causal or task.writes_answers or is_random or not isinstance(source, Sequences):
        return None
    rows = ReportRows(choose_rows(source), are_held_out=held_out is not None)
    if not rows.rows:
        return None
    digests: list[str] = []
    records_in(folder).write(REPORT_ROWS_FILE, lambda file: digests.append(write_report_rows(rows, file)))
    return digests[0] if digests else None


def _check_hub(hub: HubConfig, processes: Processes) -> None:
    """Find out now whether the adapter can be uploaded at the end.

    Raises:
        HubError: it can't; raised on every rank.
    """
    error = None
    if hub.push and hub.repo is not None and processes.is_main:
        try:
            prepare_repo(hub.repo, hub.private)
        except HubError as found:
            error = f"hub.push=true: {found} Or set hub.push=false."
    error = processes.first_error(error)
    if error is not None:
        raise HubError(error)


def _write_results(hub: HubConfig, model: ModelSpec, weights: Weights, folder: Path, summary: RunSummary) -> None:
    """Write what a finished run leaves beside its adapter, say how it ended, and upload the adapter if asked to."""
    summary.write()
    try:
        write_report([folder], folder / REPORT_FILE)
    except Exception as error:  # a failed report must not fail a run that has finished
        log.warning(f"No report: {error!r}")
    is_causal, is_random = model.modules.task.is_causal, weights is Weights.random
    log.info(describe_end(folder, summary.figures, is_causal, is_random, model.trust_remote_code))
    push_result(hub, folder / "adapter")


def _complete(world: World, processes: Processes) -> World:
    """The world, completed by what only torch knows: the device, and whether it computes in bfloat16 and fp8."""
    cuda = processes.device.type == "cuda"
    has_bf16 = has_bfloat16(processes.device)
    has_fp8 = cuda and torch.cuda.get_device_capability() >= (8, 9)
    return replace(world, device_type="cuda" if cuda else "cpu", has_bf16=has_bf16, has_fp8=has_fp8)


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """A context in which GPUs add in one order, if that is wanted. To be entered before a GPU computes anything.

    Raises:
        ConfigError: torch has no deterministic kernel for something that the run computes.
    """
    if not wanted:
        yield
        return
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    # torch would fill every new tensor, in case that somebody reads it before it is written. That takes time.
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if (found := _NO_KERNEL.match(str(error))) is None:
            raise
        reason = f"can't be kept: torch has no deterministic kernel for {found[1]}, which this model needs."
        fix = "Set training.deterministic=false, or model to another one."
        raise ConfigError([Problem("training.deterministic=true", reason, fix)]) from error
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills


def check_same_settings(recorded: Mapping[str, Any], processes: Processes) -> None:
    """Compares the settings of all ranks with those of rank 0. Every rank calls this.

    Args:
        recorded: this rank's settings by their keys, as the files of a run have them.
        processes: all ranks take part.

    Raises:
        ConfigError: some differ; the same on every rank. Holds every one of them.
    """
    first, *others = processes.gather(dict(recorded), dict[str, Any])
    problems: dict[str, Problem] = {}
    for rank, settings in enumerate(others, start=1):
        for key, value in settings.items():
            if key not in problems and _differs(key, value, first.get(key)):
                reason = f"on rank {rank} contradicts {show(key, first.get(key))} on rank 0."
                problems[key] = Problem(show(key, value), reason, _FIX, key)
    refuse(problems.values())


def _differs(key: str, value: Any, first: Any) -> bool:
    """Whether a value makes another run than rank 0's. A place may have another name, but is set on all or on none."""
    match all_settings()[key].facets.hosts:
        case Hosts.first:
            return False
        case Hosts.place:
            return bool(value) != bool(first)
        case Hosts.same:
            return bool(value != first)
        case unknown:
            assert_never(unknown)
