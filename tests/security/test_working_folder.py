"""A downloaded folder as the current one: none of its Python files runs, whatever library would import their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launch import SCRIPT, SHORT_STEPS, Launch

# What torch, transformers, accelerate and Hydra import, or look for, by names that a folder may have too
FILES = [
    *("kernels.py", "torch.py", "hydra_plugins/evil.py", "accelerate/__init__.py", "transformers/__init__.py"),
    *("flash_attn/__init__.py", "deepspeed.py", "torch_xla.py", "sitecustomize_of_ours.py", "yaml.py", "psutil.py"),
    *("runpy.py", "json.py", "qlora_fsdp/__init__.py", "qlora_fsdp/train.py"),
]
TINY = [
    "model=tiny",
    "model.config.num_hidden_layers=1",
    "data=random",
    "training.max_length=32",
    "lora.r=4",
    *SHORT_STEPS,
]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose every module leaves a mark."""
    folder = tmp_path / "downloaded"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + chr(10))\n")
    return folder


@pytest.mark.distributed
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python imports runpy from the current folder before our code")
def test_two_ranks_run_nothing_of_the_current_folder(hostile: Path) -> None:
    command = Launch(hostile, "qlora-fsdp", *TINY, "training.max_steps=2", "launch.num_processes=2")
    assert command.finish() == 0, command.output
    assert not (hostile.parent / "ran").exists(), (hostile.parent / "ran").read_text()


def test_preflight_runs_nothing_of_the_current_folder(hostile: Path) -> None:
    argv = [sys.executable, str(SCRIPT), "preflight", "model=llama3-8b", "hardware=1x24gib"]
    done = subprocess.run(argv, cwd=hostile, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "tokens/s" in done.stdout, done.stdout + done.stderr
    assert not (hostile.parent / "ran").exists(), (hostile.parent / "ran").read_text()


def test_python_m_leaves_the_current_folder_out_where_python_does_not(hostile: Path) -> None:
    """Python has imported its own modules by then, and as yet none of a library."""
    for name in ("runpy.py", "json.py", "qlora_fsdp/__init__.py", "qlora_fsdp/train.py"):
        (hostile / name).unlink()
    argv = [sys.executable, "-m", "qlora_fsdp.train", *TINY, "training.max_steps=-1"]
    done = subprocess.run(argv, cwd=hostile, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "training.max_steps=-1" in done.stderr, done.stderr
    assert not (hostile.parent / "ran").exists(), (hostile.parent / "ran").read_text()
