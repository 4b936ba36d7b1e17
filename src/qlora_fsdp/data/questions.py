"""Prompts that the model answers itself, with whatever else their rows have: what rewards an answer may ask for it.

A row is {"prompt": ...}, text or a list of messages, which may have `tools` and `system`. Text goes to the model as it
is, after what the tokenizer puts before a text. Messages are written by the chat template, with the beginning of an
answer. All columns stay with the prompt. A teacher may get another prompt (distill.teacher_prompt), and a row may have
an answer (`completion`), tokenized as one to train on would be. Rows are read when a run starts and kept in memory:
they are thousands, where texts to train on are millions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.data_sets import settings_for_evaluation
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn, TaskName
from qlora_fsdp.config.specs import DataSpec, TaskSpec
from qlora_fsdp.data.chats.conversation import read_conversation
from qlora_fsdp.data.chats.written import check_words, check_written
from qlora_fsdp.data.columns import COMMON_NAMES, find_absent, rename, show_keys
from qlora_fsdp.data.counts import DataReport, ProblemCounter, ReadReport
from qlora_fsdp.data.message import SYSTEM
from qlora_fsdp.data.read import Paths, find_source, iterate_rows, name_setting
from qlora_fsdp.data.row import (
    EMPTY,
    REFUSED,
    TOO_LONG,
    WRONG_KEYS,
    WRONG_TYPES,
    BadRow,
    add_system_prompt,
    as_messages,
    check_row,
    parse_row,
    refuse_turns_as_text,
    type_name,
)
from qlora_fsdp.data.run_data import PreparedData
from qlora_fsdp.data.sequences import NO_LABELS, Indices, Sequences
from qlora_fsdp.data.together import check_same_counts, failing_together
from qlora_fsdp.data.tokenize import RowTokenizer, TokenRow
from qlora_fsdp.data.tokenized_rows import check_token_ids
from qlora_fsdp.data.tokenizer import begin_tokens, encode, with_template
from qlora_fsdp.runtime.processes import Processes

COMPLETION = "completion"  # the column of an answer in the data


@dataclass(frozen=True)
class Question:
    """A prompt with its row.

    Attributes:
        tokens: what the model goes on from.
        prompt: as functions get it: text, or a list of messages.
        columns: the other columns, by their names in the data.
        place: where the row is, such as `sums.jsonl:3`.
        teacher_tokens: what a teacher goes on from.
        given: the tokens of the answer in the data; None where no step is on it.
    """

    tokens: list[int]
    prompt: Any
    columns: dict[str, Any]
    place: str
    teacher_tokens: list[int] = field(default_factory=list)
    given: list[int] | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation, so that the answer is a message."""
        return isinstance(self.prompt, list)

    @property
    def max_token_id(self) -> int:
        """The largest id that the model or a teacher gets."""
        return max(*self.tokens, *self.teacher_tokens, *(self.given or ()), -1)


@dataclass(frozen=True)
class Questions:
    """Prompts as rows of tokens, none of which is trained on (`sequences.Rows`)."""

    questions: Sequence[Question]

    num_answers = 0
    labels = NO_LABELS

    @cached_property
    def key(self) -> str:
        text = json.dumps([[question.tokens, question.columns] for question in self.questions], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(question.tokens) for question in self.questions], dtype=np.int64)

    @property
    def part_lengths(self) -> NDArray[np.int64]:
        return self.lengths[:, None]

    @property
    def num_targets(self) -> NDArray[np.int32]:
        """A prompt counts once."""
        return np.ones(len(self.questions), dtype=np.int32)

    def read(self, row: int) -> list[TokenRow]:
        tokens = np.array(self.questions[row].tokens, dtype=np.int32)
        return [(tokens, np.zeros(len(tokens), dtype=bool))]


