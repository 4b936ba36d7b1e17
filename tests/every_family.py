"""Every class of transformers' that writes text: does it train here? `python -m tests.every_family [FAMILY ...]`.

A small random model of each causal language model and of each model that answers about images with text goes through
build, adapt, plan and a few steps, and through the same with stock transformers, bitsandbytes and PEFT, a row at a
time. Each has a process and a time limit of its own. On a GPU (`--gpu`) it runs as a user installs it, in bfloat16;
there the log says besides whether steps are recorded as CUDA graphs.

    python -m tests.every_family --results FILE            prints a line a family, and keeps what was found
    python -m tests.every_family --results FILE --write    puts what FILE has into docs/models.md, and runs nothing

What is kept already is not run again, so that a run that was ended goes on; `--again` runs all that failed. Is to be
run whenever transformers is raised. No part of CI.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from transformers.utils.logging import disable_progress_bar

from tests.helpers import shared as shared  # how this process computes
from tests.helpers.families import Found, each, every_family, largest_difference, reference, try_family
from tests.helpers.runs import write_rows

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- every class: begin -->", "<!-- every class: end -->"
STEPS = {"cpu": 2, "gpu": 4}  # graphs are recorded after two
TOLERANCE = {"cpu": 1e-5, "gpu": 2e-2}  # of a loss, relative; bfloat16 itself is known to 4e-3
LIMIT_SECONDS = 180
TOO_NARROW = "would cross rows"  # of a refusal: at tiny sizes rows are too short for blocks of 64
MAX_REASON = 160


@dataclass(frozen=True)
class Entry:
    """What was found of a family on a kind of device.

    Attributes:
        family: transformers' name.
        device: cpu or gpu.
        transformers: the version.
        error: why it does not train; None if it does.
        why_padded: why its rows are padded; None if they are packed.
        why_launched: why steps are not recorded on a GPU; None if they are, and on a CPU.
        difference: the largest relative difference of a loss from stock libraries, or why there is no such loss.
        settings: what was set beside the common settings.
    """

    family: str
    device: str
    transformers: str
    error: str | None
    why_padded: str | None
    why_launched: str | None
    difference: float | str | None
    settings: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for the terminal."""
        if self.error is not None:
            return f"{self.family:24} {self.error}"
        packing = "packed" if self.why_padded is None else f"padded ({self.why_padded})"
        shown = f"{self.difference:.0e}" if isinstance(self.difference, float) else self.difference
        return f"{self.family:24} trains  {shown}  {packing}  {self.why_launched or ''} {' '.join(self.settings)}"


def find_out(family: str, device: str) -> Entry:
    """Run a family, in int8 where its rows are too narrow for 4 bits at this size."""
    found = _try(family, device, ())
    if found.error is not None and TOO_NARROW in found.error:
        found = _try(family, device, ("quant=int8",))
    return found


def _try(family: str, device: str, more: tuple[str, ...]) -> Entry:
    steps = STEPS[device]
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl")
        call = (family, folder, steps, ("auto",), more)
        (run,) = each(try_family, [call], device == "gpu", LIMIT_SECONDS, 1)
        run = Found({}, [], run) if isinstance(run, str) else run
        difference: float | str | None = None
        if run.error is None or run.error.startswith("failed"):
            call = (family, folder, steps, run.is_packed and run.error is None, more)
            (stock,) = each(reference, [call], False, LIMIT_SECONDS, 1)
            if isinstance(stock, str):
                difference = stock
            elif run.error is None:
                difference = largest_difference(run, stock)
    why_launched = run.why_launched if device == "gpu" and run.error is None else None
    version = transformers.__version__
    return Entry(family, device, version, run.error, run.why_padded, why_launched, difference, more)


def read_entries(file: Path) -> dict[tuple[str, str], Entry]:
    """What is kept, by family and device; later lines count."""
    found: dict[tuple[str, str], Entry] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        values = json.loads(line)
        entry = Entry(**values | {"settings": tuple(values["settings"])})
        found[entry.family, entry.device] = entry
    return found


