"""Checks of the versions of Python and packages, of the hub and of SLURM."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from qlora_fsdp.doctor.finding import Finding

VERSIONS = Path(__file__).parents[1] / "versions.json"  # what passed scripts/check_versions.py and what did not


def check_versions() -> Iterator[Finding]:
    """Compares Python and packages with the combinations that were tested, from the oldest to the newest."""
    table = json.loads(VERSIONS.read_text(encoding="utf-8"))
    combinations = [entry["versions"] for entry in table["tested"]]
    installed = {}
    for package in combinations[0]:
        tested = sorted((combination[package] for combination in combinations), key=_numbers)
        oldest, newest = tested[0].rpartition(".")[0], tested[-1]
        install = "Install Python" if package == "python" else f"pip install '{package}>={oldest}'"
        what = "Python" if package == "python" else package
        try:
            found = platform.python_version() if package == "python" else version(package)
        except PackageNotFoundError:
            yield Finding("red", what, "not installed", install)
            continue
        installed[package] = _numbers(found)
        if installed[package] < _numbers(oldest):
            yield Finding("red", what, found, f"Too old: {install}{f' {oldest} or newer' * (package == 'python')}")
        elif installed[package][:2] > _numbers(newest)[:2] and package != "python":
            yield Finding("yellow", what, found, f"Newer than what is tested ({newest}); if it fails, try that.")
        else:
            yield Finding("green", what, found)
    for bad in table["known_bad"]:
        named = {package: _numbers(text) for package, text in bad["versions"].items()}
        if all(installed.get(package, ())[: len(numbers)] == numbers for package, numbers in named.items()):
            found = f"{_shown(bad['versions'])}: {bad['reason']}"
            yield Finding("red", "combination", found, f"Install one that passed: {_shown(combinations[-1])}.")
            return
    installed.pop("python")
    same = [c for c in combinations if all(_numbers(c[p])[:2] == found[:2] for p, found in installed.items())]
    between = f"between those tested together: {'; '.join(_shown(c) for c in combinations)}"
    yield Finding("green", "combination", "tested together" if same else between)


def check_bytecode() -> Iterator[Finding]:
    """Whether Python keeps the bytecode that it compiles; a finding only if it does not.

    pip compiles what it installs, but not every installer does. Without bytecode each start compiles all again.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():  # torch has bytecode
        return
    advice = "Set PYTHONPYCACHEPREFIX to a folder that can be written."
    if sys.dont_write_bytecode:
        advice = f"Unset PYTHONDONTWRITEBYTECODE, or run `python -m compileall -q {Path(spec.origin).parents[1]}` once."
    yield Finding("yellow", "bytecode", "not kept: each start compiles torch and the others, which takes 10 s", advice)


def check_hub() -> Iterator[Finding]:
    """Whether the hub can be reached, and whether a user is logged in."""
    from huggingface_hub import constants, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("yellow", "hub", "HF_HUB_OFFLINE is set", "Set model.path and data.path to local folders.")
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # the client in use decides which class of error this is
        advice = "Set model.path and data.path to local folders."
        yield Finding("yellow", "hub", f"can't be reached ({type(error).__name__})", advice)
        return
    if get_token() is not None:
        yield Finding("green", "hub", "reached, logged in")
    else:
        yield Finding("yellow", "hub", "reached, no login", "Gated models need `hf auth login`.")


def check_slurm() -> Iterator[Finding]:
    """Whether SLURM jobs can be submitted from this host."""
    if shutil.which("sbatch"):
        job = os.environ.get("SLURM_JOB_ID")
        yield Finding("green", "SLURM", f"in job {job}" if job else "sbatch is here: hydra/launcher=slurm submits")
    else:
        yield Finding("green", "SLURM", "no sbatch: runs start on this host")


def _shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {found}" for package, found in versions.items())


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of `2.13.0+cu130`."""
    return tuple(int(part) for part in text.partition("+")[0].split(".") if part.isdigit())
