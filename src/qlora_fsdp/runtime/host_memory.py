"""Host memory that a process may still take: of the machine, and of the cgroups (containers, batch jobs) it is in."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated before the machine swaps or a cgroup's limit ends the process.

    Args:
        root: where /proc and /sys are, for tests.
    """
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms(root)])


def _cgroup_rooms(root: Path) -> list[int]:
    """What each limited cgroup that this process is in has left; cgroup v2, and v1's memory controller."""
    rooms = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):  # a limit may be anywhere above
            if not group.is_relative_to(base):
                break
            room = _room(group, limit_name, usage_name)
            rooms += [] if room is None else [room]
    return rooms


def _room(group: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit, usage = int((group / limit_name).read_text()), int((group / usage_name).read_text())
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # `max`: no limit; the root group has no such files
        return None
    return max(0, limit - usage + int(fields.get("inactive_file", 0)))  # page cache gives way
