"""Measure how large and how dense the code is, and list the places that are hard to read.

usage: python scripts/measure_code.py [--dense] [--once] [--one-importer] [--multi] [--twice] [FOLDER ...]

Without an option: a table of src, a row for each folder of the package and one for all of it. Code lines are those
without blanks, comments and docstrings. Branches are counted as radon counts them: one for each function, and one for
each `if`, loop, handler, assertion, case, comprehension, condition of one, and further operand of `and` and `or`.

With options: places as `file:line what`, of one kind each.

- `--dense`: functions of at most 20 lines with more than 10 branches;
- `--once`: private functions and methods that are used in one place;
- `--one-importer`: modules that a single other module imports;
- `--multi`: statements that do several things: three or more names assigned at once, a conditional expression inside of
  another one, a sequence of constants that is spread by a star;
- `--twice`: public names of the top level, and file names, that stand in several modules.

The numbers are a direction. What counts is how the code reads.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SHORT = 20  # lines of a function that looks easy
MANY = 10  # branches that make it hard
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
ONE_BRANCH = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.Assert,
    ast.match_case,
    ast.comprehension,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """A file of Python.

    Attributes:
        file: where it is.
        name: how others import it, as `package.folder.module`.
    """

    file: Path
    name: str

    @cached_property
    def text(self) -> str:
        """What it says."""
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods, inner ones too."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]


@dataclass
class Size:
    """Sums over modules."""

    files: int = 0
    code_lines: int = 0
    tokens: int = 0
    import_lines: int = 0
    branches: int = 0
    dense: int = 0
    whole_config: int = 0
    function_lines: list[int] = field(default_factory=list)

    def add(self, module: Module) -> None:
        """Count a module."""
        lines, tokens = count_code(module)
        self.files += 1
        self.code_lines += lines
        self.tokens += tokens
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.import_lines += count_lines(node)
        for function in module.functions:
            self.branches += count_branches(function)
            self.dense += is_dense(function)
            self.whole_config += takes_config(function)
            self.function_lines.append(count_lines(function))

    def row(self) -> list[str]:
        """The cells of the table."""
        lines = max(1, self.code_lines)
        return [
            f"{self.files:,}",
            f"{self.code_lines:,}",
            f"{self.tokens / lines:.1f}",
            f"{100 * self.branches / lines:.0f}",
            f"{self.dense}",
            f"{100 * self.import_lines / lines:.1f} %",
            f"{self.whole_config}",
            f"{max(self.function_lines, default=0)}",
        ]


HEADINGS = [
    "files",
    "code lines",
    "tokens a line",
    "branches per 100 lines",
    "short dense functions",
    "import lines",
    "functions with a whole Config",
    "longest function",
]


def find_modules(folders: list[Path]) -> list[Module]:
    """All files of Python below the folders, by name."""
    modules = []
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            modules.append(Module(file, ".".join(parts)))
    return modules


def count_lines(node: ast.stmt) -> int:
    """Lines from the first to the last of a statement."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def count_code(module: Module) -> tuple[int, int]:
    """Code lines and tokens of a module."""
    docstrings: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            docstrings.update(range(docstring.lineno, docstring.lineno + count_lines(docstring)))
    lines: set[int] = set()
    num_tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type in NOT_CODE:
            continue
        token_lines = set(range(token.start[0], token.end[0] + 1)) - docstrings
        if token_lines:
            num_tokens += 1
            lines |= token_lines
    return len(lines), num_tokens


def count_branches(function: Function) -> int:
    """Ways through a function, as radon counts them; those of inner functions are counted for both."""
    branches = 1
    for node in ast.walk(function):
        if isinstance(node, ONE_BRANCH):
            branches += 1
        if isinstance(node, ast.comprehension):
            branches += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
    return branches


def is_dense(function: Function) -> bool:
    """Whether it looks short and is not."""
    return count_lines(function) <= SHORT and count_branches(function) > MANY


