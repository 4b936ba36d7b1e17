"""Checkpoints on one process: whole or absent, and refused when they are not what the run needs."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file
from tests.helpers.lines import read_lines
from tests.helpers.quick_config import load_config
from tests.helpers.run_folders import start_folder
from torch import Tensor, nn

from qlora_fsdp.common.errors import ConfigError, ResumeError, RunFolderError
from qlora_fsdp.config.recorded import plain_settings
from qlora_fsdp.config.schema import Config, ShardingStrategy
from qlora_fsdp.config.specs import TrackingSpec
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.records import run_folder
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.run_folder import close_run_folder
from qlora_fsdp.records.run_state import checkpoint_folders
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.checkpoints.checkpoint import (
    Checkpoint,
    load_checkpoint,
    read_manifest,
    remove_checkpoints,
    verify_files,
)
from qlora_fsdp.training.checkpoints.resume import (
    begin_attempt,
    check_base,
    check_changes,
    check_data,
    choices_of,
    find_checkpoint,
    settings_of,
)
from qlora_fsdp.training.checkpoints.write import HostCopy, write_checkpoint
from qlora_fsdp.training.optim import LocalBitsandbytes
from qlora_fsdp.weights.safetensors_files import INDEX_NAME, SINGLE_NAME, fingerprint_files, read_headers


def trained(width: int = 40) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a frozen layer, after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2)).requires_grad_(False)
    model[0].weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([model[0].weight], fused=True)
    for _ in range(2):
        model(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def write_adapter(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(save_tensors(state))


def save(folder: Path, step: int, processes: Processes, write=write_adapter) -> str | None:
    content = Checkpoint(folder / f"step-{step:08}", step, 1, {"lora.r": 8}, {"num_tokens": 5}, None, [(0, 0.1)])
    return write_checkpoint(content, HostCopy().take(*trained()), write, processes)


def test_saved_state_comes_back(tmp_path: Path, processes: Processes):
    assert save(tmp_path, 2, processes) is None
    checkpoint = read_manifest(tmp_path / "step-00000002")
    assert (checkpoint.step, checkpoint.settings, checkpoint.eval_losses) == (2, {"lora.r": 8}, [[0, 0.1]])
    verify_files(checkpoint, processes)
    (model, optimizer), (saved_model, saved) = trained(), trained()
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer.state.clear()
    load_checkpoint(checkpoint, model, optimizer, processes)
    assert torch.equal(model[0].weight, saved_model[0].weight)
    loaded, expected = optimizer.state[model[0].weight], saved.state[saved_model[0].weight]
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[key], expected[key]) for key in loaded)


def test_a_snapshot_is_written_without_copies(tmp_path: Path, processes: Processes, monkeypatch):
    content, snapshot = Checkpoint(tmp_path / "step-00000002", 2, 1, {}, {}), HostCopy().take(*trained())
    assert len(snapshot.tensors) == 4  # a weight, its moments and its step, in one slab
    starts = sorted(value.data_ptr() for value in snapshot.tensors.values())
    assert starts[-1] - starts[0] < 2 * 40 * 8 * 4 + 4 * 64
    cloned = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **_: cloned.append(tensor) or tensor)
    assert write_checkpoint(content, snapshot, write_adapter, processes) is None
    assert cloned == []


def test_the_next_step_does_not_change_a_snapshot(processes: Processes):
    model = nn.Linear(64, 64, bias=False)
    optimizer = LocalBitsandbytes(
        AdamW8bit, [model.weight], [{"params": [model.weight]}], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    copies = []
    for _ in range(2):
        model(torch.ones(3, 64)).square().sum().backward()
        optimizer.step()
        if not copies:
            snapshot = HostCopy().take(model, optimizer)
            copies = [{name: value.clone() for name, value in snapshot.tensors.items()}]
    assert {name.rpartition(".")[2] for name in copies[0]} >= {"weight", "state1", "state2", "absmax1", "step"}
    assert all(torch.equal(value, copies[0][name]) for name, value in snapshot.tensors.items())
    changed = HostCopy().take(model, optimizer).tensors
    assert not torch.equal(changed["own.0.state1"], copies[0]["own.0.state1"])


@pytest.mark.parametrize(
    "name", ["rank-00000.safetensors", "index.json", "adapter/adapter_model.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_is_found(tmp_path: Path, processes: Processes, name: str, damage: str):
    save(tmp_path, 2, processes)
    file = tmp_path / "step-00000002" / name
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(ResumeError, match=r"checkpoint\.resume=none") as raised:
        verify_files(read_manifest(tmp_path / "step-00000002"), processes)
    assert str(file) in str(raised.value)


def test_other_model_is_refused(tmp_path: Path, processes: Processes):
    save(tmp_path, 2, processes)
    with pytest.raises(
        ResumeError, match=r"is of another model .*0\.weight is of shape \[40, 8\] there and .*\[48, 8\]"
    ):
        load_checkpoint(read_manifest(tmp_path / "step-00000002"), *trained(width=48), processes)


def test_failed_save_leaves_the_last_one(tmp_path: Path, processes: Processes):
    def fail(folder: Path, state: dict[str, Tensor]) -> None:
        raise OSError(28, "No space left on device", str(folder))

    assert save(tmp_path, 2, processes) is None
    error = save(tmp_path, 3, processes, write=fail)
    assert error is not None and "No space left on device" in error
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # a write beyond fails, as on a full disk
    try:
        error = save(tmp_path, 4, processes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    verify_files(read_manifest(tmp_path / "step-00000002"), processes)
    assert save(tmp_path, 5, processes) is None


def test_unfinished_ones_are_ignored_and_removed(tmp_path: Path, processes: Processes):
    for step in (2, 4, 10):
        save(tmp_path / "checkpoints", step, processes)
    folder = tmp_path / "checkpoints"
    (folder / "step-00000010").rename(folder / ".step-00000010.0123456789abcdef.tmp")
    found = find_checkpoint_of(config(f"run.folder={tmp_path}"))
    assert found is not None and found.step == 4
    assert find_checkpoint_of(config(f"run.folder={tmp_path}", "checkpoint.resume=none")) is None
    assert find_checkpoint_of(config(f"run.folder={tmp_path}", "run.overwrite=true")) is None
    older = find_checkpoint_of(config(f"run.folder={tmp_path}", f"checkpoint.resume={folder}/step-00000002"))
    assert older is not None and older.step == 2
    remove_checkpoints(folder, keep=checkpoint_folders(folder)[-1:])
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]


def test_a_restart_by_the_batch_system_goes_on_whatever_the_first_start_did(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
):
    """Once training has begun; what an attempt finds that was lost before is not its own."""
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    save(run / "checkpoints", 3, processes)
    save(other / "checkpoints", 7, processes)
    of_other = f"checkpoint.resume={other}/checkpoints/step-00000007"
    starts = [[f"run.folder={run}", how] for how in ("run.overwrite=true", "checkpoint.resume=none", of_other)]

    def steps() -> list[int | None]:
        return [getattr(find_checkpoint_of(config(*argv)), "step", None) for argv in starts]

    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert steps() == [None, None, 7]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert steps() == [None, None, 7], "the first attempt was lost before it trained"
    begin_attempt(None, run)
    assert not checkpoint_folders(run / "checkpoints")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert steps() == [None, None, 7], "the second was lost before its first checkpoint"
    save(run / "checkpoints", 2, processes)
    assert steps() == [2, 2, 2]
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    assert steps() == [None, None, 7]


def test_resume_names_what_it_could_go_on_from(tmp_path: Path, processes: Processes):
    for step in (2, 4):
        save(tmp_path / "checkpoints", step, processes)
    for given in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(ResumeError, match=rf"resume={given} is no checkpoint.*step-00000004, the newest"):
            find_checkpoint_of(config(f"checkpoint.resume={given}"))
    with pytest.raises(ResumeError, match=r"no checkpoint: it does not exist\. Set checkpoint\.resume=FOLDER"):
        find_checkpoint_of(config("checkpoint.resume=/nowhere"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ResumeError, match=r"no checkpoint: it has no manifest\.json\."):
        find_checkpoint_of(config(f"checkpoint.resume={empty}"))
    inner = tmp_path / "checkpoints" / "step-00000004" / "adapter"
    with pytest.raises(ResumeError, match=rf"is no checkpoint.* Set checkpoint\.resume={inner.parent}, which"):
        find_checkpoint_of(config(f"checkpoint.resume={inner}"))
    with pytest.raises(ResumeError, match=r"resume=true is no checkpoint.* Set checkpoint\.resume=auto, the default"):
        find_checkpoint_of(config("checkpoint.resume=true"))
    (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").write_text("{")
    with pytest.raises(ResumeError, match=r"Set checkpoint\.resume=\S+step-00000002, or checkpoint\.resume=none"):
        find_checkpoint_of(config(f"run.folder={tmp_path}"))


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
    start_folder(config(f"run.folder={tmp_path}"), processes)
    with pytest.raises(RunFolderError, match=rf"is in use: process {os.getpid()} on .* is writing to it"):
        start_folder(config(f"run.folder={tmp_path}"), processes)
    close_run_folder()
    start_folder(config(f"run.folder={tmp_path}"), processes)
    close_run_folder()


def config(*more: str) -> Config:
    batch = ["training.micro_batch_size=1", "training.global_batch_size=null"]
    return load_config(["model=tiny", "data=random", "training.max_steps=9", *batch, *more])


def find_checkpoint_of(config: Config) -> Checkpoint | None:
    return find_checkpoint(config.run, config.checkpoint)


def settings_in(config: Config, num_ranks: int) -> dict[str, Any]:
    return settings_of(plain_settings(config), num_ranks)


def choices(checkpoint: Checkpoint, config: Config, num_ranks: int) -> dict[str, Any]:
    return choices_of(checkpoint, num_ranks, config.training, config.distributed, config.fsdp)


def changes_of(checkpoint: Checkpoint, config: Config, num_ranks: int) -> list[str]:
    return check_changes(checkpoint, settings_in(config, num_ranks), config.optim.name, num_ranks)


def check_data_of(checkpoint: Checkpoint, data: Any, config: Config) -> None:
    check_data(checkpoint, data, config.data, config.training.packing, config.checkpoint.allow_changes)


def check_base_of(checkpoint: Checkpoint, base: str, config: Config) -> None:
    check_base(checkpoint, base, config.model.path, config.checkpoint.allow_changes)


def changes(old: list[str], new: list[str], old_ranks: int = 2, new_ranks: int = 2) -> list[str]:
    checkpoint = Checkpoint(Path("c"), 5, old_ranks, json.loads(json.dumps(settings_in(config(*old), old_ranks))), {})
    return changes_of(checkpoint, config(*new), new_ranks)


def test_harmless_changes_are_listed():
    new = ["run.name=b", "run.folder=outputs/run", "fsdp=offload", "memory=keep", "training.global_batch_size=2"]
    found = changes([], [*new, "training.micro_batch_size=2"], new_ranks=1)
    assert "fsdp.cpu_offload=true (was false)" in found and "1 rank (was 2)" in found
    assert {text.split("=")[0] for text in found} == {
        "run.name",
        "fsdp.cpu_offload",
        "fsdp.sharding_strategy",
        "memory.activations",
        "training.micro_batch_size",
        "1 rank (was 2)",
    }
    assert changes([], []) == []
    automatic = ["training.micro_batch_size=auto", "training.global_batch_size=2"]
    assert changes(["training.global_batch_size=2"], automatic, new_ranks=1) == [
        "training.micro_batch_size chosen anew (was 1)",
        "1 rank (was 2)",
    ]


@pytest.mark.parametrize(
    ("change", "was"),
    [
        ("lora.lora_alpha=8", "32.0"),
        ("quant.bnb_4bit_use_double_quant=false", "true"),
        ("training.learning_rate=0.001", "0.0002"),
        ("training.max_steps=10", "9"),
        ("training.seed=1", "0"),
        ("optim.betas=[0.9,0.95]", "[0.9,0.999]"),
        ("training.micro_batch_size=2", "2"),  # the global batch size follows from it
    ],
)
def test_harmful_changes_are_refused_unless_allowed(change: str, was: str):
    key = change.split("=")[0].replace("micro", "global")
    with pytest.raises(ConfigError) as raised:
        changes([], [change])
    (problem,) = raised.value.problems
    assert problem.what.startswith(f"{key}=") and f"was {was} when" in problem.reason
    assert any(key in text for text in changes([], [change, f"checkpoint.allow_changes=[{key}]"]))


@pytest.mark.parametrize(
    ("change", "was"),
    [
        ("lora.r=8", "16"),
        ("lora.target_modules=[q_proj]", "all-linear"),
        ("optim=adamw_8bit", "adamw"),
        ("tokenizer.add_tokens=[a]", "[]"),
    ],
)
def test_what_changes_the_saved_tensors_can_not_be_allowed(change: str, was: str):
    key = {"optim": "optim.name"}.get(change.split("=")[0], change.split("=")[0])
    for allowed in ([], [f"checkpoint.allow_changes=[{key}]"]):
        with pytest.raises(ConfigError) as raised:
            changes([], [change, *allowed])
        (problem,) = raised.value.problems
        assert "fits nothing else" in problem.reason
        assert problem.fix == f"Set {key}={was}, or checkpoint.resume=none to start anew."


def test_other_sequences_of_the_same_rows_are_no_other_data():
    checkpoint = Checkpoint(Path("c"), 5, 1, {"training.packing": "auto"}, {"num_sequences": 45, "num_tokens": 9})
    data: Any = SimpleNamespace(describe=lambda: {"num_sequences": 300, "num_tokens": 9})
    with pytest.raises(
        ResumeError, match=r"training\.packing=false was auto when c was written: the rows are in other"
    ):
        check_data_of(checkpoint, data, config("training.packing=false"))
    check_data_of(checkpoint, data, config("training.packing=false", "checkpoint.allow_changes=[training.packing]"))
    with pytest.raises(ResumeError, match="is not the data that c was trained on: num_sequences is 300, was 45"):
        check_data_of(checkpoint, data, config())


def test_rows_in_another_order_are_other_data_whatever_else_may_change():
    def described(lengths: list[int]) -> dict[str, int]:
        rows: Any = SimpleNamespace(lengths=np.array(lengths), num_targets=np.array(lengths) - 1)
        return Sequences(rows, np.arange(3), np.arange(4), 8, 0, is_packed=False).describe()

    checkpoint = Checkpoint(Path("c"), 5, 1, {}, described([3, 5, 4]))
    data: Any = SimpleNamespace(describe=lambda: described([5, 3, 4]))
    check_data_of(checkpoint, data, config("data.path=rows.jsonl", "checkpoint.allow_changes=[data.path]"))
    changes = ["training.learning_rate=1", "checkpoint.allow_changes=[training.learning_rate]"]
    told = r"data\.mix=\{b: 1, a: 1\} is not the data that c was trained on: row_order is \d+, was \d+\. "
    for more in ([], changes):
        with pytest.raises(ResumeError, match=told + r"Bring .* checkpoint\.allow_changes=\[data\.mix\]\."):
            check_data_of(checkpoint, data, config("data.mix={b: 1, a: 1}", *more))


def test_streamed_files_that_look_changed_say_by_what():
    data: Any = SimpleNamespace(describe=lambda: {"stream": 1})
    with pytest.raises(ResumeError, match=r"stream is 1, was 2\. Files .* known by their place, size and time of"):
        check_data_of(Checkpoint(Path("c"), 5, 1, {}, {"stream": 2}), data, config("data.streaming=true"))


def test_other_base_under_the_same_path_is_refused(tmp_path: Path):
    weights = {"a": torch.arange(5000.0), "b": torch.ones(3, 7)}
    for name, files in {"one": [weights], "same": [{k: v} for k, v in weights.items()], "other": [weights]}.items():
        (tmp_path / name).mkdir()
        for index, tensors in enumerate(files):
            changed = {key: value + (name == "other") * 1e-3 for key, value in tensors.items()}
            save_file(changed, tmp_path / name / (f"{index}.safetensors" if len(files) > 1 else SINGLE_NAME))
        if len(files) > 1:
            index = {"weight_map": {key: f"{number}.safetensors" for number, key in enumerate(weights)}}
            (tmp_path / name / INDEX_NAME).write_text(json.dumps(index))
    one, same, other = (fingerprint_files(read_headers(tmp_path / n).values()) for n in ("one", "same", "other"))
    assert one == same != other
    checkpoint = Checkpoint(Path("c"), 5, 1, {}, {}, one)
    check_base_of(checkpoint, same, config())
    with pytest.raises(ResumeError, match=r"model\.path=.* holds other weights"):
        check_base_of(checkpoint, other, config())
    check_base_of(checkpoint, other, config("checkpoint.allow_changes=[model.path]"))


def test_8bit_optimizer_needs_the_same_shards():
    both = ["optim=adamw_8bit", "training.global_batch_size=4"]
    assert changes(both, both) == []
    for more in ([], ["fsdp=no_shard"]):  # which would not help
        with pytest.raises(ConfigError, match="Start 2 ranks") as caught:
            changes(both, [*both, *more], new_ranks=4)
        assert "fsdp.sharding_strategy" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"fsdp\.sharding_strategy=NO_SHARD"):
        changes(both, [*both, "fsdp=no_shard"])


def test_a_run_goes_on_with_what_auto_chose():
    """The same split and sharding at the same number of ranks, so that sums are made in the same order."""
    chosen = ["fsdp=no_shard", "training.micro_batch_size=2", "distributed.context_parallel=2"]
    settings = settings_in(config(*chosen, "training.global_batch_size=4"), 2)
    checkpoint = Checkpoint(Path("c"), 5, 2, json.loads(json.dumps(settings)), {})
    auto = ["training.micro_batch_size=auto", "training.global_batch_size=4"]
    slices = {"distributed.context_parallel": 2}
    kept = {**slices, "training.micro_batch_size": 2, "fsdp.sharding_strategy": ShardingStrategy.NO_SHARD}
    assert choices(checkpoint, config(*auto), 2) == kept
    assert choices(checkpoint, config(*auto, "distributed.context_parallel=1"), 2) == {}, "rows in other slices"
    assert choices(checkpoint, config(*auto), 4) == {}, "there the plan chooses anew"
    assert choices(checkpoint, config("fsdp=full_shard", "training.micro_batch_size=1"), 2) == slices, "as typed"
    size = {**slices, "training.micro_batch_size": 2}
    assert choices(checkpoint, config(*auto, "fsdp.reshard_after_forward=true"), 2) == size, "it asks for parts"
    assert changes_of(checkpoint, config(*auto).with_values(kept), 2) == []


def test_metrics_end_where_the_checkpoint_was_written(tmp_path: Path):
    lines = [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]
    later = [{"step": 2, "eval_loss": 1.4}, {"step": 3, "loss": 1.0}]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines + later) + '{"step": 4, "lo')
    Journal(tmp_path, TrackingSpec.of(config()), num_steps=9, is_main=True, first_step=2).close({})
    assert read_lines(file) == lines


def test_texts_of_before_the_checkpoint_stay_whatever_is_in_them(tmp_path: Path):
    before, after = ({"step": step, "completion": "one\u2028two\x85三"} for step in (1, 2))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (before, after))
    file = tmp_path / "generations.jsonl"
    file.write_bytes(text.encode()[:-4])  # a run that was killed: the last line ends amid a character
    Journal(tmp_path, TrackingSpec.of(config()), num_steps=9, is_main=True, first_step=2).close({})
    assert [json.loads(line) for line in file.read_bytes().splitlines()] == [before]
