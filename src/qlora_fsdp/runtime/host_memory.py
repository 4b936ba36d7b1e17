"""Host memory that a process can still get, from the machine and within its cgroups (containers, batch jobs)."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated before the machine swaps or a cgroup kills the process for exceeding its limit.

    Args:
        root: the folder that holds /proc and /sys; tests make their own.
    """
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms(root)])


def _cgroup_rooms(root: Path) -> list[int]:
    """Bytes left in each cgroup with a limit that contains this process: cgroups v2, and v1's memory controller."""
    rooms = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):  # any group above may have a limit
            if not group.is_relative_to(base):
                break
            room = _room(group, *names)
            rooms += [] if room is None else [room]
    return rooms


def _room(group: Path, limit_name: str, usage_name: str) -> int | None:
    """Bytes left in one cgroup; None if it has no limit."""
    try:
        limit, usage = int((group / limit_name).read_text()), int((group / usage_name).read_text())
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # `max` stands for no limit, and the root group has no such files
        return None
    return max(0, limit - usage + int(fields.get("inactive_file", 0)))  # page cache is dropped when needed
