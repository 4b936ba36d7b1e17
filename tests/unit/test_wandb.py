"""W&B shows one run for one run folder, however often the run is started."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qlora_fsdp.config.compose import load_config
from qlora_fsdp.journal import Journal


def test_run_that_goes_on_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[dict[str, Any]] = []
    run = SimpleNamespace(finish=lambda exit_code: None, summary={})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: started.append(options) or run))
    config = load_config(["tracking.wandb=offline", "run.name=mine"])
    for first_step in (0, 7, 9, 0):
        Journal(tmp_path, config, 10, is_main=True, first_step=first_step).close({})
    ids = [options["id"] for options in started]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert all(options["resume"] == "allow" and options["name"] == "mine" for options in started)
