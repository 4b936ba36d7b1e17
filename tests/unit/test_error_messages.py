"""docs/errors.md: its messages are in the sources, its tests exist; and those messages that no other test provokes."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import DistNetworkError, TCPStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Interleave, WeightConverter

from qlora_fsdp import evaluate, train
from qlora_fsdp.common.errors import CheckpointError, ConfigError, DeviceError, RankError, TrainingError
from qlora_fsdp.config.schema import CompressedFormat, LoraConfig, ModelConfig, QuantConfig
from qlora_fsdp.config.world import World
from qlora_fsdp.inference.merge_files import merge_files
from qlora_fsdp.inference.merge_weights import Merge
from qlora_fsdp.model.adapters.apply import apply_adapters
from qlora_fsdp.model.build import BuildSettings, MetaModel, build_model
from qlora_fsdp.model.find import find_model
from qlora_fsdp.runtime.hardware import is_shortage, quote_shortage
from qlora_fsdp.runtime.processes import open_store, start_processes, wait_until_known
from qlora_fsdp.training.memory_use import explain_early_shortage, explain_shortage
from qlora_fsdp.training.step import check_gradients
from qlora_fsdp.weights import map_keys
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.row_reader import RowRequest, Sink, Span, run_requests
from qlora_fsdp.weights.safetensors_files import StoredTensor, read_headers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
# Each message is a heading, which other words of it may follow, and a list that ends with the test.
ENTRIES = re.findall(r"^#{3,4} (.+\n(?:(?!#|- ).*\n)*)((?:- .*\n(?:  .*\n)*)+)", PAGE, flags=re.MULTILINE)
OWN = [words for words, _ in ENTRIES if words in PAGE.partition("### Settings and launch")[2]]
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
SIZES = {"vocab_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def words_of(node: ast.AST) -> str:
    """The text that a call or string makes, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        return "…" + words_of(node.value)
    return (
        " ".join(words_of(child) for child in ast.iter_child_nodes(node))
        if not isinstance(node, ast.JoinedStr)
        else ("".join(words_of(value) for value in node.values))
    )


@pytest.fixture(scope="module")
def sources() -> str:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "src").rglob("*.py")]
    strings = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    return "\n".join(re.sub(r"\s+", " ", words_of(node)) for node in strings)


@pytest.mark.parametrize("words", OWN)
def test_own_messages_are_in_the_sources(sources: str, words: str):
    messages = re.findall(r"`([^`]+)`", words.replace("\n", " "))
    assert messages
    for message in messages:
        parts = [part.strip() for part in re.split(r"…|\S+=\S+|\bnan\b| x |SIGTERM|pissa", message)]
        for part in parts:
            assert part in sources, f"{part!r} of {message!r}"


@pytest.mark.parametrize(("words", "items"), ENTRIES, ids=[words[:40] for words, _ in ENTRIES])
def test_the_tests_that_provoke_them_exist(words: str, items: str):
    assert "- Cause: " in items
    test = items.partition("- Test: ")[2]
    written = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    names, links = re.findall(r"`(test_\w+)", test), re.findall(r"\]\(([^)]+)\)", test)
    assert names or links, "no test is named"
    assert all(f"def {name}" in written for name in names), names
    assert all((ROOT / "docs" / link).exists() for link in links), links


def test_a_sweep_among_the_ranks_of_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "0")
    assert train.main(["-m", "lora.r=8,16", "model=tiny", "data=random"]) == 2
    assert "this process is already one of a job" in capsys.readouterr().err


def test_an_error_is_shown_though_torchrun_gets_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert train.main(["model=tiny", "lora.rank=8"]) == 2
    assert "Did you mean lora.r?" in capsys.readouterr().err


def test_torchruns_next_attempt_does_not_say_again_what_the_last_one_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shown = []
    for attempt, setting in enumerate(["lora.r=0", "lora.r=0", "lora.r=-1"]):
        file = tmp_path / f"attempt_{attempt}" / "0" / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert train.main(["model=tiny", "data=random", setting]) == 2
        assert "ConfigError" in json.loads(file.read_text())["message"]["message"]
        shown.append(capsys.readouterr().err)
    assert "lora.r=0 must" in shown[0] and shown[1] == "" and "lora.r=-1 must" in shown[2]


