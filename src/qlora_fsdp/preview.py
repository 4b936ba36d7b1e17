"""`qlora-fsdp preview`: shows rows as the model will see them, and which of their tokens are trained on."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import CheckpointError, Problem, refuse
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.terminal import colored as colored_text
from qlora_fsdp.common.terminal import wrap_words
from qlora_fsdp.common.text import is_whole, plural, printable, shorten
from qlora_fsdp.config.outlook import Outlook
from qlora_fsdp.config.reading.commands import WITHOUT_TRAINING, CommandSettings
from qlora_fsdp.config.schema import Config, ModelConfig, RewardConfig, RolloutConfig, TaskName
from qlora_fsdp.config.specs import DataSpec, StepSpec
from qlora_fsdp.config.world import describe_slices
from qlora_fsdp.runtime.run_command import run_command, tell_next

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qlora_fsdp.data.run_data import PreparedData
    from qlora_fsdp.data.sequences import Sequences
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
Rows as the model sees them, coloured by what is trained on, with lengths and how full sequences are. Loads no weights.

usage: qlora-fsdp preview model=NAME|model.tokenizer_path=FOLDER data.path=FILE [setting=value ...]

  rows=3      this many rows, from row first=1 on; of a mix, of each data set
  color=auto  auto: colours on a terminal; always; never: what is trained on stands between [[ and ]]
  reference=COLUMN  of task=grpo: a column with an answer, whose rewards are shown (default: completion, solution or
                    answer, the first that a row has). Functions run as in training

Every other setting is one of training's: preview takes the command line of the run to come.

examples:
  qlora-fsdp preview model=llama3-8b data.path=chats.jsonl
  qlora-fsdp preview model.path=/models/my-llama data.path=chats.jsonl data.chat_template=chatml rows=10
  qlora-fsdp preview task=grpo model=qwen3-8b data.path=questions.jsonl 'reward.functions=[rewards.py:correct]'
"""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal obeys, but for tabs and line breaks
REFERENCES = ("completion", "solution", "answer")  # columns that may hold an answer to a prompt
NUM_BINS = 12
BAR_WIDTH = 40
EXAMPLE_TOKENS, EXAMPLE_LETTERS = 20, 100  # of a row that cleaning has found, around where its answer begins


@dataclass
class PreviewSettings(CommandSettings):
    """The settings of `preview`, which its --help describes."""

    rows: int = 3
    first: int = 1
    color: str = "auto"
    reference: str | None = None


def preview(settings: PreviewSettings, config: Config, processes: Processes) -> None:
    """Prepares the data as training does, and prints it."""
    problems = []
    for name, least, example in (("rows", 0, 3), ("first", 1, 1)):
        if (value := getattr(settings, name)) < least:
            problems.append(Problem(f"{name}={value}", f"must be at least {least}.", f"Set {name}={example}."))
    if settings.color not in ("auto", "always", "never"):
        problems.append(Problem(f"color={settings.color}", "is none of auto, always, never.", "Set color=auto."))
    if settings.reference is not None and not config.task.writes_answers:
        reason = "has no effect: answers are rewarded with task=grpo or task=distill alone."
        problems.append(Problem(f"reference={settings.reference}", reason, "Leave it out."))
    refuse(problems)
    with quick_imports():
        from qlora_fsdp.data.questions import prepare_questions
        from qlora_fsdp.data.run_data import PreparedData, prepare_data
        from qlora_fsdp.data.split import BatchSplit
        from qlora_fsdp.data.streams.stream import open_stream
        from qlora_fsdp.model.run_tokenizer import check_chat_rows, load_run_tokenizer
        from qlora_fsdp.weights.safetensors_files import read_headers

    tokenizer = load_run_tokenizer(config)
    spec = DataSpec.of(config)
    if config.data.streaming:
        streamed = open_stream(spec, tokenizer, BatchSplit(1, 1, 1, 1, 1), processes, None, 0, len(tokenizer))
        data = PreparedData(streamed.train.first_window.sequences, streamed.eval, streamed.report)
    else:
        prepare_rows = prepare_questions if spec.task.writes_answers else prepare_data
        data = prepare_rows(spec, tokenizer, processes, len(tokenizer))
    if not processes.is_main:
        return
    model_folder = Path(config.model.path or "").expanduser()
    with suppress(CheckpointError):  # a tokenizer is enough here
        notes = []
        if config.model.path and not spec.task.writes_answers:
            modules_to_save = config.lora.modules_to_save or []
            tensors = read_headers(model_folder)
            notes = check_chat_rows(tensors, tokenizer, spec, config.tokenizer, modules_to_save)
        data = replace(data, report=replace(data.report, notes=(*data.report.notes, *notes)))
    colored = settings.color == "always" or (settings.color == "auto" and sys.stdout.isatty())
    is_unpacked = not config.training.packing and not spec.task.writes_answers
    bad_rows = [bad for source in data.report.sources for bad in source.problems]
    row_word = "used row" if any(bad.num_kept < bad.num_rows for bad in bad_rows) else "row"
    rows = _rows(data.train, tokenizer, settings, spec, colored, row_word)
    if spec.task.writes_answers:
        rows = _prompts(data.train, tokenizer, settings, config.reward, config.rollout, config.task.name)
    shown: tuple[Iterable[str], ...] = (
        rows,
        _figures(data, spec, config.distributed.num_slices, is_unpacked),
        _cleaned(data, tokenizer),
    )
    shown += (_doubts(data, config),)
    with suppress(BrokenPipeError):  # nobody reads on, as in `... | head`
        for line in chain.from_iterable(shown):
            print(line)


