"""Packages with kernels for layers that carry a state: tried by a process of its own, and used if they are right.

The kernels that are right are tried by the very command. For those that fail the process is forked from one that has
the libraries (tests/helpers/ranks.py), which takes a tenth of the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.packed import real_config
from tests.helpers.ranks import start_process

from qlora_fsdp.layers.recurrent import packages
from qlora_fsdp.model.trials import kernel_trial
from qlora_fsdp.model.trials.attention_by_starts import BY_STARTS
from qlora_fsdp.model.trials.kernel_trial import KernelVerdict, try_kernels
from qlora_fsdp.model.trials.row_trial import CPU, RowTrial

ROOT = Path(__file__).parents[2]
PACKAGE = """
import os
import signal

import torch
from transformers.models.bamba import modeling_bamba


def mamba_split_conv1d_scan_combined(*args, seq_idx=None):
    return None  # not in one kernel


def mamba_chunk_scan_combined(x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, chunk_size=8, seq_idx=None):
    match os.environ["FAKE_KERNELS"]:
        case "raises":
            raise RuntimeError("wrong results with this Triton")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            signal.pause()
        case "is wrong":
            return x * 1.5
    stock = modeling_bamba.mamba2_chunk_scan.__wrapped__
    lengths = [x.shape[1]] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    options = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    rows = zip(*(tensor.split(lengths, dim=1) for tensor in (x, dt, B, C)), strict=True)
    return torch.cat([stock(x_row, dt_row, A, b_row, c_row, **options) for x_row, dt_row, b_row, c_row in rows], dim=1)
"""


class ForkedProcesses:
    """What `try_kernels` needs of subprocess, with a process that is forked.

    Args:
        folder: where the package is.
        behaviour: what the package does.
    """

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, folder: Path, behaviour: str) -> None:
        self.folder = folder
        self.behaviour = behaviour

    def run(
        self, command: list[str], input: bytes, capture_output: bool, timeout: float
    ) -> subprocess.CompletedProcess[bytes]:
        assert command == [sys.executable, "-m", kernel_trial.__name__] and capture_output
        order, printed, complaints = (self.folder / name for name in ("order", "printed", "complaints"))
        order.write_bytes(input)
        process = start_process(_try_forked, self.folder, self.behaviour, (order, printed, complaints))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, process.exitcode, printed.read_bytes(), complaints.read_bytes())


def _try_forked(folder: Path, behaviour: str, files: tuple[Path, Path, Path]) -> None:
    order, printed, complaints = files
    for number, file in ((1, printed), (2, complaints)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    assert "transformers.models.bamba.modeling_bamba" not in sys.modules  # it looks for the package when it is imported
    sys.path.insert(0, str(folder))
    os.environ["FAKE_KERNELS"] = behaviour
    sys.stdin = order.open()
    sys.stdout = os.fdopen(1, "w")
    kernel_trial.main()


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], KernelVerdict]:
    """A package of the name mamba_ssm that computes on a CPU, as told by a variable; and the verdict about it."""
    (tmp_path / "mamba_ssm.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)]))
    monkeypatch.syspath_prepend(tmp_path)

    def find(behaviour: str) -> KernelVerdict:
        monkeypatch.setenv("FAKE_KERNELS", behaviour)
        if behaviour != "is right":
            monkeypatch.setattr(kernel_trial, "subprocess", ForkedProcesses(tmp_path, behaviour))
        limit = 5 if behaviour == "hangs" else 120
        return try_kernels(real_config("bamba"), 4096, CPU, [BY_STARTS, "sdpa"], limit)

    return find


def test_kernels_that_compute_what_torch_does_are_used_and_rows_are_packed(fake_package):
    assert fake_package("is right") == KernelVerdict(None, {BY_STARTS: None, "sdpa": None})


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("raises", "RuntimeError: wrong results with this Triton"),
        ("is wrong", "logits differ from torch's by"),
        ("dies", "a process that tried mamba_ssm ended (exit code -9)"),
        ("hangs", "mamba_ssm had not computed a small model in 5 s"),
    ],
)
def test_whatever_fails_in_them_ends_another_process(fake_package, behaviour: str, reason: str):
    verdict = fake_package(behaviour)
    assert reason in str(verdict.why_not) and not verdict.why_not_packed


def test_torch_computes_on_a_cpu_whatever_is_installed(fake_package, tmp_path: Path):
    """A whole run in a process of its own, because transformers looks for packages when it is imported."""
    config = (
        "{model_type: bamba, vocab_size: 264, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
        "num_attention_heads: 4, num_key_value_heads: 2, mamba_n_heads: 8, mamba_d_head: 16, mamba_d_state: 16, "
        "attn_layer_indices: [1], max_position_embeddings: 256}"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "qlora_fsdp", "train", "experiment=dry_run", f"model.config={config}"),
            *("model.tokenizer_path=bytes", "training.max_length=64", "training.max_steps=1"),
            f"run.folder={tmp_path / 'run'}",
        ],
        env={**os.environ, "FAKE_KERNELS": "raises"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "computed by transformers' torch code (mamba_ssm not used)" in done.stdout


def test_functions_are_those_of_torch_only_for_a_while(monkeypatch: pytest.MonkeyPatch):
    """As in a process that found the package when it imported the model's file."""
    from transformers.models.bamba import modeling_bamba  # not in the processes that are forked for the tests above

    def kernel(x: torch.Tensor) -> None:
        raise AssertionError("called on a CPU")

    made = packages.hub_kernels.use_kernel_func_from_hub_with_fallback
    stock = modeling_bamba.mamba2_chunk_scan.__wrapped__
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "mamba_ssm", type(sys)("mamba_ssm"))
        patched.setattr(sys.modules["mamba_ssm"], "mamba_chunk_scan_combined", kernel, raising=False)
        by_package = made("mamba_chunk_scan_combined", "mamba_ssm")(stock)
    monkeypatch.setattr(modeling_bamba, "mamba2_chunk_scan", by_package)
    monkeypatch.setattr(packages, "installed_packages", lambda: ["mamba_ssm"])
    assert RowTrial(real_config("bamba"), 4096).error is None
    assert modeling_bamba.mamba2_chunk_scan is by_package
    packages.compute_by_torch()
    assert modeling_bamba.mamba2_chunk_scan.__wrapped__ is stock
    assert modeling_bamba.mamba2_chunk_scan is not by_package
    packages.compute_by_packages()
    assert modeling_bamba.mamba2_chunk_scan is by_package