def takes_config(function: Function) -> bool:
    """Whether an argument is all of the settings."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments if argument.annotation is not None]
    return any(ast.unparse(annotation) == "Config" for annotation in annotations)


def list_dense(modules: list[Module]) -> Iterator[str]:
    """Functions that look short and are not, the densest first."""
    found = []
    for module in modules:
        for function in module.functions:
            if is_dense(function):
                found.append((count_branches(function), count_lines(function), module, function))
    for branches, lines, module, function in sorted(found, key=lambda one: (-one[0], one[1])):
        yield f"{module.file}:{function.lineno} {function.name}: {branches} branches in {lines} lines"


def list_once(modules: list[Module]) -> Iterator[str]:
    """Private functions and methods that one place uses, the shortest first."""
    found = []
    for module in modules:
        uses = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for function in module.functions:
            name = function.name
            is_private = name.startswith("_") and not name.startswith("__")
            if is_private and uses[name] == 1:
                found.append((count_lines(function), f"{module.file}:{function.lineno} {name}"))
    for lines, place in sorted(found):
        yield f"{place}: {lines} lines"


def find_imports(module: Module, names: set[str]) -> set[str]:
    """The modules among `names` that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found & names


def list_one_importer(modules: list[Module]) -> Iterator[str]:
    """Modules that a single other one imports, the smallest first."""
    importers: dict[str, list[str]] = defaultdict(list)
    names = {module.name for module in modules}
    for module in modules:
        for name in find_imports(module, names - {module.name}):
            importers[name].append(module.name)
    found = []
    for module in modules:
        if len(importers[module.name]) == 1 and module.file.stem not in {"__init__", "__main__"}:
            found.append((count_code(module)[0], module, importers[module.name][0]))
    for lines, module, importer in sorted(found, key=lambda one: one[0]):
        yield f"{module.file}: {lines} lines, imported by {importer}"


def list_multi(modules: list[Module]) -> Iterator[str]:
    """Statements and expressions that say several things."""
    for module in modules:
        for node in ast.walk(module.tree):
            what = why_multi(node)
            if what is not None:
                line = getattr(node, "lineno", 0)
                yield f"{module.file}:{line} {what}"


def why_multi(node: ast.AST) -> str | None:
    """What is several things at once in a node; None if it is one thing."""
    if isinstance(node, ast.Assign):
        is_constructed = isinstance(node.value, ast.Tuple)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and len(target.elts) >= 3 and is_constructed:
                return f"{len(target.elts)} assignments"
        if len(node.targets) >= 3:
            return f"{len(node.targets)} assignments"
    if isinstance(node, ast.IfExp):
        parts = (node.test, node.body, node.orelse)
        if any(isinstance(inner, ast.IfExp) for part in parts for inner in ast.walk(part)):
            return "a conditional in a conditional"
    if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
        elements = node.value.elts
        if elements and all(isinstance(element, ast.Constant) for element in elements):
            return "constants behind a star"
    return None


def list_twice(modules: list[Module]) -> Iterator[str]:
    """Public names of the top level and names of files that stand in several modules."""
    names: dict[str, list[Path]] = defaultdict(list)
    stems: dict[str, list[Path]] = defaultdict(list)
    for module in modules:
        stems[module.file.stem].append(module.file)
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                names[node.name].append(module.file)
    for name, files in sorted(names.items()):
        if len(files) > 1:
            yield f"{name}: {', '.join(map(str, files))}"
    for stem, files in sorted(stems.items()):
        if len(files) > 1 and stem not in {"__init__", "__main__"}:
            yield f"{stem}.py: {', '.join(map(str, files))}"


def print_table(modules: list[Module]) -> None:
    """A row for each folder, and one for all."""
    sizes: dict[str, Size] = defaultdict(Size)
    total = Size()
    for module in modules:
        sizes[str(module.file.parent)].add(module)
        total.add(module)
    rows = [[folder, *size.row()] for folder, size in sorted(sizes.items())]
    rows.append(["all", *total.row()])
    print("| folder | " + " | ".join(HEADINGS) + " |")
    print("|---" * (len(HEADINGS) + 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


LISTS = {
    "dense": list_dense,
    "once": list_once,
    "one_importer": list_one_importer,
    "multi": list_multi,
    "twice": list_twice,
}


def main() -> None:
    """Print the table, or the lists that are asked for."""
    parser = argparse.ArgumentParser(description="How large and how dense is the code?")
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("src")])
    for name in LISTS:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true")
    options = parser.parse_args()
    modules = find_modules(options.folders)
    asked = [name for name in LISTS if getattr(options, name)]
    for name in asked:
        print("\n".join(LISTS[name](modules)))
    if not asked:
        print_table(modules)


if __name__ == "__main__":
    main()
