r"""Write the demo's data: what does each public function of the standard library do, in one line?

    python scripts/make_docstring_pairs.py

makes demo/docstrings.jsonl (training) and demo/docstrings_eval.jsonl (modules whose source neither the base model nor
the adapter has seen). A row is {"prompt": "What does `textwrap.dedent(text)` do?\n", "completion": "Remove any ..."}.
Rows depend on the version of Python that runs this; the committed ones come from the one in demo/base/README.md.

    python scripts/make_docstring_pairs.py chats

makes demo/chats.jsonl and demo/chats_eval.jsonl of some of these rows, as conversations of two messages.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "demo"

# Tests, generated tables and bundled programs: little prose about the library, or none.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "encodings"}

# Kept from the base model's text and from the training pairs, so that evaluation shows what carries over.
HELD_OUT_MODULES = {
    *("bisect", "calendar", "colorsys", "configparser", "csv", "fractions", "graphlib", "heapq", "ipaddress", "queue"),
    *("random", "sched", "shutil", "statistics", "string", "tarfile", "textwrap", "zipfile"),
}

# Longer summaries are rarely one sentence, and cost more than a small model learns from them.
MAX_SUMMARY_CHARS = 80
MAX_PROMPT_CHARS = 100


def stdlib_sources() -> Iterator[tuple[str, str]]:
    """Yields (dotted module name, source text) of every pure Python module of the standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts) and not any(part.startswith("config-") for part in parts):
            module = ".".join(part for part in parts if part != "__init__")
            yield module, path.read_text(encoding="utf-8")


def parse(source: str) -> ast.Module:
    """Parses a module, without the warnings about old escapes that its author has to care about, not we."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def public_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields (dotted name, function) of the public functions and methods below a module or a class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            name = f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from public_functions(child, name)
            else:
                yield name, child


def signature(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns the call as documentation writes it: no annotations, no `self`."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments = ast.unparse(function.args)
    for receiver in ("self", "cls"):
        arguments = arguments.removeprefix(f"{receiver}, ") if arguments != receiver else ""
    return f"{name}({arguments})"


def summary(docstring: str) -> str | None:
    """Returns the docstring's first paragraph if it is one line of prose as PEP 257 wants it, else None."""
    line = " ".join(docstring.split("\n\n")[0].split())
    is_prose = line.endswith(".") and line[:1].isupper() and line.isascii() and "->" not in line
    return line if is_prose and len(line.split()) > 2 and len(line) <= MAX_SUMMARY_CHARS else None


def docstring_pairs() -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (module, row) for every public function that says in one line what it does."""
    for module, source in stdlib_sources():
        if any(part.startswith("_") for part in module.split(".")):
            continue
        for name, function in public_functions(parse(source), module):
            line = summary(ast.get_docstring(function) or "")
            call = signature(name, function)
            if line and len(call) <= MAX_PROMPT_CHARS:
                yield module, {"prompt": f"What does `{call}` do?\n", "completion": line}


def write_chats() -> None:
    """Writes some rows of each file, drawn at random, as chats."""
    for name, kept, num_chats in (("docstrings", "chats", 300), ("docstrings_eval", "chats_eval", 24)):
        rows = [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        chats = []
        for row in random.Random(0).sample(rows, num_chats):
            question = {"role": "user", "content": row["prompt"].strip()}
            chats.append({"messages": [question, {"role": "assistant", "content": row["completion"]}]})
        (DEMO / f"{kept}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")


def main() -> None:
    """Writes both files, leaving out of the evaluation rows each answer that training rows give too."""
    pairs = list(docstring_pairs())
    train = [row for module, row in pairs if module not in HELD_OUT_MODULES]
    seen = {row["completion"] for row in train}
    held_out = [row for module, row in pairs if module in HELD_OUT_MODULES and row["completion"] not in seen]
    for path, rows in ((DEMO / "docstrings.jsonl", train), (DEMO / "docstrings_eval.jsonl", held_out)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    write_chats() if sys.argv[1:] == ["chats"] else main()
