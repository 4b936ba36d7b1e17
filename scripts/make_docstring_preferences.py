r"""Write pairs of answers from the demo's data: which of two summaries is this function's?

    python scripts/make_docstring_preferences.py FOLDER NUM_TRAINING NUM_EVAL [NUM_KNOWN]

makes FOLDER/train.jsonl from demo/docstrings.jsonl and FOLDER/eval.jsonl from demo/docstrings_eval.jsonl, whose
functions belong to modules that training never sees. With NUM_KNOWN, as many functions of training's modules are kept
out of train.jsonl, and FOLDER/known.jsonl asks about them once each. A row is {"prompt": "What does
`textwrap.dedent(text)` do?\n", "chosen": "Remove any ...", "rejected": another function's summary}. In a round every
function is asked about once, and every summary is chosen once and rejected once. So a summary by itself does not tell
which side it is on: the question has to be read.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from make_docstring_pairs import DEMO


def preferences(rows: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield each question with its summary and another function's, round after round with other ones, without end.

    Functions whose summaries are the same make no pair: where two of them meet, none is made.
    """
    rng = random.Random(0)
    while True:
        asked, others = rng.sample(rows, len(rows)), rng.sample(rows, len(rows))
        for row, other in zip(asked, others, strict=True):
            if row["completion"] != other["completion"]:
                yield {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}


def write_preferences(folder: Path, num_training: int, num_eval: int, num_known: int = 0) -> None:
    """Write the files, of so many pairs each. What is asked in known.jsonl is in no pair of train.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    training, others = read_rows("docstrings"), read_rows("docstrings_eval")
    if num_known:
        random.Random(1).shuffle(training)
        known, training = training[:num_known], training[num_known:]
        seen = {row["completion"] for row in training}
        known = [row for row in known if row["completion"] not in seen]
        write_pairs(folder / "known.jsonl", known, len(known))
    write_pairs(folder / "train.jsonl", training, num_training)
    write_pairs(folder / "eval.jsonl", others, num_eval)


def read_rows(source: str) -> list[dict[str, str]]:
    """The questions and summaries of a file of the demo."""
    return [json.loads(line) for line in (DEMO / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_pairs(file: Path, rows: list[dict[str, str]], number: int) -> None:
    """Write so many pairs of these functions."""
    lines = "".join(json.dumps(pair) + "\n" for pair in islice(preferences(rows), number))
    file.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        raise SystemExit(__doc__)
    write_preferences(Path(sys.argv[1]), *map(int, sys.argv[2:]))