def _rows(
    data: Sequences,
    tokenizer: PreTrainedTokenizerBase,
    settings: PreviewSettings,
    spec: DataSpec,
    colored: bool,
    row_word: str,
) -> Iterator[str]:
    """The rows in the order of the file, each below a line about it; of a mix, some of each data set.

    They are numbered as rows that are used. Where others are left out, whose places in the file are told below, each
    line says so.
    """
    import numpy as np

    from qlora_fsdp.data.labels import name_labels
    from qlora_fsdp.data.mix import MixedRows
    from qlora_fsdp.data.tokenizer import ContainedTokenizer

    contained = ContainedTokenizer(tokenizer)
    starts = data.rows.starts.tolist() if isinstance(data.rows, MixedRows) else [0, len(data.rows.num_targets)]
    names = [f"{path}, " for path in spec.settings.mix] if isinstance(data.rows, MixedRows) else [""]
    used = np.unique(data.row_ids)  # a mix repeats rows
    order = [
        (row, f"{name}{row_word} {row - first + 1}")
        for name, (first, last) in zip(names, pairwise(starts), strict=True)
        for row in used[(first <= used) & (used < last)][settings.first - 1 :][: settings.rows].tolist()
    ]
    for row, place in order:
        parts = data.rows.read(row)
        sides = ("", "") if len(parts) < 2 else (", chosen", ", rejected")
        for (tokens, is_target), side in zip(parts, sides, strict=False):
            about = f"{len(tokens)} tokens, {int(is_target.sum())} trained on"
            if data.has_labels:
                labels = data.labels_of(np.flatnonzero(data.row_ids == row)[:1])
                about = f"{len(tokens)} tokens, labels: {name_labels(labels, spec.task.settings)}"
            yield printable(f"--- {place}{side}: {about}")
            edges = [0, *(i for i in range(1, len(tokens)) if is_target[i] != is_target[i - 1]), len(tokens)]
            texts = [(contained.decode(tokens[a:b].tolist()), bool(is_target[a])) for a, b in pairwise(edges)]
            yield "".join(_mark(text, trained, colored) for text, trained in texts)


def _prompts(
    data: Sequences,
    tokenizer: PreTrainedTokenizerBase,
    settings: PreviewSettings,
    reward: RewardConfig,
    rollout: RolloutConfig,
    task: TaskName,
) -> Iterator[str]:
    """Prompts as the model gets them, their columns, and what functions give the answers that a column holds.

    Raises:
        RewardError: a function can't be used, or has failed.
    """
    from qlora_fsdp.data.questions import question_of
    from qlora_fsdp.data.tokenizer import ContainedTokenizer, encode
    from qlora_fsdp.training.rewards.functions import AnsweredQuestion, RewardFunctions

    contained = ContainedTokenizer(tokenizer)
    first = settings.first - 1
    questions = [question_of(data, index) for index in range(first, min(first + settings.rows, len(data)))]
    for question in questions:
        yield printable(f"--- {question.place}: a prompt of {len(question.tokens)} tokens")
        yield _mark(contained.decode(question.tokens), False, False)
        for name, value in question.columns.items():
            yield printable(f"{name}: {value}")
        if question.teacher_tokens not in ([], question.tokens):
            yield printable(f"--- the teacher's prompt of {len(question.teacher_tokens)} tokens")
            yield _mark(contained.decode(question.teacher_tokens), False, False)
        if question.given is not None:
            yield printable(f"--- the answer in the data, of {len(question.given)} tokens")
            yield _mark(contained.decode(question.given), True, False)
    if not reward.functions and task is TaskName.distill:
        return
    if not reward.functions:
        yield "--- No rewards are shown: reward.functions names no function."
        return
    names = REFERENCES if settings.reference is None else (settings.reference,)
    held = []
    for question in questions:
        found_names = [name for name in names if name in question.columns]
        if found_names:
            held.append((question, found_names[0]))
    if not held:
        yield f"--- No rewards are shown: no row has a column {' or '.join(names)}; reference=COLUMN names another one."
        return
    answers = []
    for question, name in held:
        text = str(question.columns[name])
        answers.append(AnsweredQuestion(question, encode(tokenizer, text), text))
    functions = RewardFunctions(reward, rollout.max_completion_length)
    try:
        found = functions.reward(answers, {"global_step": 0, "max_steps": 0})
    finally:
        functions.close()
    yield "--- rewards of the answers in the data"
    for (question, name), given in zip(held, found.by_function.tolist(), strict=True):
        told = ", ".join(f"{each} {value:g}" for each, value in zip(functions.names, given, strict=True))
        yield printable(f"{question.place}, {name}: {told}")


