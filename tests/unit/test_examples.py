"""Every recipe of examples/ composes, passes the checks of a run, and fits the GPUs that it is named for.

The tables of examples/README.md and README.md have what preflight plans today.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qlora_fsdp import preflight
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.reading.compose import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TABLE = (ROOT / "examples" / "README.md").read_text()
MODELS = re.findall(
    r"\| (\d) x (RTX 4090|H100) \| `([^`]+)` \| ([\d.]+) \| ([\d,]+) \|\n", (ROOT / "README.md").read_text()
)


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
    row = re.search(rf"\[{re.escape(file.name)}\].*\| ([\d.]+) \| ([\d,]+) \|", TABLE)
    assert row is not None, f"examples/README.md has no row for {file.name}"
    check_row(["--config", str(file), hardware[0]], row[1], row[2], tmp_path)


@pytest.mark.parametrize(("count", "gpu", "settings", "gib", "speed"), MODELS)
def test_a_model_fits_as_the_readme_says(
    count: str, gpu: str, settings: str, gib: str, speed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_row([*settings.split(), f"hardware={count}x{gpu.replace(' ', '').lower()}"], gib, speed, tmp_path)


def check_row(arguments: list[str], gib: str, speed: str, folder: Path) -> None:
    """Checks that preflight says that the run fits, and what a table says of it."""
    figures = folder / "preflight.json"
    assert preflight.preflight(arguments, figures) == 0
    planned = json.loads(figures.read_text())
    assert float(gib) == pytest.approx(planned["needed_gib"], abs=0.5)
    assert float(speed.replace(",", "")) == pytest.approx(planned["tokens_per_second"], rel=0.1)
