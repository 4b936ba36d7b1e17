"""The first half of a run: everything that can be found out before anything large exists.

The model is assembled on the meta device, its memory is planned, and the data is tokenized and divided into steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.text import plural, show_size
from qlora_fsdp.config.outlook import Outlook
from qlora_fsdp.config.recorded import plain_settings
from qlora_fsdp.config.schema import Activations, Config
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import DataSpec, ModuleSpec, RunSpec, ShardSpec, StepSpec, TrackingSpec
from qlora_fsdp.config.world import describe_slices
from qlora_fsdp.data.questions import prepare_questions
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.sequences import TrainingData
from qlora_fsdp.data.split import BatchSplit, split_batches
from qlora_fsdp.data.streams.stream import open_stream
from qlora_fsdp.layers.rewire import use_head_pieces, use_tiles
from qlora_fsdp.memory.plan_run import Machine, RunPlan, plan_run, run_without_plan
from qlora_fsdp.memory.workload import check_graph
from qlora_fsdp.model.activations import InputOffload, MemoryFallback, has_dropout, set_activation_policy
from qlora_fsdp.model.adapters.apply import trainable_names
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter
from qlora_fsdp.model.assemble import AssembledModel, describe_base, describe_layers, share_sequences
from qlora_fsdp.model.count import FlopCounter, Sizes, count_bytes, count_flops
from qlora_fsdp.model.positions import check_positions
from qlora_fsdp.model.swap_layers import quant_settings
from qlora_fsdp.model.tasks.classifier import Classifier
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.runtime.fallbacks import replace_missing
from qlora_fsdp.runtime.hardware import choose_dtype, dtype_name, find_machine, hold_to
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.tracing.model_tracer import ModelTracer, UntraceableModel, trace_assembled
from qlora_fsdp.training.checkpoints.resume import resumed_run
from qlora_fsdp.training.memory_use import PhasePeaks, start_snapshot
from qlora_fsdp.training.start_adapter import assemble_for_training
from qlora_fsdp.training.teacher import assemble_teacher, check_scores, check_teacher_positions
from qlora_fsdp.weights.quantized_cache import use_cache


@dataclass(frozen=True)
class Prepared:
    """A run whose weights do not exist yet.

    Attributes:
        spec: the run, of which nothing is open.
        assembled: the model on meta, and what it was assembled from.
        teacher: the same of a teacher that is a model of its own; None without one.
        base: fingerprint of the model files; None for random weights.
        base_layers: fingerprint of the transformer layers only, by which an adapter remembers its base.
        start: the adapter that the run starts from; None for a new one.
        sizes: numbers and bytes of the parameters.
        flops: counts the FLOPs of a batch.
        data: sequences of tokenized rows, or a stream of them.
        split: how the data is divided into steps.
        machine: the GPU, and how much of its memory the run may use.
        run_plan: the memory plan, and what was chosen by it.
        peaks: measures memory by phase. With memory.activations=auto it also lowers the activation policy when memory
            is short.
    """

    spec: RunSpec
    assembled: AssembledModel
    teacher: AssembledModel | None
    base: str | None
    base_layers: str | None
    start: SavedAdapter | None
    sizes: Sizes
    flops: FlopCounter
    data: PreparedData[TrainingData]
    split: BatchSplit
    machine: Machine
    run_plan: RunPlan
    peaks: PhasePeaks

    @property
    def model(self) -> TaskModel:
        """The model that is trained."""
        return self.assembled.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with added tokens."""
        return self.assembled.tokenizer


