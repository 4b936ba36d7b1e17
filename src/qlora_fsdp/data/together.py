"""What the ranks do together before they train: they fail together, and have the same data.

Hosts may have other files under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.counts import DataReport
from qlora_fsdp.data.read import Source
from qlora_fsdp.runtime.processes import Processes


@contextmanager
def failing_together(processes: Processes) -> Iterator[None]:
    """Around work of single ranks: if it fails on one, all raise. Every rank enters this, and it waits for all of them.

    Raises:
        DataError: another rank failed. If this rank failed, its own exception is raised instead.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = processes.first_error(None if failure is None else str(failure) or repr(failure))
    if failure is not None:
        raise failure
    if text is not None:
        raise DataError(text)


def check_same_counts(report: DataReport, processes: Processes) -> None:
    """Compares what the ranks have read.

    Raises:
        DataError: it differs; the same on every rank.
    """
    counts = (report.num_rows, report.num_tokens, report.num_target_tokens, report.num_eval_target_tokens)
    first, *others = processes.gather(counts, tuple[int, int, int, int])
    for rank, found in enumerate(others, start=1):
        if found != first:
            raise DataError(
                f"The data of rank {rank} is not rank 0's: {_show_counts(found)}, and there {_show_counts(first)}. "
                "Copy the same files to every host, or set data.path and data.eval_path to a folder that all share."
            )


def _show_counts(counts: tuple[int, int, int, int]) -> str:
    num_rows, num_tokens, num_targets, num_held_out = counts
    return f"{num_rows:,} rows of {num_tokens:,} tokens, {num_targets:,} of them trained on, {num_held_out:,} held out"


def check_same_files(sources: Sequence[Source], processes: Processes) -> None:
    """Compares names and sizes of the files of a stream, of which each rank reads some for all ranks.

    Raises:
        DataError: they differ; the same on every rank.
    """
    listed = [(source.path, [(file.name, file.num_bytes) for file in source.files]) for source in sources]
    named = processes.gather(listed, list[tuple[str, list[tuple[str, int]]]])
    for rank, lists in enumerate(named):
        for (_, own), (path, first) in zip(lists, named[0], strict=True):
            if own != first:
                name = min((name for name, _ in set(own) ^ set(first)), default="another order")
                raise DataError(
                    f"{path} has other files on rank {rank} than on rank 0: {name}. Streamed data must be the same on "
                    "every host. Set data.path or data.mix to a shared folder, or copy it again."
                )
