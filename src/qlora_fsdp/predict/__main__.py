"""`qlora-fsdp predict`: what a model says of every row of a file, in the rows' order, and resumable.

What is predicted stands in OUT.part, a line a row, as soon as it is known, below a first line that says of which rows
and of which adapter it is. A run that was killed goes on behind the last whole line. OUT itself is written at the end.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import ConfigError, DataError, Problem, RunFolderError, refuse
from qlora_fsdp.common.files import digest_file, open_to_append, remove, write_atomically
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.text import first_line, join_words, plural
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS
from qlora_fsdp.config.data_sets import as_paths
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings
from qlora_fsdp.config.schema import Config, DataConfig, ModelConfig, TaskConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.generate import (
    GenerateSettings,
    check_generation,
    check_lengths,
    check_prompt_row,
    complete,
    tokenize_prompts,
)
from qlora_fsdp.runtime.run_command import check_out, log, run_command

if TYPE_CHECKING:
    from qlora_fsdp.model.assemble import AssembledModel
    from qlora_fsdp.predict.predictor import Predictor
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
What a model says of every row of a file: classes with probabilities, numbers, labels of words, rewards, or texts.

usage: qlora-fsdp predict [adapter=DIR] data.path=FILE out=FILE [launch.num_processes=N] [setting=value ...]

  adapter=DIR      the adapter's folder, which also knows its base model and its task. Without one: model.path=...
  data.path=FILE   rows as for training, whose labels or answers are not needed; data.columns and training.max_length
                   as there, to be typed again. Models that write text take {"prompt": ...} or {"messages": [...]}
  out=FILE         .jsonl or .csv: the rows in their order, each with its "prediction"; classes also have
                   "probabilities". Until all is done it is FILE.part. The same command goes on from there
  batch_size=N     texts that a process computes at a time (default: 8; of models that write text 64, or as many as its
                   GPU has memory for)

of models that write text, as for generate:
  max_new_tokens=128, temperature=0, top_p=1, seed=0, raw=false

Several processes share the rows, and the model's weights where these don't fit each.

examples:
  qlora-fsdp predict adapter=outputs/run/adapter data.path=asked.jsonl out=answered.csv
  qlora-fsdp predict adapter=outputs/run/adapter data.path=asked.jsonl out=answered.jsonl launch.num_processes=4
"""

PART = ".part"
TEXTS_A_PART = 256  # of a process, completed before they are written: a text that ends makes room for the next
Rows = list[tuple[str, dict[str, Any]]]  # places and rows
Predict = Callable[[int, int], list[dict[str, Any]]]  # the predictions of the rows from one number to another


@dataclass
class PredictSettings(BaseAndAdapterSettings):
    """Settings of `predict`, as its --help says."""

    out: str | None = None
    batch_size: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    raw: bool = False


def predict_rows(settings: PredictSettings, config: Config, processes: Processes) -> None:
    """Load the model, and write the predictions of the rows that have none yet."""
    generation = _generation_of(settings)
    _check(settings, config.data, config.task, generation, processes)
    assert settings.out is not None
    rows, digest = read_asked_rows(config.data, config.task)
    file = PredictionFile(
        Path(settings.out).expanduser(), _identity(settings, config.model, DataSpec.of(config), digest)
    )
    num_done = processes.share(file.open() if processes.is_main else None, int, patiently=True)
    if num_done > len(rows):
        raise RunFolderError(f"{file.part} has more lines than there are rows. Remove it, and predict all anew.")
    if num_done:
        log.info(f"Goes on behind row {num_done:,} of {len(rows):,}, which {file.part} has")
    if num_done < len(rows):
        with quick_imports():
            from qlora_fsdp.inference.trained import load_trained
            from qlora_fsdp.predict.predictor import BATCH_SIZE, Predictor

        trained = load_trained(config, settings, processes, generates=config.task.is_causal)
        if config.task.is_causal:
            predict = _by_text(rows, trained, generation, config.data.system_prompt, processes)
            step = max(TEXTS_A_PART, settings.batch_size or 0) * processes.num_ranks
        else:
            batch_size = settings.batch_size or BATCH_SIZE
            predictor = Predictor(trained, config.task, config.data.columns, config.training.max_length)
            predict = _by_head(rows, predictor, batch_size, processes)
            step = batch_size * processes.num_ranks
        for first in range(num_done, len(rows), step):
            last = min(len(rows), first + step)
            found = predict(first, last)
            if processes.is_main:
                file.add(found)
    if processes.is_main:
        file.finish([row for _, row in rows])
        log.info(f"{plural(len(rows), 'prediction')} in {settings.out}")