def test_an_experts_tensor_that_is_lost_or_broken_or_quantized(tmp_path: Path):
    sizes = {**SIZES, "hidden_size": 64, "num_key_value_heads": 2, "moe_intermediate_size": 64, "head_dim": 32}
    config = AutoConfig.for_model("qwen3_moe", num_experts=12, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = "model.layers.0.mlp.experts"

    broken = {key: tensor.clone() for key, tensor in tensors.items()}
    for key in (f"{experts}.7.up_proj.weight", f"{experts}.9.down_proj.weight"):
        broken[key][3, 5] = float("nan")
    save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
    meta = build(tmp_path, QuantConfig())
    meta.model.to_empty(device="cpu")
    with pytest.raises(CheckpointError, match=r"experts\.7\.up_proj\.weight has 1 NaN or infinite value, .* 1 other t"):
        fill_from_files(meta.assignments, torch.device("cpu"), torch.float32)

    codes = tensors | {f"{experts}.7.up_proj.weight.absmax": torch.ones(64)}
    save_file(codes, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"transformers would split or merge (.*\n.*)*absmax: it belongs to codes"
    ):
        build(tmp_path, QuantConfig())

    for lost in (
        [f"{experts}.2.up_proj.weight"],
        [f"{experts}.11.gate_proj.weight", f"{experts}.11.up_proj.weight", f"{experts}.11.down_proj.weight"],
    ):
        kept = {key: tensor for key, tensor in tensors.items() if key not in lost}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"Tensors {len(lost)} missing from the files") as caught:
            build(tmp_path, QuantConfig())
        assert all(f"  - {key}" in str(caught.value) for key in lost)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_processes_that_do_not_meet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], local_rank):
    """On several hosts torch printed its functions' addresses twice above the message."""
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (ranks | {"LOCAL_RANK": f"{local_rank}", "LOCAL_WORLD_SIZE": f"{local_rank + 1}"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"the 2 processes did not meet at MASTER_ADDR=.*Connection refused"):
        start_processes(1, use_cpu=True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_is_not_known(monkeypatch: pytest.MonkeyPatch, rank: int):
    """All ranks waited without a word until distributed.timeout_seconds had gone by."""
    ranks = {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "nosuchhost", "MASTER_PORT": "29500"}
    for name, value in (ranks | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("qlora_fsdp.runtime.processes.NAME_SECONDS", 0)
    monkeypatch.setattr("qlora_fsdp.runtime.processes.socket.getaddrinfo", Mock(side_effect=UNKNOWN))
    with pytest.raises(DeviceError, match="MASTER_ADDR=nosuchhost: no host of that name is known here"):
        start_processes(600, use_cpu=True)


def test_a_host_may_be_known_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("qlora_fsdp.runtime.processes.socket.getaddrinfo", Mock(side_effect=[UNKNOWN, UNKNOWN, []]))
    monkeypatch.setattr("qlora_fsdp.runtime.processes.time.sleep", waits := Mock())
    wait_until_known("node-1", 60)
    assert waits.call_count == 2


def test_a_store_that_is_gone_is_not_told_by_torch(capfd: pytest.CaptureFixture[str]):
    """Above the message of a run whose rank 0 was killed it printed thirty lines, most of them addresses."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    del store
    for _ in range(2):
        with pytest.raises(DistNetworkError):
            client.check(["key"])
    assert capfd.readouterr().err == ""


def test_a_rank_that_comes_first_asks_for_the_store_only_once_rank_0_serves_it(monkeypatch: pytest.MonkeyPatch):
    """torch's client, which is refused, would wait half a second and more."""
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", 0))
        port, waits = rank_0.getsockname()[1], list[float]()
        monkeypatch.setattr("qlora_fsdp.runtime.processes.time.sleep", lambda s: (waits.append(s), rank_0.listen()))
        monkeypatch.setattr("qlora_fsdp.runtime.processes.TCPStore", lambda *args, **named: len(waits))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        assert open_store(World(2, rank=1, local_num_ranks=2), timedelta(seconds=60)) == 1


def build(folder: Path, quant: QuantConfig) -> MetaModel:
    files = find_model(ModelConfig(path=str(folder)), is_main=True, first_error=lambda error: error)
    return build_model(files, BuildSettings(quant, torch.float32, "sdpa"))


def test_a_layout_that_is_split_or_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = AutoConfig.for_model("mixtral", hidden_size=64, num_local_experts=2, num_key_value_heads=2, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # By columns, which no layout that transformers converts today is.
    rules, columns = map_keys.get_model_conversion_mapping, WeightConverter("o_proj", "o_proj", [Interleave(dim=1)])
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="transformers would split") as caught:
        patched.setattr(map_keys, "get_model_conversion_mapping", lambda model: [*rules(model), columns])
        build(tmp_path, QuantConfig())
    assert "model.layers.0.self_attn.o_proj.weight: it cuts rows apart" in str(caught.value)
    # What it says to do helps; save_pretrained alone writes the old layout again.
    assert "save_pretrained(FOLDER, save_original_format=False)" in str(caught.value)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    apply_adapters(build(tmp_path / "new", QuantConfig()).model, LoraConfig())


class Ignore(Sink):
    def put(self, rows: torch.Tensor, first_row: int) -> None:
        pass


def test_files_that_are_missing_or_end_early(tmp_path: Path):
    weight, file = torch.ones(4, 8), tmp_path / "there.safetensors"
    save_file({"w": weight}, file)
    stored = {"w": file.name, "v": "not-there.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": stored}))
    with pytest.raises(CheckpointError, match=r"not-there\.safetensors: missing, though the index names it"):
        read_headers(tmp_path)
    tensor = StoredTensor("w", file, file.stat().st_size - weight.nbytes, (4, 8), torch.float32)
    os.truncate(file, file.stat().st_size - 1)
    request = RowRequest([Span(tensor, 0, 4)], 32, Ignore())
    with pytest.raises(CheckpointError, match="can't be read at w: it ends early"):
        run_requests([request], torch.device("cpu"), on_progress=lambda count: None)


def test_tied_tables_that_differ(tmp_path: Path):
    """transformers loads the two as they are, with a warning; the config says that there is one."""
    config = AutoConfig.for_model("llama", hidden_size=64, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, file, {"format": "pt"})
    build(tmp_path, QuantConfig())  # the same table twice
    head = table.clone()
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but the files hold"
    ):
        build(tmp_path, QuantConfig())
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(stock.lm_head.weight, stock.model.embed_tokens.weight)


