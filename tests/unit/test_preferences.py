"""Preferences before any model: rows, batches, settings; and the head's losses of single tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process
from tests.helpers.plans import traced
from tests.helpers.quick_config import load_config
from torch import nn
from torch.nn import functional as F

from qlora_fsdp.common import sizes
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.schema import (
    BadRows,
    Config,
    DataConfig,
    ModelConfig,
    PreferenceConfig,
    PreferenceLoss,
    TaskConfig,
    TaskName,
    TrainingConfig,
)
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.batch import Batch, collate
from qlora_fsdp.data.read_answers import read_answers
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.layers.rewire import attach_loss
from qlora_fsdp.memory.gpus import find_gpu
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.speed import tokens_per_second
from qlora_fsdp.memory.workload import Workload
from qlora_fsdp.training.batches import GlobalBatches

BOS, EOS, PAD = 256, 257, 258
TOKENIZER = byte_tokenizer()
USER = {"role": "user", "content": "Hi"}
SYSTEM, OTHER = {"role": "system", "content": "S"}, {"role": "user", "content": "Why?"}
IN_PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
YES, NO = ({"role": "assistant", "content": text} for text in ("Yes", "No."))


def prepare(folder: Path, rows: list[Any], tokenizer: Any = TOKENIZER, loss: str = "dpo", **more: Any) -> PreparedData:
    file = folder / "rows.jsonl"
    write_lines(file, rows)
    training = {key: more.pop(key) for key in ("max_length", "packing") if key in more}
    config = Config(
        task=TaskConfig(TaskName.preference),
        preference=PreferenceConfig(PreferenceLoss[loss]),
        data=DataConfig(path=str(file), cache_folder=str(folder / "cache"), **more),
        training=TrainingConfig(**({"max_length": 32, "packing": True} | training)),
    )
    return prepare_data(DataSpec.of(config), tokenizer, one_process(), 259)


def rows_of(data: Sequences) -> list[list[tuple[str, str]]]:
    """For each pair or answer, in the order of the file, each row's text, and what of it is trained on."""
    found = []
    for row in sorted(data.row_ids.tolist()):
        parts = data.rows.read(row)
        found.append([(TOKENIZER.decode(tokens), TOKENIZER.decode(tokens[mask])) for tokens, mask in parts])
    return found


