"""What a field of the schema says of itself: its facets.

Whatever the program knows of a single setting is declared where the setting is, by `setting(...)`, and read by
`config/settings.py` and the modules that it names. A field must decide what has no safe default:

    r: int = setting(16, Run.fixed, ALWAYS, files=Files.users, owner=Owner.adapter, bounds=at_least(1))

says that another rank makes another run whose checkpoints fit no other rank, that the rank always has an effect, that a
file of the user's may set it and an adapter's settings file may not, and that it is a property of a saved adapter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, cast

from typing_extensions import assert_never

Value = TypeVar("Value")


class Run(Enum):
    """What another value makes of a run that has begun."""

    same = "the same run: it changes no number, or only the rounding of sums"
    same_shards = "the same run, unless each rank keeps an optimizer state of its own, which fits no other shards"
    other = "another run, which checkpoint.allow_changes can ask for"
    fixed = "another run, and what a checkpoint holds fits no other value"
    start = "nothing: it says how runs are started, and is not recorded with them"

    @property
    def is_same(self) -> bool:
        """Whether a run with another value is still the same run."""
        match self:
            case Run.same | Run.same_shards | Run.start:
                return True
            case Run.other | Run.fixed:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def is_recorded(self) -> bool:
        """Whether the files of a run have the setting."""
        return self is not Run.start


class Files(Enum):
    """Which files may set it. Whoever may write a file decides what it may do to the machine that reads it."""

    adapters = "any file, also that in an adapter's folder, which somebody else may have written: it describes a model"
    users = "files that the user names: --config, an experiment; an adapter's file is refused"
    skipped = "files that the user names; in an adapter's file it is passed over, because early ones carry it"
    none = "none that may have been passed on: the user types it, or has it in an own folder; a file with it is told"


class Owner(Enum):
    """Whose property it is, where a whole model or adapter is named in one word."""

    base = "the base model's: where another model is typed, what a file says of it does not count"
    adapter = "the adapter's: with lora.start it is that adapter's own"
    run = "the run's"


class Hosts(Enum):
    """How it may differ between the ranks of a run on several hosts."""

    same = "not at all"
    place = "it names a place, which other hosts may call otherwise; it is set on all or on none"
    first = "freely: rank 0's counts, or each host's own"


@dataclass(frozen=True)
class Bounds:
    """The finite numbers that a setting takes: those from `low` on, or above it if `low` is excluded, below `high`."""

    low: float
    includes_low: bool
    high: float = math.inf

    def allow(self, value: float) -> bool:
        """Whether a setting may have this value."""
        return self.low < value < self.high or (self.includes_low and value == self.low)

    def __str__(self) -> str:
        text = f"at least {self.low:g}" if self.includes_low else f"greater than {self.low:g}"
        return text + (f" and less than {self.high:.10g}" if math.isfinite(self.high) else "")


def at_least(low: float, below: float = math.inf) -> Bounds:
    """Numbers from `low` on, below `below`."""
    return Bounds(low, includes_low=True, high=below)


def above(low: float, below: float = math.inf) -> Bounds:
    """Numbers above `low` and below `below`."""
    return Bounds(low, includes_low=False, high=below)


@dataclass(frozen=True)
class When:
    """A setting has an effect only where another one has one of some values.

    Attributes:
        key: the other setting.
        values: the values; empty: any but null.
        fix: how they are set, for a message; empty: by the key and a value.
    """

    key: str
    values: tuple[Any, ...]
    fix: str = ""

    def holds(self, value: Any) -> bool:
        """Whether it has an effect where the other setting has this value."""
        return value in self.values if self.values else value is not None


def when(key: str, *values: Any, fix: str = "") -> tuple[When, ...]:
    """The condition of a setting that has an effect only where `key` has one of `values`, or any value but null."""
    return (When(key, values, fix),)


ALWAYS: tuple[When, ...] = ()


@dataclass(frozen=True)
class Facets:
    """What a field says of itself; `setting` has the meanings."""

    run: Run
    used: tuple[When, ...]
    files: Files | None
    owner: Owner | None
    bounds: Bounds | None
    values: tuple[Any, ...]
    words: tuple[str | None, ...]
    text_or_list: bool
    example: str
    other_names: tuple[str, ...]
    hosts: Hosts
    is_planned: bool
    is_common: bool


def setting(
    default: Value,
    run: Run,
    used: tuple[When, ...],
    *,
    files: Files | None = None,
    owner: Owner | None = None,
    bounds: Bounds | None = None,
    values: tuple[Any, ...] = (),
    words: tuple[str | None, ...] = (),
    text_or_list: bool = False,
    example: str = "",
    other_names: tuple[str, ...] = (),
    hosts: Hosts = Hosts.same,
    is_planned: bool = True,
    is_common: bool = False,
) -> Value:
    """Declares a field of a section of the settings.

    Args:
        default: the default. A list or a mapping is copied for each configuration.
        run: what another value makes of a run.
        used: when it has an effect: `ALWAYS`, or `when(...)`, of which all conditions must hold.
        files: which files may set it. It must be decided where `run` says that the value is part of what a run is;
            else it is `Files.users`, so that no adapter's file sets it.
        owner: whose property it is. It must be decided in the sections that describe a model and an adapter.
        bounds: the numbers that it takes. They must be decided of every number.
        values: all values that it takes, if these are few and not of one type; the type is `Any` then.
        words: what it takes besides whole numbers: words, or null; the type is `Any` then.
        text_or_list: whether it takes text or a list of texts; the type is `Any` then.
        example: a value that works, in the quotes without which a shell takes it apart. Every mapping has one.
        other_names: what transformers, TRL, PEFT, Axolotl, LLaMA-Factory, torchtune and common speech call it, where
            that is too different to be guessed.
        hosts: how it may differ between the hosts of a run.
        is_planned: whether preflight uses it, which needs neither the data nor the model's files.
        is_common: whether --help lists it.
    """
    facets = Facets(
        run,
        used,
        files,
        owner,
        bounds,
        values,
        words,
        text_or_list,
        example,
        other_names,
        hosts,
        is_planned,
        is_common,
    )
    metadata = {"facets": facets}
    if isinstance(default, (list, dict)):
        return cast(Value, field(default_factory=lambda: copy.deepcopy(default), metadata=metadata))
    return field(default=default, metadata=metadata)


def find_undecided(section: str, kind: Any, facets: Facets) -> Iterator[str]:
    """Yields the facets that a field of a section must decide and does not, each as the end of `it must say ...`."""
    if facets.files is None and not facets.run.is_same:
        yield "which files may set it (files=)"
    if facets.owner is None and section in ("model", "lora"):
        yield "whether it is the base model's, an adapter's own or the run's (owner=)"
    if facets.bounds is None and kind in (int, float):
        yield "which numbers it takes (bounds=)"
    if not facets.example and str(kind).startswith("dict"):
        yield "what a value looks like (example=)"
