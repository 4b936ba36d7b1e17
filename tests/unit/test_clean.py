"""What cleaning leaves out of the training data: rows repeated, nearly repeated, held out too, too short or long."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process

from qlora_fsdp import preview
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import (
    Config,
    DataConfig,
    PreferenceConfig,
    PreferenceLoss,
    ProblemType,
    TaskConfig,
    TaskName,
    TrainingConfig,
)
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.cleaning import row_hashes
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in ("rn", "lt", "st", "ck")]
Prepare = Callable[..., PreparedData[Sequences]]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Prepares data in one process; keywords are settings of `data`, but for these."""

    def prepare(
        path: Path | None, task: TaskConfig | None = None, is_main: bool = True, for_training: bool = True, **data: Any
    ) -> PreparedData[Sequences]:
        loss = PreferenceLoss.kto if data.pop("judged", False) else PreferenceLoss.dpo
        config = Config(
            task=task or TaskConfig(),
            data=DataConfig(path=None if path is None else str(path), cache_folder=str(tmp_path / "cache"), **data),
            preference=PreferenceConfig(loss=loss),
            training=TrainingConfig(max_length=512, packing=False),
        )
        process = one_process(0 if is_main else 1)
        return prepare_data(DataSpec.of(config), TOKENIZER, process, 259, for_training=for_training)

    return prepare


def texts(sequences: Sequences) -> list[str]:
    """The rows as text, in the order of the data."""
    rows = [row for i in range(len(sequences)) for row in sequences.rows_of(i)]
    return [str(TOKENIZER.decode(tokens.tolist(), skip_special_tokens=True)) for tokens, _ in rows]


def write(path: Path, *rows: Any) -> Path:
    return write_lines(path, rows)


def told(prepared: PreparedData[Sequences]) -> list[str]:
    """What the log says about cleaning."""
    return [line for line in str(prepared.report).splitlines() if line.startswith("cleaning: ")]


def test_repeated_rows_are_left_out_and_told(tmp_path: Path, prepare: Prepare) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": text} for text in "abaaca"))
    for _ in range(2):  # from the cache too
        prepared = prepare(path)
        assert texts(prepared.train) == ["a", "b", "c"]
        said = "cleaning: 3 rows left out (the same as an earlier one; data.deduplicate=false keeps them)"
        assert told(prepared) == [said]
    kept = prepare(path, deduplicate=False)
    assert texts(kept.train) == list("abaaca")
    assert told(kept) == ["cleaning: 3 rows used (the same as an earlier one; data.deduplicate=true leaves them out)"]
    assert not told(prepare(write(tmp_path / "b.jsonl", {"text": "a"}, {"text": "b"})))


def test_a_row_is_known_again_in_other_files_forms_and_data_sets(tmp_path: Path, prepare: Prepare) -> None:
    """The same tokens and targets count, however they were written; a first data set keeps what both have."""
    rows = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(6)]
    first = write(tmp_path / "first.jsonl", *rows[:4], {"completion": "0!", "prompt": "0?", "more": [1]})
    second = tmp_path / "second.csv"
    second.write_text("prompt,completion\n" + "".join(f"{n}?,{n}!\n" for n in (2, 3, 4, 5)))
    whole = write(tmp_path / "text.jsonl", *({"text": f"{n}?{n}!"} for n in (0, 1)))  # all tokens are trained on
    prepared = prepare(None, mix={str(first): 1, str(second): 1, str(whole): 1})
    assert [part.num_rows for part in prepared.report.mix] == [4, 2, 2]
    assert "cleaning: 3 rows left out" in told(prepared)[0]
    with pytest.raises(DataError, match=r"No row of .*again\.jsonl is left: 5 rows left out \(the same as an earlier"):
        again = write(tmp_path / "again.jsonl", *rows[:4])
        prepare(None, mix={str(first): 1, str(again): 1})


def test_rows_with_other_labels_or_answers_are_not_repeated(tmp_path: Path, prepare: Prepare) -> None:
    labelled = TaskConfig(TaskName.sequence_classification, ProblemType.single_label_classification, ["no", "yes"])
    path = write(tmp_path / "a.jsonl", *({"text": "a", "label": label} for label in ("no", "yes", 1, 0)))
    prepared = prepare(path, labelled)
    assert len(prepared.train) == 2 and prepared.train.labels_of(range(2)).tolist() == [[0], [1]]

    pairs = [{"prompt": "a", "chosen": c, "rejected": r} for c, r in (("b", "c"), ("c", "b"), ("b", "d"), ("b", "c"))]
    prepared = prepare(write(tmp_path / "pairs.jsonl", *pairs), TaskConfig(TaskName.preference))
    assert texts(prepared.train) == ["ab", "ac", "ac", "ab", "ab", "ad"]

    judged = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, True)]
    prepared = prepare(write(tmp_path / "judged.jsonl", *judged), TaskConfig(TaskName.preference), judged=True)
    assert len(prepared.train) == 2