def text_row(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_both_answers_follow_the_prompt_and_are_trained_on(tmp_path: Path) -> None:
    data = prepare(tmp_path, [text_row("a b ", "c", "dd")]).train
    assert rows_of(data) == [[("<bos>a b c<eos>", "c<eos>"), ("<bos>a b dd<eos>", "dd<eos>")]]


def test_without_a_prompt_it_is_what_both_answers_begin_with(tmp_path: Path) -> None:
    rows = [{"chosen": "Q? A: it is", "rejected": "Q? A: no"}, {"chosen": "The cat", "rejected": "The dog"}]
    assert rows_of(prepare(tmp_path, rows).train) == [
        [("<bos>Q? A: it is<eos>", " it is<eos>"), ("<bos>Q? A: no<eos>", " no<eos>")],
        [("<bos>The cat<eos>", " cat<eos>"), ("<bos>The dog<eos>", " dog<eos>")],
    ]


def test_a_prompt_with_which_both_answers_begin_is_written_once(tmp_path: Path) -> None:
    rows = [text_row("Q? ", "Q? yes", "Q? no"), text_row("Q? ", "Q? yes", "no, Q? ")]
    assert rows_of(prepare(tmp_path, rows).train) == [
        [("<bos>Q? yes<eos>", "yes<eos>"), ("<bos>Q? no<eos>", "no<eos>")],
        [("<bos>Q? Q? yes<eos>", "Q? yes<eos>"), ("<bos>Q? no, Q? <eos>", "no, Q? <eos>")],  # one of them answers so
    ]
    with pytest.raises(BadRow, match="chosen is empty"):
        read_answers(text_row("Q? ", "Q? ", "Q? no"), True, {})


def test_a_prompt_of_another_name_is_not_left_unread(tmp_path: Path) -> None:
    plain = {"question": "a b ", "chosen": "c", "rejected": "dd"}
    whole = {"question": 'it\'s "a"', "chosen": 'it\'s "a" c', "rejected": 'it\'s "a" dd'}
    data = prepare(tmp_path, [plain, whole])
    assert rows_of(data.train) == [[('<bos>it\'s "a" c<eos>', " c<eos>"), ('<bos>it\'s "a" dd<eos>', " dd<eos>")]]
    told = "(no prompt; keys are question, chosen, rejected; set data.columns={prompt: question})"
    assert told in str(data.report.sources[0])
    renamed = prepare(tmp_path, [plain], columns={"prompt": "question"}).train
    assert rows_of(renamed) == [[("<bos>a b c<eos>", "c<eos>"), ("<bos>a b dd<eos>", "dd<eos>")]]


def test_of_a_row_without_answers_these_are_asked_for_and_no_prompt() -> None:
    with pytest.raises(BadRow, match=r"no chosen and no rejected; keys are messages; data\.columns=\{chosen: NAME\}"):
        read_answers({"messages": [USER, YES]}, True, {})
    with pytest.raises(BadRow, match="no prompt and no completion; keys are messages, label;"):
        read_answers({"messages": [USER, YES], "label": True}, False, {})


def test_texts_about_an_image_are_told() -> None:
    with pytest.raises(BadRow) as told:
        read_answers({"prompt": "a", "chosen": "b", "rejected": "c", "image": "a.png"}, True, {})
    assert told.value.detail == "the row has image, and training is on text alone"


@pytest.mark.parametrize("columns", [{}, {"role": "from", "content": "value"}])
def test_turns_of_other_names_go_with_answers_of_text(columns: dict[str, str]) -> None:
    row = {"conversations": [{"from": "human", "value": "Hi?"}], "chosen": "Yes", "rejected": "No."}
    chosen, _ = read_answers(row, True, {"prompt": "conversations", **columns})
    user, answer = chosen.fields["messages"]
    assert (user["role"], user["content"], user["train"]) == ("user", "Hi?", False)
    assert answer == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize("turn", [{"from": "human", "value": "a b"}, {"role": "user", "content": "a b"}])
@pytest.mark.parametrize("name", ["conversations", "messages"])
def test_a_conversation_beside_answers_is_not_left_unread(tmp_path: Path, turn: dict[str, str], name: str) -> None:
    answers, whole = {"chosen": "c", "rejected": "dd"}, {"chosen": "a b c", "rejected": "a b dd"}
    data = prepare(tmp_path, [{name: [turn], **answers}, {name: [turn], **whole}])
    assert rows_of(data.train) == [[("<bos>a b c<eos>", " c<eos>"), ("<bos>a b dd<eos>", " dd<eos>")]]
    assert f"(no prompt; keys are {name}, chosen, rejected; set data.columns={{prompt: {name}}})" in str(
        data.report.sources[0]
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "Hi", "chosen": [USER, YES], "rejected": [USER, NO]},  # as ultrafeedback_binarized has them
        {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [USER], "chosen": [USER | {"name": None}, YES], "rejected": [USER | {"name": None}, NO]},  # Parquet
        {"prompt": "Hi", "chosen": [YES], "rejected": [NO]},
        {"prompt": [SYSTEM, USER], "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [USER], "chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]},
        {"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, YES], "rejected": [USER, NO]},
        {"prompt": [USER | {"content": "Hi "}], "chosen": [IN_PARTS, YES], "rejected": [USER, NO]},
        {"prompt": [USER], "chosen": "Yes", "rejected": "No."},
        {
            "chosen": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}],
            "rejected": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "No."}],
        },
    ],
)
def test_forms_of_messages_are_one_conversation(tmp_path: Path, row: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template="chatml"))
    ((chosen, rejected),) = rows_of(prepare(tmp_path, [row], tokenizer, max_length=128).train)
    assert (chosen[1], rejected[1]) == ("Yes<|im_end|><eos>", "No.<|im_end|><eos>")
    assert chosen[0].replace("Yes", "No.") == rejected[0]
    assert chosen[0].count("<|im_start|>user") == 1