def prepare_questions(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, processes: Processes, vocab_size: int
) -> PreparedData[Sequences]:
    """Reads the prompts of a run, and those that are held out. Every rank calls this, and has all of them.

    Raises:
        DataError: there is none that can be used; raised on every rank.
    """
    data = spec.settings
    assert data.path is not None
    with failing_together(processes):
        found, report = _read(data.path, data, spec, tokenizer)
        reports = [report]
        held_out: list[Question] = []
        if data.eval_path is not None:
            held_out, report = _read(data.eval_path, settings_for_evaluation(data), spec, tokenizer)
            reports.append(report)
        for report in reports:
            check_token_ids(report.max_token_id, vocab_size, report.path)
    order = np.random.default_rng(spec.row_seed).permutation(len(found))
    if data.max_rows is not None:
        order = np.sort(order[: data.max_rows])
        found = [found[number] for number in order.tolist()]
        order = np.random.default_rng(spec.row_seed).permutation(len(found))
    if data.eval_fraction > 0:
        number = max(1, int(len(found) * data.eval_fraction))
        if number >= len(found):
            raise DataError(
                f"data.eval_fraction={data.eval_fraction} of {len(found)} usable prompts leaves none to train on. Set "
                "it lower, or set data.eval_path."
            )
        chosen = set(order[:number].tolist())
        held_out = [question for row, question in enumerate(found) if row in chosen]
        found = [question for row, question in enumerate(found) if row not in chosen]
    assert isinstance(tokenizer.pad_token_id, int)
    train = _as_sequences(found, spec, tokenizer.pad_token_id)
    evaluation = _as_sequences(held_out, spec, tokenizer.pad_token_id) if held_out else None
    report_of_all = DataReport(
        sources=tuple(reports),
        num_sequences=len(train),
        num_rows=len(train),
        num_tokens=int(train.token_counts.sum()),
        num_target_tokens=len(train),
        packing_efficiency=1.0,
        num_eval_sequences=len(held_out),
        num_eval_target_tokens=len(held_out),
        are_prompts=True,
    )
    check_same_counts(report_of_all, processes)
    return PreparedData(train, evaluation, report_of_all)


def question_of(sequences: Sequences, index: int) -> Question:
    """The question that is a sequence."""
    rows = sequences.rows
    assert isinstance(rows, Questions)
    row = int(sequences.row_ids_of(index)[0])
    return rows.questions[row]


def _as_sequences(questions: list[Question], spec: DataSpec, pad_token_id: int) -> Sequences:
    rows: Indices = np.arange(len(questions), dtype=np.int64)
    starts = np.arange(len(questions) + 1, dtype=np.int64)
    return Sequences(Questions(questions), rows, starts, spec.max_length, pad_token_id, is_packed=False)


def _read(
    path: Paths, data: DataConfig, spec: DataSpec, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Question], ReadReport]:
    """The questions of a source, and the report about it."""
    source = find_source(path, data, spec.task.settings)
    tokenizer = with_template(tokenizer, data)
    counter = ProblemCounter()
    found: list[Question] = []
    room = spec.max_length - spec.task.rollout.max_completion_length
    num_rows = 0
    for place, raw in iterate_rows(source):
        num_rows += 1
        try:
            row = parse_row(raw)
            question = _read_question(row, place, data, tokenizer)
            if spec.task.name is TaskName.distill:
                question = _with_teacher(question, row, data, spec.task, tokenizer)
            longest = max(len(question.tokens), len(question.teacher_tokens))
            if longest > room:
                length = f"{longest} tokens, and rollout.max_completion_length leaves {room} to prompts"
                raise BadRow(TOO_LONG, length)
            found.append(question)
        except BadRow as bad:
            counter.add(place, bad.kind, bad.detail, is_kept=False)
    report = ReadReport(
        path=source.path,
        num_rows=num_rows,
        num_used_rows=len(found),
        num_tokens=sum(len(question.tokens) for question in found),
        max_token_id=max((question.max_token_id for question in found), default=-1),
        problems=counter.problems(),
        skipped=source.skipped,
    )
    if report.problems and data.bad_rows is BadRows.error:
        raise DataError(f"data.bad_rows=error, and {report}\nRepair these rows, or set data.bad_rows=skip.")
    if not found:
        what = f"{report}" if num_rows else f"{report.path} has no rows"
        where = name_setting(path, data)
        more = "rollout.max_completion_length or training.max_length"
        raise DataError(f"There is no usable prompt. {what}\nRepair the rows, or set {where}, data.columns, {more}.")
    return found, report


def _with_teacher(
    question: Question,
    row: dict[str, Any],
    data: DataConfig,
    task: TaskSpec,
    tokenizer: PreTrainedTokenizerBase,
) -> Question:
    """The question with the teacher's prompt, and with the row's answer where steps are on such.

    Raises:
        BadRow: the row lacks one of the two, or it can't be used, or the teacher's prompt is of another kind.
    """
    settings = task.distill
    column = settings.teacher_prompt
    own = dict(row)
    if column is not None and column not in row:
        raise BadRow(WRONG_KEYS, f"no {column}, which distill.teacher_prompt names; keys are {show_keys(row)}")
    if column is not None:
        own[data.columns.get("prompt", "prompt")] = row[column]
    asked = _read_question(own, question.place, data, tokenizer, settings.teacher_system_prompt)
    if asked.is_chat != question.is_chat:
        forms = {True: "a list of messages", False: "text"}
        unlike = f"{column} is {forms[asked.is_chat]}, and the prompt is {forms[question.is_chat]}"
        raise BadRow(WRONG_TYPES, f"{unlike}; write both as messages, or both as text")
    if settings.teacher_system_prompt is not None and not asked.is_chat:
        raise BadRow(WRONG_TYPES, "the prompt is text, which distill.teacher_system_prompt can't stand before")
    given = None
    if settings.lmbda < 1:
        given = _given_tokens(question, row, data, task, tokenizer)
    return replace(question, teacher_tokens=asked.tokens, given=given)


