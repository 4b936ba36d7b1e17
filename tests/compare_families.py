"""Losses of every family against stock libraries: `python -m tests.compare_families [FAMILY ...]`.

A tiny random model of each family trains for some steps on 1, 2 and 4 ranks, packed and padded, and stock transformers,
bitsandbytes and PEFT train the same in one process, a row at a time. Prints a Markdown table of the largest differences
of a loss, or why a run was refused. `--write` puts its rows into docs/models.md. `--all` takes every causal language
model of the installed transformers, at sizes that are derived from its default config, padded on one rank, and ends
with counts.

No part of `make test`, which compares one family of each mechanism (tests/distributed/test_losses.py).
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
)
from transformers.utils.logging import disable_progress_bar

from qlora_fsdp.common.errors import UserError
from qlora_fsdp.model.trials.attention_by_starts import BY_STARTS
from qlora_fsdp.model.trials.row_trial import RowTrial
from tests.helpers import shared as shared  # how this process computes
from tests.helpers.checkpoints import FAMILIES, OTHER_FAMILIES, write_checkpoint
from tests.helpers.families import EPS, MORE, make_config
from tests.helpers.plain_varlen import cpu_with_varlen
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.reference import find_experts, stock_losses
from tests.helpers.runs import settings, train_here, write_rows

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
TOLERANCE = 1e-5
MAX_REASON = 400
TOO_NARROW = "would cross rows"  # of a refusal
FAMILIES_A_WORLD = 10  # with --all; else one that fails would end the others
NOT_PACKED = re.compile(r"refused: training\.packing=true can't be used with \w+: (.*)\. Set training\.packing=auto")


Case = tuple[str, bool]  # a family, and whether its rows are packed


@dataclass(frozen=True)
class Wanted:
    """What is compared: on how many ranks, for how many steps, and whether rows are packed."""

    ranks: Sequence[int]
    steps: int
    packings: Sequence[bool]

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step: at least 4, and the same number on every rank of each world."""
        smallest = math.lcm(*self.ranks)
        return smallest * math.ceil(4 / smallest)


@dataclass
class Comparison:
    """What was found of one family.

    Attributes:
        family: transformers' name.
        experts: where they are computed, for the table.
        differences: the largest difference of a loss over all ranks, or why there is none, by whether rows were packed.
        settings: those that were needed beside the common ones.
        needs_starts: whether only kernels of GPUs keep its packed rows apart, which plain torch then stands in for.
    """

    family: str
    experts: str = ""
    differences: dict[bool, float | str] = field(default_factory=dict)
    settings: list[str] = field(default_factory=list)
    needs_starts: bool = False

    def row(self) -> str:
        """A line of the table."""
        name = f"{self.family} ({', '.join(self.settings)})" if self.settings else self.family
        cells = [_show(found) + " on GPUs" * (each and self.needs_starts) for each, found in self.differences.items()]
        return f"| {' | '.join([name, self.experts, *cells])} |"


def _show(found: float | str) -> str:
    if isinstance(found, str):
        match = NOT_PACKED.match(found)
        return (f"no: {match.group(1)}" if match else found).replace("|", "/")
    return f"{found:.0e}" if found < TOLERANCE else f"**{found:.0e}**"


def describe_experts(config: PretrainedConfig) -> str:
    """How the experts of a model are computed, for the table."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if find_experts(model):
        return "4-bit, adapted"
    is_mixture = any("expert" in name for name, param in model.named_parameters() if param.ndim == 3)
    return "full precision, frozen" if is_mixture else ""


def needs_starts(config: PretrainedConfig) -> bool:
    """Whether packed rows are kept apart by kernels that are told where rows start, and by no mask."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    trial = RowTrial(config, max_length=64)
    by_masks = trial.why_not_packed("eager")
    return by_masks is not None and trial.why_not_packed(BY_STARTS) is None


def train_each(cases: Mapping[Case, Sequence[str]], by_starts: Sequence[Case]) -> dict[Case, list[float] | str]:
    """Losses of runs on this rank of a world, some of them with kernels of GPUs, or why there are none."""
    found: dict[Case, list[float] | str] = {}
    for case, argv in cases.items():
        try:
            with cpu_with_varlen() if case in by_starts else nullcontext():
                found[case] = train_here(argv).losses
        except UserError as error:
            found[case] = f"refused: {_first_line(error)}"
        except Exception as error:
            if os.environ["WORLD_SIZE"] != "1":  # the others would wait for this rank
                raise
            traceback.print_exc()
            found[case] = f"failed: {_first_line(error)}"
    return found