@pytest.mark.parametrize("prompt", ["Hi", [USER]])
def test_a_judged_conversation_has_its_prompt_once(prompt: Any) -> None:
    (answer,) = read_answers({"prompt": prompt, "completion": [USER, YES], "label": True}, False, {})
    assert answer.fields["messages"] == [USER | {"train": False}, YES]


@pytest.mark.parametrize("prompt", ["Hi", [USER]])
def test_a_judged_conversation_keeps_its_own_system_message(prompt: Any) -> None:
    (answer,) = read_answers({"prompt": prompt, "completion": [SYSTEM, USER, YES], "label": True}, False, {})
    assert answer.fields["messages"] == [SYSTEM | {"train": False}, USER | {"train": False}, YES]


@pytest.mark.parametrize("role", ["role", "from"])
def test_a_call_that_both_answers_begin_with_is_no_prompt(role: str) -> None:
    call, yes, no = ({role: "assistant", "content": text} for text in ("<call>f</call>", "Yes", "No."))
    answers = {"chosen": [call, yes], "rejected": [call, no]}
    for answer in read_answers({"prompt": "Hi", **answers}, True, {"role": role} if role == "from" else {}):
        assert [message["role"] for message in answer.fields["messages"]] == ["user", "assistant", "assistant"]


@pytest.mark.parametrize("row", [{"prompt": [USER], "chosen": [OTHER, YES]}, {"prompt": "Hi", "chosen": [OTHER, YES]}])
def test_a_conversation_that_does_not_begin_with_its_prompt_is_told(row: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match="the answer is a conversation that does not begin with the prompt"):
        read_answers({**row, "rejected": [USER, NO]}, True, {})


@pytest.mark.parametrize("text", ['[{"role": "assistant", "content": "a"}]', "[{'content': 'a', 'role': 'assistant'}]"])
@pytest.mark.parametrize("key", ["prompt", "chosen", "rejected"])
def test_messages_as_text_are_told(text: str, key: str) -> None:
    with pytest.raises(BadRow, match=f"{key} is text that holds a list of messages"):
        read_answers({**text_row("a ", "b", "c"), key: text}, True, {})
    table = '[{"role": "agent", "span": "Ada"}]'  # an answer in JSON is text
    assert read_answers({**text_row("a ", "b", "c"), key: table}, True, {})


def test_earlier_answers_of_a_prompt_are_not_trained_on(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template="chatml"))
    row = {"prompt": [USER, YES, USER], "chosen": [YES], "rejected": [NO]}
    ((chosen, _),) = rows_of(prepare(tmp_path, [row], tokenizer, max_length=256).train)
    assert chosen[0].count("Yes") == 2 and chosen[1] == "Yes<|im_end|><eos>"


@pytest.mark.parametrize("order", [{"ranks": [2, 1, 2]}, {"scores": [0.5, 9.0, 0.5]}])
def test_of_a_ranked_list_every_answer_makes_a_pair_with_every_worse_one(tmp_path: Path, order: dict[str, Any]) -> None:
    rows = [{"prompt": "p ", "responses": ["a", "b", "c"], **order}, text_row("q ", "d", "e")]
    data = prepare(tmp_path, rows)
    assert [[target for _, target in pair] for pair in rows_of(data.train)] == [
        ["b<eos>", "a<eos>"],
        ["b<eos>", "c<eos>"],
        ["d<eos>", "e<eos>"],
    ]
    assert data.report.num_answers == 2 and not data.report.sources[0].problems