def _given_tokens(
    question: Question,
    row: dict[str, Any],
    data: DataConfig,
    task: TaskSpec,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """The tokens of the answer that a row has: those that supervised fine-tuning would train on.

    Raises:
        BadRow: it has none, or one that is too long or can't be used.
    """
    renamed = rename(row, data.columns)
    if COMPLETION not in renamed:
        raise BadRow(WRONG_KEYS, f"no {COMPLETION}, which distill.lmbda={task.distill.lmbda:g} asks for")
    most = task.rollout.max_completion_length
    answer = renamed[COMPLETION]
    if question.is_chat and isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    answered = {"prompt": question.prompt, COMPLETION: answer, "tools": renamed.get("tools")}
    named = {key: value for key, value in answered.items() if value is not None}
    read = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 2**31, BadRows.skip, thoughts=data.thoughts)
    found = read.whole({"place": [question.place], "row": [json.dumps(named).encode()]})
    if found["problem"][0]:
        raise BadRow(found["problem"][0], found["detail"][0])
    tokens: list[int] = found["tokens"][0][found["is_target"][0]].tolist()
    if len(tokens) > most:
        raise BadRow(TOO_LONG, f"an answer of {len(tokens)} tokens, and rollout.max_completion_length is {most}")
    return tokens


def _read_question(
    row: dict[str, Any],
    place: str,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    instructions: str | None = None,
) -> Question:
    """A row as a question, with `instructions` in place of the system message that it would have, if it is a chat.

    Raises:
        BadRow: it can't be used.
    """
    columns = {key: value for key, value in row.items() if key not in ("prompt", data.columns.get("prompt"))}
    absent = find_absent(row, data.columns)
    if absent:
        raise BadRow(WRONG_KEYS, f"{absent}; keys are {show_keys(row)}")
    renamed = rename(row, data.columns)
    if "prompt" not in renamed:
        other = next((name for name in (*COMMON_NAMES["prompt"], *COMMON_NAMES["messages"]) if name in row), "NAME")
        raise BadRow(WRONG_KEYS, f"no prompt; keys are {show_keys(row)}; set data.columns={{prompt: {other}}}")
    prompt = renamed["prompt"]
    if isinstance(prompt, list):
        messages, tools = _as_chat(prompt, renamed, data, instructions)
        return Question(_chat_tokens(tokenizer, messages, tools), messages, columns, place)
    refuse_turns_as_text("prompt", prompt)
    if not isinstance(prompt, str):
        raise BadRow(WRONG_TYPES, f"prompt is {type_name(prompt)}, neither text nor a list of messages")
    if not prompt:
        raise BadRow(EMPTY, "prompt is empty")
    begin, tokens = begin_tokens(tokenizer), encode(tokenizer, prompt)
    return Question(tokens if tokens[: len(begin)] == begin else begin + tokens, prompt, columns, place)


def _as_chat(
    prompt: list[Any], row: dict[str, Any], data: DataConfig, instructions: str | None
) -> tuple[list[dict[str, Any]], Any]:
    """The messages of a prompt and its tools.

    `instructions` take the place of a system message, and data.system_prompt stands before messages without one.
    """
    given = {"messages": as_messages(prompt, {}), "tools": row.get("tools"), "system": row.get("system")}
    _, checked = check_row(given, DataFormat.messages, {})
    if instructions is not None:
        has_one = checked["messages"][0]["role"] in SYSTEM
        others = checked["messages"][1:] if has_one else checked["messages"]
        checked = {**checked, "messages": [{"role": "system", "content": instructions}, *others]}
    elif data.system_prompt:
        checked = add_system_prompt(checked, data.system_prompt)
    messages = checked["messages"]
    if messages[-1]["role"] == "assistant":
        raise BadRow(WRONG_KEYS, "prompt ends with an answer, after which the model has nothing to say")
    return messages, checked["tools"]


def _chat_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    """A conversation by the chat template, with the beginning of the assistant's next turn."""
    if tokenizer.chat_template is None:
        raise DataError(
            "Prompts are messages, and the tokenizer has no chat template. Set data.chat_template=chatml (or llama3, "
            "alpaca, or a Jinja file), or write prompts as text."
        )
    try:
        conversation = read_conversation(messages, tools, tokenizer)
        text = conversation.render(conversation.messages, prompt=True)
        written = conversation.render(conversation.messages)
        check_written(conversation, written)
        check_words(conversation, written)
    except BadRow:
        raise
    except Exception as error:  # a template is a program, and its sandbox lets any error through
        raise BadRow(REFUSED, str(error)) from error
    return encode(tokenizer, text)
