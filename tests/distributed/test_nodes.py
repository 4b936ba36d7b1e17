"""Nodes that do not hold the same files: here two processes in folders of their own."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from qlora_fsdp.common.errors import CheckpointError, ConfigError, DataError
from qlora_fsdp.config.recorded import plain_settings
from qlora_fsdp.config.schema import ModelConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.run_data import prepare_data
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.streams.stream import open_stream
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.model import find
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.training.run import check_same_settings
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import Meeting, be_a_host, run_ranks

pytestmark = pytest.mark.distributed
STREAMED = ["data.streaming=true", "data.buffer_rows=8", "training.max_steps=1"]


def find_on_each(folders: list[Path]) -> str:
    """Look for the model `here` in a folder of this rank's own, as the first of its node; what went wrong."""
    rank = int(os.environ["RANK"])
    be_a_host()
    os.chdir(folders[rank])

    def no_hub(path: str, **options: object) -> str:
        raise OSError(f"no network on rank {rank}")

    download, find.snapshot_download = find.snapshot_download, no_hub
    Meeting.new_port()
    processes = start_processes(20, use_cpu=True)
    try:
        find.find_model(ModelConfig(path="here"), processes.is_local_main, processes.first_error)
        return "found"
    except CheckpointError as error:
        return str(error)
    finally:
        find.snapshot_download = download
        stop_processes()


def test_a_model_that_one_node_lacks_is_missed_by_all(checkpoint: Callable[..., Path], tmp_path: Path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "here").symlink_to(checkpoint("llama"))
    errors = run_ranks(2, find_on_each, folders, timeout_seconds=120)
    assert errors[0] == errors[1] and "model.path=here is no folder on " in errors[0]
    assert "no network on rank 1" in errors[0]


def compare_on_each(commands: list[list[str]]) -> str:
    """Compare the settings of this rank's own command line; what went wrong."""
    config = load_config(["model=tiny", "data=random", "training.max_steps=3", *commands[int(os.environ["RANK"])]])
    Meeting.new_port()
    processes = start_processes(20, use_cpu=True)
    try:
        check_same_settings(plain_settings(config), processes)
        return "the same"
    except ConfigError as error:
        return str(error)
    finally:
        stop_processes()


@pytest.mark.parametrize(
    ("on_rank_1", "told"),
    [
        (
            ["training.learning_rate=1", "lora.r=4", "model.path=/here"],
            [
                "training.learning_rate=1.0 on rank 1 contradicts training.learning_rate=0.0002 on rank 0.",
                "lora.r=4 on rank 1 contradicts lora.r=16 on rank 0.",
                "model.path=/here on rank 1 contradicts model.path=null on rank 0.",
            ],
        ),
        (["run.name=other", "data.cache_folder=/here", "data.num_proc=3", "tracking.project=mine"], []),
    ],
)
def test_other_settings_on_another_node_are_refused_on_both(on_rank_1: list[str], told: list[str]):
    first = ["data.cache_folder=/there"]
    errors = run_ranks(2, compare_on_each, [first, on_rank_1], timeout_seconds=120)
    assert errors[0] == errors[1] and (told or errors[0] == "the same")
    assert all(text in errors[0] for text in told)


def read_on_each(files: list[Path], cache: Path, settings: list[str]) -> str:
    """Read this rank's own file, as the first of its node; what went wrong."""
    rank = int(os.environ["RANK"])
    be_a_host()
    own = [f"data.path={files[rank]}", f"data.cache_folder={cache}"]
    config = load_config(["model=tiny", *own, *(text.replace("FILE", str(files[rank])) for text in settings)])
    Meeting.new_port()
    processes = start_processes(20, use_cpu=True)
    try:
        if config.data.streaming:
            open_stream(DataSpec.of(config), byte_tokenizer(), BatchSplit(1, 2, 2, 1, 2), processes, None, 0, 320)
        else:
            prepare_data(DataSpec.of(config), byte_tokenizer(), processes, 320)
        return "the same"
    except DataError as error:
        return str(error)
    finally:
        stop_processes()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "The data of rank 1 is not rank 0's: 3 rows of "),
        (STREAMED, "has other files on rank 1 than on rank 0: rows.jsonl."),
        ([*STREAMED, "data.path=SHARED", "data.eval_path=FILE"], "The data of rank 1 is not rank 0's: 8 rows of "),
    ],
)
def test_other_data_on_another_node_is_refused_on_both(tmp_path: Path, settings: list[str], told: str):
    files = [tmp_path / "0" / "rows.jsonl", tmp_path / "1" / "rows.jsonl"]
    for file, words in zip(files, (["a", "b"], ["a", "b", "c"]), strict=True):
        file.parent.mkdir()
        file.write_text("".join(f'{{"prompt": "say ", "completion": "{word}"}}\n' for word in words))
    settings = [text.replace("SHARED", str(files[1])) for text in settings]
    errors = run_ranks(2, read_on_each, files, tmp_path / "cache", settings, timeout_seconds=120)
    assert errors[0] == errors[1] and told in errors[0]


def meet_without_launcher(hosts: list[str]) -> tuple[int, bool, int]:
    """Meet with what a script of srun or mpirun exports: no LOCAL_WORLD_SIZE. Ranks here, whether they stayed, all."""
    platform.node = lambda: hosts[int(os.environ["RANK"])]
    Meeting.new_port()
    del os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_RANK"] = "0"
    processes = start_processes(300, use_cpu=True)
    try:
        return processes.local_num_ranks, processes.folder is None, int(processes.sum([1.0])[0])
    finally:
        processes.wait()  # rank 0 may serve the store
        stop_processes()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["a", "b", "b"], [(1, True, 3), (2, True, 3), (2, True, 3)]),
        (["a", "a", "a"], [(3, False, 3)] * 3),
    ],
    ids=["several hosts", "one host"],
)
def test_ranks_that_no_launcher_has_started_find_out_who_is_on_their_host(
    hosts: list[str], expected: list[tuple[int, bool, int]]
) -> None:
    assert run_ranks(len(hosts), meet_without_launcher, hosts) == expected
