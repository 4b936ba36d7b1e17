"""doctor on this host, and on hosts with something wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from bitsandbytes import cextension
from tests.helpers.ranks import StartedRanks

from qlora_fsdp.data import workers
from qlora_fsdp.doctor import __main__ as doctor
from qlora_fsdp.doctor import gpu_checks, host
from qlora_fsdp.doctor.host import Finding
from qlora_fsdp.runtime import host_memory

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def doctor_on_a_rank(diagnose: Callable[[Path], list[Finding]]) -> NoReturn:
    doctor.MEETING_SECONDS, doctor.diagnose = 5, diagnose
    # As under torchrun, the store outlives the ranks.
    os.environ |= {"MASTER_PORT": os.environ["MEETING_PORT"], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.exit(doctor.main([]))


def run_doctor(log: Path, diagnose: Callable[[Path], list[Finding]]) -> tuple[list[int | None], str]:
    """Exit codes of two processes, of which rank 0 diagnoses so, and what they printed."""
    ranks = StartedRanks([log] * 2, doctor_on_a_rank, diagnose)
    try:
        for process in ranks.processes:
            process.join(120)
        return [process.exitcode for process in ranks.processes], log.read_text()
    finally:
        ranks.kill()


def test_two_processes_on_this_host(tmp_path: Path):
    file = tmp_path / "doctor.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, "-m", "qlora_fsdp.doctor", "--json", file, "--folder", tmp_path]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    findings = {finding["what"]: finding for finding in json.loads(file.read_text())}
    for what in ("Python", "torch", "bitsandbytes", "host memory", "disk", "hub", "SLURM", "all-reduce", "all-to-all"):
        assert what in findings, done.stderr
        assert done.stdout.count(f"  {what:<14}  ") == 1  # rank 0 alone prints
    assert {finding["level"] for finding in findings.values()} <= {"green", "yellow"}, done.stdout
    assert re.match(r"[\d.]+ GB/s between 2 processes", findings["all-reduce"]["found"])
    assert done.returncode == 0


def test_its_exit_code_is_that_of_the_findings_whatever_happens_while_python_ends():
    """As threads of the processes' exchange, which are inside C++ then, may abort a process that is done."""
    run = "runpy.run_module('qlora_fsdp.doctor', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", f"import atexit, os, runpy; atexit.register(os.abort); {run}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Can this host train?"), done.stderr


def diagnose_slowly(folder: Path) -> list[Finding]:
    time.sleep(7)  # longer than the processes have to meet
    return []


def die(folder: Path) -> list[Finding]:
    os._exit(1)


def test_the_others_wait_for_the_checks_of_rank_0_while_it_lives(tmp_path: Path):
    exit_codes, output = run_doctor(tmp_path / "slow.txt", diagnose_slowly)
    assert exit_codes == [0, 0] and output.count("GB/s between 2 processes") == 3, output
    exit_codes, output = run_doctor(tmp_path / "killed.txt", die)
    assert exit_codes == [1, 0] and "GB/s" not in output and "Error: " in output, output


