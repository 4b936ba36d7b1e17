"""How a command starts, before torch is there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from qlora_fsdp.common.startup import quick_imports


def test_scipy_is_hidden_while_the_libraries_are_imported_and_then_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scipy = pytest.importorskip("scipy")
    with quick_imports():
        assert sys.modules["scipy"] is scipy, "what is imported already is not taken away"
    monkeypatch.delitem(sys.modules, "scipy")
    with quick_imports(), quick_imports():
        assert find_spec("scipy") is None
    assert find_spec("scipy") is not None
