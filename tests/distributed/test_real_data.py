"""Real text from Python itself, in several kinds of file, from `preview` to an adapter that is evaluated.

pydoc's help is 80 pages about the language, each with a name; the texts are Python's and differ from version to
version. What is asserted is what any of them must give.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qlora_fsdp import evaluate, preview
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by, settings, train_here

pytestmark = pytest.mark.distributed
PAGES = sorted((name, page.strip()[:120]) for name, page in topics.items())


def write_pages(folder: Path) -> Path:
    """A mix of chats, a table, Parquet, a saved data set and plain text, with pages that are in two of them."""
    chats = [[{"from": "human", "value": f"What is {name}?"}, {"from": "gpt", "value": page}] for name, page in PAGES]
    with gzip.open(folder / "chats.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"conversations": chat}) + "\n" for chat in [*chats[:30], chats[0]])
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "answer"), *PAGES[30:50]])
    names, pages = zip(*PAGES[40:60], strict=True)
    pq.write_table(pa.table({"prompt": names, "completion": pages}), folder / "a.parquet")
    datasets.Dataset.from_list([{"messages": chat} for chat in chats[25:40]]).save_to_disk(folder / "saved")
    (folder / "book").mkdir()
    for name, page in PAGES[60:70]:
        (folder / "book" / f"{name}.txt").write_text(f"{name}\n\n{page}", encoding="utf-8")
    held_out = folder / "held_out.jsonl"
    write_lines(held_out, ({"prompt": n, "completion": p} for n, p in PAGES[58:66]))
    return held_out


def run(folder: Path, argv: list[str]) -> tuple[str, list[float], str]:
    shown = printed_by(preview.main, [text for text in argv if not text.startswith("run.")])
    losses = train_here(argv).losses
    adapter = [f"adapter={folder / 'run' / 'adapter'}", f"data.path={folder / 'held_out.jsonl'}"]
    return shown, losses, printed_by(evaluate.main, [*adapter, f"data.cache_folder={folder}"])


def test_pages_of_the_standard_library_train_an_adapter(tmp_path: Path, checkpoint) -> None:
    held_out = write_pages(tmp_path)
    columns = "{columns: {prompt: question, completion: answer}}"
    mix = {"chats.jsonl.gz": 1, "table.csv": columns, "a.parquet": 1, "saved": "{weight: 0.5}", "book": 1}
    named = ", ".join(f"{tmp_path / name}: {own}" for name, own in mix.items())
    argv = settings(
        checkpoint("llama"),
        held_out,
        *("data.path=null", f"data.mix={{{named}}}", f"data.eval_path={held_out}", "data.decontaminate=true"),
        *("training.max_length=256", "training.max_steps=12", "training.learning_rate=3e-3", "data.mix_until=shortest"),
        f"run.folder={tmp_path / 'run'}",
    )
    (found,) = run_ranks(1, run, tmp_path, argv)
    shown, losses, evaluated = found
    # The first chat again, ten pages of the table in the Parquet file too, and five chats in the saved data set.
    assert "cleaning: 16 rows left out (the same as an earlier one; data.deduplicate=false keeps them)" in shown
    assert "cleaning: 2 rows left out (the same as 2 of the 8 evaluation rows; data.decontaminate=true)" in shown
    log = (tmp_path / "run" / "train.log").read_text()
    for name, number in {"chats.jsonl.gz": 31, "table.csv": 20, "a.parquet": 20, "saved": 15, "book": 10}.items():
        assert f"{tmp_path / name}: {number} rows read, {number} used" in log
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    first, *_, last = [line["eval_loss"] for line in steps if "eval_loss" in line]
    assert last < first and json.loads(evaluated)["loss"] == pytest.approx(last, abs=0.05)
