"""docs/benchmarks.md shows what benchmarks/results holds."""

from __future__ import annotations

import pytest
from benchmarks import show


def test_page_shows_the_tables_of_its_files() -> None:
    page = show.PAGE.read_text(encoding="utf-8")
    assert len(show.SHOWN.findall(page)) >= 4
    assert show.update(page) == page, "run python benchmarks/show.py --update"


@pytest.mark.parametrize("name", sorted(file.stem for file in show.RESULTS.glob("*.json")))
def test_results_say_where_they_are_from(name: str) -> None:
    content = show.read(name)
    assert content["title"] and content["host"] and content["dates"] and content["versions"]["torch"]
    for table in content["tables"]:
        assert table.keys() <= {"text", "command", "columns", "rows"}
        assert all(len(row) == len(table["columns"]) for row in table.get("rows", []))
    assert show.show(name).startswith(f"# {content['title']}")
