"""`eval "$(qlora-fsdp completion)"`, in a shell's start file: the tab key completes commands, groups and settings.

The shell calls `qlora-fsdp completion LINE` at each tab, and gets the words that the line may go on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qlora_fsdp.config.command_line import conf_folder, default_options, group_options
from qlora_fsdp.config.settings import all_settings

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


def main(argv: Sequence[str], commands: Sequence[str]) -> int:
    """Prints the script for the shell; or, given a line, the words that its last one may become, one a line."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nusage: qlora-fsdp completion [LINE]")
    elif not argv:
        print(SCRIPT)
    else:
        for text in candidates(argv[0], commands):
            print(text)
    return 0


def candidates(line: str, commands: Sequence[str]) -> list[str]:
    """Returns the words that the last word of a command line may become, sorted."""
    words = line.split(" ")
    word = words[-1]
    possible = (f"{name} " for name in commands) if len(words) < 3 else _settings(word)
    return sorted(text for text in possible if text.startswith(word))


def _settings(word: str) -> Iterator[str]:
    """What stands for the options of a group or the values of a setting if the word names one; else all names."""
    name, equals, _ = word.partition("=")
    folders = [conf_folder()]
    if equals:
        setting = all_settings().get(name)
        values = group_options(name, folders) if setting is None else setting.choices
        yield from (f"{name}={value} " for value in values)
    else:
        yield from (f"{group}=" for group in [*default_options(), "experiment"])
        yield from (f"{key}=" for key in all_settings())
