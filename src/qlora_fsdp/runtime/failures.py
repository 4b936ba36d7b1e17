"""Why a run ends: the failure that ranks tell one another, and what an error says of it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, field

import torch.distributed as dist

from qlora_fsdp.common.errors import Interrupted, StopNow, UserError
from qlora_fsdp.common.text import first_line

OF_GLOO = ("gloo", "Application timeout caused pair closure")  # most errors begin with the place in its source


@dataclass(frozen=True)
class Failure:
    """The reason why a run ends.

    Attributes:
        rank: the rank that tells of it.
        text: the message.
        exit_code: the exit code of every rank.
        is_of_others: whether the message is about other ranks, which could not tell of it themselves.
        lost: ranks that are not there to print the message.
    """

    rank: int
    text: str
    exit_code: int
    is_of_others: bool = False
    lost: list[int] = field(default_factory=list)


def find_interrupted(error: BaseException | None) -> Interrupted | StopNow | None:
    """The signal behind an error, if any: a library that a signal interrupts may raise an error of its own."""
    while error is not None and not isinstance(error, Interrupted | StopNow):
        error = error.__cause__ or error.__context__
    return error


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or late."""
    text = str(error)
    is_of_gloo = isinstance(error, RuntimeError) and any(mark in text for mark in OF_GLOO)
    return (isinstance(error, dist.DistError) or is_of_gloo) and os.strerror(errno.EMFILE) not in text


def describe_error(error: BaseException) -> str:
    """The message of an error for the other ranks."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {reason_of(error)}. Its traceback is in the output of this rank."


def reason_of(error: BaseException) -> str:
    """The first line of an error's text, without gloo's place in its source."""
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first_line(error)).rstrip(".")