def _generation_of(settings: PredictSettings) -> GenerateSettings:
    """How texts are written, as `generate` has it."""
    return GenerateSettings(
        adapter=settings.adapter,
        other_base=settings.other_base,
        prompt="",  # the rows are read here
        raw=settings.raw,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )


def _check(
    settings: PredictSettings, data: DataConfig, task: TaskConfig, generation: GenerateSettings, processes: Processes
) -> None:
    """Refuse what makes no sense, before anything is read.

    Raises:
        ConfigError: all problems that were found.
    """
    problems = list(_not_read(data))
    if settings.out is None:
        problems.append(Problem("out", "is missing.", "Set out=predictions.jsonl, or a file .csv."))
    elif Path(settings.out).suffix not in (".jsonl", ".csv"):
        reason = "has an unknown ending."
        problems.append(Problem(f"out={settings.out}", reason, "Set out to a file .jsonl or .csv."))
    elif processes.is_main:
        problems += check_out(settings.out, as_paths(data.path))
    if task.is_causal:
        check_generation(generation, task, problems)
        return
    if settings.batch_size is not None and settings.batch_size < 1:
        problems.append(Problem(f"batch_size={settings.batch_size}", "must be at least 1.", "Set batch_size higher."))
    for name in ("max_new_tokens", "temperature", "top_p", "seed", "raw"):
        value = getattr(settings, name)
        if value != getattr(PredictSettings, name):
            reason = f"has no effect with {show('task.name', task.name)}, which writes no text."
            problems.append(Problem(show(name, value), reason, "Leave it out."))
    refuse(problems)


def _not_read(data: DataConfig) -> Iterator[Problem]:
    """Settings that choose among rows, of which every one gets its prediction."""
    default = DataConfig()
    for name in ("mix", "max_rows", "eval_path", "eval_fraction"):
        value = getattr(data, name)
        if value != getattr(default, name):
            reason = "has no effect: every row of data.path gets its prediction."
            yield Problem(show(f"data.{name}", value), reason, "Leave it out.")


def read_asked_rows(data: DataConfig, task: TaskConfig) -> tuple[Rows, str]:
    """Every row with its place, and the SHA-256 of them all.

    Raises:
        DataError: there is none, or one is no JSON object.
    """
    from qlora_fsdp.data.read import find_source, iterate_rows
    from qlora_fsdp.data.row import BadRow, parse_row

    source = replace(find_source(data.path, data, task), choose=list)
    digest = hashlib.sha256()
    rows: Rows = []
    for place, raw in iterate_rows(source):
        digest.update(len(raw).to_bytes(8, "big") + raw)
        try:
            rows.append((place, parse_row(raw)))
        except BadRow as bad:
            raise DataError(f"{place}: {bad.kind}: {bad.detail}. Correct it, or leave it out.") from bad
    if not rows:
        raise DataError(f"{show('data.path', data.path)} has no rows. Set it to a file that has some.")
    return rows, digest.hexdigest()


def _identity(settings: PredictSettings, model: ModelConfig, data: DataSpec, digest: str) -> dict[str, Any]:
    """What predictions depend on, by the setting that decides it: those of one file must have all in common."""
    weights = None
    if settings.adapter is not None:
        weights = digest_file(Path(settings.adapter).expanduser() / ADAPTER_WEIGHTS)
    found: dict[str, Any] = {
        "data.path": digest,
        "adapter": weights,
        "model.path": model.path or model.name,
        "training.max_length": data.max_length,
        "data.columns": dict(data.settings.columns),
    }
    if data.task.is_causal:
        names = ("max_new_tokens", "temperature", "top_p", "seed", "raw")
        found |= {name: getattr(settings, name) for name in names}
        found["data.system_prompt"] = data.settings.system_prompt
        found["data.template_arguments"] = dict(data.settings.template_arguments)
    return found


