"""Which modules a setting names, by the rules of the libraries that the settings come from.

PEFT applies these rules to a model. `model/adapters/apply.py` looks for names that fit nothing. Unit tests compare
every function here with the library's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qlora_fsdp.common.contained import LimitError, TryError, call
from qlora_fsdp.common.errors import AdapterError

PLAIN = re.compile(r"[\w.-]*")  # a regular expression that says nothing of how often or which, and so takes no time
MATCHING_SECONDS = 10.0  # of processor time, for all names of a model; honest expressions take far less


def try_matching(
    setting: str, match: Callable[..., Any], names: Sequence[str], *expressions: str | Sequence[str]
) -> Any:
    """Matches regular expressions that anybody may have written, within limits. They may be matched again then.

    Args:
        setting: what holds the expressions, for the message.
        match: matches every name that they will be matched with, and returns JSON. It is called in another process if
            one of them is more than a name.
        names: its first argument.
        expressions: its other arguments.

    Raises:
        AdapterError: matching takes more than `MATCHING_SECONDS`, or an expression is none.
    """
    texts = [text for each in expressions for text in ([each] if isinstance(each, str) else each)]
    if all(PLAIN.fullmatch(text) for text in texts):
        return match(names, *expressions)
    try:
        return call(match, names, *expressions, seconds=MATCHING_SECONDS)
    except LimitError:
        raise AdapterError(
            f"{setting}: a regular expression takes too long. Set a list of names, or a simpler one."
        ) from None
    except TryError as error:
        raise AdapterError(
            f"{setting}: {error} in a regular expression. Correct it, or set a list of names."
        ) from error


def is_target(name: str, targets: str | Iterable[str]) -> bool:
    """Whether PEFT's `target_modules` or `exclude_modules` name a module.

    Args:
        name: the module's full name.
        targets: a regular expression that must match the whole name; or names and ends of names, cut at a dot.
    """
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def fits_pattern(name: str, pattern: str) -> bool:
    """Whether a key of PEFT's `rank_pattern` or `alpha_pattern` names a module."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def match_all(names: Sequence[str], wanted: str | Sequence[str]) -> None:
    """Matches every name once, as PEFT does with a regular expression, or with the keys of a pattern."""
    for name in names:
        if isinstance(wanted, str):
            is_target(name, wanted)
            continue
        for pattern in wanted:
            fits_pattern(name, pattern)


def match_skips(linears: Sequence[str], named: Sequence[str], skip: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which of the names in the settings fit no layer, and the layers that nothing in `skip` leaves out."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    unused = [each for each in named if all(should_convert_module(name, [each]) for name in linears)]
    return unused, [name for name in linears if should_convert_module(name, list(skip))]
