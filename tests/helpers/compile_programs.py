"""Run the programs beside this one that compile kernels, each when a line on stdin asks for it.

A process for them all, because it takes each of them longer to import torch and Triton than to compile. A line is a
list in JSON: the program's name and its arguments. It is answered by the line that the program prints.
"""

from __future__ import annotations

import json
import runpy
import sys


def main() -> None:
    for line in sys.stdin:
        program, *arguments = json.loads(line)
        sys.argv = [program, *arguments]
        runpy.run_module(f"tests.helpers.{program}", run_name="__main__")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
