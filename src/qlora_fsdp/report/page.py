"""Writes the report of one run or of several: figures, charts, differences, settings and environment.

It is one page with its style, for light and dark screens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.common.text import without_directions
from qlora_fsdp.records.run_state import REPORT_FILE, SWEEP_FILE, find_runs, read_jobs
from qlora_fsdp.report.charts import NUM_COLOURS
from qlora_fsdp.report.run_files import Run, read_run_files
from qlora_fsdp.report.sections import charts, details, figures, generations, memory, overview, swept

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #6b6b6b; --rule: #dddddd; --paper: #ffffff; --bad: #b3261e;
  --0: #0072b2; --1: #d55e00; --2: #009e73; --3: #cc79a7; --4: #56b4e9; --5: #e69f00; --6: #7a5cc4; --7: #555555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a0a0a0; --rule: #3a3a3a; --paper: #161616;
  --bad: #ff8a80; --0: #4aa8e0; --7: #aaaaaa; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
figcaption { color: var(--soft); } figcaption b { color: var(--ink); font-weight: 600; }
.bad { color: var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 1rem; }
@media (max-width: 500px) { .charts { grid-template-columns: 1fr; } }
figure { margin: .8rem 0 0; } svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--rule); } polyline { fill: none; stroke-width: 1.5; } .faint { opacity: .35; stroke-width: 1; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: normal; vertical-align: top; }
.facts td { white-space: pre-wrap; overflow-wrap: anywhere; } .facts { margin-bottom: 1.2rem; }
.facts pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 13px; margin: .3rem 0; } summary { cursor: pointer; }
.text td { white-space: pre-wrap; vertical-align: top; min-width: 14rem; overflow-wrap: anywhere; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .4rem 0 .2rem; }
.thin { height: .15rem; vertical-align: middle; }
""" + "".join(
    f".c{i} {{ stroke: var(--{i}); }} circle.c{i} {{ fill: var(--{i}); }} .key.k{i} {{ background: var(--{i}); }}\n"
    for i in range(NUM_COLOURS)
)


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
    swept_settings = {run: settings for folder in folders for run, settings in read_jobs(folder / SWEEP_FILE)}
    title = names[found[0]] if len(found) == 1 else root.name
    runs = [read_run_files(run, names[run], swept_settings.get(run, {})) for run in found]
    page = without_directions(make_page(title, runs))
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
        body += [overview(run), charts(runs), generations(run), memory(run), details(run)]
    else:
        body += [figures(runs), swept(runs), charts(runs)]
    content = "\n".join(part for part in body if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n{content}\n</body></html>\n"
    )


def _natural(path: Path) -> list[tuple[int, float, str]]:
    """A key that sorts as people expect: r=4 before r=16."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(path))
    return [(1, float(part), "") if index % 2 else (0, 0.0, part) for index, part in enumerate(parts)]