def compare(families: Sequence[str], wanted: Wanted, folder: Path, more: Sequence[str] = ()) -> list[Comparison]:
    """Train tiny models of some families in one world for each number of ranks, and compare with stock libraries."""
    found, cases = [], dict[Case, list[str]]()
    rows = write_rows(folder / "rows.jsonl")
    for family in families:
        comparison = Comparison(family, settings=[*MORE.get(family, []), *more])
        found.append(comparison)
        try:
            config = make_config(family)
            comparison.experts = describe_experts(config)
            comparison.needs_starts = True in wanted.packings and needs_starts(config)
            checkpoint = write_checkpoint(config, folder / family)
        except Exception as error:
            comparison.differences = dict.fromkeys(wanted.packings, f"no tiny model: {_first_line(error)}")
            continue
        common = [f"training.max_steps={wanted.steps}", f"optim.eps={EPS}", *comparison.settings]
        common.append(f"training.global_batch_size={wanted.global_batch_size}")
        for packing in wanted.packings:
            cases[family, packing] = settings(checkpoint, rows, *common, packing=packing)
    by_starts = [(each.family, True) for each in found if each.needs_starts]
    ours: dict[Case, list[list[float] | str]] = {case: [] for case in cases}
    for num_ranks in wanted.ranks:
        split = [f"training.micro_batch_size={wanted.global_batch_size // num_ranks}"]
        try:
            split_cases = {case: [*argv, *split] for case, argv in cases.items()}
            worlds = run_ranks(num_ranks, train_each, split_cases, by_starts)
        except RanksFailed as error:
            logging.error("%s on %d ranks: %s", families, num_ranks, error)
            worlds = [dict.fromkeys(cases, f"failed: {_last_line(error)}")]
        for case in cases:
            ours[case] += [world[case] for world in worlds]
    for comparison in found:
        for packing in wanted.packings:
            if (case := (comparison.family, packing)) in cases:
                comparison.differences[packing] = _difference(ours[case], cases[case])
    return found


def compare_all(families: Sequence[str], wanted: Wanted, size: int) -> Iterator[Comparison]:
    """Compare families, `size` at a time.

    Those whose rows are too short for blocks of 64, at tiny sizes, are compared in int8.
    """
    for first in range(0, len(families), size):
        with TemporaryDirectory() as folder:
            some = compare(families[first : first + size], wanted, Path(folder))
        narrow = [each.family for each in some if any(TOO_NARROW in str(why) for why in each.differences.values())]
        if narrow:
            with TemporaryDirectory() as folder:
                in_int8 = compare(narrow, wanted, Path(folder), ["quant=int8"])
            some = [each for each in some if each.family not in narrow] + in_int8
        yield from some


def _difference(ours: Sequence[list[float] | str], argv: Sequence[str]) -> float | str:
    """The largest difference from the reference, or the first reason why there is none."""
    reasons = [losses for losses in ours if isinstance(losses, str)]
    if reasons and not reasons[0].startswith("failed"):
        return reasons[0]
    try:
        reference = stock_losses(argv)
    except Exception as error:
        return f"stock libraries fail: {_first_line(error)}"
    if reasons:
        return reasons[0]
    return max(
        abs(a - b) if abs(a - b) >= 0 else float("inf")
        for losses in ours
        if isinstance(losses, list)
        for a, b in zip(losses, reference, strict=True)
    )


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line and not line.startswith(("rank", " ", "Its output"))]
    return (lines[-1] if lines else str(error))[:MAX_REASON]


def header(packings: Sequence[bool]) -> list[str]:
    """The first two lines of the Markdown table."""
    columns = ["Family", "Experts", *("Packed" if packing else "Padded" for packing in packings)]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def write_table(head: Sequence[str], rows: Sequence[str]) -> None:
    """Put rows into the table between its markers in the document; rows of other families stay."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    old = table.strip().splitlines()[len(head) :]
    by_family = {row.split()[1]: row for row in [*old, *rows]}
    lines = [*head, *(by_family[family] for family in sorted(by_family))]
    DOCUMENT.write_text("\n".join([before + BEGIN, *lines, END]) + after, encoding="utf-8")


def count(found: Sequence[Comparison]) -> str:
    """How many families equal the reference, packed and padded, and how many there are."""
    kinds: Counter[str] = Counter()
    for comparison in found:
        for packing, difference in comparison.differences.items():
            kind = difference.partition(":")[0] if isinstance(difference, str) else "equal"
            kind = "different" if not isinstance(difference, str) and difference >= TOLERANCE else kind
            kinds[f"{'packed' if packing else 'padded'} {kind}"] += 1
    return f"{len(found)} families: " + ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "families", nargs="*", help="transformers' names of models; all that tests know if there is none"
    )
    parser.add_argument("--all", action="store_true", help="every causal language model that transformers has")
    parser.add_argument("--ranks", help="numbers of ranks: 1,2,4, and 1 with --all")
    parser.add_argument("--steps", type=int, help="steps of a run: 20, and 2 with --all")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    asked = parser.parse_args()
    gc.unfreeze()  # what tests/helpers/shared.py freezes, Triton's bindings would call leaks at the end
    logging.disable(logging.WARNING)
    disable_progress_bar()
    every = sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})
    tested = sorted({*FAMILIES, *OTHER_FAMILIES, "mistral3", "qwen3_vl"})
    families = asked.families or (every if asked.all else tested)
    ranks = [int(number) for number in (asked.ranks or ("1" if asked.all else "1,2,4")).split(",")]
    wanted = Wanted(ranks, asked.steps or (2 if asked.all else 20), (False,) if asked.all else (True, False))
    print("\n".join(header(wanted.packings)), flush=True)
    found = []
    for comparison in compare_all(families, wanted, FAMILIES_A_WORLD if asked.all else 1):
        print(comparison.row(), flush=True)
        found.append(comparison)
    print(count(found), file=sys.stderr)
    if asked.write:
        write_table(header(wanted.packings), [comparison.row() for comparison in found])


if __name__ == "__main__":
    main()
