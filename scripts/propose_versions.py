"""Propose newer versions for constraints.txt, from what `pip list --outdated` finds for this environment.

usage: python scripts/propose_versions.py [--write]

Without --write it prints the lines that would change. With it, constraints.txt is changed; then run `make setup`,
`make test-all` and `make versions`, and read the change logs of what moved. Lines for other versions of Python than
this one stay as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def propose(text: str, latest: dict[str, str]) -> str:
    """The text of constraints.txt with newer versions.

    Args:
        text: as it is.
        latest: by canonical name, the newest version of packages that have one.
    """
    return "\n".join(_newer(line, latest) for line in text.split("\n"))


def _newer(line: str, latest: dict[str, str]) -> str:
    if "==" not in line or line.startswith("#"):
        return line
    requirement = Requirement(line)
    version = latest.get(canonicalize_name(requirement.name))
    if version is None or not (requirement.marker is None or requirement.marker.evaluate()):
        return line
    old = str(requirement.specifier)
    return line.replace(old, f"=={version}", 1)


def main() -> int:
    """Ask pip, and print or write what is newer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="change constraints.txt")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pip", "list", "--outdated", "--format=json", "--disable-pip-version-check"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    text = CONSTRAINTS.read_text(encoding="utf-8")
    newer = propose(text, {canonicalize_name(each["name"]): each["latest_version"] for each in found})
    for before, after in zip(text.split("\n"), newer.split("\n"), strict=True):
        if before != after:
            print(f"{before}  ->  {after}")
    if options.write:
        CONSTRAINTS.write_text(newer, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
