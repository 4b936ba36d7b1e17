"""Which modules a setting names, by the rules of the libraries that the settings come from.

PEFT applies these rules to a model. `model/adapters/apply.py` looks for names that fit nothing. Unit tests compare
every function here with the library's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.limits import limited_time

MATCHING_SECONDS = 30.0  # of processor time, for all names of a model; honest expressions take far less


@contextmanager
def limited_matching(setting: str) -> Iterator[None]:
    """Wraps regular expressions that anybody may have written, which are then cut off if they take too long.

    Args:
        setting: what holds the expressions, for the message.

    Raises:
        AdapterError: matching took more than `MATCHING_SECONDS`, or an expression is none.
    """
    slow = AdapterError(f"{setting}: a regular expression takes too long. Set a list of names, or a simpler one.")
    try:
        with limited_time(MATCHING_SECONDS, slow):
            yield
    except (re.error, OverflowError, RecursionError) as error:
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
