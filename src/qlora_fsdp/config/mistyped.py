"""Words of a command line as people mistype them, each with what was meant. Imports neither Hydra nor torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.settings import all_settings, nearest_settings

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
        elif word in FLAGS or word.startswith(tuple(f"{option}=" for option in WITH_VALUE)):
            continue
        elif word.startswith("-"):
            yield _with_dashes(word, words, groups)
        elif spaced := _take_spaced(word, words):
            reason = "has spaces around the equals sign, which make it several words."
            yield Problem(" ".join(spaced), reason, f"Write {''.join(spaced)}.")
        elif re.fullmatch(r"\+*[\w.]+=", word):
            key = word.lstrip("+")[:-1]
            yield Problem(word, "has no value.", f"Write {key}=VALUE, or leave it out.", setting=key)
        elif "=" not in word and word in all_settings():
            yield Problem(word, "has no value.", f"Write {word}=VALUE.", setting=word)


def _take_spaced(word: str, words: list[str]) -> list[str]:
    """The words of `key = value`, `key= value` or `key =value`, which are taken out of `words`; else empty."""
    following = words[0] if words else ""
    if "=" not in word and following == "=":
        taken = 2 if len(words) > 1 else 1
    elif ("=" not in word and re.match(r"=.", following)) or (
        re.fullmatch(r"[\w.]+=", word) and following and not re.match(r"-|[\w./]+=", following)
    ):
        taken = 1
    else:
        return []
    spaced = [word, *words[:taken]]
    del words[:taken]
    return spaced


def _with_dashes(word: str, words: list[str], groups: Collection[str]) -> Problem:
    """`--model tiny`, `--lr=1e-4` or `-model=tiny`, whose value is taken out of `words`."""
    typed, (name, equals, value) = word, word.lstrip("-").partition("=")
    if not equals and words and "=" not in words[0] and not re.match(r"-\D", words[0]):
        value = words.pop(0)
        typed += f" {value}"
    name = name.replace("-", "_")
    if name in OF_HYDRA:
        return Problem(typed, "is no option here.", f"Write {OF_HYDRA[name]}.")
    known = [name] if name in groups or name in all_settings() else nearest_settings(name)
    keys = " or ".join(f"{key}={value or 'VALUE'}" for key in known or [name])
    fix = f"Write {keys}." if known else f"Write {keys} if that is a setting; --help lists the options."
    return Problem(typed, "is no option: settings are written without dashes and with an equals sign.", fix)
