"""Find the runs of a report and write it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from qlora_fsdp.errors import RunFolderError
from qlora_fsdp.files import write_atomically
from qlora_fsdp.report.page import make_page, read
from qlora_fsdp.run_state import find_runs


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes a report about all runs in some folders.

    Args:
        folders: run folders, or folders that hold some.
        output: the file; None: report.html in the folder that they share.

    Returns:
        The file.

    Raises:
        RunFolderError: there is no run, or the file can't be written.
    """
    folders = [folder.resolve() for folder in folders]
    found = list(dict.fromkeys(run for folder in folders for run in sorted(find_runs(folder), key=_natural)))
    if not found:
        where = ", ".join(map(str, folders))
        raise RunFolderError(f"No run is in {where}. Name a run.folder, or a folder above some.")
    root = Path(os.path.commonpath(folders))
    names = {run: run.name if run == root else str(run.relative_to(root)) for run in found}
    page = make_page(names[found[0]] if len(found) == 1 else root.name, [read(run, names[run]) for run in found])
    file = root / "report.html" if output is None else output
    try:
        write_atomically(file, page)
    except OSError as error:
        raise RunFolderError(f"{file} can't be written: {error}. Name another with --output.") from error
    return file


def _natural(path: Path) -> list[tuple[int, float, str]]:
    """The order that people expect: r=4 before r=16."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(path))
    return [(1, float(part), "") if index % 2 else (0, 0.0, part) for index, part in enumerate(parts)]