def test_an_answer_that_makes_no_pair_takes_no_other_pair_away(tmp_path: Path) -> None:
    rows = [{"prompt": "p ", "responses": ["a", "b", " ", "a"], "scores": [4, 2, 1, 3]}]
    data = prepare(tmp_path, rows, deduplicate=False)
    pairs = [[target for _, target in pair] for pair in rows_of(data.train)]
    assert pairs == [["a<eos>", "b<eos>"]] * 2 and not data.report.sources[0].problems


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ranks": [1, 1]}, "says of no answer that it is better"),
        ({"ranks": [1]}, "not two lists of the same length"),
        ({}, "not two lists of the same length"),
        ({"scores": [1, None]}, "not all numbers"),
        ({"responses": list(map(str, range(40))), "ranks": list(range(40))}, "40 responses, over 32"),
        ({"responses": ["a", "a"], "ranks": [1, 2]}, "chosen and rejected are the same"),
        ({"responses": ["a", " "], "ranks": [1, 2]}, "rejected is empty"),
    ],
)
def test_lists_that_are_not_ranked_are_left_out(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    bad = {"prompt": "p ", "responses": ["a", "b"]} | row
    data = prepare(tmp_path, [bad, text_row("q ", "d", "e")])
    assert len(rows_of(data.train)) == 1 and reason in str(data.report.sources[0])


def test_bad_rows_are_left_out_and_told_once(tmp_path: Path) -> None:
    rows = [
        text_row("good ", "yes", "no"),
        text_row("same ", "yes", "yes"),
        text_row("empty ", "yes", " "),
        text_row("x" * 40, "yes", "no"),
        {"prompt": "a", "completion": "b"},
        text_row("cut ", "y" * 40, "no"),
        text_row("cut the same ", "y" * 40, "y" * 50),
    ]
    report = prepare(tmp_path, rows).report
    lines = [line.strip() for line in str(report.sources[0]).splitlines()]
    assert lines[0].endswith("7 rows read, 2 used")
    assert sorted(lines[1:]) == sorted(
        [
            "2 rows left out (chosen and rejected are the same): rows.jsonl:2; rows.jsonl:7 (within 32 tokens)",
            "1 row left out (empty): rows.jsonl:3 (rejected is empty)",
            "1 row left out (no target token): rows.jsonl:4 (within 32 tokens, which the prompt alone fills)",
            "1 row left out (wrong keys): rows.jsonl:5 (no chosen and no rejected; keys are prompt, completion; "
            "data.columns={chosen: NAME} says which it is)",
            "1 row cut (longer than training.max_length): rows.jsonl:6 (46 tokens)",
        ]
    )
    with pytest.raises(DataError, match=r"data.bad_rows=error.*7 rows read, 1 used"):
        prepare(tmp_path, rows, bad_rows=BadRows.error)


def test_answers_with_labels_where_pairs_are_wanted_are_told_which_loss_takes_them(tmp_path: Path) -> None:
    data = prepare(tmp_path, [text_row("a ", "yes", "no"), {"prompt": "b ", "completion": "yes", "label": True}])
    assert "keys are prompt, completion, label; task=preference preference.loss=kto takes labels" in str(
        data.report.sources[0]
    )


def test_a_pair_stays_together_in_a_packed_sequence(tmp_path: Path) -> None:
    rows = [text_row("p" * n, "c" * (n + 1), "r" * (12 - n)) for n in range(1, 10)]
    data = prepare(tmp_path, rows).train
    assert data.max_length == 64 and data.lengths.max() <= 64 and len(data) < 9
    batch = collate(data, np.arange(len(data)), micro_batch_size=len(data) + 1)
    assert batch.input_ids.shape == (len(data) + 1, 64) and batch.num_answers == 18
    starts = batch.sequence_starts.tolist()
    flat = batch.input_ids.flatten().tolist()
    ends = [flat.index(EOS, start) for start in starts[:18]]
    texts = [bytes(flat[start + 1 : end]).decode() for start, end in zip(starts[:18], ends, strict=True)]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    assert sorted(pairs) == sorted((r["prompt"] + r["chosen"], r["prompt"] + r["rejected"]) for r in rows)


def test_without_packing_every_answer_is_a_sequence(tmp_path: Path) -> None:
    rows = [text_row("p" * n, "c", "rr") for n in range(1, 4)]
    batch = collate(prepare(tmp_path, rows, packing=False).train, np.arange(3), micro_batch_size=4)
    assert batch.input_ids.shape == (8, 8) and batch.num_answers == 6
    assert batch.input_ids[4:6, :7].tolist() == [[BOS, *b"pppc", EOS, PAD], [BOS, *b"ppprr", EOS]]


def test_judged_answers_bring_a_prompt_with_another_answer(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "completion": f"c{n}", "label": n != 1} for n in range(3)]
    data = prepare(tmp_path, rows, loss="kto", packing=False).train
    batch = collate(data, np.arange(3), micro_batch_size=4)
    assert batch.is_good is not None and batch.is_good.tolist() == [True, False, True]
    assert isinstance(batch.mismatched, Batch)
    expected = [[BOS, *f"p{n}c{(n - 1) % 3}".encode(), EOS, PAD, PAD] for n in range(3)]
    assert batch.mismatched.input_ids[:3].tolist() == expected
    assert (batch.mismatched.targets != -100).sum(1).tolist() == [3, 3, 3, 0]


