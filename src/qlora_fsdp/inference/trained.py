"""A trained model in use: the quantized base with its adapter, whole on one process or sharded over several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import torch

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, read_lora
from qlora_fsdp.config.adapter.lora_start import SETTING
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings, read_base_fingerprint, read_started_from
from qlora_fsdp.config.schema import Config, PreferenceLoss, TaskConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.data.batch import Batch, Rewarded, Taught
from qlora_fsdp.data.labels import label_width
from qlora_fsdp.data.tokenizer import NO_TOKENS, extend_tokenizer, find_tokenizer, template_name
from qlora_fsdp.model.adapters.initialize import initialize_adapters
from qlora_fsdp.model.adapters.read_adapter import BASE_FIX, NO_ADAPTER, SavedAdapter
from qlora_fsdp.model.assemble import AssembledModel, assemble, check_fingerprint, describe_base
from qlora_fsdp.model.settle import settle_model
from qlora_fsdp.model.tasks.distill_lm import DistillLM
from qlora_fsdp.model.tasks.preference import PreferenceLM
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.run_state import CHECKPOINTS, START_FOLDER
from qlora_fsdp.runtime.fallbacks import check_bitsandbytes
from qlora_fsdp.runtime.hardware import dtype_name
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import log
from qlora_fsdp.sharding.materialize import materialize
from qlora_fsdp.weights.quantized_cache import use_cache

WHOLE_SHARE = 0.6  # of a GPU's free memory that a whole model may take; the rest is for texts and what computing takes


def assemble_trained(
    config: Config, settings: BaseAndAdapterSettings, processes: Processes, generates: bool = False
) -> AssembledModel:
    """The base on meta with the adapter's layers, without any weights. Collective.

    Args:
        config: settings of the base, which an adapter's folder has.
        settings: the command's: PEFT's folder of a LoRA adapter, or None for the base alone, and whether the base may
            be another one.
        processes: all ranks take part.
        generates: the model is for `generate`: its attention has to know a cache and padding on the left.

    Raises:
        AdapterError: the adapter is not LoRA, does not fit the base, was trained on another one, or has NaN or infinite
            values.
    """
    check_bitsandbytes(config.quant, processes.device)
    folder = None if settings.adapter is None else Path(settings.adapter).expanduser()
    saved = None if folder is None else SavedAdapter(folder)
    lora = NO_ADAPTER if folder is None else replace(read_lora(folder), lora_dropout=0.0)
    tokens = NO_TOKENS if saved is None else saved.read_tokens()
    try:
        spec = settle_model(
            config,
            lora,
            processes,
            trains=False,
            generates=generates,
            tokenizer_folder=folder,
            saved_tokens=tokens,
        )
        trained = assemble(spec, processes.device)
    except AdapterError as error:
        raise AdapterError(
            f"adapter={folder} does not fit the model: {error}\nSet model.path to the model that it was trained on."
        ) from error
    if saved is not None:
        saved.check(trained.model.model)
        if not settings.other_base:
            check_fingerprint(
                trained,
                read_base_fingerprint(settings.adapter),
                processes,
                base=show("model.path", config.model.path or config.model.name),
                adapter=str(saved),
                fix=f". {BASE_FIX}. If you want the adapter on these all the same, type other_base=true.",
            )
        saved.check_values(processes)
    return trained


def load_trained(
    config: Config, settings: BaseAndAdapterSettings, processes: Processes, generates: bool = False
) -> AssembledModel:
    """Assemble as `assemble_trained` does, and load base and adapter. The model is in evaluation mode. Collective.

    Several ranks each get the whole model where it fits, else a shard.

    Args:
        config: settings of the base, which an adapter's folder has.
        settings: the command's: PEFT's folder of a LoRA adapter, or None for the base alone, and whether the base may
            be another one.
        processes: all ranks take part.
        generates: the model is for `generate`. Otherwise it has the reference of its preference, if it learned one.

    Raises:
        AdapterError: the adapter is not LoRA, does not fit the base, was trained on another one, or has NaN or
            infinite values; or the one that its preference's loss compares it with is not to be found.
    """
    trained, adapter = assemble_trained(config, settings, processes, generates), settings.adapter
    meta, device = trained.meta, processes.device
    if config.model.cache_quantized:  # an adapter's settings may come from another machine: nothing is written
        base, folder = describe_base(meta.assignments, processes), config.model.cache_folder
        meta.assignments = use_cache(meta.assignments, base, folder, trained.dtype, processes, writes=False)

    reference = None if generates else Reference(trained, adapter, config, processes)

    def fill_adapters(model: peft.PeftModel) -> None:
        if reference is not None:
            reference.freeze(model)
        else:
            initialize_adapters(model, True, config.training.seed, trained.tokens)
        if adapter is not None:
            SavedAdapter(Path(adapter).expanduser()).load(model)

    is_whole = processes.num_ranks == 1 or fits_whole(trained, config.fsdp.cpu_offload, processes)
    shards = ShardSpec.whole()
    if not is_whole:
        shards = ShardSpec.of(config.fsdp, processes.num_ranks, processes.local_num_ranks)
    loaded = materialize(trained, shards, config.training.seed, processes, fill_adapters)
    trained.model.eval()
    if loaded.units:
        _run_from_the_root(trained.model, config.task, device)
    kind = "with the whole model" if is_whole else "with a part of each layer"
    part = "" if processes.num_ranks == 1 else f", each {kind}"
    template = f", chat template: {template_name(trained.tokenizer)}" if generates else ""
    log.info(
        f"Model: {meta.model.name_or_path}, {meta.kind}, {dtype_name(trained.dtype)}, adapter: {adapter or 'none'}, "
        f"{plural(processes.num_ranks, 'rank')} on {device.type}{part}{template}"
    )
    return trained


def fits_whole(trained: AssembledModel, cpu_offload: bool, processes: Processes) -> bool:
    """Whether each rank can have the whole model on its GPU, where nothing has to be gathered. Collective.

    Not on a CPU, whose memory all ranks share, and not with fsdp=offload, which is asked for where memory is short.
    """
    if processes.device.type != "cuda" or cpu_offload:
        return False
    num_bytes = sum(param.numel() * param.itemsize for param in trained.model.parameters())
    least_free = -processes.max([-float(torch.cuda.mem_get_info(processes.device)[0])])[0]
    return num_bytes <= WHOLE_SHARE * least_free


def num_positions(trained: AssembledModel) -> int | None:
    """Tokens that prompt and completion may have together; None if the model sets no limit."""
    return getattr(trained.model.base.config.get_text_config(), "max_position_embeddings", None)


@torch.no_grad()
def _run_from_the_root(model: TaskModel, task: TaskConfig, device: torch.device) -> None:
    """Run the sharded model once on a few tokens.

    FSDP sets itself up in its first forward pass, which has to begin at the root module. `generate` begins at a module
    inside.
    """
    ones = torch.ones((1, 8), dtype=torch.int64)
    zeros = torch.zeros((1, 8))
    batch = Batch(
        input_ids=ones,
        targets=ones,
        position_ids=torch.arange(8)[None],
        sequence_starts=torch.tensor([0, 8], dtype=torch.int32),
        max_row_length=8,
        labels=torch.zeros((0, label_width(task))),
        label_positions=torch.zeros(0, dtype=torch.int64),
        num_tokens=torch.tensor([8]),
        is_good=torch.zeros(0, dtype=torch.bool),
        rewarded=Rewarded(advantages=torch.zeros(1), weights=zeros, sampled=zeros, old=zeros, reference=zeros),
        taught=Taught(positions=torch.zeros(0, dtype=torch.int64), sampled=torch.zeros(0)),
    )
    batch = batch.to(device)
    model(model.with_reference(batch) if isinstance(model, DistillLM) else batch)
    model.forget_outputs()


class Reference:
    """The reference of a saved adapter. It is found before anything large is read. Collective.

    Args:
        trained: the base with the adapter's layers, on meta.
        adapter: the adapter's folder; None for the base alone.
        config: settings of the base and of the preference.
        processes: all ranks take part.

    Raises:
        AdapterError: the adapter that training started from is not to be found, or is another one.
    """

    def __init__(self, trained: AssembledModel, adapter: str | None, config: Config, processes: Processes) -> None:
        self.model = trained.model
        self.seed = config.training.seed
        self.is_wanted = isinstance(self.model, PreferenceLM) and config.preference.loss.needs_reference
        self.start = None
        if self.is_wanted and adapter is not None:
            self.start = _find_start(adapter, config.lora.start, config.preference.loss)
        self.tokens = trained.tokens
        self.adapter = None if adapter is None else SavedAdapter(Path(adapter).expanduser())
        if self.start is not None:
            self.start.check(trained.model.model, trained.meta.head)
            self.start.check_values(processes)
            log.info(f"Reference: the adapter in {self.start.folder}, from which training started")
        elif self.is_wanted and (config.tokenizer.add_tokens or config.tokenizer.add_special_tokens):
            # Rows of new tokens began at the mean. The adapter's tokenizer knows these tokens, and the base's does not.
            self.tokens = extend_tokenizer(
                find_tokenizer(config.model, config.data, trained.files.folder, None, False), config.tokenizer
            )

    def freeze(self, model: peft.PeftModel) -> None:
        """Fill the adapter's layers, on a base that is loaded, and keep what they then have as the reference."""
        initialize_adapters(model, True, self.seed, self.tokens)
        if self.start is not None:
            self.start.load(model)
        elif self.adapter is not None:
            self.adapter.load_untrained(model)
        if isinstance(self.model, PreferenceLM) and self.is_wanted:
            self.model.freeze_start(keeps_copy=True)


