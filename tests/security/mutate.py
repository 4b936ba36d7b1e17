"""Damage files at random, and read them: each reading ends in success or in one error for the user.

`python -m tests.security.mutate --count 1000` mutates each kind of file so often and prints what ended otherwise, with
the seed that repeats it. test_mutations.py runs a few of them. Nothing outside the mutated folder may change, and a
reading that takes more time or memory than the limits below counts as a failure.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qlora_fsdp.common.errors import UserError, print_error
from qlora_fsdp.common.files import digest_file
from tests.security.kinds import KINDS_OF_FILES
from tests.security.kinds_of_records import KINDS_OF_RECORDS

MAX_SECONDS = 20  # of one reading: of processor time, as the host may be busy with other things
MAX_BYTES = 4 * 2**30  # of memory that the process takes
DEEP = 100_000
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, 1e6, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30, 10**400, -(2**63),
    "", "x", "0", "64", "../x", "/etc/passwd", "\0", "\x1b]0;owned\x07", "\ud800", "${oc.env:HOME}", "(.+)+#",
    "a" * 10_000, [], [None], [[]], ["x"], [1, 2], {}, {"x": 1}, {"": None}, [{}], {"_target_": "os.system"},
]  # fmt: skip


KINDS = KINDS_OF_FILES | KINDS_OF_RECORDS


@dataclass
class Outcome:
    """How the readings of one kind of file ended: in success, in an error for the user, or otherwise."""

    succeeded: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0


def mutate(content: bytes, is_text: bool, rng: random.Random) -> bytes:
    """The content of a file, damaged in some way."""
    if is_text and rng.random() < 0.75:
        try:
            return _mutate_json(json.loads(content), rng)
        except ValueError:  # a file of JSON lines
            lines = content.splitlines(keepends=True)
            number = rng.randrange(len(lines))
            lines[number] = _mutate_json(json.loads(lines[number]), rng) + b"\n"
            return b"".join(lines)
    return _mutate_bytes(content, rng)


def _mutate_json(value: Any, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        places = list(_places(value))
        if not places:
            return json.dumps(rng.choice(ODD)).encode()
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1:
                holder[key] = "DEEP"
            case 2 if isinstance(holder, dict):
                holder[str(rng.choice(ODD))] = holder.pop(key)
            case 3:
                holder[key] = [holder[key]]
            case _:
                holder[key] = deepcopy(rng.choice(ODD))
    text = json.dumps(value)
    return text.replace('"DEEP"', "[" * DEEP + "]" * (DEEP * rng.randrange(2)), 1).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside a value, as what holds it and the key."""
    for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from _places(item)


def _mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    at = rng.randrange(len(changed))
    match rng.randrange(6):
        case 0:
            for _ in range(rng.choice((1, 3, 30))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            del changed[at : at + rng.choice((1, 8, 1000))]
        case 3:
            changed[at:at] = rng.randbytes(rng.choice((1, 8, 1000)))
        case 4:
            changed[at:at] = changed[max(0, at - 100) : at] * 50
        case _:
            changed[at : at + 8] = b"\xff" * 8
    return bytes(changed)


def run_mutations(name: str, folder: Path, count: int, seed: int) -> Outcome:
    """Mutate one kind of file `count` times inside `folder`, and read it each time."""
    kind, outcome, honest = KINDS[name], Outcome(), folder / "honest"
    honest.mkdir(parents=True)
    kind.make(honest)
    sentinel = folder / "x"  # where `../x` leads
    sentinel.write_text("untouched")
    (file,) = honest.glob(kind.name)
    name_in_folder = file.relative_to(honest)
    content = file.read_bytes()
    kind.read(honest)
    before = _digests(folder)
    for number in range(count):
        rng = random.Random(f"{name} {seed} {number}")
        copy = folder / "copy"
        shutil.copytree(honest, copy)
        (copy / name_in_folder).write_bytes(mutate(content, kind.is_text, rng))
        start = time.process_time()
        try:
            with _limited_seconds():
                kind.read(copy)
            outcome.succeeded += 1
        except UserError as error:
            outcome.refused += 1
            with redirect_stderr(StringIO()) as shown:
                print_error(error)
            if "\x1b" in shown.getvalue():
                outcome.failures.append(f"{name} seed={seed} number={number}: an escape sequence in {error!r}")
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            last = traceback.format_exc(limit=-4).strip()
            outcome.failures.append(f"{name} seed={seed} number={number}: {type(error).__name__}: {last[-1500:]}")
        outcome.slowest_seconds = max(outcome.slowest_seconds, time.process_time() - start)
        shutil.rmtree(copy)
        if _digests(folder) != before:
            raise AssertionError(f"{name} seed={seed} number={number} changed files outside its folder")
    return outcome


class TooSlow(BaseException):
    """A reading took too long. No handler of errors takes it for one of a file."""


@contextmanager
def _limited_seconds() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise TooSlow(f"a reading took more than {MAX_SECONDS} seconds")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _digests(folder: Path) -> dict[str, str]:
    return {str(file): digest_file(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def main() -> int:
    """Run mutations of the kinds that the command line names, and print what ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    num_failures = 0
    for name in arguments.kind or KINDS:
        with TemporaryDirectory() as folder:
            outcome = run_mutations(name, Path(folder), arguments.count, arguments.seed)
        num_failures += len(outcome.failures)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name}: {outcome.succeeded} read, {outcome.refused} refused, {len(outcome.failures)} failed; at most "
            f"{outcome.slowest_seconds:.1f} s, {peak:.1f} GiB",
            flush=True,
        )
        alike = Counter(text.rpartition("\n")[2] for text in outcome.failures)
        for text in outcome.failures:
            last = text.rpartition("\n")[2]
            if alike.pop(last, 0):
                print(text, flush=True)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
