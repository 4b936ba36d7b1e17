"""summary.json: how a run ended, and its figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import UserError
from qlora_fsdp.common.files import write_json
from qlora_fsdp.config.written import hide
from qlora_fsdp.records.record_files import check_own, records_in
from qlora_fsdp.records.run_state import SUMMARY_FILE

FIRST_SIGNAL_CODE = 128  # a shell's exit code for a process that a signal ended is above this


class RunSummary:
    """Collects the figures of a run, and writes summary.json when the run ends.

    Every rank has one, because any rank may be the one that records a failure. Only rank 0 calls `write`.

    Attributes:
        figures: what summary.json would hold now.
    """

    def __init__(self, num_ranks: int) -> None:
        self.figures: dict[str, Any] = {"status": "running", "num_ranks": num_ranks}
        self._folder: Path | None = None
        self._holder: str | None = None

    def open(self, folder: Path, holder: str | None) -> None:
        """From here on a failure can be recorded: the run folder is this run's. Its lock names the `holder`, rank 0."""
        self._folder, self._holder = folder, holder

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Around what a checkpoint costs at the start: to verify it, and to load it."""
        started = time.perf_counter()
        yield
        self.figures["resume_seconds"] = self.figures.get("resume_seconds", 0.0) + time.perf_counter() - started

    def starts_from(self, adapter: str, digest: str) -> None:
        """The adapter that `lora.start` names, and the SHA-256 of its weights."""
        self.figures["started_from"] = {"adapter": adapter, "sha256": digest}

    def loaded(self, figures: dict[str, Any], setup_seconds: float) -> None:
        """The model is loaded and proven; all that came before the first step took `setup_seconds`."""
        self.figures |= figures | {"setup_seconds": setup_seconds}

    def trained(self, checkpoints: dict[str, Any]) -> None:
        """Training has ended, well or not; `checkpoints` is what was saved on the way."""
        self.figures["checkpoints"] = checkpoints

    def measured(self, predicted: dict[str, Any] | None, measured: dict[str, Any]) -> None:
        """The memory that the plan predicted, if there is one, and the memory that the run took."""
        self.figures["memory"] = {"predicted": predicted, "measured": measured}

    def finished(self, result: dict[str, Any], seconds: float) -> None:
        """The adapter is written; `result` is how training went."""
        self.figures |= {"status": "finished"} | result | {"seconds": seconds}

    def failed(self, error: BaseException) -> None:
        """Write that an error or a signal, on whichever rank, has ended the run; nothing before there is a folder."""
        if self._folder is None:
            return
        status = "interrupted" if getattr(error, "exit_code", 1) > FIRST_SIGNAL_CODE else "failed"
        text = hide(str(error) if isinstance(error, UserError) else repr(error))
        with suppress(OSError):  # the folder may be what failed
            check_own(self._folder, self._holder)
            write_json(self._folder / SUMMARY_FILE, self.figures | {"status": status, "error": text})

    def write(self) -> None:
        """Write summary.json, if the disk takes it."""
        assert self._folder is not None
        records_in(self._folder).write(SUMMARY_FILE, lambda file: write_json(file, self.figures))
