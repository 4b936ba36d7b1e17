"""Who is lost, judged from made-up beats: slow, suspended and waiting ranks are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qlora_fsdp.common.text import printable_lines
from qlora_fsdp.runtime.heartbeats import LONGEST_INTERVAL_SECONDS, Beat, Judge, Unchanged, beat_interval

TIMEOUT = 600.0
INTERVAL = beat_interval(3, TIMEOUT)


class World:
    """Three ranks whose beats are looked at by one of them."""

    def __init__(self) -> None:
        self.judge, self.now = Judge(3, TIMEOUT), 0.0
        self.numbers, self.positions, self.collectives, self.cpu = [0] * 3, [0] * 3, [0] * 3, [0.0] * 3

    def pass_time(
        self, seconds: float, silent: Sequence[int] = (), moving: Sequence[int] = (), working: Sequence[int] = ()
    ) -> dict[int, str]:
        """Look until this time has passed, or a rank is lost; `moving`: main threads, `working`: processes."""
        end, lost = self.now + seconds, dict[int, str]()
        while self.now < end and not lost:
            self.now += INTERVAL
            for rank in range(3):
                self.numbers[rank] += rank not in silent
                self.positions[rank] += rank in moving
                self.cpu[rank] += rank in working
            lost = self.look()
        return lost

    def look(self) -> dict[int, str]:
        beats = [
            Beat(number, f"in stage_{rank} (file.py:{rank})", position, collectives)
            for rank, (number, position, collectives) in enumerate(
                zip(self.numbers, self.positions, self.collectives, strict=True)
            )
        ]
        return self.judge.find_lost(beats, self.cpu, self.now)


def test_a_silent_rank_is_lost_after_the_timeout_whatever_the_others_do():
    world = World()
    assert world.pass_time(100, moving=[0, 1, 2]) == {}
    assert world.pass_time(TIMEOUT - 2 * INTERVAL, silent=[1], moving=[0, 2]) == {}
    lost = world.pass_time(4 * INTERVAL, silent=[1], moving=[0, 2])
    assert list(lost) == [1] and lost[1].startswith("gave its last sign of life 60")
    assert lost[1].endswith(" s ago, in stage_1 (file.py:1)")


def test_all_silent_ranks_are_named():
    assert list(World().pass_time(2 * TIMEOUT, silent=[1, 2])) == [1, 2]


def test_main_threads_that_stand_still_are_merely_slow():
    assert World().pass_time(10 * TIMEOUT) == {}


def test_a_rank_that_keeps_the_interpreter_busy_writes_no_beats_and_is_not_lost():
    world = World()
    assert world.pass_time(10 * TIMEOUT, silent=[1], working=[1]) == {}
    assert list(world.pass_time(2 * TIMEOUT, silent=[1])) == [1]


def test_a_suspended_job_is_not_lost():
    """Each rank's last look was before the suspension; afterwards they continue one after the other."""
    world = World()
    world.pass_time(100)
    for _ in range(5):
        world.now += 10 * TIMEOUT
        assert world.look() == {}
        assert world.pass_time(TIMEOUT / 2, silent=[1]) == {}
        assert world.pass_time(2 * INTERVAL) == {}


def test_the_rank_that_others_wait_for_is_lost_once_nobody_has_moved_for_the_timeout():
    world = World()
    world.collectives = [8, 7, 8]
    assert world.pass_time(10 * TIMEOUT, moving=[1]) == {}
    assert world.pass_time(TIMEOUT - 2 * INTERVAL) == {}
    lost = world.pass_time(4 * INTERVAL)
    assert list(lost) == [1] and "has stood still for 60" in lost[1] and "in stage_1 (file.py:1)" in lost[1]


def test_one_collective_on_all_ranks_names_nobody():
    world = World()
    world.collectives = [8, 8, 8]
    assert world.pass_time(10 * TIMEOUT) == {}


def test_unchanged_counts_a_late_look_for_little():
    unchanged = Unchanged(longest_look=10)
    assert [unchanged.look("a", now) for now in (100, 104, 1000, 1001)] == [0, 4, 14, 15]
    assert unchanged.look("b", 1002) == 0


@pytest.mark.parametrize("num_ranks", [2, 8, 64, 512])
def test_beats_come_often_enough(num_ranks: int):
    """A lost rank is told within the minute that NCCL has longer than the timeout."""
    assert beat_interval(num_ranks, 10) == 1
    assert LONGEST_INTERVAL_SECONDS < beat_interval(num_ranks, 600) < 40


def test_what_a_terminal_might_obey_is_removed():
    assert printable_lines("a\x1b[2Jb\x9bc\r\x07\n\tä — 行") == "a?[2Jb?c??\n        ä — 行"
