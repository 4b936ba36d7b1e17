"""Chat templates of published models, out of two packages that keep them: TRL and Axolotl.

`make` unpacks the packages into a folder of the environment, without what they need and where nothing is imported from
them (`MODEL_TEMPLATES=FOLDER` names another). Where they could not be had, the tests that need a template are skipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("MODEL_TEMPLATES", Path(sys.prefix) / "model_templates"))
FOLDERS = (FOLDER / "trl" / "chat_templates", FOLDER / "axolotl" / "utils" / "chat_templates" / "templates")

# By the names of their files; TRL's where both have one. Those that end in _training have {% generation %} marks.
MODELS = {
    file.stem: file.read_text(encoding="utf-8")
    for folder in reversed(FOLDERS)
    for file in (sorted(folder.glob("*.jinja")) if folder.is_dir() else [])
}


def model_template(name: str) -> str:
    """The source of a template; skips the test, by the template's name, where the packages are not there."""
    if not MODELS:
        pytest.skip(f"the template {name} is not here: TRL's and Axolotl's packages could not be had by `make`")
    return MODELS[name]