def test_blocks_that_cross_rows(tmp_path: Path):
    config = AutoConfig.for_model("llama", hidden_size=96, num_key_value_heads=2, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)can't quantize 6 layers.*cross rows.*quant=int8"):
        build(tmp_path, QuantConfig())
    for size, smaller in ((128, "32 or 64"), (64, "32")):
        quant = QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.int4, group_size=size)
        fix = rf"quant\.group_size={size} can't quantize [67] layers.*a smaller quant\.group_size, {smaller}\. Or: "
        with pytest.raises(ConfigError, match=rf"(?s){fix}Set quant=fp8"):
            build(tmp_path, quant)
    config = AutoConfig.for_model("llama", hidden_size=24, num_key_value_heads=2, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    quant = QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.nvfp4)
    with pytest.raises(
        ConfigError, match=r"(?s)quant\.compressed_tensors=nvfp4 can't quantize 6 layers.*Set quant=fp8"
    ):
        build(tmp_path, quant)


def test_a_quantized_base_can_not_be_merged_in_full(tmp_path: Path):
    trained = SimpleNamespace(
        meta=SimpleNamespace(assignments=[SimpleNamespace(stored_parts={"codes": 0})]),
        files=SimpleNamespace(folder=tmp_path),
    )
    merge = Merge(trained, tmp_path, tmp_path, False, None, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="is quantized and has no full-precision weights to merge onto"):
        merge_files(merge)


def test_trained_parameters_without_a_gradient():
    model = SimpleNamespace(
        model=nn.Linear(2, 2), may_get_zero_gradient=lambda name: False, judge_step=lambda step, loss: None
    )
    processes = SimpleNamespace(sum=lambda values: values)
    with pytest.raises(TrainingError, match=r"(?s)2 parameters that should be trained got no usable gradient.*bias"):
        check_gradients(model, 0, True, processes, 1.0)


def test_gradients_that_the_first_update_made_zero():
    """Adapters that had a gradient were said not to belong in lora.target_modules."""
    model = SimpleNamespace(
        model=nn.Linear(2, 2), may_get_zero_gradient=lambda name: False, judge_step=lambda step, loss: None
    )
    for param in model.model.parameters():
        param.grad = torch.zeros_like(param)
    processes = SimpleNamespace(sum=lambda values: values)
    with pytest.raises(TrainingError, match=r"2 parameters .* in step 2.*Set training\.learning_rate lower") as caught:
        check_gradients(model, 1, False, processes, 1.0)
    assert "target_modules" not in str(caught.value)


def test_tasks_that_can_not_be_evaluated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    assert evaluate.main(["model=tiny", "tasks=arc_easy", "limit=0"]) == 2
    message = capsys.readouterr().err
    assert "tasks=arc_easy needs lm-eval, which is not installed" in message and "limit=0 must be at least 1" in message


def test_a_host_that_is_out_of_memory():
    """What torch says of it was a traceback."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    error = caught.value
    assert isinstance(error, RuntimeError) and is_shortage(error)
    assert quote_shortage(error) == "The host is out of memory: 1073741824.00 GiB could not be allocated"
    assert "nvidia-smi" not in str(explain_early_shortage(error, writes_cache=False))
    for device, advice in (("cuda", "free -g"), ("cpu", "training.max_length lower")):
        peaks: Any = SimpleNamespace(record=lambda: None, now="forward", device=torch.device(device))
        assert advice in str(explain_shortage(error, None, None, peaks, None))
    assert quote_shortage(RuntimeError("CUDA out of memory. Tried")) == "The GPU is out of memory: CUDA out of memory"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "RANK=0 is set without WORLD_SIZE and MASTER_ADDR and MASTER_PORT. Unset RANK to run one"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "b"}, "MASTER_PORT=b is not a number."),
    ],
)
def test_variables_that_are_left_of_another_launch(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=expected):
        start_processes(5, use_cpu=True)