def run_folder_of(adapter: str) -> Path:
    """The folder of the run that wrote an adapter, if the adapter is where the run or its checkpoint left it."""
    folder = Path(adapter).expanduser().resolve().parent
    return folder.parent.parent if folder.parent.name == CHECKPOINTS else folder


def _find_start(adapter: str, typed: str | None, loss: PreferenceLoss) -> SavedAdapter | None:
    """The adapter that training started from: as typed, or the copy in the run's folder; None if it began anew.

    Raises:
        AdapterError: the adapter's folder names one that is not there, or not the one that is typed.
    """
    wanted = read_started_from(adapter)
    place = run_folder_of(adapter) / START_FOLDER if typed is None else Path(typed).expanduser()
    weights = place / ADAPTER_WEIGHTS
    if weights.is_file() and wanted in (None, digest_file(weights)):
        return SavedAdapter(place, SETTING)
    if wanted is None:
        return None
    name = show("preference.loss", loss)
    where = f"{START_FOLDER} beside it" if typed is None else show(SETTING, typed)
    raise AdapterError(
        f"adapter={adapter} was trained on from another adapter, which {name} compares it with, and {where} does not "
        f"have it (SHA-256 of its weights: {wanted}). Set {SETTING} to its folder, or preference.loss=cpo, which "
        "compares with none."
    )
