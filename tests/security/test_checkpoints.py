"""Whoever resumes from a checkpoint of somebody else's runs nothing that is in it.

Forged checkpoints have the right checksums, which anybody can compute.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from qlora_fsdp.common.errors import ResumeError
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.config.schema import DataConfig
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.training.checkpoints.checkpoint import (
    Checkpoint,
    digest_manifest,
    load_checkpoint,
    read_manifest,
    verify_files,
)
from qlora_fsdp.training.checkpoints.resume import check_data, check_step
from qlora_fsdp.training.checkpoints.saved_tensors import BadFile, read_index, read_own, read_rows
from qlora_fsdp.training.checkpoints.write import HostCopy, write_checkpoint
from qlora_fsdp.training.optim import LocalBitsandbytes
from tests.cli.launch import ForkedLaunch
from tests.helpers.ranks import Meeting, run_ranks
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
NUM_STEPS, STEP = 4, 2
FIRST_FILE = "rank-00000.safetensors"


def seal(folder: Path) -> None:
    """Bring the manifest up to date with the files, as whoever has changed them would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    write_manifest(
        folder, manifest | {"files": {str(p.relative_to(folder)): (p.stat().st_size, digest_file(p)) for p in paths}}
    )


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("sha256", None)
    manifest = json.loads(json.dumps(manifest))
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest_manifest(manifest), **manifest}))