class PredictionFile:
    """The predictions so far, in OUT.part, and the file that is made of them. Only rank 0 writes.

    Args:
        out: the file that is made.
        identity: what the predictions depend on, as values of JSON.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.out = out
        self.part = out.with_name(out.name + PART)
        self.identity = identity

    def open(self) -> int:
        """The number of rows that have a prediction. Begins the file, or cuts off a last line that is not whole.

        Raises:
            ConfigError: the file is of other rows, another adapter or other settings.
            RunFolderError: it can't be written, or is no such file.
        """
        try:
            if not self.part.exists():
                write_atomically(self.part, json.dumps(self.identity) + "\n")
                return 0
            whole = self.part.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]
            first, *lines = whole.splitlines() or [b""]
            if self._differs(first) and not lines:  # nothing is lost: its command has failed at the first rows
                write_atomically(self.part, json.dumps(self.identity) + "\n")
                return 0
            self._compare(first)
            with self.part.open("r+b") as stream:
                stream.truncate(len(whole))
        except OSError as error:
            raise RunFolderError(f"{self.part} can't be written: {error}. Set out to another file.") from error
        return len(lines)

    def _differs(self, line: bytes) -> list[str]:
        """The names of what predictions depend on that was otherwise when the file was begun.

        Raises:
            RunFolderError: it is no file of predictions.
        """
        try:
            before = json.loads(line)
        except (ValueError, RecursionError):
            before = None
        if not isinstance(before, dict) or "data.path" not in before:
            raise RunFolderError(f"{self.part} is no file of predictions. Set out to another file, or remove it.")
        return [name for name in self.identity if before.get(name) != self.identity[name]]

    def _compare(self, line: bytes) -> None:
        others = self._differs(line)
        if others:
            names = {"data.path": "other rows (data.path)", "adapter": "another adapter"}
            differs = join_words([names.get(name, f"another {name}") for name in others])
            reason = f"was begun with {differs}."
            fix = "Set out to another file; or remove this one, to predict all anew."
            raise ConfigError([Problem(str(self.part), reason, fix, "out")])

    def add(self, predictions: Sequence[dict[str, Any]]) -> None:
        """Appends the predictions of the next rows.

        Raises:
            RunFolderError: the disk takes no more. Whole lines stay, and the same command goes on behind them.
        """
        text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in predictions)
        try:
            with open_to_append(self.part) as stream:
                stream.write(text)
        except OSError as error:
            raise RunFolderError(
                f"{self.part} can't be written: {error}. Make room: the same command goes on from there."
            ) from error

    def finish(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the file: each row with what was predicted. The predictions alone are not needed then.

        Raises:
            RunFolderError: it can't be written, or holds something else than predictions.
        """
        try:
            with self.part.open(encoding="utf-8", newline="\n") as stream:
                next(stream)
                predictions = [json.loads(line) for line in stream]
            made = [{**row, **prediction} for row, prediction in zip(rows, predictions, strict=True)]
        except (ValueError, TypeError, RecursionError) as error:
            reason = f"{self.part} holds something else than a prediction for each row ({first_line(error)})"
            raise RunFolderError(f"{reason}. Remove it, and give the same command: it predicts all anew.") from error
        if self.out.suffix == ".csv":
            text = _as_csv(made)
        else:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a character, as JSON escapes it
        try:
            write_atomically(self.out, text)
            remove(self.part)
        except OSError as error:
            raise RunFolderError(
                f"out={self.out} can't be written: {error}. The predictions are in {self.part}: make room, and give "
                "the same command."
            ) from error


def _as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """A table with a column for each field. Objects have a column for each of theirs, and lists are JSON."""
    flat = [dict(_cells(row)) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _cells(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", _cell(inner)) for key, inner in value.items())
        else:
            yield name, _cell(value)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _by_head(rows: Rows, predictor: Predictor, batch_size: int, processes: Processes) -> Predict:
    """Predictions of a classifier, a regression or a reward model. Every row is read before the first is predicted."""
    encoded = [predictor.encode(row, place) for place, row in rows]
    if num_cut := sum(row.is_cut for row in encoded):
        log.info(
            f"Note: {plural(num_cut, 'row')} of {len(rows):,} have more than {predictor.max_length:,} tokens, and the "
            "rest of them is not seen. training.max_length allows more, as far as the model knows more positions"
        )

    def predict(first: int, last: int) -> list[dict[str, Any]]:
        begin = min(last, first + processes.rank * batch_size)
        mine = encoded[begin : min(last, begin + batch_size)]
        parts = processes.gather(predictor.predict(mine, batch_size, processes), list[dict[str, Any]], patiently=True)
        return [each for part in parts for each in part]

    return predict


def _by_text(
    rows: Rows, trained: AssembledModel, settings: GenerateSettings, system: str | None, processes: Processes
) -> Predict:
    """Completions of prompts and conversations. Every row is read before the first is completed."""
    from qlora_fsdp.inference.trained import num_positions

    for place, row in rows:
        check_prompt_row(row, place)
    prompts = tokenize_prompts([row for _, row in rows], trained, settings, system)
    check_lengths(prompts, settings, num_positions(trained))

    def predict(first: int, last: int) -> list[dict[str, Any]]:
        own = replace(settings, seed=settings.seed + first)  # or each part of the rows would be sampled alike
        parts = processes.gather(complete(prompts[first:last], trained, own, processes), dict[int, str], patiently=True)
        texts: dict[int, str] = {number: text for part in parts for number, text in part.items()}
        return [{"prediction": texts[number]} for number in range(last - first)]

    return predict


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run_command(argv, PredictSettings, USAGE, predict_rows, optional=["reward.functions"])


if __name__ == "__main__":
    end_process(main())