def test_pairs_become_judged_answers(tmp_path: Path) -> None:
    data = prepare(tmp_path, [text_row("p", "c", "r"), text_row("q", "d", "s")], loss="kto").train
    assert [row[0][0] for row in rows_of(data)] == ["<bos>pc<eos>", "<bos>pr<eos>", "<bos>qd<eos>", "<bos>qs<eos>"]
    assert data.rows.is_good.tolist() == [True, False, True, False]  # type: ignore[attr-defined]


def mismatched_texts(data: Sequences) -> list[str]:
    rows: Any = data.rows
    found = [rows.read_mismatched(row)[0] for row in range(len(rows.lengths))]
    return [TOKENIZER.decode(tokens, skip_special_tokens=True) for tokens in found]


def test_another_answer_is_cut_after_the_prompt_that_it_follows(tmp_path: Path) -> None:
    """As TRL has it. It was cut after its own prompt, so that a long prompt left little of it to the others."""
    rows = [{"prompt": prompt, "completion": "abcdefgh", "label": prompt == "p"} for prompt in ("p", "longer", "long")]
    data = prepare(tmp_path, rows, loss="kto", max_length=9).train
    assert mismatched_texts(data) == ["pabcdefg", "longerab", "longabcd"]
    assert data.rows.lengths.tolist() == [9, 9, 9]


def test_counts_are_of_the_answers_and_not_of_the_room_for_others(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "completion": "c" * n * n, "label": n > 2} for n in range(1, 6)]
    prepared = prepare(tmp_path, rows, loss="kto")
    num_tokens = sum(len(tokens) for n in range(len(prepared.train)) for tokens, _ in prepared.train.rows_of(n))
    assert prepared.report.num_tokens == num_tokens < prepared.train.lengths.sum()
    epoch = GlobalBatches(prepared.train, BatchSplit(1, len(prepared.train), 1, 1, len(prepared.train)), seed=0, rank=0)
    assert epoch.of_step(0).num_tokens == num_tokens  # of the metrics of a step


def test_another_answer_is_never_one_of_the_same_prompt(tmp_path: Path) -> None:
    """The two answers of a pair follow one another; the second one's prompt once got the first one's answer."""
    data = prepare(tmp_path, [text_row(name, f"+{name}", f"-{name}") for name in ("p", "q")], loss="kto").train
    assert mismatched_texts(data) == ["p+q", "p-q", "q+p", "q-p"]
    sizes_of = {"p": 3, "q": 1, "rr": 2}  # three answers to one prompt, one to the next, ...
    rows = [
        {"prompt": prompt, "completion": f"{prompt}{n}" + "." * n, "label": n == 0}
        for prompt, size in sizes_of.items()
        for n in range(size)
    ]
    data = prepare(tmp_path, rows, loss="kto").train
    assert mismatched_texts(data) == ["prr0", "prr1.", "prr0", "qp0", "rrq0", "rrq0"]
    own = [len(prompt) + len(prompt) + 1 + n for prompt, size in sizes_of.items() for n in range(size)]
    longest = [2 + max(length, len(text)) for length, text in zip(own, mismatched_texts(data), strict=True)]
    assert data.rows.lengths.tolist() == longest
    alone = [{"prompt": "p", "completion": f"c{n}", "label": n == 0} for n in range(3)]
    assert mismatched_texts(prepare(tmp_path, alone, loss="kto").train) == ["pc2", "pc0", "pc1"]