@pytest.fixture(scope="module")
def straight(
    checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A checkpoint of a run of 2 ranks that has ended, and the run's command line without its folder."""
    folder = tmp_path_factory.mktemp("straight")
    argv = settings(checkpoint("llama"), rows, f"training.max_steps={NUM_STEPS}")
    run_ranks(2, train_all, {"adamw": [*argv, f"run.folder={folder}", f"checkpoint.every_steps={STEP}"]})
    return folder / "checkpoints" / f"step-{STEP:08}", argv


def test_a_checkpoint_without_an_index_ends_with_one_message(straight, tmp_path: Path):
    """Checkpoints that were written before the index existed are named as such."""
    saved, _ = straight
    old = shutil.copytree(saved, tmp_path / "old")
    (old / "index.json").unlink()
    seal(old)
    with pytest.raises(
        ResumeError, match=r"old has no index\.json, so another version of this program wrote it\. Set "
    ):
        load_checkpoint(read_manifest(old), nn.Module(), torch.optim.AdamW([nn.Parameter(torch.ones(1))]), ALONE)


def change_entry(**values: Any) -> Callable[[Path], None]:
    """Other values in the index's entry of a weight, given the old ones."""

    def change(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        entry = next(entry for name, entry in index["tensors"].items() if name.startswith("model."))
        for key, value in values.items():
            entry[key] = value(entry[key])
        (folder / "index.json").write_text(json.dumps(index))

    return change


def change_file(name: str, change_tensor: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    """Another tensor in the file of rank 0, or none."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / FIRST_FILE)
        value = tensors.pop(name)
        save_file(tensors | ({} if change_tensor is None else {name: change_tensor(value)}), folder / FIRST_FILE)

    return change


def change_header(change_offsets: Callable[[int, int, int], list[int]]) -> Callable[[Path], None]:
    """Other offsets of a tensor in the file of rank 0, given the old ones and the number of bytes of all."""

    def change(folder: Path) -> None:
        content = (folder / FIRST_FILE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        entry = next(entry for entry in header.values() if entry["data_offsets"][0] > 0)
        entry["data_offsets"] = change_offsets(*entry["data_offsets"], len(content) - 8 - length)
        text = json.dumps(header).encode()
        (folder / FIRST_FILE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return change


def lead_outside(folder: Path) -> None:
    """The index leads to a file beside the checkpoint, which is a right one."""
    shutil.copy(folder / FIRST_FILE, folder.parent)
    change_entry(pieces=lambda pieces: [[f"../{FIRST_FILE}", *pieces[0][1:]], *pieces[1:]])(folder)


# Case: what is done to the checkpoint of a weight [128, 64], of which each of two ranks has half; what is said then.
FORGED = {
    "a path out of the folder": (lead_outside, rf"is to lie in \.\./{FIRST_FILE}, which is no file of this checkpoint"),
    "an absolute path": (
        change_entry(pieces=lambda pieces: [["/etc/passwd", *pieces[0][1:]], *pieces[1:]]),
        "is to lie in /etc/passwd, which is no file of this checkpoint",
    ),
    "another shape": (
        change_entry(shape=lambda _: [128, 7]),
        r"of shape \[128, 7\] there and of shape \[128, 64\] here",
    ),
    "another dtype": (change_entry(dtype=lambda _: "BF16"), r"of shape \[128, 64\] in torch\.bfloat16 there"),
    "an unknown dtype": (change_entry(dtype=lambda _: "X9"), "it lacks 'X9'"),
    "a negative shape": (change_entry(shape=lambda _: [-8, 64]), r"has the shape \[-8, 64\]"),
    "overlapping rows": (
        change_entry(pieces=lambda pieces: [pieces[0], [pieces[1][0], 3, 128]]),
        r"has rows \[3, 128\) in rank-00001\.safetensors, after \[0, 64\)",
    ),
    "rows beyond the end": (
        change_entry(pieces=lambda pieces: [pieces[0], [pieces[1][0], 64, 999]]),
        "has 128 rows, and its pieces have 999",
    ),
    "rows that are missing": (change_entry(pieces=lambda pieces: pieces[:1]), "has 128 rows, and its pieces have 64"),
    "rows that are no numbers": (
        change_entry(pieces=lambda pieces: [[pieces[0][0], 0, "64"], pieces[1]]),
        r"has rows \[0, 64\) in",
    ),
    "no index": (lambda folder: (folder / "index.json").write_text("[1]"), r"index\.json can't be used"),
    "deep nesting": (lambda folder: (folder / "index.json").write_text("[" * 200_000), r"index\.json can't be used"),
    "other rows in the file": (
        change_file("model.weight", lambda rows: rows[:3].clone()),
        r"is \[3, 64\] in torch\.float32, not \[64, 64\] in torch\.float32",
    ),
    "another dtype in the file": (
        change_file("model.weight", lambda rows: rows.half()),
        r"is \[64, 64\] in torch\.float16, not \[64, 64\] in torch\.float32",
    ),
    "a tensor that is not there": (
        change_file("model.weight", None),
        r"it lacks model\.weight, which index\.json says is there",
    ),
    "bytes that overlap": (change_header(lambda first, last, _: [first - 4, last - 4]), "overlap"),
    "bytes beyond the end": (change_header(lambda first, last, size: [size, size + last - first]), "cut short"),
    "too many bytes": (change_header(lambda first, last, size: [first, size]), "shape and dtype do not take"),
}
# The same of the state of adamw_8bit, which the index does not mention.
FORGED_STATE = {
    "fewer scales": (
        change_file("own.0.absmax1", lambda scales: scales[:1].clone()),
        r"absmax1 is \[1\] in .*not \[16\]",
    ),
    "state of another dtype": (change_file("own.0.state1", lambda codes: codes.float()), "not .* in torch.uint8"),
    "no codebook": (change_file("own.0.qmap1", None), r"it lacks 0\.qmap1"),
}


def save_forge_and_load(folder: Path) -> dict[str, str]:
    """What a rank is told of each forged checkpoint, after the right ones were loaded without a word."""
    Meeting.new_port()
    processes, told = start_processes(60, use_cpu=True), {}
    mesh = init_device_mesh("cpu", (processes.num_ranks,))
    try:
        for optimizer_class, cases in ((torch.optim.AdamW, FORGED), (LocalBitsandbytes, FORGED_STATE)):
            model = nn.Linear(64, 128, bias=False)
            fully_shard(model, mesh=mesh)
            options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
            own = (AdamW8bit, [model.weight]) if optimizer_class is LocalBitsandbytes else ()
            optimizer = optimizer_class(*own, [{"params": [model.weight]}], **options)
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            content = Checkpoint(folder / optimizer_class.__name__, 1, processes.num_ranks, {}, {})
            assert write_checkpoint(content, HostCopy().take(model, optimizer), write_adapter, processes) is None
            load_checkpoint(read_manifest(content.folder), model, optimizer, processes)
            for case, (forge, _) in cases.items():
                forged = folder / case.replace(" ", "-") / "step-00000001"
                if processes.is_main:
                    shutil.copytree(content.folder, forged)
                    forge(forged)
                    seal(forged)
                processes.wait()
                try:
                    load_checkpoint(read_manifest(forged), model, optimizer, processes)
                    told[case] = "nothing"
                except ResumeError as error:
                    told[case] = str(error)
        return told
    finally:
        stop_processes()


def write_adapter(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")


def told_in_limits(action: Callable[[], Any]) -> str:
    """What a reader is told while this process may take 768 MiB more than it has."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 768 * 2**20
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    try:
        action()
    except (BadFile, ResumeError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return "nothing"


ALONE: Any = SimpleNamespace(rank=0, num_ranks=1, wait=lambda patiently: None, first_error=lambda error: error)


def test_an_own_file_that_the_manifest_does_not_list_is_not_read(tmp_path: Path):
    (tmp_path / "index.json").write_text('{"tensors": {}}')
    save_file({}, tmp_path / FIRST_FILE)
    param = nn.Parameter(torch.ones(64, 64))
    options = {"lr": 1.0, "betas": (0.9, 0.9), "eps": 1.0, "weight_decay": 0.0}
    optimizer = LocalBitsandbytes(AdamW8bit, [param], [{"params": [param]}], **options)
    content = Checkpoint(tmp_path, 1, 1, {}, {}, files={"index.json": (1, "")})
    with pytest.raises(ResumeError, match=rf"{FIRST_FILE} can't be used: it is no file of this checkpoint"):
        load_checkpoint(content, nn.Module(), optimizer, ALONE)


def make_pipe(file: Path, outside: Path) -> None:
    os.mkfifo(file)


def link_outside(file: Path, outside: Path) -> None:
    file.symlink_to(outside)


def link_folder(file: Path, outside: Path) -> None:
    shutil.move(file.parent, outside.parent / "adapter")
    file.parent.symlink_to(outside.parent / "adapter")
    shutil.copy(outside, file)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("manifest.json", make_pipe, "it is not a regular file"),
        ("manifest.json", link_outside, "it is a link"),
        ("index.json", make_pipe, "it is not a regular file"),
        (FIRST_FILE, link_outside, "it is a link"),
        ("adapter/adapter_model.safetensors", link_folder, "it is a link, or lies behind one that leaves"),
    ],
)
def test_only_regular_files_of_the_folder_are_read(straight, tmp_path: Path, name: str, change: Any, message: str):
    real = shutil.copytree(straight[0], tmp_path / "real" / "run" / "step-00000002")
    (tmp_path / "link").symlink_to(real.parent)
    folder = tmp_path / "link" / real.name  # a folder of checkpoints on another disk is all right
    verify_files(read_manifest(folder), ALONE)
    shutil.move(folder / name, tmp_path / "outside")
    change(folder / name, tmp_path / "outside")

    def read() -> None:
        verify_files(read_manifest(folder), ALONE)
        read_rows(read_index(folder, read_manifest(folder).files)["model.weight"], torch.empty(1), 0)

    told = told_in_limits(read)
    assert str((folder / name).parent) in told and message in told, told


def test_a_file_of_another_size_is_not_read_to_its_end(straight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = shutil.copytree(straight[0], tmp_path / "step-00000002")
    os.truncate(folder / "index.json", 2**40)
    told = told_in_limits(lambda: verify_files(read_manifest(folder), ALONE))
    assert f"index.json is damaged: it has {2**40} bytes, not" in told


def test_a_piece_is_compared_before_it_is_read(tmp_path: Path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]}}).encode()
    (tmp_path / FIRST_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(tmp_path / FIRST_FILE, 8 + len(header) + 2**32)
    entry = {"dtype": "F32", "shape": [4], "pieces": [[FIRST_FILE, 0, 4]]}
    (tmp_path / "index.json").write_text(json.dumps({"tensors": {"a": entry}}))
    told = told_in_limits(lambda: read_rows(read_index(tmp_path, {FIRST_FILE})["a"], torch.empty(4), 0))
    assert f"a is [{2**30}] in torch.float32, not [4] in torch.float32" in told


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [128.0, 64], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 1' + b"0" * 30 + b'], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0]}}',
    ],
)
def test_a_forged_header_is_refused(tmp_path: Path, header: bytes):
    (tmp_path / FIRST_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadFile, match=rf"{FIRST_FILE} can't be used: "):
        read_own(tmp_path / FIRST_FILE)