def table(entries: Mapping[tuple[str, str], Entry]) -> list[str]:
    """The lines of docs/models.md: families that do the same stand together."""
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for (family, device), entry in sorted(entries.items()):
        if device == "cpu":
            groups[_group(entry)].append(family)
    lines = ["| On a CPU | Classes |", "|---|---|"]
    for (_order, what), families in sorted(groups.items()):
        lines.append(f"| {what} ({len(families)}) | {', '.join(families)} |")
    on_gpu: dict[tuple[int, str], list[str]] = defaultdict(list)
    for (family, device), entry in sorted(entries.items()):
        if device == "gpu":
            on_gpu[_group_on_gpu(entry)].append(family)
    if on_gpu:
        lines += ["", "| On a GPU | Classes |", "|---|---|"]
        for (_order, what), families in sorted(on_gpu.items()):
            lines.append(f"| {what} ({len(families)}) | {', '.join(families)} |")
    return lines


def _group(entry: Entry) -> tuple[int, str]:
    """The row of the table that a family stands in, with the order of rows."""
    if entry.error is not None:
        is_stock = isinstance(entry.difference, str)
        if entry.error.startswith("no tiny model"):
            return 6, "not tried: no small model could be made of the default config"
        if entry.error.startswith("refused"):
            return 4, f"refused: {_reason(entry.error)}"
        return (5, f"stock libraries fail too: {_reason(entry.error)}") if is_stock else (3, _reason(entry.error))
    if isinstance(entry.difference, float) and entry.difference > TOLERANCE[entry.device]:
        return 2, f"**other losses than stock's**, by {entry.difference:.0e}"
    against = (
        "" if isinstance(entry.difference, float) else "; stock libraries can't train it, so losses are not compared"
    )
    if entry.why_padded is None:
        return 0, f"trains, packed{against}"
    return 1, f"trains, padded: {_reason(entry.why_padded)}{against}"


def _group_on_gpu(entry: Entry) -> tuple[int, str]:
    if entry.error is not None or entry.why_launched is not None:
        return 1 + (entry.error is not None), _reason(entry.error or entry.why_launched or "")
    return 0, "trains, recorded as CUDA graphs"


def _reason(text: str) -> str:
    """A reason without what differs between families that have the same: numbers, names, long endings."""
    text = text.removeprefix("refused: ").removeprefix("failed: ").replace("|", "/")
    text = re.sub(r"\w+For(ConditionalGeneration|CausalLM)", "its class", text)
    text = re.sub(r"wants [\w ]+ beside", "wants images beside", text)
    text = re.sub(r"^\d+ parameters", "some parameters", text)
    text = re.sub(r"it has [\d,]+ parameters", "it has millions of parameters", text)
    text = re.sub(r"change by [0-9.e-]+ of", "change by a part of", text)
    text = re.sub(r"differ by [0-9.e-]+ of", "differ by a part of", text)
    text = re.sub(r"/tmp/\S+", "FOLDER", text)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


def write_table(entries: Mapping[tuple[str, str], Entry]) -> None:
    """Put the table between its markers in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text("\n".join([before + BEGIN, *table(entries), END]) + after, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs families, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="transformers' names of models; all if there is none")
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--gpu", action="store_true", help="run on the GPU")
    parser.add_argument("--again", action="store_true", help="run those once more that did not train")
    parser.add_argument("--write", action="store_true", help=f"put the results into {DOCUMENT.name}, and run nothing")
    asked = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    entries = read_entries(asked.results)
    if asked.write:
        write_table(entries)
        return
    device = "gpu" if asked.gpu else "cpu"
    for family in asked.families or every_family():
        known = entries.get((family, device))
        has_failed = known is not None and (known.error is not None or not isinstance(known.difference, float))
        if known is not None and not asked.families and not (asked.again and has_failed):
            continue
        entry = find_out(family, device)
        print(entry.line(), flush=True)
        with asked.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


if __name__ == "__main__":
    main()