@pytest.mark.parametrize(("loss", "max_length", "num_held_out"), [("dpo", 32, 9), ("dpo", 8, 9), ("kto", 8, 4)])
def test_all_answers_of_a_row_are_held_out_or_none(
    tmp_path: Path, loss: str, max_length: int, num_held_out: int
) -> None:
    """Of 8 tokens, answers are cut and the last row is left out."""
    ranked = [{"prompt": f"{n}.", "responses": ["a", "b" * 9, "c"], "ranks": [1, 2, 3]} for n in range(10)]
    pairs = [text_row(f"{n}.", "a", "b" * 9) for n in range(9)] + [text_row("too long.", "a", "b")]
    more = {"eval_fraction": 0.3, "max_length": max_length, "bad_rows": BadRows.truncate}
    data = prepare(tmp_path, ranked if loss == "dpo" else pairs, loss=loss, **more)
    assert data.eval is not None
    held_out, train = (Counter(row[0][0].split(".")[0] for row in rows_of(part)) for part in (data.eval, data.train))
    assert held_out.total() == num_held_out and not held_out.keys() & train.keys()
    assert set((held_out | train).values()) == {3 if loss == "dpo" else 2}


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_kind_teach_nothing(tmp_path: Path, label: bool) -> None:
    rows = [{"prompt": "p", "completion": f"c{n}", "label": label} for n in range(3)]
    with pytest.raises(DataError, match=f"every label is {str(label).lower()}"):
        prepare(tmp_path, rows, loss="kto")


