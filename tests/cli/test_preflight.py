"""`python -m qlora_fsdp.preflight` as a user runs it, and the message when a GPU is out of memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import qlora_fsdp
import qlora_fsdp.training.run as pipeline
import qlora_fsdp.training.train_adapter as stage
from qlora_fsdp import preflight
from qlora_fsdp.common.errors import ConfigError, MemoryShortage
from qlora_fsdp.config.world import World
from qlora_fsdp.preflight import expect_tokens
from tests.cli.launch import run_forked
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import Meeting, run_ranks

SEVENTY_B = ["model=llama3-70b", "hardware=2x24gib", "training.max_length=2048"]


@pytest.fixture(scope="module")
def seventy_b(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What the command, as a user starts it, said of a run that does not fit, and what it wrote."""
    folder, source = tmp_path_factory.mktemp("seventy_b"), str(Path(qlora_fsdp.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "qlora_fsdp.preflight", *SEVENTY_B]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done, json.loads((folder / "preflight.json").read_text())


def test_command_line(seventy_b):
    """Without a GPU or a download: the table, preflight.json, and 3 for a run that does not fit."""
    done, figures = seventy_b
    assert (done.returncode, done.stderr) == (3, "")  # libraries have nothing to say either, also when Python ends
    for text in (
        "codes",
        "gathered layers",
        "backward",
        "Does not fit",
        "fsdp=offload",
        "4 GPUs",
        "Host memory",
        "hours",
    ):
        assert text in done.stdout
    assert done.stdout.startswith("Does not fit: llama3-70b (70.55 B parameters) on 2 x 24 GiB needs ")
    assert figures["fits"] is False and figures["changes"]
    assert 15 < figures["plan"]["phases"]["load"]["codes"] < 17


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("training.max_lenght=9", "Did you mean training.max_length?"),
        ("training.packing=never", "must be true, false or auto"),
        ("model.path=/no/such/folder", "has no config.json"),
    ],
)
def test_mistakes_are_told_before_torch_is_imported(tmp_path: Path, argument: str, reason: str):
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import runpy; "
    code += f"sys.argv[1:] = {[*SEVENTY_B, argument]!r}; runpy.run_module('qlora_fsdp.preflight', run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": str(Path(qlora_fsdp.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and reason in done.stderr


@pytest.mark.parametrize("packing", ["auto", "true"])
def test_rows_that_see_one_another_are_padded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, packing: str
):
    """As in the run itself. All families that the plan knows keep rows apart, so that one has to be broken."""
    of_rows = "transformers.masking_utils.packed_sequence_mask_function"
    monkeypatch.setattr(of_rows, lambda rows: lambda batch, head, query, key: query >= 0)
    more = ["model=smollm2-135m-instruct", "hardware=1x24gib", f"training.packing={packing}"]
    more += ["model.attn_implementation=sdpa", "training.max_length=1999"]
    if packing == "true":
        with pytest.raises(
            ConfigError, match=r"training.packing=true can't be used with LlamaForCausalLM: packed rows see"
        ):
            run_preflight(tmp_path, *more)
        return
    assert run_preflight(tmp_path, *more)[0] == 0
    assert (
        "Note: rows of LlamaForCausalLM are padded: packed rows see one another (logits change by "
        in capsys.readouterr().out
    )


def test_a_run_that_is_to_record_and_cannot_is_refused(tmp_path: Path):
    more = ["model=smollm2-135m-instruct", "hardware=1x24gib", "compute.cuda_graph=true"]
    assert run_preflight(tmp_path, *more)[0] == 0
    with pytest.raises(ConfigError, match=r"compute.cuda_graph=true can't be had: what comes from host memory"):
        run_preflight(tmp_path, *more, "fsdp=offload")


def test_the_example_of_the_readme_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The verdict is the first line, and it is said whose the speed is and where it comes from."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"^qlora-fsdp preflight (model=\S+ hardware=\S+)", readme, re.MULTILINE)
    assert example is not None
    assert run_preflight(tmp_path, *example[1].split())[0] == 0
    out = capsys.readouterr().out
    assert out.startswith("Fits: qwen2.5-0.5b-instruct (0.49 B parameters) on 1 x 24 GiB needs ")
    assert "predicted from the GPU's datasheet, by what H200s reached" in out
    run_preflight(tmp_path, "model=llama3-8b", "hardware=2x24gib")
    total, each = re.search(r"([\d,]+) tokens/s in all \(([\d,]+) per GPU\)", capsys.readouterr().out).groups()
    assert int(total.replace(",", "")) == pytest.approx(2 * int(each.replace(",", "")), abs=1)


def run_preflight(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = folder / "preflight.json"
    code = preflight.preflight(arguments, file)
    return code, json.loads(file.read_text())


def test_a_fit_and_the_changes_that_give_it(seventy_b, tmp_path: Path):
    """What is said to make it fit does."""
    _, figures = seventy_b
    overrides = [change["change"] for change in figures["changes"] if "GPUs" not in change["change"]]
    assert overrides
    for change in overrides:
        assert run_preflight(tmp_path, *SEVENTY_B, *change.split())[0] == 0, change


SHARED = "distributed.context_parallel=4"


def test_the_longest_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """They fit, and rows that are 1 % longer do not; several GPUs split the base."""
    model = ["model=llama3.2-1b-base", "hardware=1x24gib"]
    code, figures = run_preflight(tmp_path, *model, "training.max_length=max")
    out = capsys.readouterr().out
    rows = figures["longest"]
    assert code == 0 and [row["gpus"] for row in rows] == [1, 2, 4, 8]
    lengths = [row["max_length"] for row in rows]
    assert [row["gpus_a_row"] for row in rows] == [1, 2, 4, 8]
    assert all(1.8 < long / short < 2.2 for short, long in pairwise(lengths))
    assert f"{lengths[0]:,}" in out and "131,072 positions: model.rope_scaling" in out
    for length, expected in ((lengths[0], 0), (round(1.01 * lengths[0]), 3)):
        batch = [f"training.max_length={length}", "training.micro_batch_size=1", "training.global_batch_size=1"]
        assert run_preflight(tmp_path, *model, *batch)[0] == expected
    code, figures = run_preflight(tmp_path, "model=llama3-70b", "hardware=1x24gib", "training.max_length=max")
    assert code == 3 and figures["longest"][0]["gpus"] > 1
    shared = run_preflight(tmp_path, *model[:1], "hardware=4x24gib", "training.max_length=max", SHARED)[1]["longest"]
    assert [row["gpus"] for row in shared] == [4, 8] and 3.5 * lengths[0] < shared[0]["max_length"] < 4.5 * lengths[0]


def test_own_model_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = load_config(["model=llama3-8b"]).model.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_bytes(b" " * 8_000_000)
    code, figures = run_preflight(
        tmp_path,
        f"model.path={tmp_path}",
        "hardware=8xh200",
        f"data.path={tmp_path}/rows.jsonl",
        "training.num_epochs=2",
    )
    named = run_preflight(tmp_path, "model=llama3-8b", "hardware=8xh200")[1]
    assert code == 0 and figures["num_tokens"] == 4e6 and figures["plan"] == named["plan"]
    assert "8.03 B parameters" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_bytes(b" " * 8_000)
    run_preflight(tmp_path, "model=tiny", "hardware=1xh200", f"data.path={tmp_path}/rows.jsonl")
    assert re.search(r"0\.87 M parameters(.|\n)* tokens/s in all .*; 0:00:00 for 2,000 tokens", capsys.readouterr().out)
    assert figures["hours"] == pytest.approx(4e6 / figures["tokens_per_second"] / 3600)
    large = ("model=llama3-8b", "hardware=8xh200", "training.micro_batch_size=4")
    in_bf16, in_fp8 = run_preflight(tmp_path, *large)[1], run_preflight(tmp_path, *large, "compute=fp8")[1]
    assert 1.2 < in_fp8["tokens_per_second"] / in_bf16["tokens_per_second"] < 2


def test_where_the_number_of_tokens_comes_from(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(b" " * 8_000_000)

    def count(*settings: str) -> tuple[float, str]:
        config = load_config(["model=tiny", "training.num_epochs=2", *settings])
        return expect_tokens(config.data, config.training, tokens_a_step=0)

    data = f"data.path={tmp_path}/rows.jsonl"
    assert count(data) == (4e6, "8.0 MB of data, 4 bytes a token")
    fewer = "8.0 MB of data, 4 bytes a token; less by data.max_rows and data.split"
    assert count(data, "data.max_rows=9", "data.split='train[:50%]'") == (4e6, fewer)
    part = f"data.mix={{{tmp_path}/rows.jsonl: {{max_rows: 9, split: 'train[:50%]'}}}}"
    assert count(part) == (4e6, fewer)
    assert count(data, "data.eval_fraction=0.25")[0] == 3e6
    (tmp_path / "more.jsonl").write_bytes(b" " * 2_000_000)
    both = f"data.mix={{{tmp_path}/rows.jsonl: 3, {tmp_path}/more.jsonl: 1}}"
    assert count(both)[0] == 2 * 8e6 * 4 / 3 / 4
    assert count(both, data)[0] == count(both)[0], "training refuses both"
    assert count(both, "data.mix_until=shortest")[0] == 2 * 2e6 * 4 / 4
    mix = [f"data.mix={{{tmp_path}/rows.jsonl: 1}}", "data.mix_until=3000"]
    assert count(*mix) == (6000, "data.mix_until=3000")


def test_what_is_not_what_it_seems(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """float32 takes twice the activations, and more for attention, whose kernels for it keep repeated keys and values;
    data that is not here gives no hours of its own; random weights are made; weights that don't fit."""
    common = ["model=llama3-8b", "hardware=1x80gib", "memory=keep", "training.micro_batch_size=2"]
    named = run_preflight(tmp_path, *common)[1]
    wide = ["training.precision=float32", "data.path=rows.jsonl"]
    figures = run_preflight(tmp_path, *common, *wide)[1]
    activations = [each["plan"]["phases"]["backward"]["activations"] for each in (figures, named)]
    assert 2 * activations[1] <= activations[0] < 2.5 * activations[1]
    assert figures["num_tokens_from"] == "an example: rows.jsonl is not here"
    assert "several times as fast as float32" in capsys.readouterr().out
    stored, made = (
        run_preflight(tmp_path, "model=llama3-8b", "hardware=1xh200", f"model.weights={weights}")[1]["read_gib"]
        for weights in ("checkpoint", "random")
    )
    assert stored > 14 and made == 0
    assert "Loading: nothing is read; 1 s to make random weights on each GPU" in capsys.readouterr().out
    assert run_preflight(tmp_path, "model=llama3-70b", "hardware=2x16gib")[0] == 3
    assert "A rank's weights alone take 5.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware=2xh20O", "model=llama3-8b"], "Did you mean 2xh200"),
        (["hardware=8xa100", "model=llama3-8b"], "Did you mean 8xa100-40g or 8xa100-80g?"),
        (["hardware=h100x4", "model=llama3-8b"], "Did you mean 4xh100 or 4xh100-pcie?"),
        (["hardware=2x3090", "model=llama3-8b"], "Did you mean 2xrtx3090?"),
        (["hardware=2 x 24576 MiB", "model=llama3-8b"], "Did you mean 2x24gib?"),
        (["hardware=2x24mib", "model=llama3-8b"], "Set hardware=2x24gib, or another"),
        (["hardware=1x24gib", "hardware=2x24gib", "model=llama3-8b"], "is given 2 times"),
        (
            ["hardware=2x24gib", "model=llama3-8b", "memory.target_gib=40"],
            "is more than a GPU of hardware= has: 24 GiB",
        ),
        (["hardware=2x24gib", "model=llama3-8b", "model.path=/nowhere"], "model.path=/nowhere has no config.json"),
        (
            ["hardware=2x24gib", "model=llama3-8b", "training.max_length=2k"],
            "\nError: training.max_length=2k must be a",
        ),
        (["hardware=1xh200", "model=llama3-8b", "data=demo/chats.jsonl", "data.split=test"], "is no split of demo/"),
        (["hardware=1xh200"], "model.path=null names no model. Set model to a preset"),
        (["hardware=1xh200", "model=llama3-8b", "lora.rr=8"], "lora.rr=8 is not a setting"),
        (["hardware=3xh200", "model=llama3-8b", "training.global_batch_size=4"], "Set training.global_batch_size=3"),
        (["hardware=1xh200", "model=llama3-8b", "training.global_batch_size=null"], "needs a global batch to divide"),
        (["hardware=1xh200", "model=llama3-8b", "fsdp=offload", "optim=adamw_8bit"], "optim.name=adamw_8bit keeps"),
        (["hardware=1xh200", "model=gemma3-27b", "quant.embeddings=int8"], "whose head shares its weight"),
        (["hardware=1xa100-80g", "model=llama3-8b", "compute=fp8"], "compute.matmul=fp8 can't be used"),
        (["hardware=1xh200", "model.weights=random", "model.config={model_type: nonsense}"], "config can't be used"),
        (["hardware=1xh200", "model.weights=random", "model.config={hidden_size: 64}"], "names no model"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(Path(qlora_fsdp.__file__).parents[2])
    assert preflight.main(arguments) == 2
    assert message in capsys.readouterr().err


def run_out_of_memory(folder: Path) -> tuple[str, int, dict[str, Any]]:
    """A run whose GPU is said to be full in the second forward."""

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    Meeting.new_port()
    stage.train = fail
    arguments = ["model=tiny", "data=random", "training.max_steps=2", "data.max_rows=8", f"run.folder={folder}"]
    try:
        pipeline.run(load_config(arguments), World())
    except MemoryShortage as error:
        return str(error), error.exit_code, json.loads((folder / "summary.json").read_text())
    raise AssertionError("no complaint")


def test_out_of_memory(tmp_path: Path):
    """The plan beside what was allocated, what would help, exit code 3, and the figures in summary.json."""
    ((message, code, summary),) = run_ranks(1, run_out_of_memory, tmp_path)
    assert code == 3
    assert message.startswith("The GPU is out of memory: CUDA out of memory, in proof.")
    for text in (
        "planned",
        "backward",
        "What would help most",
        "training.max_length=1024",
        "Checkpoints are as they were",
    ):
        assert text in message
    assert summary["status"] == "failed" and summary["memory"]["predicted"]["tensors_gib"]["forward"] > 0


def break_pipe() -> None:
    """Stdout becomes a pipe whose reader has gone, as in `... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


@pytest.mark.parametrize(
    "command",
    ["preflight model=tiny data=random training.max_steps=1 hardware=1x24gib", "status .", "--help", "train --help"],
)
def test_nobody_reads_on(tmp_path: Path, command: str) -> None:
    for name in ("config.yaml", "environment.json"):  # a run, to status
        (tmp_path / name).touch()
    exit_code, printed = run_forked(tmp_path, *command.split(), preexec=break_pipe)
    assert exit_code == -signal.SIGPIPE, "it ends silently"
    assert not printed
