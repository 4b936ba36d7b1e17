"""Every recipe of examples/ composes, passes the checks of a run, and fits the GPUs that it is named for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qlora_fsdp import preflight
from qlora_fsdp.config.check_settings import check_settings
from qlora_fsdp.config.compose import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TABLE = (ROOT / "examples" / "README.md").read_text()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_recipe_trains_and_fits(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = file.read_text()
    for command in ("preflight", "train"):
        assert f"qlora-fsdp {command} " in text and f"--config examples/{file.name} " in text
    hardware = re.search(r"hardware=(\S+)", text)
    assert hardware is not None
    rows = tmp_path / "chats.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    assert check_settings(load_config(["--config", str(file), f"data={rows}"])) == []
    monkeypatch.chdir(tmp_path)
    figures = tmp_path / "preflight.json"
    assert preflight.preflight(["--config", str(file), hardware[0]], figures) == 0
    row = re.search(rf"\[{re.escape(file.name)}\].*\| ([\d.]+) \| ([\d,]+) \|", TABLE)
    assert row is not None, f"examples/README.md has no row for {file.name}"
    planned = json.loads(figures.read_text())
    assert float(row[1]) == pytest.approx(planned["plan"]["needed_gib"], abs=0.5)
    assert float(row[2].replace(",", "")) == pytest.approx(planned["tokens_per_second"], rel=0.1)
