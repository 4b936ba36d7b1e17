"""What most numeric tests share: how their process computes, and tiny checkpoints and rows, made once a session."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: without a GPU its kernels run in Python

from qlora_fsdp.common.startup import quick_imports

with quick_imports():  # most of what the modules of tests import, once in each of the workers
    import bitsandbytes.nn.modules
    import torch

    from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes
    from tests.helpers.blocks import CHECKPOINTS, write_blocks
    from tests.helpers.checkpoints import make_checkpoint
    from tests.helpers.quick_config import COMPOSED, composing_quickly
    from tests.helpers.runs import write_rows
    from tests.helpers.smollm2 import make_model

# Stock layers, our reference, would evaluate in bfloat16 on CPUs that have instructions for it.
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
torch.set_num_threads(1)  # models are tiny, and ranks or another worker compute beside this process


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Each test begins with a log that `caplog` sees once, and what it does to the log ends with it.

    A run in this process stops its log from reaching the root's handlers. In a later test pytest would see that, and
    put its handler on both loggers, and lines would come twice if the test let the log reach the root again.
    """
    log = logging.getLogger("qlora_fsdp")
    log.propagate = True
    yield
    log.handlers.clear()
    log.setLevel(logging.NOTSET)
    log.propagate = True


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `qlora-fsdp` does to its process stays in the test, which has a folder of its own and no GPU."""
    monkeypatch.setattr("qlora_fsdp.__main__.begin", lambda detail: None)
    monkeypatch.setattr("qlora_fsdp.__main__.end_with_the_reader", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """This process as the only rank of a run, on the CPU."""
    yield start_processes(60, use_cpu=True)
    stop_processes()


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of prompts and completions."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, dtype=bfloat16)`: the folder of a tiny random model."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[tuple[str, torch.dtype], Path] = {}

    def make(family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        key = (family, dtype)
        if key not in made:
            made[key] = make_checkpoint(family, folder / f"{family}-{str(dtype).removeprefix('torch.')}", dtype)
        return made[key]

    return make


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of the session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def composed(common_folder: Path) -> Iterator[None]:
    """Hydra composes each choice of this project's files once for all workers, and for what they fork."""
    folder = common_folder / "composed"
    folder.mkdir(exist_ok=True)
    os.environ[COMPOSED] = str(folder)
    with composing_quickly():
        yield


@pytest.fixture(scope="session")
def smollm2(common_folder: Path) -> Path:
    """The folder of a real chat model, which all workers share: to make it takes half a minute."""
    with FileLock(common_folder / "smollm2.lock"):
        return make_model(common_folder / "smollm2")


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a few odd-sized layers, in each dtype and number of files that `CHECKPOINTS` names."""
    folder = tmp_path_factory.mktemp("blocks")
    for dtype, num_files in CHECKPOINTS:
        write_blocks(folder / f"{dtype}-{num_files}", dtype, num_files)
    return folder
