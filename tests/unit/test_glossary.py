"""The words of docs/design.md: what they name is there, and no public name has two meanings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.measure_code import find_modules, list_twice

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([a-z][\w, -]*) \| (.+) \| (.+) \|$", re.MULTILINE)


def read_glossary() -> list[tuple[str, str, list[str]]]:
    """Word, meaning, and the names in the code."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = text.partition("## Words\n")[2].partition("\n## ")[0]
    return [(word, meaning, re.findall(r"`(\w+)`", names)) for word, meaning, names in ROW.findall(section)]


def test_words_are_defined_once_and_in_order() -> None:
    words = [word for word, _, _ in read_glossary()]
    assert len(words) >= 25
    assert words == sorted(set(words))


def test_what_the_glossary_names_is_in_the_code() -> None:
    source = "\n".join(module.text for module in find_modules([ROOT / "src"]))
    for word, _, names in read_glossary():
        assert names, f"{word} names nothing"
        for name in names:
            assert re.search(rf"^\s*(?:class|def) {name}\b", source, re.MULTILINE), f"{word}: there is no {name}"


# Names and files that stand in several modules. A name leaves this list when it gets one meaning; none may come.
KNOWN_TWICE = """
Tiles Trace activate attend backward combine evaluate.py format.py forward gather main prepare prepare.py read_rows
read_text
"""


@pytest.mark.parametrize("kind", ["name", "file"])
def test_no_other_name_stands_twice(kind: str) -> None:
    known = set(KNOWN_TWICE.split())
    found = {line.partition(":")[0] for line in list_twice(find_modules([ROOT / "src"]))}
    found = {name for name in found if name.endswith(".py") == (kind == "file")}
    assert found <= known, f"a second meaning: {', '.join(sorted(found - known))}"
