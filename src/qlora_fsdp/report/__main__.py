"""`qlora-fsdp report FOLDER...`: writes report.html about a run, or about all runs in the folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import UserError, print_error
from qlora_fsdp.report.page import write_report
from qlora_fsdp.report.sweep_table import read_results, show_results, write_results


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report that the command line asks for, and a sweep's table anew; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="qlora-fsdp report", description="Write report.html about a run, or to compare several."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, a sweep, or what holds several")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the folder they share")
    options = parser.parse_args(argv)
    try:
        for folder in options.folders:
            if jobs := read_results(folder):
                print(show_results(folder.resolve(), jobs))
                try:
                    write_results(folder, jobs)
                except OSError as error:  # it may be somebody else's, of which --output makes a report elsewhere
                    print(f"Note: sweep.json and sweep.csv stay as they are: {error}", file=sys.stderr)
        print(write_report(options.folders, options.output))
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
