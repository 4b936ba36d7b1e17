r"""Write pairs of answers from the demo's data: which of two summaries is this function's?

    python scripts/make_docstring_preferences.py FOLDER [ROUNDS]

makes FOLDER/train.jsonl from demo/pairs.jsonl and FOLDER/eval.jsonl from demo/pairs_eval.jsonl, whose functions belong
to modules that training never sees. A row is {"prompt": "What does `textwrap.dedent(text)` do?\n", "chosen": "Remove
any ...", "rejected": another function's summary}. In a round every function is asked about once, and every summary is
chosen once and rejected once. So a summary by itself does not tell which side it is on: the question has to be read.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from make_docstring_pairs import DEMO


def preferences(rows: list[dict[str, str]], num_rounds: int) -> Iterator[dict[str, str]]:
    """Yield each question with its summary and another function's, `num_rounds` times with other ones.

    Functions whose summaries are the same are no pair, and are left out where two of them meet.
    """
    rng = random.Random(0)
    for _ in range(num_rounds):
        asked, others = rng.sample(rows, len(rows)), rng.sample(rows, len(rows))
        for row, other in zip(asked, others, strict=True):
            if row["completion"] != other["completion"]:
                yield {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}


def write_preferences(folder: Path, num_rounds: int) -> None:
    """Write both files: `num_rounds` for training, and one to evaluate on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source, rounds in (("train", "pairs", num_rounds), ("eval", "pairs_eval", 1)):
        rows = [json.loads(line) for line in (DEMO / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()]
        pairs = list(preferences(rows, rounds))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(pairs)} pairs")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    write_preferences(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 1)