@pytest.mark.parametrize(
    ("installed", "level", "advice"),
    [
        ("2.10.1", "red", "Too old: pip install 'torch>=2.11'"),
        ("2.11.0+cu130", "green", ""),
        ("9.0", "yellow", "Newer"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, installed: str, level: str, advice: str):
    newest = json.loads(host.VERSIONS.read_text())["tested"][-1]["versions"]
    monkeypatch.setattr(host, "version", lambda package: installed if package == "torch" else newest[package])
    (torch_finding,) = [finding for finding in host.check_versions() if finding.what == "torch"]
    assert torch_finding.level == level and torch_finding.advice.startswith(advice)


def test_a_combination_that_failed_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    table = json.loads(host.VERSIONS.read_text())
    newest = table["tested"][-1]["versions"]
    bad = {"versions": {"torch": newest["torch"], "peft": newest["peft"].rpartition(".")[0]}, "reason": "losses differ"}
    (tmp_path / "versions.json").write_text(json.dumps(table | {"known_bad": [bad]}))
    monkeypatch.setattr(host, "VERSIONS", tmp_path / "versions.json")
    monkeypatch.setattr(host, "version", lambda package: newest[package])
    (finding,) = [finding for finding in host.check_versions() if finding.level == "red"]
    assert finding.what == "combination" and "losses differ" in finding.found and newest["torch"] in finding.advice
    other = {package: "0.1" if package == "peft" else found for package, found in newest.items()}
    monkeypatch.setattr(host, "version", lambda package: other[package])
    assert "losses differ" not in str(list(host.check_versions()))


@pytest.mark.parametrize(
    ("dont_write", "advice"), [(True, "Unset PYTHONDONTWRITE"), (False, "Set PYTHONPYCACHEPREFIX")]
)
def test_bytecode_that_is_not_kept_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dont_write: bool, advice: str
):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", dont_write)
    (finding,) = host.check_bytecode()
    assert finding.level == "yellow" and finding.advice.startswith(advice)
    compiled = Path(cache_from_source(torch.__file__))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert list(host.check_bytecode()) == []


@pytest.mark.parametrize("missing", [False, True])
def test_the_library_of_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch, missing: bool):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    if missing:
        library = cextension.ErrorHandlerMockBNBNativeLibrary("no libcudart.so")
        monkeypatch.setattr(cextension, "lib", library)
    finding = gpu_checks._check_driver()
    assert finding.level == ("red" if missing else "green")
    assert ("no library" if missing else "libbitsandbytes_") in finding.found


def test_the_tested_versions_are_those_that_the_project_promises():
    """scripts/check_versions.py was run since the bounds changed."""
    tested = {e["name"]: e["versions"] for e in json.loads(host.VERSIONS.read_text())["tested"]}
    pinned = re.findall(r'^([\w-]+)==([\w.]+)(?:$|; python_version >= "3.11")', CONSTRAINTS.read_text(), re.MULTILINE)
    lowest = dict(re.findall(r'^    "([\w-]+)>=([\w.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for name in set(tested["oldest"]) - {"python"}:
        assert tested["oldest"][name].removesuffix(".0") == lowest[name], name
        assert tested["newest"][name] == dict(pinned)[name], name
    assert tested["oldest"]["python"].startswith("3.10.")


def test_what_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def broken(*_: object) -> None:
        raise OSError("libcudart.so: not found")

    monkeypatch.setattr("qlora_fsdp.layers.quantized.format.Format.quantize_rows", broken)
    monkeypatch.setattr(doctor, "check_hub", lambda: iter(()))
    assert doctor.main(["--folder", str(tmp_path)]) == 1
    assert "OSError: libcudart.so: not found" in capsys.readouterr().out


def test_a_container_has_what_its_limits_leave_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(host_memory, "_cgroup_rooms", lambda root: [2**30])
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(workers, "CPU_LIMIT", tmp_path / "cpu.max")
    found = next(host.check_memory()).found
    assert re.fullmatch(r"1 of \d+ GiB free, 1 cores", found)


def test_pinned_memory_that_cannot_be_had_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args, pin_memory: bool, **kwargs):
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS\nCUDA kernel errors")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", refuse)
    (finding,) = gpu_checks.check_pinned()
    assert (
        finding.level == "red" and finding.found.endswith("not supported on this OS") and "ulimit -l" in finding.advice
    )


def test_without_a_library_of_bitsandbytes_the_rest_of_a_gpu_is_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cextension, "lib", cextension.ErrorHandlerMockBNBNativeLibrary("no libcudart.so"))
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**34, 2**34))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    check_bytes = gpu_checks._check_bytes
    monkeypatch.setattr(gpu_checks, "_check_bytes", lambda what, device: check_bytes(what, "cpu"))
    levels = {finding.what: finding.level for finding in gpu_checks.check_gpus()}
    assert levels == {"CUDA": "red", "GPU 0": "green", "GPU 0 bytes": "green"}
