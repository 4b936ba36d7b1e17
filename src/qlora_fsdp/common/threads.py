"""Work on a thread beside the main one. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def begin_call(call: Callable[[], Result], name: str) -> Future[Result]:
    """Begins a call on a thread of its own. What it returns or raises comes out where the result is asked for.

    A pool of concurrent.futures would keep the process from ending while the call goes on; this thread does not.
    """
    result = Future[Result]()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return result