def prepare(
    config: Config,
    processes: Processes,
    folder: Path,
    first_step: int,
    start: SavedAdapter | None,
    choices: Mapping[str, Any],
) -> Prepared:
    """Find out everything that can be found out before anything large exists. Collective.

    Args:
        config: the run's settings.
        processes: all ranks take part.
        folder: the run folder.
        first_step: optimizer steps that a checkpoint has done already.
        start: the adapter that the run starts from; None for a new one.
        choices: what was chosen for settings that are `auto` when that checkpoint was written, by key. It is chosen
            again if it still fits.

    Raises:
        UserError: the model, the data, the settings or the hardware do not go together.
    """
    device, dtype = processes.device, choose_dtype(config.training.precision, processes.device)
    ranks = f"{plural(processes.num_ranks, 'rank')} on {device.type}"
    default = f", on {config.data.path}, the default: data.path= names yours" if config.data.is_default else ""
    log.info(f"Run {config.run.name}: {ranks}, {dtype_name(dtype)}, in {folder}{default}")
    kernels, missing = replace_missing(ModuleSpec.of(config), config.training.precision, device)
    config = config.with_values({"kernels.fuse_layers": kernels.fuse_layers})
    assembled = assemble_for_training(start, config, processes)
    model, meta = assembled.model, assembled.meta
    base, base_layers = describe_base(meta.assignments, processes), describe_layers(assembled, processes)
    if config.model.cache_quantized:
        meta.assignments = use_cache(meta.assignments, base, config.model.cache_folder, dtype, processes)
    teacher = assemble_teacher(config, assembled, processes)
    machine = find_machine(config.memory.target_gib, processes)
    settled = config.with_values({"training.packing": assembled.spec.packs_rows})
    run_plan = _plan_memory(settled, assembled, teacher, machine, processes, choices)
    inputs = InputOffload(run_plan.offloaded_bytes)
    set_activation_policy(model.layers, run_plan.policies, inputs)
    spec = _resolve(config, assembled, run_plan, processes)
    num_shards = spec.shards.num_shards
    sizes = count_bytes(model, processes.rank % num_shards, num_shards)
    for note in (*missing, *assembled.notes):
        log.info(f"Note: {note}")
    for note in [] if teacher is None else teacher.notes:
        log.info(f"Note on the teacher: {note}")
    _log_model(assembled, sizes)
    for line in run_plan.lines:
        log.info(f"Memory: {line}")
    is_cuda = device.type == "cuda"
    check_graph(spec.modules, spec.shards.cpu_offload, run_plan.policies, has_dropout(model), is_cuda)
    earlier = resumed_run(config.checkpoint)
    data, split = _prepare_data(spec, assembled, teacher, processes, folder, first_step, earlier)
    flops = count_flops(model, meta.config.get_text_config())
    # Recomputing a layer exchanges heads again, so ranks that share sequences must have the same policy all the time.
    is_auto = config.memory.activations is Activations.auto and run_plan.num_slices == 1
    peaks = PhasePeaks(device, MemoryFallback(model.layers, run_plan.policies, inputs) if is_auto else None)
    return Prepared(
        spec, assembled, teacher, base, base_layers, start, sizes, flops, data, split, machine, run_plan, peaks
    )


def _resolve(config: Config, assembled: AssembledModel, run_plan: RunPlan, processes: Processes) -> RunSpec:
    """The run as its parts get it: settings, and what the model's files, a small model and the plan have decided."""
    settled = config.with_values({"training.packing": assembled.spec.packs_rows})
    return RunSpec(
        modules=replace(assembled.spec.modules, num_slices=run_plan.num_slices),
        data=replace(DataSpec.of(config), packs_rows=assembled.spec.packs_rows),
        shards=ShardSpec.of(
            config.fsdp,
            processes.num_ranks,
            processes.local_num_ranks,
            strategy=run_plan.sharding_strategy,
            reshard_after_forward=run_plan.reshard_after_forward,
            reads_peers=run_plan.reads_peers,
        ),
        steps=StepSpec.of(
            config.training,
            config.optim,
            processes.num_ranks,
            micro_batch_size=run_plan.micro_batch_size,
            num_slices=run_plan.num_slices,
            num_iterations=config.grpo.num_iterations,
        ),
        saving=config.checkpoint,
        reward=config.reward,
        generations=config.tracking,
        tracking=TrackingSpec.of(config),
        recorded=plain_settings(config),
        has_memory_target=config.memory.target_gib is not None,
        outlook=Outlook.of(settled, processes.num_ranks),
    )


