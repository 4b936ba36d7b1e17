"""The options of the command line, words that look mistyped, the folders with YAML, and the page that `--help` prints.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, shorten
from typing import NoReturn

import yaml

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.files import shipped_file
from qlora_fsdp.config.settings import all_settings, nearest_settings, show

_WIDTH = 118
_USAGE = "qlora-fsdp train [group=option ...] [setting=value ...]"

_EXAMPLES = """\
  qlora-fsdp train model=llama3-8b data.path=chats.jsonl
  qlora-fsdp train model.path=/models/my-llama quant=int8 lora.r=32 data.path=chats.jsonl launch.num_processes=4
  qlora-fsdp train -m lora.r=8,16,32 model=llama3-8b data.path=chats.jsonl
  qlora-fsdp train experiment=dry_run model=llama3-70b
  torchrun --nproc_per_node 4 --master-port 29500 -m qlora_fsdp.train model=tiny data=random training.max_steps=10"""

_OPTIONS = """\
  --help             this page
  --cfg job          print the configuration, all resolved, and exit
  --config FILE      settings and options of groups in a YAML file; what is typed wins (docs/configuration.md)
  --config-dir DIR   a folder with YAML of your own: DIR/experiment/mine.yaml is experiment=mine
  -m, --multirun     a sweep: lora.r=8,16 makes two jobs, started as launch.* says (docs/sweeps.md)
  hydra/launcher=slurm [-m]   submit it to SLURM, as slurm.* says; or skypilot, or kubernetes (docs/clusters.md)"""


@dataclass(frozen=True)
class Arguments:
    """The command line, split into its parts."""

    overrides: tuple[str, ...]
    folders: tuple[Path, ...]
    help: bool
    cfg: bool
    config_file: Path | None = None
    multirun: bool = False

    @property
    def starts_jobs(self) -> bool:
        """Whether this process starts others that train, in place of training itself."""
        starts = ("hydra/launcher=", "hydra/sweeper=")
        return self.multirun or any(override.lstrip("+").startswith(starts) for override in self.overrides)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("The command line", f"can't be read: {message}.", f"The options are:\n{_OPTIONS}")])


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Splits the command line into options and overrides.

    Raises:
        ConfigError: an unknown option, a --config-dir that is no folder, or more than one --config.
    """
    if "--help" not in argv and "-h" not in argv:
        refuse(find_mistyped(argv, group_options("", [conf_folder()])))
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--config-dir", type=Path, action="append", default=[])
    parser.add_argument("-m", "--multirun", action="store_true")
    options = parser.parse_intermixed_args(argv)
    folders = [conf_folder()]
    for folder in options.config_dir:
        if not folder.is_dir():
            problem = Problem(f"--config-dir {folder}", "is not a folder.", "Name the folder that holds your groups.")
            raise ConfigError([problem])
        folders.append(folder.resolve())
    if len(options.config) > 1:
        problem = Problem("--config", f"is given {len(options.config)} times.", "Put the settings into one file.")
        raise ConfigError([problem])
    return Arguments(
        tuple(options.overrides),
        tuple(folders),
        options.help,
        options.cfg is not None,
        options.config[0].expanduser().absolute() if options.config else None,
        options.multirun,
    )


def conf_folder() -> Path:
    """Returns conf/, the project's own groups of options."""
    return shipped_file("conf/config.yaml").parent


def group_options(group: str, folders: Sequence[Path]) -> list[str]:
    """Returns the options of a group, sorted; empty if there is no such group. The group "" holds all groups' names."""
    found = [path for folder in folders if (folder / group).is_dir() for path in (folder / group).iterdir()]
    if not group:
        return sorted({path.name for path in found if path.is_dir()})
    return sorted({path.stem for path in found if path.suffix == ".yaml"})


def default_options() -> dict[str, str | None]:
    """Returns each group's default option, in the order of conf/config.yaml."""
    defaults = yaml.safe_load((conf_folder() / "config.yaml").read_text())["defaults"]
    entries = [entry for entry in defaults if isinstance(entry, dict)]
    return {group: option for entry in entries for group, option in entry.items() if not group.startswith("override ")}


def help_text(folders: Sequence[Path]) -> str:
    """Returns the page that --help prints."""
    defaults = default_options()
    own_groups = [group for group in group_options("", folders) if group not in defaults]
    groups = [
        _wrap(f"  {group:<11}", [f"[{o}]" if o == defaults.get(group) else o for o in group_options(group, folders)])
        for group in [*defaults, *own_groups]
    ]
    settings = []
    for setting in (setting for setting in all_settings().values() if setting.facets.is_common):
        start = f"  {show(setting.key, setting.default):<34}  "
        settings.append(
            start + shorten(setting.comment, _WIDTH - len(start), placeholder=" ...", break_on_hyphens=False)
        )
    return "\n".join(
        [
            "Fine-tune a language model with QLoRA on FSDP2.",
            f"\nusage: {_USAGE}",
            f"\nexamples:\n{_EXAMPLES}",
            "\ngroups and their options, the default in brackets (conf/GROUP/OPTION.yaml):",
            *groups,
            "\nthe commonest settings, with their defaults (all of them: docs/configuration.md):",
            *settings,
            f"\noptions:\n{_OPTIONS}",
        ]
    )


def _wrap(start: str, words: Sequence[str]) -> str:
    """Words behind `start`, in lines that stand below one another."""
    indented = " " * len(start)
    return fill("  ".join(words), _WIDTH, initial_indent=start, subsequent_indent=indented, break_on_hyphens=False)


FLAGS = ("-h", "--help", "-m", "--multirun")
WITH_VALUE = ("--cfg", "--config", "--config-dir")
# Options of Hydra's own commands, and what takes their place.
OF_HYDRA = {
    **dict.fromkeys(("c", "cn", "config_name"), "--config FILE.yaml"),
    **dict.fromkeys(("cp", "config_path"), "--config-dir FOLDER"),
}


# A setting and its value with spaces beside the equals sign, in words that NUL divides: `lr = 1e-4`.
_SPACED = re.compile(r"(?:^|\0)([\w.]+)(?:\0=\0?|=\0)(?!-\D)([^\0=]+)(?=\0|$)")


def find_mistyped(argv: Sequence[str], groups: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each word that looks like a setting and is not written as one."""
    for spaced in _SPACED.finditer("\0".join(argv)):
        typed = spaced[0].strip("\0").replace("\0", " ")
        reason = "has spaces around the equals sign, which make it several words."
        yield Problem(typed, reason, f"Write {spaced[1]}={spaced[2]}.")
    for before, word, behind in zip(["", *argv], argv, [*argv[1:], ""], strict=False):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        is_option = word in FLAGS or word.partition("=")[0] in WITH_VALUE or before in WITH_VALUE
        if is_option or re.match(r"--?[A-Za-z]", word) is None:
            continue
        typed = word
        if not equals and behind and "=" not in behind and not re.match(r"-\D", behind):
            typed = f"{word} {behind}"
            value = behind
        if name in OF_HYDRA:
            yield Problem(typed, "is no option here.", f"Write {OF_HYDRA[name]}.")
            continue
        known = [name] if name in groups or name in all_settings() else nearest_settings(name)
        shown = value or "VALUE"
        fix = f"Write {name}={shown} if that is a setting; --help lists the options."
        meant = difflib.get_close_matches(word, FLAGS, n=1, cutoff=0.7)
        if meant:
            fix = f"Did you mean {meant[0]}?"
        elif known:
            fix = f"Write {' or '.join(f'{key}={shown}' for key in known)}."
        yield Problem(typed, "is no option: settings are written without dashes and with an equals sign.", fix)
