r"""Write labelled rows from the standard library: which module does a function's summary come from?

    python scripts/make_docstring_labels.py FOLDER

makes FOLDER/train.jsonl and FOLDER/eval.jsonl. A row is {"text": "Return True if fd is ...", "label": "asyncio"}. Rows
depend on the version of Python that runs this.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from make_docstring_pairs import docstring_pairs

MODULES = ("asyncio", "email", "http", "logging", "xml")
NUM_TRAINING_ROWS = 240
NUM_EVAL_ROWS = 160


def main() -> None:
    """Writes both files; a summary that several modules share is in neither."""
    modules_of: dict[str, set[str]] = {}
    for module, row in docstring_pairs():
        modules_of.setdefault(row["completion"], set()).add(module.partition(".")[0])
    rows = [
        {"text": text, "label": next(iter(modules))}
        for text, modules in modules_of.items()
        if len(modules) == 1 and not modules.isdisjoint(MODULES)
    ]
    random.Random(0).shuffle(rows)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:NUM_TRAINING_ROWS]), ("eval", rows[NUM_TRAINING_ROWS:][:NUM_EVAL_ROWS])):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{path}: {len(part)} rows")


if __name__ == "__main__":
    main()
