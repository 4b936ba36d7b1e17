"""The schema is the one source: docs/configuration.md and the defaults under conf/ say what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.recorded import plain_default, plain_settings
from qlora_fsdp.config.settings import all_settings

ROOT = Path(__file__).parents[2]
STARTING = ("launch.", "slurm.", "skypilot.", "kubernetes.")  # sections that no run records


def test_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_configuration_docs.py"))
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == script["make_page"](), "run python scripts/make_configuration_docs.py"


def test_every_setting_is_described() -> None:
    assert [key for key, setting in all_settings().items() if not setting.comment] == []


def test_a_run_without_settings_has_the_schemas_defaults() -> None:
    composed = plain_settings(load_config([]))
    defaults = {key: plain_default(key) for key in all_settings() if not key.startswith(STARTING)}
    assert composed == defaults | {"run.folder": "outputs/run"}  # outputs/${run.name}


def test_every_default_is_within_its_bounds() -> None:
    bounded = {key: setting for key, setting in all_settings().items() if setting.bounds is not None}
    assert len(bounded) > 30
    for key, setting in bounded.items():
        is_no_number = setting.default is None or setting.default in setting.facets.words
        assert is_no_number or setting.bounds.allow(setting.default), key


def test_the_page_on_checkpoints_names_each_setting_that_may_change_in_between() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    told = page.partition("Settings that may change")[2].partition("Any other change is refused")[0]
    named = set(re.findall(r"`([\w.]+)`", told))
    harmless = {key for key, setting in all_settings().items() if setting.facets.run.is_same}
    assert {key for key in harmless if not named & {key, key.partition(".")[0], key.partition(".")[2]}} == set()
