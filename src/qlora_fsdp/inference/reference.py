"""What the loss of a preference compares a saved adapter with: what training compared it with.

Training has its reference before the first step changes anything. A saved adapter has only the end, so the reference is
made again: the base with what an adapter begins with, or with the adapter that the run started from.
"""

from __future__ import annotations

from pathlib import Path

import peft

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.config.adapter_config import ADAPTER_WEIGHTS
from qlora_fsdp.config.commands import read_started_from
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.start_adapter import SETTING, typed_folder
from qlora_fsdp.data.tokenizer import add_tokens, find_tokenizer
from qlora_fsdp.model.adapters.initialize import initialize_adapters
from qlora_fsdp.model.adapters.read import SavedAdapter
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.tasks.preference import PreferenceLM
from qlora_fsdp.records.run_state import CHECKPOINTS, START_FOLDER
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import log


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
        self.model, self.seed = trained.model, config.training.seed
        self.is_wanted = isinstance(self.model, PreferenceLM) and config.preference.loss.needs_reference
        self.start = _find_start(adapter, config) if self.is_wanted and adapter is not None else None
        self.tokens = trained.tokens
        self.adapter = None if adapter is None else SavedAdapter(Path(adapter).expanduser())
        if self.start is not None:
            self.start.check(trained.model.model, trained.meta.head)
            self.start.check_values(processes)
            log.info(f"Reference: the adapter in {self.start.folder}, from which training started")
        elif self.is_wanted and (config.tokenizer.add_tokens or config.tokenizer.add_special_tokens):
            # Rows of new tokens began at the mean. The adapter's tokenizer knows these tokens, and the base's does not.
            self.tokens = add_tokens(
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


def _find_start(adapter: str, config: Config) -> SavedAdapter | None:
    """The adapter that training started from: as typed, or the copy in the run's folder; None if it began anew.

    Raises:
        AdapterError: the adapter's folder names one that is not there, or not the one that is typed.
    """
    wanted = read_started_from(adapter)
    folder = Path(adapter).expanduser().resolve().parent  # of the run, or of one of its checkpoints
    run_folder = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    place = run_folder / START_FOLDER if config.lora.start is None else typed_folder(config)
    weights = place / ADAPTER_WEIGHTS
    if weights.is_file() and wanted in (None, digest_file(weights)):
        return SavedAdapter(place, SETTING)
    if wanted is None:
        return None
    loss = show("preference.loss", config.preference.loss)
    where = f"{START_FOLDER} beside it" if config.lora.start is None else show(SETTING, config.lora.start)
    raise AdapterError(
        f"adapter={adapter} was trained on from another adapter, which {loss} compares it with, and {where} does not "
        f"have it (SHA-256 of its weights: {wanted}). Set {SETTING} to its folder, or preference.loss=cpo, which "
        "compares with none."
    )
