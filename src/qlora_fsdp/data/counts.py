"""Counts of what was read and what was left out, which rank 0 prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from qlora_fsdp.common.text import plural
from qlora_fsdp.data.row import SPLIT

NUM_EXAMPLES = 5


@dataclass(frozen=True)
class RowProblem:
    """Rows with one kind of problem.

    Attributes:
        kind: one of the kinds of data.row.
        num_rows: how many rows have the problem.
        num_kept: how many of these rows are cut and used all the same.
        examples: the first few of them, with file and line; those of which the same is to be said together.
    """

    kind: str
    num_rows: int
    num_kept: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        done = "cut" if self.num_kept == self.num_rows else "left out"
        if self.kind == SPLIT:
            done = "split"
        return f"{plural(self.num_rows, 'row')} {done} ({self.kind}): {'; '.join(self.examples)}"


class ProblemCounter:
    """Counts rows with problems by kind, and keeps the places of the first of each."""

    def __init__(self, counted: dict[str, Any] | None = None) -> None:
        """Counts on from what `to_json` gave."""
        counted = counted or {}
        self._num_rows: dict[str, int] = counted.get("num_rows", {})
        self._num_kept: dict[str, int] = counted.get("num_kept", {})
        self._places: dict[str, dict[str, list[str]]] = counted.get("places", {})  # by kind and detail

    def to_json(self) -> dict[str, Any]:
        return {"num_rows": self._num_rows, "num_kept": self._num_kept, "places": self._places}

    def add_more(self, kind: str, num_rows: int, is_kept: bool) -> None:
        """Counts rows of a kind of which enough examples are told already."""
        self._num_rows[kind] += num_rows
        self._num_kept[kind] += num_rows * is_kept

    def add(self, place: str, kind: str, detail: str, is_kept: bool) -> None:
        """Counts a row at a place, a file and line. `is_kept`: it is cut and used all the same."""
        self._num_rows[kind] = self._num_rows.get(kind, 0) + 1
        self._num_kept[kind] = self._num_kept.get(kind, 0) + int(is_kept)
        if self._num_rows[kind] <= NUM_EXAMPLES:
            self._places.setdefault(kind, {}).setdefault(detail, []).append(place)

    def problems(self) -> tuple[RowProblem, ...]:
        """The kinds of problems and their numbers, the most frequent first."""
        kinds = sorted(self._num_rows, key=lambda kind: -self._num_rows[kind])
        return tuple(RowProblem(k, self._num_rows[k], self._num_kept[k], self._examples(k)) for k in kinds)

    def _examples(self, kind: str) -> tuple[str, ...]:
        shown = [
            f"{', '.join(places)} ({detail})" if detail else ", ".join(places)
            for detail, places in self._places[kind].items()
        ]
        return (*shown, *(["..."] if self._num_rows[kind] > NUM_EXAMPLES else []))


@dataclass(frozen=True)
class ReadReport:
    """Counts of what was read from one source. They are stored beside the source's tokens.

    Attributes:
        path: path of the source, as the user gave it.
        num_rows: raw rows read, after data.max_rows.
        num_used_rows: token rows made of them. Long text becomes several rows.
        num_tokens: tokens in the used rows.
        max_token_id: the largest of these tokens.
        problems: the bad rows, the most frequent kind first.
        label_width: numbers per label; 0 without labels.
        skipped: which files of a folder are left out, and why. It is not stored, as such files do not change the
            tokens.
        repeated: which data sets a stream read over and over. It is not stored either.
        unused: the columns that the first row, or the table, has besides those that are used.
        told: what the model learns otherwise than the data says (`chats.told`). It is counted anew from the tokens.
    """

    path: str
    num_rows: int
    num_used_rows: int
    num_tokens: int
    max_token_id: int
    problems: tuple[RowProblem, ...]
    label_width: int = 0
    skipped: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    def __str__(self) -> str:
        unused = f"; columns that are not used: {', '.join(self.unused)}" if self.unused else ""
        lines = [f"{self.path}: {plural(self.num_rows, 'row')} read, {self.num_used_rows:,} used{unused}"]
        return "\n".join(
            [*lines, *(f"  {line}" for line in (*self.repeated, *self.skipped, *self.problems, *self.told))]
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ReadReport:
        problems = tuple(RowProblem(**{**p, "examples": tuple(p["examples"])}) for p in value["problems"])
        unused = tuple(value.get("unused", ()))
        return cls(**{**value, "problems": problems, "skipped": (), "repeated": (), "told": (), "unused": unused})


@dataclass(frozen=True)
class Cleaning:
    """Rows of the training data that are left out, or that somebody may want to leave out (`clean`).

    Attributes:
        what: what is the matter with them.
        hint: the setting that leaves them out, or that would.
        num_rows: how many they are.
        examples: the numbers of the first few of them among the rows of all data sets.
        leaves_out: whether they are left out.
    """

    what: str
    hint: str
    num_rows: int
    examples: tuple[int, ...]
    leaves_out: bool = True

    def __str__(self) -> str:
        done = "left out" if self.leaves_out else "used"
        return f"{plural(self.num_rows, 'row')} {done} ({self.what}; {self.hint})"


@dataclass(frozen=True)
class MixPart:
    """The part of an epoch that one data set of a mix contributes.

    Attributes:
        num_rows: token rows to train on, each counted once.
        num_used_rows: the same, with repetitions counted.
        row_share, token_share: its part of the epoch's rows, and of the epoch's tokens.
    """

    path: str
    num_rows: int
    num_used_rows: int
    row_share: float
    token_share: float

    @property
    def often(self) -> str:
        """How many rows an epoch has of it, and how often each."""
        if self.num_used_rows < self.num_rows:
            return f"{self.num_used_rows:,} of {plural(self.num_rows, 'row')} once"
        times = self.num_used_rows / self.num_rows
        return f"{plural(self.num_rows, 'row')} {'once' if times == 1 else f'{times:.3g} times'}"

    def __str__(self) -> str:
        shares = f"{self.row_share:.1%} of the rows and {self.token_share:.1%} of the tokens"
        return f"mix: {self.path}: {self.often}, {shares}"


@dataclass(frozen=True)
class DataReport:
    """Counts of the data of a run. Those without `eval` in their name are of the training data.

    Attributes:
        sources: the training data, then the evaluation data if it has a path of its own.
        num_sequences: packs of rows; without packing, rows.
        num_rows: token rows in the sequences.
        num_tokens: tokens without padding.
        num_target_tokens: positions with a loss; of a preference, pairs or answers.
        packing_efficiency: num_tokens divided by num_sequences x training.max_length.
        num_eval_sequences: 0 without evaluation data.
        num_eval_target_tokens: 0 without evaluation data.
        label_counts: number of rows by label; empty without labels.
        mix: the data sets of a mix; empty without a mix.
        cleanings: what cleaning has found.
        streamed_rows: rows that a stream reads at a time. All counts are of the first of these. 0: no stream.
        purpose: what the training data is used for, if it is not for training.
        num_answers: see `sequences.Rows`.
        notes: what is likely to be a mistake, though the run can go on.
        are_prompts: whether rows are prompts that the model answers itself.
    """

    sources: tuple[ReadReport, ...]
    num_sequences: int
    num_rows: int
    num_tokens: int
    num_target_tokens: int
    packing_efficiency: float
    num_eval_sequences: int
    num_eval_target_tokens: int
    label_counts: dict[str, int] = field(default_factory=dict)
    mix: tuple[MixPart, ...] = ()
    cleanings: tuple[Cleaning, ...] = ()
    streamed_rows: int = 0
    purpose: str = "training"
    num_answers: int = 0
    notes: tuple[str, ...] = ()
    are_prompts: bool = False

    def __str__(self) -> str:
        if self.are_prompts:
            sources = [str(source) for source in self.sources]
            lines = [*sources, f"{self.purpose}: {plural(self.num_rows, 'prompt')}, {self.num_tokens:,} tokens"]
            if self.num_eval_sequences:
                lines.append(f"evaluation: {plural(self.num_eval_sequences, 'prompt')}")
            return "\n".join(lines)
        counted = self._targets(self.num_target_tokens, f"{self.num_target_tokens:,} with a loss")
        lines = [
            *(str(source) for source in self.sources),
            *(f"cleaning: {cleaning}" for cleaning in self.cleanings),
            *(str(part) for part in self.mix),
            *([f"streaming, {self.streamed_rows:,} rows at a time, of which the first:"] if self.streamed_rows else []),
            f"{self.purpose}: {plural(self.num_rows, 'row')} in {plural(self.num_sequences, 'sequence')},"
            f" {self.packing_efficiency:.1%} full, {self.num_tokens:,} tokens, {counted}",
        ]
        if self.num_eval_sequences:
            with_loss = f"{self.num_eval_target_tokens:,} tokens with a loss"
            counted = self._targets(self.num_eval_target_tokens, with_loss)
            lines.append(f"evaluation: {plural(self.num_eval_sequences, 'sequence')}, {counted}")
        if self.label_counts:
            lines.append(f"labels: {', '.join(f'{name} {number:,}' for name, number in self.label_counts.items())}")
        lines += [f"warning: {note}" for note in self.notes]
        return "\n".join(lines)

    def _targets(self, number: int, otherwise: str) -> str:
        """The noun for what each loss belongs to: pairs or answers, or else `otherwise`."""
        if not self.num_answers:
            return otherwise
        return plural(number, "pair" if self.num_answers == 2 else "answer")
