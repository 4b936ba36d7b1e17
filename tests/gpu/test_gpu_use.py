"""doctor finds nothing wrong with a GPU that trains; completions and merges are the CPU's."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from qlora_fsdp import generate, merge
from qlora_fsdp.doctor.gpu_checks import check_gpus
from qlora_fsdp.inference import trained
from tests.helpers.ranks import Meeting, run_ranks
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.gpu
DEMO = Path(__file__).parents[2] / "demo" / "base"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_doctor() -> None:
    findings = {finding.what: finding for finding in check_gpus()}
    for index in range(torch.cuda.device_count()):
        assert {f"GPU {index}", f"GPU {index} bytes", f"GPU {index} bnb"} <= findings.keys()
    assert all(finding.level != "red" for finding in findings.values()), findings


def complete_together(adapter: Path, folder: Path, prompts: Path) -> None:
    """Complete in float32 with layers that are spread over all GPUs, as if none could hold the model; twice."""
    for name in ("first", "second"):
        Meeting.new_port()
        out = [f"prompts={prompts}", f"out={folder / name}.jsonl", "max_new_tokens=16"]
        with patch.object(trained, "WHOLE_SHARE", 0.0):
            assert generate.main([f"adapter={adapter}", "training.precision=float32", *out]) == 0


def use(adapter: Path, folder: Path, prompts: Path) -> None:
    """Complete and merge in float32 on this process's device."""
    base = [f"adapter={adapter}", "training.precision=float32"]
    Meeting.new_port()
    assert generate.main([*base, f"prompts={prompts}", f"out={folder / 'completions.jsonl'}", "max_new_tokens=16"]) == 0
    report = [f"report_data={prompts}", f"data.cache_folder={folder}"]
    Meeting.new_port()
    assert merge.main([*base, f"out={folder / 'merged'}", "base=dequantized", *report]) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_completions_and_merges_are_those_of_a_cpu(rows: Path, tmp_path: Path) -> None:
    few = ["training.max_steps=4", "training.learning_rate=2e-3", "model.tokenizer_path=null"]
    run_ranks(1, train_all, {"demo": settings(DEMO, rows, *few, f"run.folder={tmp_path / 'run'}")})
    prompts = tmp_path / "prompts.jsonl"
    questions = [{"prompt": "What does `textwrap.dedent(text)` do?\n"}, {"prompt": "import"}]
    prompts.write_text("".join(json.dumps({**row, "completion": " Nothing."}) + "\n" for row in questions))
    found = {}
    for device in ("cpu", "gpu"):
        folder = tmp_path / device
        folder.mkdir()
        run_ranks(1, use, tmp_path / "run" / "adapter", folder, prompts, gpu=device == "gpu")
        report = json.loads((folder / "merged" / "merge_report.json").read_text())
        assert report["models"]["merged"]["kl_mean"] < 1e-4
        found[device] = (folder / "completions.jsonl").read_text()
    assert found["cpu"] == found["gpu"]
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        run_ranks(num_gpus, complete_together, tmp_path / "run" / "adapter", tmp_path, prompts, gpu=True)
        for name in ("first", "second"):
            assert (tmp_path / f"{name}.jsonl").read_text() == found["gpu"]