def test_rows_of_the_evaluation_are_told_and_left_out_on_demand(tmp_path: Path, prepare: Prepare) -> None:
    train = write(tmp_path / "train.jsonl", *({"text": text} for text in "abcdd"))
    held_out = write(tmp_path / "held_out.jsonl", *({"text": text} for text in "ddbxxy"))
    prepared = prepare(train, eval_path=str(held_out))
    assert texts(prepared.train) == list("abcd") and texts(prepared.eval) == list("ddbxxy")  # evaluation stays as it is
    assert told(prepared)[1].startswith("cleaning: 2 rows used (the same as 3 of the 6 evaluation rows; so that the")
    assert "data.decontaminate=true leaves them out" in told(prepared)[1]
    prepared = prepare(train, eval_path=str(held_out), decontaminate=True)
    assert texts(prepared.train) == list("ac") and texts(prepared.eval) == list("ddbxxy")
    assert "2 rows left out (the same as 3 of the 6 evaluation rows; data.decontaminate=true)" in told(prepared)[1]
    with pytest.raises(DataError, match=r"data\.decontaminate=true leaves no row of .*train\.jsonl"):
        prepare(train, eval_path=str(train), decontaminate=True)
    assert texts(prepare(train, for_training=False).train) == list("abcdd")


def test_no_row_is_trained_on_and_held_out(tmp_path: Path, prepare: Prepare) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": str(n % 30)} for n in range(90)))
    prepared = prepare(path, eval_fraction=0.3)
    assert len(prepared.eval) == 9 and set(texts(prepared.train)) | set(texts(prepared.eval)) == set(
        map(str, range(30))
    )
    assert not set(texts(prepared.train)) & set(texts(prepared.eval))
    repeated = prepare(path, eval_fraction=0.3, deduplicate=False)
    both = set(texts(repeated.train)) & set(texts(repeated.eval))
    number = sum(text in both for text in texts(repeated.eval))
    assert both and f"the same as {number} of the 27 evaluation rows" in told(repeated)[1]
    cleaned = prepare(path, eval_fraction=0.3, deduplicate=False, decontaminate=True)
    assert texts(cleaned.train) == [text for text in texts(repeated.train) if text not in both]


def test_short_and_long_rows(tmp_path: Path, prepare: Prepare) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": n * "a"} for n in range(1, 21)))  # and a begin and an end token
    prepared = prepare(path, min_tokens=5, max_tokens=20)
    assert [len(text) for text in texts(prepared.train)] == list(range(3, 19))
    assert told(prepared) == [
        "cleaning: 2 rows left out (too short; data.min_tokens=5)",
        "cleaning: 2 rows left out (too long; data.max_tokens=20)",
    ]
    pairs = [{"prompt": "", "chosen": "a" * c, "rejected": "b" * r} for c, r in ((1, 2), (1, 9), (9, 1))]
    prepared = prepare(write(tmp_path / "pairs.jsonl", *pairs), TaskConfig(TaskName.preference), min_tokens=9)
    assert len(prepared.train) == 2


def test_the_length_of_an_answer_is_its_own_and_not_that_of_the_answer_beside_its_prompt(
    tmp_path: Path, prepare: Prepare
) -> None:
    rows = [{"prompt": f"{n}", "completion": "x" * (10 * n), "label": n % 2 == 0} for n in range(8, 0, -1)]
    path = write(tmp_path / "a.jsonl", *rows)
    for more in ({"path": path}, {"path": None, "mix": {str(path): 1.0}}):
        prepared = prepare(task=TaskConfig(name=TaskName.preference), judged=True, min_tokens=23, max_tokens=63, **more)
        lengths = [len(tokens) for i in range(len(prepared.train)) for tokens, _ in prepared.train.rows_of(i)]
        assert lengths == [63, 53, 43, 33, 23]  # of 83, 73, ..., 13 with begin, prompt and end


