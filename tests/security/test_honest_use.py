"""What the rules against other people's files must not make harder, through the real command line.

The user may only read the model: it belongs to another, in a folder of mode r-xr-xr-x or in a hub cache full of links.
Outputs lie on another disk behind a link, and a run is moved before it goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.helpers.checkpoints import make_checkpoint

SETPRIV = shutil.which("setpriv")
IS_ROOT = os.geteuid() == 0
OTHER_USER = 65534
# Root may write everywhere. Without these capabilities it is a user like any other, who keeps the installed packages.
NO_PRIVILEGES = [str(SETPRIV), "--bounding-set=-dac_override,-dac_read_search,-fowner", "--"] if IS_ROOT else []

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(IS_ROOT and SETPRIV is None, reason="root may write everywhere, and setpriv is missing"),
]


def start_as_user(folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start Python in `folder`, as a user who may write there and not to what belongs to others."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_", "HF_"))}
    own |= {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder.parent / "shared" / "hub")}
    own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    argv = [*NO_PRIVILEGES, sys.executable, *command]
    return subprocess.Popen(argv, env=own, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run_as_user(folder: Path, *command: str) -> tuple[int, str]:
    """Run Python in `folder` as `start_as_user` does: its exit code and output."""
    process = start_as_user(folder, *command)
    output, _ = process.communicate()
    return process.returncode, output


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of somebody else's with a model, as it is and in a hub cache, which others may only read."""
    shared = tmp_path / "shared"
    make_checkpoint("llama", shared / "model", torch.float32)
    byte_tokenizer().save_pretrained(shared / "model")
    repository = shared / "hub" / "models--org--name"
    for name in ("blobs", "refs", "snapshots/abc"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for number, file in enumerate(sorted((shared / "model").iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (repository / "snapshots" / "abc" / file.name).symlink_to(Path("../../blobs") / str(number))
    for path in [shared, *shared.rglob("*")]:
        if IS_ROOT:
            os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    return shared


def test_a_model_to_read_a_scratch_link_and_a_moved_run(shared: Path, rows: Path, tmp_path: Path) -> None:
    """The run begins with the model of the hub's cache, and goes on with the same one in a folder."""
    user, scratch = tmp_path / "user", tmp_path / "scratch"
    user.mkdir()
    scratch.mkdir()
    (user / "outputs").symlink_to(scratch)
    _, told = run_as_user(user, "-c", f"open({str(shared / 'model' / 'config.json')!r}, 'a')")
    assert "PermissionError" in told

    data = user / "rows.jsonl"
    shutil.copy(rows, data)
    train = ["-m", "qlora_fsdp.train", f"data.path={data}", "training.max_length=64"]
    train += [
        "training.global_batch_size=2",
        "checkpoint.every_steps=2",
        "checkpoint.allow_changes=[training.max_steps,model.path]",
    ]
    first = ["model.path=org/name", "run.folder=outputs/run", "training.max_steps=100000"]
    started = start_as_user(user, *train, *first)
    assert started.stdout is not None
    metrics = scratch / "run" / "metrics.jsonl"
    while started.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") > 1):
        time.sleep(0.05)  # lines of the table come seldom
    started.send_signal(signal.SIGINT)
    output = started.stdout.read()
    assert started.wait() == 130, output

    steps = steps_of(scratch / "run")
    (scratch / "run").rename(user / "moved")
    second = [f"model.path={shared / 'model'}", "run.folder=moved", f"training.max_steps={len(steps) + 2}"]
    code, output = run_as_user(user, *train, *second)
    assert code == 0 and "Going on from step" in (user / "moved" / "train.log").read_text(), output
    assert steps_of(user / "moved") == [*steps, len(steps) + 1, len(steps) + 2]
    code, output = run_as_user(
        user, "-m", "qlora_fsdp.generate", "adapter=moved/adapter", "prompt=Hello", "max_new_tokens=2"
    )
    assert code == 0, output


def steps_of(run: Path) -> list[int]:
    """The steps that a run has done."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "loss" in line]
