"""Writes the report of one run or of several: figures, charts, differences, settings and environment."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.records.run_state import REPORT_FILE, SWEEP_FILE, find_runs, read_jobs
from qlora_fsdp.report.run_files import Run, read_run_files
from qlora_fsdp.report.sections import charts, details, facts, figures, generations, memory, swept
from qlora_fsdp.report.style import STYLE


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes a report about all runs in some folders. Returns its file.

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
    settings = {run: by_sweep for folder in folders for run, by_sweep in read_jobs(folder / SWEEP_FILE)}
    page = make_page(
        names[found[0]] if len(found) == 1 else root.name,
        [read_run_files(run, names[run], settings.get(run, {})) for run in found],
    )
    file = root / REPORT_FILE if output is None else output
    try:
        write_atomically(file, page)
    except OSError as error:
        raise RunFolderError(f"{file} can't be written: {error}. Name another with --output.") from error
    return file


def make_page(title: str, runs: Sequence[Run]) -> str:
    """Returns the report as one file of HTML, without scripts and without anything from elsewhere."""
    body = [f"<h1>{escape(title)}</h1>"]
    if len(runs) == 1:
        run = runs[0]
        body += [facts(run), charts(runs), generations(run), memory(run), details(run)]
    else:
        body += [figures(runs), swept(runs), charts(runs)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(part for part in body if part) + "\n</body></html>\n"
    )


def _natural(path: Path) -> list[tuple[int, float, str]]:
    """A key that sorts as people expect: r=4 before r=16."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(path))
    return [(1, float(part), "") if index % 2 else (0, 0.0, part) for index, part in enumerate(parts)]