def test_one_data_set_of_a_mix_and_held_out_rows_may_have_labels_of_one_kind(tmp_path: Path) -> None:
    for name, label in (("good", True), ("bad", False)):
        rows = [{"prompt": f"p{n}", "completion": f"{name}{n}", "label": label} for n in range(3)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    good, bad = (str(tmp_path / f"{name}.jsonl") for name in ("good", "bad"))
    more = {"path": None, "mix": {good: 2, bad: 1}, "eval_path": good}
    config = Config(
        task=TaskConfig(TaskName.preference),
        preference=PreferenceConfig(PreferenceLoss.kto),
        data=DataConfig(cache_folder=str(tmp_path / "cache"), **more),
        training=TrainingConfig(max_length=32, packing=True),
    )
    data = prepare_data(DataSpec.of(config), TOKENIZER, one_process(), 259)
    assert data.train.rows.is_good.tolist() == [True] * 3 + [False] * 3  # type: ignore[attr-defined]
    assert data.eval is not None and data.eval.rows.is_good.all()  # type: ignore[attr-defined]
    config.data.mix = {good: 1}
    with pytest.raises(DataError, match=r"good\.jsonl: every label is true"):
        prepare_data(DataSpec.of(config), TOKENIZER, one_process(), 259)


@pytest.mark.parametrize(("value", "is_good"), [(1, True), ("false", False), ("True", True), (0.0, False)])
def test_labels_as_tables_have_them(tmp_path: Path, value: Any, is_good: bool) -> None:
    rows = [
        {"prompt": "p", "completion": "c", "label": value},
        {"prompt": "p", "completion": "d", "label": not is_good},
    ]
    data = prepare(tmp_path, rows, loss="kto").train
    assert data.rows.is_good.tolist() == [is_good, not is_good]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["preference.beta=0"], "preference.beta=0.0 must be finite and greater than 0"),
        (["preference.simpo_gamma=2"], "has no effect with preference.loss=dpo"),
        (["preference.loss=orpo", "preference.precompute=false"], "has no effect with preference.loss=orpo"),
        (["preference.loss=kto", "preference.sft_weight=1"], "has no effect with preference.loss=kto"),
        (["preference.label_smoothing=0.5"], "preference.label_smoothing=0.5 must be"),
        (["data.format=messages"], "rows have prompt, chosen and rejected"),
        (["data.loss_on=all"], "compares answers to the same prompt"),
        (["kernels.cross_entropy=liger"], "sums over all tokens, not over answers"),
        (["preference.precompute=false", "lora.modules_to_save=[lm_head]"], "the reference would have it"),
        (["task=causal_lm", "preference.beta=0.5"], "has no effect with task.name=causal_lm"),
        (["data.streaming=true"], "answers are counted beforehand"),
        (["data.path=timdettmers/openassistant-guanaco"], "has no answers to compare"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, overrides: list[str], expected: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    config = load_config(["model=tiny", "task=preference", f"data.path={rows}", "training.max_steps=1", *overrides])
    assert expected in "\n".join(map(str, check_settings(config)))


def test_a_preference_has_no_problem(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    for loss in PreferenceLoss:
        argv = ["model=tiny", "task=preference", f"data.path={rows}", f"preference.loss={loss.value}"]
        assert check_settings(load_config(argv)) == []


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_losses_of_tokens_and_their_weighted_gradient(monkeypatch, is_frozen: bool, softcap: float | None) -> None:
    monkeypatch.setattr(sizes, "MIN_CHUNK", 32)
    monkeypatch.setattr(sizes, "LOGITS_BYTES", 1)
    torch.manual_seed(0)
    head = nn.Linear(16, 50).requires_grad_(not is_frozen)
    hidden, weights = torch.randn(2, 30, 16), torch.randn(2, 30)
    targets = torch.randint(0, 50, (2, 30))
    targets[0, :7] = -100
    exact = hidden.double().requires_grad_()
    logits = F.linear(exact, *(p.detach().double() for p in head.parameters()))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none").view(2, 30)
    (expected * weights).sum().backward()

    hidden = hidden.requires_grad_()
    attach_loss(head, LogitTransform(cap=softcap))
    losses = head(hidden, targets, "none")
    (losses * weights).sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_reference_reaches_the_batch_by_row(tmp_path: Path) -> None:
    data = prepare(tmp_path, [text_row("p" * n, "c", "r") for n in range(1, 6)]).train
    reference = np.arange(10, dtype=np.float32).reshape(5, 2)
    batch = collate(replace(data, reference=reference), np.arange(len(data)), micro_batch_size=len(data))
    assert batch.reference is not None
    lengths = (batch.targets != -100).sum().item()
    assert lengths == 20
    np.testing.assert_array_equal(batch.reference, reference[data.row_ids])


def test_the_plan_has_room_for_pairs_and_time_for_the_reference() -> None:
    def workload(*overrides: str) -> Workload:
        config = load_config(["model=llama3.2-1b-base", "data.path=rows.jsonl", *overrides])
        return Workload(traced(config), config, 1, 1, 1)

    def kept(work: Workload) -> int:
        return work.layer_use(0, Policy.none).saved + work.ends.loss + work.ends.loss_backward

    sft = workload("training.max_length=1024")
    dpo = workload("training.max_length=512", "task=preference")
    assert dpo.num_tokens == sft.num_tokens == 1024
    assert kept(dpo) == pytest.approx(kept(sft), rel=0.01)
    padded = workload("training.max_length=512", "task=preference", "training.packing=false")
    assert kept(padded) == pytest.approx(kept(sft), rel=0.01)
    policies, gpu = [Policy.none] * sft.num_layers, find_gpu("NVIDIA H200")
    assert gpu is not None
    speed = tokens_per_second(dpo, policies, gpu)
    assert speed == pytest.approx(tokens_per_second(sft, policies, gpu), rel=0.01)
    in_step = workload("training.max_length=512", "task=preference", "preference.precompute=false")
    assert 0.6 * speed < tokens_per_second(in_step, policies, gpu) < 0.8 * speed
