"""Print measured results as Markdown tables: all of benchmarks/results, or some of its files.

    python benchmarks/show.py                  # every table of every file
    python benchmarks/show.py 8b-scaling       # the tables of one file, with date, host, versions and commands
    python benchmarks/show.py --update         # write the tables of docs/benchmarks.md anew from their files

A file holds one subject: `title`, `dates`, `host`, `versions`, and `tables`, each with the `text` and the `command`
that belong to it, `columns` and `rows`. docs/benchmarks.md shows some of the tables. A comment stands above each of
them, `<!-- 8b-scaling 0 -->`, which names the file and the table's place in it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
SHOWN = re.compile(r"(<!-- (\S+) (\d+) -->\n)(?:\|.*\n)*")


def read(name: str) -> dict[str, Any]:
    """The content of benchmarks/results/NAME.json."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def markdown(table: dict[str, Any]) -> str:
    """The rows of a table in Markdown; empty for a note that has no rows."""
    if "columns" not in table:
        return ""
    lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def update(page: str) -> str:
    """The page with each marked table written anew from its file."""
    return SHOWN.sub(lambda found: found[1] + markdown(read(found[2])["tables"][int(found[3])]), page)


def show(name: str) -> str:
    """Everything that a file holds, as Markdown."""
    content = read(name)
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    parts = [f"# {content['title']}", f"{', '.join(content['dates'])}; {content['host']}; {versions}."]
    for table in content["tables"]:
        parts += table.get("text", [])
        if "command" in table:
            parts.append("\n".join(["```sh", *table["command"], "```"]))
        parts.append(markdown(table).rstrip())
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Print the files that the command line names, or update the page."""
    parser = argparse.ArgumentParser(description="Print measured results as Markdown.")
    names = sorted(file.stem for file in RESULTS.glob("*.json"))
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(names)}")
    parser.add_argument("--update", action="store_true", help="write the tables of docs/benchmarks.md anew")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such results. There are {', '.join(names)}.")
    if options.update:
        PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n".join(show(name) for name in options.names or names))


if __name__ == "__main__":
    main()
