"""The folder of a run, as a run that starts makes it."""

from __future__ import annotations

from pathlib import Path

from qlora_fsdp.config.reading.compose import to_yaml
from qlora_fsdp.config.schema import Config
from qlora_fsdp.records.run_folder import hold_run_folder, open_run_folder
from qlora_fsdp.runtime.processes import Processes


def start_folder(config: Config, processes: Processes, keep_records: bool = False) -> Path:
    """Hold and open the run folder, until `close_run_folder`."""
    folder = hold_run_folder(config.run, processes)
    open_run_folder(folder, to_yaml(config, as_written=True), processes, keep_records)
    return folder
