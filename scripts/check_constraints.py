"""Check that constraints.txt names every package that is installed, in its version.

usage: python scripts/check_constraints.py

pip, this package, and what torch pins itself, differently in each of its builds, are left out, and so is the local part
of a version (`+cpu`). The exit code is 1 if something is missing or is another version.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
NOT_PINNED = re.compile("pip|qlora-fsdp|triton|cuda-.*|nvidia-.*")


def read_constraints(file: Path = CONSTRAINTS) -> dict[str, str]:
    """The version of every package by its canonical name, as far as it is for this Python and platform."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    found: dict[str, str] = {}
    for requirement in map(Requirement, filter(None, lines)):
        if requirement.marker is None or requirement.marker.evaluate():
            found[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return found


def find_differences(installed: dict[str, str], pinned: dict[str, str]) -> Iterator[str]:
    """A line for each package that is not pinned, or is installed in another version than the pinned one."""
    for name, version in sorted(installed.items()):
        if NOT_PINNED.fullmatch(name):
            continue
        if name not in pinned:
            yield f"{name}=={version} is installed and not in constraints.txt."
        elif Version(version).public != pinned[name]:
            yield f"{name}=={version} is installed, and constraints.txt has {pinned[name]}."


def main() -> int:
    """Print the differences of this environment."""
    installed: dict[str, str] = {canonicalize_name(found.name): found.version for found in distributions()}
    differences = list(find_differences(installed, read_constraints()))
    print("\n".join(differences) or "Every installed package is pinned in constraints.txt.")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