def test_whatever_goes_wrong_in_loading_is_told_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise AttributeError("no such \x1b thing")

    monkeypatch.setattr("qlora_fsdp.training.checkpoints.checkpoint.read_index", fail)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(ResumeError, match=r"can't be used: AttributeError: no such \? thing"):
        load_checkpoint(
            Checkpoint(tmp_path, 1, 1, {}, {}, files={"index.json": (1, "")}), nn.Module(), optimizer, ALONE
        )


def test_a_step_that_the_run_does_not_reach_is_refused(tmp_path: Path):
    check_step(Checkpoint(tmp_path, 4, 1, {}, {}), num_steps=4)
    with pytest.raises(ResumeError, match="is of step 5, and this run has 4 steps"):
        check_step(Checkpoint(tmp_path, 5, 1, {}, {}), num_steps=4)


def test_counts_of_other_data_are_shown_without_what_a_terminal_obeys(tmp_path: Path):
    data: Any = SimpleNamespace(describe=lambda: {"num_tokens": 5})
    settings = DataConfig(path="rows.jsonl")
    with pytest.raises(ResumeError, match=r"num_tokens is 5, was \?\]0;owned\?\."):
        check_data(Checkpoint(tmp_path, 5, 1, {}, {"num_tokens": "\x1b]0;owned\x07"}), data, settings, True, [])  # type: ignore[dict-item]


