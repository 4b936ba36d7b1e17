"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import runpy
from pathlib import Path

from qlora_fsdp.config.settings import all_settings

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_configuration_docs.py"))
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == script["make_page"](), "run python scripts/make_configuration_docs.py"


def test_every_setting_is_described() -> None:
    assert [key for key, setting in all_settings().items() if not setting.comment] == []
