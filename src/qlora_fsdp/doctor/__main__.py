"""`qlora-fsdp doctor`: can this host train, and what would be in the way?

Each check yields findings. Green means that all is well, yellow that training runs with a drawback, and red that it
does not run. Yellow and red findings say what to do. With `launch.num_processes=N` the processes also measure
how fast they exchange data.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import RankError, RunFolderError, UserError, print_error
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.startup import announce, end_process, is_first_rank, quick_imports
from qlora_fsdp.common.terminal import colored, uses_color
from qlora_fsdp.common.text import first_line, name_error
from qlora_fsdp.doctor.gpu_checks import (
    check_cpu_kernels,
    check_exchange,
    check_gpus,
    check_pinned,
    check_recurrent_kernels,
)
from qlora_fsdp.doctor.host import (
    Finding,
    check_bytecode,
    check_disk,
    check_hub,
    check_memory,
    check_slurm,
    check_versions,
)

if TYPE_CHECKING:
    from qlora_fsdp.runtime.processes import Processes

MEETING_SECONDS = 120

USAGE = """
Can this host train? Versions, GPUs, bitsandbytes, memory, disk, hub, SLURM; green, yellow or red, with what to do.

usage: qlora-fsdp doctor [launch.num_processes=N] [--json FILE] [--folder DIR]

  --json FILE   write the findings there too
  --folder DIR  measure this disk: where models are, or run folders (default: this folder)

With N processes it also measures how fast they exchange data. The exit code is 1 if anything is red.
"""


def diagnose(folder: Path) -> list[Finding]:
    """The findings of every check. A check that fails is a red finding itself."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", check_versions),
        ("bytecode", check_bytecode),
        ("GPUs", check_gpus),
        ("bitsandbytes", check_cpu_kernels),
        ("gated delta rule", check_recurrent_kernels),
        ("memory", check_memory),
        ("pinned memory", check_pinned),
        ("disk", lambda: check_disk(folder)),
        ("hub", check_hub),
        ("SLURM", check_slurm),
    ]
    with quick_imports(), suppress(Exception):  # a check below reports what can't be imported
        import_module("bitsandbytes")
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:  # any failure is what this command is there to find
            findings.append(Finding("red", name, name_error(error), "Mend this first."))
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks and print the findings.

    Returns:
        1 if anything is red, 2 if the findings can't be written, else 0.
    """
    parser = argparse.ArgumentParser("qlora-fsdp doctor", usage=USAGE.partition("usage: ")[2], add_help=False)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_args(argv)
    is_main = is_first_rank()
    if options.help:
        if is_main:
            print(USAGE.strip())
        return 0
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    announce(num_ranks)
    # The processes meet before rank 0 runs its checks, which may take longer than the others would wait for it.
    met = _meet() if num_ranks > 1 else None
    findings: list[Finding] = diagnose(options.folder) if is_main else []
    if met is not None:
        findings += [met] if isinstance(met, Finding) else _exchanged(met)
    if not is_main:
        return 0
    has_colors = uses_color(sys.stdout)
    for finding in findings:
        level = colored(finding.level, finding.level) if has_colors else finding.level
        print(str(finding).replace(finding.level, level, 1))
    if options.json is not None:
        try:
            write_json(options.json, [asdict(finding) for finding in findings])
        except OSError as error:
            print_error(RunFolderError(f"--json {options.json} can't be written: {error}. Name another file."))
            return RunFolderError.exit_code
    return int(any(finding.level == "red" for finding in findings))


def _meet() -> Processes | Finding:
    """All processes of the launch; or a finding if they did not meet."""
    try:
        with quick_imports():
            from qlora_fsdp.runtime.processes import start_processes
        return start_processes(MEETING_SECONDS)
    except (UserError, RuntimeError, ImportError) as error:
        return _failed(error)


def _exchanged(processes: Processes) -> list[Finding]:
    """Measure what takes all processes, once rank 0 has run its own checks."""
    from qlora_fsdp.runtime.processes import stop_processes

    try:
        processes.wait(patiently=True)  # for rank 0, however long its checks take, as long as it lives
        return list(check_exchange(processes))
    except (UserError, RuntimeError) as error:
        return [_failed(error)]
    finally:
        stop_processes()


def _failed(error: Exception) -> Finding:
    """Print an error on the rank that has it, and turn it into a finding."""
    print_error(error if isinstance(error, UserError) else RankError(str(error)))
    return Finding("red", "processes", first_line(error), "See docs/errors.md.")


if __name__ == "__main__":
    end_process(main())