def test_near_duplicates_are_those_that_share_most_shingles(tmp_path: Path, prepare: Prepare) -> None:
    """Compared with the share of common runs of five bytes, counted without hashing; a long prompt is in all rows."""
    pytest.importorskip("datasketch")
    rng = random.Random(0)
    system = " ".join(rng.choices(WORDS, k=30)) + ": "
    bodies = [rng.choices(WORDS, k=40) for _ in range(40)]
    for number in range(20):  # one word is another: nearly the same; a third of the words are: not
        changed = list(bodies[number])
        for place in rng.sample(range(40), k=1 if number % 2 else 14):
            changed[place] = rng.choice(WORDS)
        bodies.append(changed)
    rows = [system + " ".join(body) for body in bodies]
    rows += [f"{system}{n} and {n + 1} are {2 * n + 1}" for n in range(100, 130)]  # alike only in their prompt

    def shingles(text: str) -> set[str]:
        text = text.removeprefix(system)
        return {text[n : n + 5] for n in range(len(text) - 4)}

    expected: list[str] = []
    for row in rows:
        own = shingles(row)
        shares = [len(own & other) / len(own | other) for other in map(shingles, expected)]
        assert all(not 0.7 < share < 0.85 for share in shares), "too near to tell by an estimate"
        if max(shares, default=0.0) < 0.78:
            expected.append(row)
    assert len(expected) == len(rows) - 10
    path = write(tmp_path / "a.jsonl", *({"text": row} for row in rows))
    prepared = prepare(path, near_duplicates=0.78)
    assert texts(prepared.train) == expected
    said = "cleaning: 10 rows left out (nearly the same as an earlier one; data.near_duplicates=0.78)"
    assert told(prepared) == [said]


def test_what_the_last_rows_begin_with_is_known_as_well(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of somewhat fewer than two samples of rows, the sample was of the first ones alone."""
    pytest.importorskip("datasketch")
    monkeypatch.setattr("qlora_fsdp.data.cleaning.clean.SAMPLED_ROWS", 100)
    rng = random.Random(0)
    system = " ".join(rng.choices(WORDS, k=40)) + ": "
    rows = [("" if number < 120 else system) + " ".join(rng.choices(WORDS, k=8)) for number in range(190)]
    path = write(tmp_path / "a.jsonl", *({"text": row} for row in rows))
    assert texts(prepare(path, near_duplicates=0.6).train) == rows


def test_what_was_found_is_kept_for_other_ranks_and_later_runs(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasketch")
    path = write(tmp_path / "a.jsonl", *({"text": text} for text in ("a" * 60, "b" * 600, "a" * 59, "b" * 600)))
    path.chmod(0o600)
    first = prepare(path, near_duplicates=0.5)
    assert len(first.train) == 3  # the long rows are cut into two, of which the second ends otherwise
    kept = sorted((tmp_path / "cache").glob("*.npy"))
    assert [file.name.partition("-")[0] for file in kept] == ["hashes", "near"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in kept)  # as are the tokens that they were made of

    def fail(*_: object) -> None:
        raise AssertionError("it is kept")

    with monkeypatch.context() as patch:
        patch.setattr(row_hashes, "_hash", fail)
        patch.setattr("qlora_fsdp.data.cleaning.clean._find", fail)
        assert texts(prepare(path, near_duplicates=0.5).train) == texts(first.train)
        assert texts(prepare(path, near_duplicates=0.5, is_main=False).train) == texts(first.train)
    for file in kept:
        file.write_bytes(b"damaged")
    assert texts(prepare(path, near_duplicates=0.5).train) == texts(first.train)


def test_preview_shows_five_rows_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"What is {n % 9}?", "completion": f"It is \x1b[2J{n % 9}."} for n in range(18)]
    path = write(tmp_path / "a.jsonl", *rows, {"text": "x"})
    held_out = write(tmp_path / "b.jsonl", rows[3])
    base = ["model=tiny", "model.tokenizer_path=bytes", f"data.path={path}", f"data.cache_folder={tmp_path}"]
    assert preview.main([*base, f"data.eval_path={held_out}", "data.min_tokens=4", "rows=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = lines[next(number for number, line in enumerate(lines) if "such as:" in line) :]
    assert [line for line in shown if line.startswith("---")] == [
        "--- 1 row left out (too short; data.min_tokens=4), such as:",
        "--- 9 rows left out (the same as an earlier one; data.deduplicate=false keeps them), such as:",
        "--- 1 row used (the same as 1 of the 1 evaluation row; so that the evaluation tells less;"
        " data.decontaminate=true leaves them out), such as:",
    ]
    assert sum(line.startswith("  <bos>What is ") for line in shown) == 6 and "\x1b" not in "".join(shown)