def _mark(text: str, is_target: bool, colored: bool) -> str:
    text = CONTROL.sub(lambda match: repr(match.group())[1:-1], text)
    if not colored:
        return f"[[{text}]]" if is_target else text
    return colored_text(text, "green" if is_target else "dim")


def _figures(data: PreparedData[Sequences], spec: DataSpec, num_slices: int, is_unpacked: bool) -> Iterator[str]:
    """Describe the rows: counts, their lengths as bars, and how much of a batch would be padding."""
    import numpy as np

    yield from ("---", *map(printable, str(data.report).splitlines()))
    lengths = data.train.rows.part_lengths.sum(1)[data.train.row_ids]
    middle, tail = np.percentile(lengths, [50, 95]).astype(int)
    yield f"tokens a row: {lengths.min()} to {lengths.max()}, half up to {middle}, 95 % up to {tail}"
    width = -(-(int(np.ptp(lengths)) + 1) // NUM_BINS)  # in tokens, rounded up
    counts = np.bincount((lengths - lengths.min()) // width)
    for low, count in zip(range(lengths.min(), lengths.max() + 1, width), counts, strict=True):
        bar = "#" * round(BAR_WIDTH * count / counts.max())
        high = f"to {low + width - 1}" if width > 1 else ""
        yield f"  {low:>7} {high:<10} {count:>9,} {bar}".rstrip()
    slices = describe_slices(spec.sequence_length, num_slices)
    if slices:
        slice_length = math.ceil(spec.sequence_length / num_slices)
        longer = plural(int((lengths > slice_length).sum()), "row")
        yield f"sequences of {spec.sequence_length} tokens{slices}; {longer} longer than a slice"
    if is_unpacked:
        padding = 1 - lengths.mean() / lengths.max()
        yield f"without packing, up to {padding:.0%} of a batch of all rows would be padding"


def _doubts(data: PreparedData[Sequences], config: Config) -> Iterator[str]:
    """What is to be doubted about the run: few steps, of data that ends, and an unusual learning rate."""
    from qlora_fsdp.data.split import split_batches

    if config.training.max_steps == WITHOUT_TRAINING["training"]["max_steps"]:  # not typed: the epochs say it
        config = config.with_values({"training.max_steps": None})
    known = _known_positions(config.model)
    longest = data.train.longest_part
    if known is not None and longest > known:
        yield (
            f"Note: the longest row has {longest:,} tokens, and the model was made for {known:,} positions. Set "
            f"training.max_length={known}, which cuts rows there, or see model.rope_scaling."
        )
    outlook = Outlook.of(config, 1)
    doubts = [outlook.unusual_rate()]
    if config.training.global_batch_size is not None and not config.data.streaming:
        steps = StepSpec.of(config.training, config.optim, 1, micro_batch_size=1)
        num_steps = split_batches(steps, 1, len(data.train)).num_steps
        doubts.append(outlook.few_steps(num_steps, len(data.train)))
    yield from (wrap_words(f"Note: {doubt}", sys.stdout) for doubt in doubts if doubt is not None)


def _known_positions(model: ModelConfig) -> int | None:
    """Positions that the model was made for, by its config.json here or its preset; None if neither says."""
    file = Path(model.path or "").expanduser() / "config.json"
    values = model.config
    if model.rope_scaling:
        return None  # training says what these are made for
    if model.path is not None and file.is_file():
        with suppress(ValueError, OSError):  # training says what is wrong with it
            values = read_json_object(file, MAX_CONFIG_BYTES)
    text = values.get("text_config")
    known = (text if isinstance(text, dict) else values).get("max_position_embeddings")
    return known if is_whole(known) else None


def _cleaned(data: PreparedData[Sequences], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The beginnings of some rows of each kind that cleaning has found."""
    from qlora_fsdp.data.tokenizer import ContainedTokenizer

    contained = ContainedTokenizer(tokenizer)
    for cleaning in data.report.cleanings:
        yield printable(f"--- {cleaning}, such as:")
        for row in cleaning.examples:
            tokens, is_target = data.train.rows.read(row)[0]
            first_target = int(is_target.argmax())  # what comes before may be alike in all rows
            shown = tokens[max(0, first_target - EXAMPLE_TOKENS) : first_target + EXAMPLE_TOKENS]
            text = " ".join(contained.decode(shown.tolist()).split())
            yield f"  {shorten(text, EXAMPLE_LETTERS)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    exit_code = run_command(arguments, PreviewSettings, USAGE, preview, ["reward.functions"], takes_adapter=False)
    if exit_code == 0:
        own = tuple(f"{field.name}=" for field in fields(PreviewSettings))
        tell_next([text for text in arguments if not text.startswith(own)])
    return exit_code


if __name__ == "__main__":
    end_process(main())
