"""Which rows are trained on, and what becomes of them before they are tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from typing_extensions import assert_never

from qlora_fsdp.config.schema.facets import ALWAYS, Files, Hosts, Run, above, at_least, setting, when
from qlora_fsdp.config.schema.task import TaskName

# What the QLoRA paper (arXiv:2305.14314) trained Guanaco on: conversations of OpenAssistant.
DEFAULT_DATA = "timdettmers/openassistant-guanaco"
CHAT_TEMPLATES = ("alpaca", "chatml", "llama3")  # those that ship here, in data/templates/


DEFAULT_CACHE_FOLDER = "~/.cache/qlora_fsdp/data"
SHORTEST = "shortest"  # a value of data.mix_until


class DataFormat(Enum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    prompt_completion = "prompt_completion"
    instruction = "instruction"
    text = "text"
    random = "random"


class LossOn(Enum):
    completion = "completion"
    last = "last"
    all = "all"

    @property
    def is_everything(self) -> bool:
        """Whether every token is trained on, whoever says it."""
        match self:
            case LossOn.all:
                return True
            case LossOn.completion | LossOn.last:
                return False
            case unknown:
                assert_never(unknown)


class Thoughts(Enum):
    last = "last"
    all = "all"
    none = "none"


class BadRows(Enum):
    error = "error"
    skip = "skip"
    truncate = "truncate"


@dataclass
class DataConfig:
    # A .jsonl, .json, .csv, .tsv, .parquet or .arrow file; a folder of .txt or .md files or of any of these; a pattern
    # such as rows/*.jsonl; a URL such as s3://bucket/rows.jsonl; or a hub data set's name. Several files, folders,
    # patterns or URLs are a list, [a.jsonl,b.jsonl], whose rows follow one another. The default is what the QLoRA paper
    # trained on. It counts for training and preview, where neither a mix nor random tokens are asked for; other
    # commands want data named.
    path: Any = setting(
        DEFAULT_DATA,
        Run.other,
        ALWAYS,
        files=Files.users,
        text_or_list=True,
        other_names=("dataset", "dataset_name", "datasets"),
        hosts=Hosts.place,
        is_planned=False,
        is_common=True,
    )
    # Several of these with their weights, in place of path: {chats.jsonl: 3, code.jsonl: 1} takes three of four rows
    # from chats. A data set may have settings of its own, {code.jsonl: {weight: 1, max_rows: 5000}}: weight, max_rows,
    # split, name, format, chat_template, columns and system_prompt.
    mix: dict[str, Any] = setting(
        {},
        Run.other,
        ALWAYS,
        files=Files.users,
        example="'{a.jsonl: 1, b.jsonl: 1}'",
        hosts=Hosts.place,
        is_planned=False,
    )
    # How long an epoch of a mix is. longest: until every row was seen, so that data sets which are small for their
    # weight are repeated. shortest: until the first data set is used up, so that no row is repeated and the others are
    # not seen whole. A whole number: about so many tokens.
    mix_until: Any = setting(
        "longest", Run.other, ALWAYS, files=Files.users, bounds=at_least(1), words=("longest", SHORTEST)
    )
    # Subset of a hub data set.
    name: str | None = setting(None, Run.other, ALWAYS, files=Files.users)
    # Split of a data set that has splits, with the rows of it to take: train, train[:5000], train[10%:]. Files without
    # splits are train.
    split: str = setting("train", Run.other, ALWAYS, files=Files.users)
    # Held-out data of the same form. null: eval_fraction of the rows.
    eval_path: Any = setting(
        None, Run.other, ALWAYS, files=Files.users, text_or_list=True, hosts=Hosts.place, is_planned=False
    )
    # Split of eval_path, with the rows of it to take. null: the name of data.split, and all rows.
    eval_split: str | None = setting(None, Run.other, when("data.eval_path"), files=Files.users)
    # Part of the rows that is held out for evaluation when there is no eval_path. 0: no evaluation.
    eval_fraction: float = setting(
        0.0, Run.other, ALWAYS, files=Files.users, bounds=at_least(0, below=1), other_names=("val_set_size", "val_size")
    )
    # Use at most this many rows, drawn by data.seed; the first ones are data.split=train[:5000]. For a mix this holds
    # for each of its data sets. null: all rows.
    max_rows: int | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=at_least(1))
    # Seed of the choice of rows: by max_rows, by eval_fraction, and by a mix. Set it to compare runs of different
    # training.seed on the same rows. null: training.seed.
    seed: int | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=at_least(0, below=2**31))
    # Form of the rows. `auto` looks at their keys. `random` makes random tokens, for dry runs.
    format: DataFormat = setting(DataFormat.auto, Run.other, ALWAYS, files=Files.users)
    # The names that the data has for prompt, completion, messages, role, content, text, label and so on, where these
    # differ: {prompt: question, completion: answer}.
    columns: dict[str, str] = setting(
        {}, Run.other, ALWAYS, files=Files.users, example="'{prompt: question, completion: answer}'"
    )
    # A system message for conversations that have none.
    system_prompt: str | None = setting(None, Run.other, ALWAYS, files=Files.adapters)
    # What is trained on. completion: the completion, which is all of the assistant's turns. last: of a conversation the
    # last of these alone. all: every token.
    loss_on: LossOn = setting(
        LossOn.completion, Run.other, ALWAYS, files=Files.users, other_names=("train_on_inputs", "mask_history")
    )
    # The thoughts of answers. last: the chat template decides, and most templates write those of the last answer alone.
    # all: answers whose thoughts it leaves out are trained on as the ends of conversations of their own, so that a row
    # becomes several. none: there are none, whatever the data has.
    thoughts: Thoughts = setting(Thoughts.last, Run.other, when("task.name", TaskName.causal_lm), files=Files.users)
    # A Jinja file, or the name of a template that ships here (chatml, llama3, alpaca). null: the tokenizer's own.
    chat_template: str | None = setting(
        None, Run.other, ALWAYS, files=Files.users, other_names=("template",), hosts=Hosts.place, is_planned=False
    )
    # What the chat template is given beside the messages, in training and when the adapter is used, for which it is
    # saved: {enable_thinking: false} is known to templates of models that think.
    template_arguments: dict[str, Any] = setting(
        {},
        Run.other,
        ALWAYS,
        files=Files.adapters,
        example="'{enable_thinking: false}'",
        other_names=("chat_template_kwargs", "enable_thinking"),
    )
    # What to do with an unusable row. error: stop and list all of them. skip: leave it out. truncate: cut it if it is
    # longer than training.max_length, and leave it out if it is unusable for another reason.
    bad_rows: BadRows = setting(BadRows.truncate, Run.other, ALWAYS, files=Files.users)
    # Leave out rows of the training data that have the same tokens, targets and label as an earlier one, also of
    # another data set of a mix. Evaluation data and streams stay as they are.
    deduplicate: bool = setting(True, Run.other, ALWAYS, files=Files.users)
    # Leave out rows of the training data that are nearly the same as an earlier one: with at least this share of runs
    # of five tokens in common (Jaccard's index, estimated by MinHash; needs the package datasketch). 0.8 is usual.
    near_duplicates: float | None = setting(
        None, Run.other, ALWAYS, files=Files.users, bounds=above(0, below=1), is_planned=False
    )
    # Leave out rows of the training data that are in the evaluation data too. Without it they are only counted.
    decontaminate: bool = setting(False, Run.other, ALWAYS, files=Files.users)
    # Leave out rows of the training data with fewer tokens. With pairs the longer answer counts, with its prompt.
    min_tokens: int | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=at_least(1))
    # Leave out rows of the training data with more tokens, at most training.max_length. Rows that are longer than that
    # are cut first (data.bad_rows).
    max_tokens: int | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=at_least(1))
    # Read the rows while training, in the order of the files. This is for data that is larger than the disk. It needs
    # training.max_steps to know the end, and data.eval_path to evaluate. Each rank reads and tokenizes its part.
    streaming: bool = setting(False, Run.other, ALWAYS, files=Files.users)
    # With streaming: the rows that are tokenized, packed and shuffled together, ahead of the training. From 2,000 rows
    # on, processes of each rank tokenize: data.num_proc, or its share of the host's cores but one, at most 8.
    buffer_rows: int = setting(10000, Run.other, ALWAYS, files=Files.users, bounds=at_least(1))
    # Processes that tokenize. null: one for each CPU core that this rank may use.
    num_proc: int | None = setting(None, Run.same, ALWAYS, bounds=at_least(1), hosts=Hosts.first)
    # Where tokenized data is kept, also what a run that was broken off has done. null: ~/.cache/qlora_fsdp/data
    cache_folder: str | None = setting(None, Run.same, ALWAYS, hosts=Hosts.place)

    @property
    def has_evaluation(self) -> bool:
        """Whether there are rows to evaluate on: other data, or a part of the rows."""
        return self.eval_path is not None or self.eval_fraction > 0

    @property
    def is_default(self) -> bool:
        """Whether a run takes the data of those who name none."""
        return bool(self.path == DEFAULT_DATA)
