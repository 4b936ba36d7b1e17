"""Ask NVIDIA's driver about this host's GPUs, without torch, which takes seconds to import."""

from __future__ import annotations

import subprocess

TIMEOUT_SECONDS = 30  # of a driver that hangs


def query_gpus(*fields: str) -> list[list[str]]:
    """These fields of each GPU, by `nvidia-smi --query-gpu`; empty if there is no GPU, no driver or no answer.

    Args:
        fields: names that `nvidia-smi --help-query-gpu` lists, such as `index` or `memory.total`, which is in MiB. The
            last one may hold commas, as names do.
    """
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",", len(fields) - 1)] for line in found.splitlines()]
    return [row for row in rows if len(row) == len(fields)]
