"""`qlora-fsdp convert`: another project's file of settings as one of `--config`. Imports no torch.

The result goes through the checks of a run. What they find is told, for example a data set that is not here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from qlora_fsdp.common.errors import ConfigError, Problem, UserError, print_error, refuse
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.common.startup import end_process
from qlora_fsdp.common.text import first_line, for_stdout, printable, shorten
from qlora_fsdp.config.bounded_yaml import parse_settings, read_small_text
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.convert.accelerate import convert_accelerate
from qlora_fsdp.config.convert.axolotl import convert_axolotl
from qlora_fsdp.config.convert.common_settings import TheirSettings
from qlora_fsdp.config.convert.llama_factory import convert_llama_factory
from qlora_fsdp.config.convert.trl import DEFAULTS, convert_trl, find_trainer
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.recorded import sections_of

PROJECTS = ("axolotl", "llama_factory", "trl", "accelerate")
USAGE = f"""\
Another project's file of settings as one of --config: names, data sets and batch sizes, and what has no counterpart.

usage: qlora-fsdp convert FILE.yaml [out=FILE.yaml] [of=PROJECT] [gpus=N] [trainer=TRAINER]

  FILE.yaml      of axolotl, LLaMA-Factory or TRL, or what `accelerate config` wrote
  out=FILE.yaml  where the result is written (default: printed)
  of=PROJECT     {", ".join(PROJECTS)} (default: found out by its settings)
  gpus=N         GPUs that the run had there, which its batch size counts for each (default: 1)
  trainer=NAME   of TRL: {", ".join(DEFAULTS)} (default: found out by its settings)

examples:
  qlora-fsdp convert qlora.yml out=run.yaml gpus=2
  qlora-fsdp train --config run.yaml
"""
WIDTH = 116  # of comments
# Settings whose values are secrets, which the file that is written must not have.
SECRET = re.compile(r"api_?key|password|secret|(^|_)(hub|hf|ms|om|auth|access)_(\w+_)?token$|^token$", re.IGNORECASE)


@dataclass
class ConvertSettings:
    """The command line."""

    file: Path
    out: str | None = None
    of: str | None = None
    gpus: int = 1
    trainer: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Converts the file that the command line names; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE.rstrip())
        return 0 if arguments else 2
    try:
        settings = _read_arguments(arguments)
        text = convert_file(settings.file, settings.of, settings.gpus, settings.trainer)
        if settings.out is None:
            print(for_stdout(text), end="")
        else:
            _write(settings.out, text)
        _tell_problems(text)
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


def convert_file(file: Path, of: str | None = None, gpus: int = 1, trainer: str | None = None) -> str:
    """Returns the text of a file for `--config`.

    Args:
        file: another project's.
        of: the project, one of PROJECTS; None to find it out.
        gpus: GPUs that the run had there.
        trainer: of TRL; None to find it out.

    Raises:
        ConfigError: the file can't be read, or is of no known project.
    """
    try:
        values = {str(key): value for key, value in parse_settings(read_small_text(file)).items()}
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or shorten(first_line(error), 400)
        reason = f"can't be read: {told}."
        raise ConfigError([Problem(str(file), reason, "Name a YAML file of settings.")]) from None
    project = of or _find_project(values)
    if project is None:
        fix = f"Say whose it is: of={', of='.join(PROJECTS)}."
        raise ConfigError([Problem(str(file), "has settings of no project that is known here.", fix)])
    theirs = TheirSettings(dict(values), gpus)
    title = project
    try:
        if project == "axolotl":
            convert_axolotl(theirs)
        elif project == "llama_factory":
            convert_llama_factory(theirs, file.parent)
        elif project == "trl":
            trainer = trainer or find_trainer(values)
            title = f"trl {trainer}"
            convert_trl(theirs, trainer)
        else:
            convert_accelerate(theirs)
    except (OSError, TypeError, ValueError, AttributeError, KeyError, StopIteration) as error:
        reason = f"has a value of another kind than {project}'s: {shorten(first_line(error), 200)}."
        raise ConfigError([Problem(str(file), reason, "Correct it there.")]) from error
    return _write_out(theirs, f"{file.name} ({title})")


def _find_project(values: dict[str, Any]) -> str | None:
    """Whose settings these are: each project has names that no other one uses."""
    if "base_model" in values:
        return "axolotl"
    if {"finetuning_type", "stage", "cutoff_len", "dataset_dir"} & values.keys():
        return "llama_factory"
    if "distributed_type" in values or "compute_environment" in values:
        return "accelerate"
    return "trl" if "model_name_or_path" in values else None


def _write_out(theirs: TheirSettings, title: str) -> str:
    lines = [f"# From {printable(title)}, by qlora-fsdp convert."]
    for section, names in sections_of(theirs.settings).items():
        lines.append(f"{section}:")
        for name, value in names.items():
            remark = theirs.remarks.get(f"{section}.{name}")
            if remark:
                lines.append(f"  # {printable(remark)}")
            lines.append(f"  {name}: {_one_line(value)}")
    if theirs.left_out:
        lines.append("# Left out:")
        for name, value, reason in theirs.left_out:
            shown = "(a secret)" if SECRET.search(name) else _one_line(value)
            lines.append(f"#   {shorten(printable(f'{name}: {shown}'), WIDTH)}")
            lines.append(f"#     {printable(reason)}")
    return "\n".join(lines) + "\n"


def _one_line(value: Any) -> str:
    """A value in YAML's flow style."""
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _write(out: str, text: str) -> None:
    file = Path(out).expanduser()
    try:
        write_atomically(file, text)
    except OSError as error:
        raise ConfigError([Problem(f"out={out}", f"can't be written: {error}.", "Set out to another file.")]) from error
    print(f"Written to {out}. Next: qlora-fsdp preflight --config {out}", file=sys.stderr)


def _tell_problems(text: str) -> None:
    """Says what a run would say of the result."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "converted.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            refuse(check_settings(load_config(["--config", str(file)])))
        except UserError as error:
            told = error.problems if isinstance(error, ConfigError) else [error]
            for problem in told:
                print(f"Note: {printable(str(problem).replace(f'{file}: ', ''))}", file=sys.stderr)


def _read_arguments(arguments: Sequence[str]) -> ConvertSettings:
    """Reads the command line.

    Raises:
        ConfigError: all that is wrong with it.
    """
    problems: list[Problem] = []
    files = [word for word in arguments if "=" not in word]
    if len(files) != 1:
        problems.append(Problem("convert", f"takes one file, and {len(files)} are named.", "Name the file to convert."))
    settings = ConvertSettings(Path(files[0] if files else "").expanduser())
    for word in arguments:
        name, equals, value = word.partition("=")
        if not equals:
            continue
        if name == "gpus":
            with suppress(ValueError):
                settings.gpus = int(value)
            if not value.isdecimal() or settings.gpus < 1:
                problems.append(Problem(word, "must be a whole number of at least 1.", "Set gpus to that."))
        elif name == "of" and value in PROJECTS:
            settings.of = value
        elif name == "trainer" and value in DEFAULTS:
            settings.trainer = value
        elif name == "out" and value:
            settings.out = value
        else:
            words = {"of": PROJECTS, "trainer": tuple(DEFAULTS)}
            fix = "Settings are out=, of=, gpus= and trainer=."
            if name in words:
                fix = f"Set {name} to one of {', '.join(words[name])}."
            problems.append(Problem(word, "is no setting of this command.", fix))
    refuse(problems)
    return settings


if __name__ == "__main__":
    end_process(main())
