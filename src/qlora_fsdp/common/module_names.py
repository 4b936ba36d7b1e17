"""Which modules a setting names, by the rules of the libraries that the settings come from.

PEFT applies these rules to a model. `model/adapters/apply.py` looks for names that fit nothing. Unit tests compare
every function here with the library's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from qlora_fsdp.common.contained import LimitError, TryError, call
from qlora_fsdp.common.errors import AdapterError

MATCHING_SECONDS = 10.0  # of processor time, for all names of a model; honest expressions take far less


def try_matching(setting: str, match: Callable[..., Any], *args: Any) -> Any:
    """Matches regular expressions that anybody may have written, within limits. They may be matched again then.

    Args:
        setting: what holds the expressions, for the message.
        match: matches every name that they will be matched with, in another process, and returns JSON.
        args: its arguments, plain values.

    Raises:
        AdapterError: matching takes more than `MATCHING_SECONDS`, or an expression is none.
    """
    try:
        return call(match, *args, seconds=MATCHING_SECONDS)
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
