"""`eval "$(qlora-fsdp completion)"`, in a shell's start file: the tab key completes commands, groups and settings.

The shell calls `qlora-fsdp completion LINE` at each tab, and gets the words that the line may go on with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from qlora_fsdp.config.reading.command_line import WITH_VALUE, conf_folder, default_options, group_options
from qlora_fsdp.config.settings import all_settings

WITHOUT_SETTINGS = ("status", "report", "doctor", "schema", "completion")
ONLY_OWN_SETTINGS = ("push",)

# Bash and zsh (through its bashcompinit) split words at = too, so the function completes what stands after the last.
SCRIPT = """\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_qlora_fsdp() {
  local line=${COMP_LINE:0:$COMP_POINT}
  local word=${line##* }
  local before=
  case $word in *=*) before=${word%=*}= ;; esac
  COMPREPLY=()
  while IFS= read -r found; do
    COMPREPLY+=("${found#"$before"}")
  done < <(qlora-fsdp completion "$line" 2>/dev/null)
}
complete -o default -o nospace -F _qlora_fsdp qlora-fsdp"""


def main(argv: Sequence[str], commands: Mapping[str, str]) -> int:
    """Prints the script for the shell; or, given a line, the words that its last one may become, one a line.

    Args:
        argv: the arguments.
        commands: the module of each command, by its name.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nusage: qlora-fsdp completion [LINE]")
    elif not argv:
        print(SCRIPT)
    else:
        for text in candidates(argv[0], commands):
            print(text)
    return 0


def candidates(line: str, commands: Mapping[str, str]) -> list[str]:
    """Returns the words that the last word of a command line may become, sorted; none where the shell names files."""
    words = line.split(" ")
    word = words[-1]
    possible: Iterable[str]
    if len(words) < 3:
        possible = [f"{command} " for command in commands]
    elif words[1] in WITHOUT_SETTINGS or words[-2] in WITH_VALUE:
        possible = []
    else:
        own = _own_settings(commands.get(words[1]))
        if words[1] in ONLY_OWN_SETTINGS:
            possible = [f"{key}=" for key in own]
        else:
            possible = _settings(word, own)
    return sorted(text for text in possible if text.startswith(word))


def _settings(word: str, own: Sequence[str]) -> Iterator[str]:
    """What stands for the options of a group or the values of a setting if the word names one; else all names."""
    name, equals, _ = word.partition("=")
    folders = [conf_folder()]
    if equals:
        setting = all_settings().get(name)
        values = group_options(name, folders) if setting is None else setting.words
        yield from (f"{name}={value} " for value in values)
    else:
        yield from (f"{key}=" for key in own)
        yield from (f"{group}=" for group in [*default_options(), "experiment"])
        yield from (f"{key}=" for key in all_settings())


def _own_settings(module: str | None) -> list[str]:
    """The settings that a command has besides training's, from its --help: importing it would take half a second."""
    spec = None if module is None else find_spec(module)
    text = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
    return re.findall(r"^  (\w+)=", text, re.MULTILINE)