def _plan_memory(
    config: Config,
    assembled: AssembledModel,
    teacher: AssembledModel | None,
    machine: Machine,
    processes: Processes,
    choices: Mapping[str, Any],
) -> RunPlan:
    """Choose what the settings leave open, change the model accordingly, and hold the GPU to its memory target."""
    model, device = assembled.model, processes.device
    # Every rank takes rank 0's plan, which depends on the speed measured on its GPU.
    own = _plan(config.with_values(choices), assembled, teacher, machine) if processes.is_main else None
    may_choose_anew = not config.optim.name.is_bitsandbytes  # which fits no other shards
    if own is not None and choices and not own.fits and may_choose_anew:
        shown = ", ".join(show(key, value) for key, value in choices.items())
        log.info(f"Memory: what the checkpoint was trained with does not fit here, and is chosen anew: {shown}")
        own = _plan(config, assembled, teacher, machine)
    run_plan: RunPlan = processes.share(own, RunPlan)
    if not processes.is_main:
        run_plan = run_plan.with_models(trace_assembled(assembled, machine.is_cuda), _traced(teacher, machine))
    use_tiles(model.layers, run_plan.num_tile_tokens)
    use_head_pieces(model.head, run_plan.head_in_pieces)
    share_sequences(assembled, run_plan.num_slices, processes)
    if config.memory.target_gib is not None:
        hold_to(machine.target, run_plan.plan.library_bytes if run_plan.plan is not None else 0, device)
    if config.memory.snapshot:
        start_snapshot(device)
    return run_plan


def _traced(teacher: AssembledModel | None, machine: Machine) -> ModelTracer | None:
    return None if teacher is None else trace_assembled(teacher, machine.is_cuda)


def _plan(config: Config, assembled: AssembledModel, teacher: AssembledModel | None, machine: Machine) -> RunPlan:
    """The plan of a model that is traced on meta, and of its teacher."""
    try:
        return plan_run(
            config,
            trace_assembled(assembled, machine.is_cuda),
            quant_settings(assembled.meta.format, config.quant),
            machine,
            _traced(teacher, machine),
        )
    except UntraceableModel as error:
        return run_without_plan(config, len(assembled.model.layers), str(error))


def _log_model(assembled: AssembledModel, sizes: Sizes) -> None:
    meta, num_fp8 = assembled.meta, assembled.num_fp8_layers
    log.info(
        f"Model: {meta.model.name_or_path}, {show_size(sizes.num_base)} parameters, {meta.kind}, "
        f"{assembled.spec.attention} attention, Liger kernels: {', '.join(assembled.liger_kernels) or 'none'}; "
        f"{assembled.num_fused_groups} groups of layers fused"
        f"{f', {num_fp8} layers in fp8' if num_fp8 else ''}; "
        f"training {show_size(sizes.num_trainable)} in {len(trainable_names(assembled.model))} tensors"
    )


def _prepare_data(
    spec: RunSpec,
    assembled: AssembledModel,
    teacher: AssembledModel | None,
    processes: Processes,
    folder: Path,
    first_step: int,
    earlier_folder: Path | None,
) -> tuple[PreparedData[TrainingData], BatchSplit]:
    """Tokenize the data, or open a stream of it, and divide it into steps."""
    model = assembled.model
    meta = assembled.meta
    tokenizer = assembled.tokenizer
    data: PreparedData[TrainingData]
    if spec.data.settings.streaming:
        split = split_batches(spec.steps, processes.num_ranks, 0)  # max_steps says where it ends
        data = open_stream(spec.data, tokenizer, split, processes, folder, first_step, model.vocab_size, earlier_folder)
    else:
        if spec.data.task.writes_answers:
            prompts = prepare_questions(spec.data, tokenizer, processes, model.vocab_size)
            check_scores(spec.data.task, tokenizer, prompts, processes)
            data = prompts
        else:
            data = prepare_data(spec.data, tokenizer, processes, model.vocab_size)
        split = split_batches(spec.steps, processes.num_ranks, len(data.train))
        if spec.steps.group_by_length:
            grouped = replace(data.train, group_size=split.global_batch_size)
            data = replace(data, train=grouped)
    beyond = check_positions(meta.model, meta.config.get_text_config(), data)
    if teacher is not None:
        check_teacher_positions(teacher, spec.data.max_length)
    if isinstance(model, Classifier):
        model.weigh_classes(data.train, processes.device)
    for line in str(data.report).splitlines():
        log.info(f"Data: {line}")
    if beyond is not None:
        log.info(f"Note: {beyond}")
    length = spec.data.sequence_length
    slices = describe_slices(length, spec.steps.num_slices)
    log.info(f"Steps: {split.num_steps} of {length} tokens a sequence at most{slices}")
    num_sequences = None if spec.data.settings.streaming else len(data.train)
    for doubt in (spec.outlook.few_steps(split.num_steps, num_sequences), spec.outlook.unusual_rate()):
        if doubt is not None:
            log.warning(f"Note: {doubt}")
    return data, split