def test_what_contradicts_the_model_or_itself_is_refused(tmp_path: Path):
    one, other = run_ranks(2, save_forge_and_load, tmp_path)
    for case, (_, message) in (FORGED | FORGED_STATE).items():
        assert re.search(message, one[case]) and one[case] == other[case], (case, one[case], other[case])
        assert str(tmp_path / case.replace(" ", "-")) in one[case] and "checkpoint.resume=none" in one[case]


def test_a_forged_index_ends_the_command_with_one_message(straight, tmp_path: Path):
    saved, argv = straight
    forged = shutil.copytree(saved, tmp_path / "forged")
    lead_outside(forged)
    seal(forged)
    command = ForkedLaunch(tmp_path, 2, *argv, f"checkpoint.resume={forged}")
    assert command.finish() == 2, command.output
    (error,) = command.errors
    assert "weight is to lie in ../rank-00000.safetensors" in error and "Traceback" not in command.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../outside": [1, "0"]}}, r"it lists \.\./outside, which is not in the folder"),
        ({"files": {"/etc/passwd": [1, "0"]}}, "it lists /etc/passwd, which is not in the folder"),
        ({"files": {"a": ["1", "0"]}}, "it has no size and checksum of a"),
        ({"files": {"a": 3}}, "can't be used"),
        ({"files": []}, "can't be used"),
        ({"step": "2"}, "its step or number of ranks is no number"),
        ({"settings": [1]}, "its settings or data are no names with values"),
        ({"eval_losses": [["a", {}]]}, "its evaluation losses are no numbers"),
        ({"more": 1}, "can't be used"),
        ({"files": {"a\0b": [1, "0"]}}, r"it lists a\?b, which is no name"),
        ({"files": {"a\ud800": [1, "0"]}}, r"it lists a\?, which is no name"),
        ({"step": -5}, "its step or number of ranks is no number"),
        ({"step": 10**30}, "its step or number of ranks is no number"),
        ({"num_ranks": 0}, "its step or number of ranks is no number"),
        ({"eval_losses": ""}, "its evaluation losses are no list"),
        ({"eval_metrics": ""}, "its evaluations' figures are no list"),
        ({"eval_metrics": [[1, {"f1": "0.5"}]]}, "its evaluations' figures are no numbers"),
        ({"eval_metrics": [[1, {"f1": 10**400}]]}, "its evaluations' figures are no numbers"),
        ({"eval_losses": [[1, 10**400]]}, "its evaluation losses are no numbers"),
        ({"settings": {"lora.r": json.loads("[" * 900 + "]" * 900)}}, "its settings or data are nested deeply"),
        ({"settings": {"lora.r": "x" * 2**25}}, "it has more than 33,554,432 bytes"),
        ({"files": {"../\x1b]0;owned\x07": [1, "0"]}}, r"it lists \.\./\?\]0;owned\?, which"),
    ],
)
def test_a_forged_manifest_is_refused(straight, tmp_path: Path, change: dict[str, Any], message: str):
    forged = shutil.copytree(straight[0], tmp_path / "forged")
    write_manifest(forged, json.loads((forged / "manifest.json").read_text()) | change)
    with pytest.raises(ResumeError, match=message):
        read_manifest(forged)
