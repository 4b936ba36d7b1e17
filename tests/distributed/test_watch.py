"""The watch, in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from qlora_fsdp.common.errors import CheckpointError, Interrupted
from qlora_fsdp.common.run_key import seal
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.runtime.watch import Failure, Watch, is_lost_contact
from tests.helpers.ranks import Meeting, be_a_host, run_ranks

pytestmark = pytest.mark.distributed


def catch_another_signal() -> tuple[list[int], signal.Signals | None]:
    """What a library's handler saw, and what the watch was asked by that signal and SIGTERM after it."""
    Meeting.new_port()
    watch, seen = Watch(start_processes(60)), list[int]()
    watch.be_patient("the run stops")
    signal.signal(signal.SIGCHLD, lambda number, frame: seen.append(number))
    os.kill(os.getpid(), signal.SIGCHLD)
    os.kill(os.getpid(), signal.SIGTERM)
    while watch.asked is None:  # it keeps the first one
        time.sleep(0.01)
    watch.stop()
    stop_processes()
    return seen, watch.asked


def test_a_signal_that_a_library_handles_ends_no_run() -> None:
    assert run_ranks(1, catch_another_signal) == [([signal.SIGCHLD], signal.SIGTERM)]


def read_another_ranks_failure(text: str) -> tuple[str, int]:
    """What a signal is explained by, and the exit code, if another rank has told of a failure with this text."""
    Meeting.new_port()
    watch = Watch(start_processes(60))
    watch.store.set("failure", seal(Failure(1, text, 3), watch._key))
    reason = watch.explain(Interrupted(signal.SIGTERM))
    watch.stop()
    stop_processes()
    return str(reason), getattr(reason, "exit_code", 0)


def test_text_from_the_store_has_nothing_that_a_terminal_obeys() -> None:
    assert run_ranks(1, read_another_ranks_failure, "no\x1b[2J file\nat\x07 all") == [
        ("rank 1: no?[2J file\nat? all", 3)
    ]


def lose_the_launcher(kept: str) -> tuple[str, bool]:
    """What explains a signal where the launcher, which held the store, is gone; and whether this rank says so."""
    Meeting.new_port()
    shown = list[BaseException]()
    watch = Watch(replace(start_processes(60), rank_0_holds_store=False), shown.append)
    with mock.patch.object(watch, "_find_first", side_effect=dist.DistNetworkError("Broken pipe")):
        reason = watch.explain(Interrupted(signal.SIGTERM, kept))
    watch.finish()
    watch.stop()
    stop_processes()
    return str(reason), shown == [reason]


def test_a_launcher_that_was_killed_is_named_once_with_what_is_saved() -> None:
    text = "The launcher of the ranks was killed, perhaps for want of memory: its store can't be reached (Broken pipe)."
    kept = "Step 3 is saved."
    assert run_ranks(2, lose_the_launcher, kept) == [(f"{text} {kept}", True), (f"{text} {kept}", False)]


def fail_without_rank_0(text: str) -> tuple[bool, bool]:
    """Whether a rank ends with its own error where rank 0, which held the store, is gone; and whether it says so."""
    be_a_host()
    Meeting.new_port()
    shown = list[BaseException]()
    watch, error = Watch(start_processes(60), shown.append), CheckpointError(text)
    with mock.patch.object(watch, "_find_first", side_effect=dist.DistNetworkError("Connection reset by peer")):
        reason = watch.explain(error)
    watch.finish()
    watch.stop()
    stop_processes()
    return reason is error, shown == [error]


def test_an_error_of_a_ranks_own_is_not_taken_for_the_end_of_rank_0() -> None:
    """All ranks may have the same one, and rank 0 may have ended by it before the others tell of it."""
    assert run_ranks(2, fail_without_rank_0, "its bytes differ") == [(True, True), (True, True)]


def test_errors_of_gloo_are_lost_contact_with_the_place_in_its_source_or_without() -> None:
    text = "Application timeout caused pair closure"
    for error in (
        RuntimeError(text),
        RuntimeError(f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:12] {text}"),
    ):
        assert is_lost_contact(error)
    assert not is_lost_contact(RuntimeError("shape mismatch"))
    assert not is_lost_contact(RuntimeError("[/gloo/unix.cc:51] rv != -1. -1 vs -1. pipe: Too many open files"))
