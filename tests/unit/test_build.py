"""What is built from model files, and that building leaves them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import quantize_checkpoint

from qlora_fsdp.config.schema import ModelConfig, QuantConfig, TaskConfig, TaskName
from qlora_fsdp.model.build import BuildSettings, MetaModel, build_model
from qlora_fsdp.model.find import find_model

CLASSIFIER = TaskConfig(name=TaskName.sequence_classification, labels=["no", "maybe", "yes"])
CASES = {"full": TaskConfig(), "quantized": TaskConfig(), "classifier": CLASSIFIER}


def describe(meta: MetaModel) -> dict[str, Any]:
    """All that can be compared: modules are others in each build."""
    return {
        "config": meta.config.to_dict(),
        "modules": str(meta.model),
        "parameters": {name: (param.shape, param.dtype) for name, param in meta.model.named_parameters()},
        "assignments": [(a.name, a.stored, a.stored_parts, a.nested_offset, a.copies) for a in meta.assignments],
        "format": meta.format,
        "notes": meta.notes,
        "head": meta.head,
    }


@pytest.mark.parametrize("case", CASES)
def test_two_builds_from_the_same_files_are_equal(checkpoint: Callable[..., Path], tmp_path: Path, case: str):
    folder = checkpoint("llama", torch.float32)
    if case == "quantized":
        folder = quantize_checkpoint(folder, tmp_path / "quantized", load_in_4bit=True)
    files = find_model(ModelConfig(path=str(folder)), True, lambda error: error)
    before = files.config.to_dict()
    settings = BuildSettings(QuantConfig(), torch.float32, "eager", CASES[case], pad_token_id=0)
    first, second = (describe(build_model(files, settings)) for _ in range(2))
    assert first == second and files.config.to_dict() == before
    assert (first["head"] == ["score"]) == (case == "classifier")
    assert any("already quantized" in note for note in first["notes"]) == (case == "quantized")
