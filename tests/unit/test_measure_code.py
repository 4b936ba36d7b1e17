"""What scripts/measure_code.py counts and lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import measure_code
from scripts.measure_code import Module, count_branches, count_code

SMALL = '''"""A module."""

from __future__ import annotations


def one(values: list[int]) -> int:
    """Not code."""
    # neither is this
    if not values or values[0] < 0:
        return 0
    return sum(v for v in values if v)
'''


def test_code_lines_and_branches_of_a_small_module(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(SMALL, encoding="utf-8")
    module = Module(file, "small")
    lines, _ = count_code(module)
    assert lines == 5  # the import, the signature, and three of the body
    # one for the function, one each for `if`, `or`, the comprehension and its condition
    assert count_branches(module.functions[0]) == 5


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("a, b, c = 1, 2, 3", "3 assignments"),
        ("a, b, c = values", None),
        ("a = b = c = 1", "3 assignments"),
        ("a = 1 if b else 2 if c else 3", "a conditional in a conditional"),
        ('print(*("a", "b"))', "constants behind a star"),
        ("print(*values)", None),
    ],
)
def test_statements_that_say_several_things_are_listed(tmp_path: Path, line: str, what: str | None) -> None:
    file = tmp_path / "small.py"
    file.write_text(line + "\n", encoding="utf-8")
    listed = list(measure_code.list_multi([Module(file, "small")]))
    assert listed == ([] if what is None else [f"{file}:1 {what}"])


def test_a_module_with_one_importer_is_listed(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text("X = 1\n", encoding="utf-8")
    (tmp_path / "door.py").write_text("from room import X\nprint(X)\n", encoding="utf-8")
    modules = measure_code.find_modules([tmp_path])
    assert list(measure_code.list_one_importer(modules)) == [f"{tmp_path}/room.py: 1 lines, imported by door"]
