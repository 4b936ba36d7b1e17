"""The options of the command line, words that look mistyped, the folders with YAML, and the page that `--help` prints.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

import argparse
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
  torchrun --nproc_per_node 4 -m qlora_fsdp.train model=tiny data=random training.max_steps=10"""

_OPTIONS = """\
  --help             this page
  --cfg job          print the configuration, all resolved, and exit
  --config FILE      settings and options of groups in a YAML file; what is typed wins (docs/configuration.md)
  --config-dir DIR   a folder with YAML of your own: DIR/experiment/mine.yaml is experiment=mine
  -m, --multirun     a sweep: lora.r=8,16 makes two jobs, started as launch.* says (docs/sweeps.md)
  hydra/launcher=slurm [-m]   submit it to SLURM, as slurm.* says (docs/clusters.md)"""


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
    **dict.fromkeys(("cn", "config_name"), "--config FILE.yaml"),
    **dict.fromkeys(("cp", "config_path"), "--config-dir FOLDER"),
}


def find_mistyped(argv: Sequence[str], groups: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each word that looks like a setting and is not written as one."""
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in WITH_VALUE:
            words[:1] = []
            continue
        if word in FLAGS or word.partition("=")[0] in WITH_VALUE:
            continue
        if word.startswith("-"):
            yield _with_dashes(word, words, groups)
            continue
        spaced = _take_spaced(word, words)
        if spaced:
            reason = "has spaces around the equals sign, which make it several words."
            yield Problem(" ".join(spaced), reason, f"Write {''.join(spaced)}.")
        else:
            yield from _find_no_value(word)


def _find_no_value(word: str) -> Iterator[Problem]:
    """The problem with `lora.r=`, or with `lora.r` alone."""
    if re.fullmatch(r"\+*[\w.]+=", word):
        key = word.lstrip("+")[:-1]
        yield Problem(word, "has no value.", f"Write {key}=VALUE, or leave it out.", setting=key)
    elif word in all_settings():
        yield Problem(word, "has no value.", f"Write {word}=VALUE.", setting=word)


def _take_spaced(word: str, words: list[str]) -> list[str]:
    """The words of `key = value`, `key= value` or `key =value`, which are taken out of `words`; else empty."""
    following = words[0] if words else ""
    has_equals = "=" in word
    is_cut_before = not has_equals and re.match(r"=.", following)
    ends_with_equals = re.fullmatch(r"[\w.]+=", word)
    is_cut_behind = ends_with_equals and following and not re.match(r"-|[\w./]+=", following)
    if not has_equals and following == "=":
        taken = 2 if len(words) > 1 else 1
    elif is_cut_before or is_cut_behind:
        taken = 1
    else:
        return []
    spaced = [word, *words[:taken]]
    del words[:taken]
    return spaced


def _with_dashes(word: str, words: list[str], groups: Collection[str]) -> Problem:
    """`--model tiny`, `--lr=1e-4` or `-model=tiny`, whose value is taken out of `words`."""
    typed = word
    name, equals, value = word.lstrip("-").partition("=")
    if not equals and _starts_with_value(words):
        value = words.pop(0)
        typed += f" {value}"
    name = name.replace("-", "_")
    if name in OF_HYDRA:
        return Problem(typed, "is no option here.", f"Write {OF_HYDRA[name]}.")
    known = nearest_settings(name)
    if name in groups or name in all_settings():
        known = [name]
    shown = value or "VALUE"
    fix = f"Write {name}={shown} if that is a setting; --help lists the options."
    if known:
        fix = f"Write {' or '.join(f'{key}={shown}' for key in known)}."
    return Problem(typed, "is no option: settings are written without dashes and with an equals sign.", fix)


def _starts_with_value(words: Sequence[str]) -> bool:
    """Whether the next word is a value, maybe a negative number, and no setting or option."""
    return len(words) > 0 and "=" not in words[0] and not re.match(r"-\D", words[0])
