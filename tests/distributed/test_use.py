"""evaluate, generate and chat, whole and sharded: what stock transformers and PEFT give, token by token."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from qlora_fsdp import chat, evaluate, generate, merge
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import QuantConfig
from qlora_fsdp.decoding.completer import Completer, Request
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import Meeting, StartedRanks, once, run_ranks
from tests.helpers.reference import load_stock, stock_loss
from tests.helpers.runs import printed_by, settings, train_all

pytestmark = pytest.mark.distributed
PROMPTS = ["the cat sat", "rain", "old town and birds sang on"]
TURNS = ["hi", "/system Be brief.", "the cat", "/reset", "the cat", "rain"]
NUM_NEW = 12
DEMO = Path(__file__).parents[2] / "demo" / "base"
CASES = {  # a small model that knows some English, and random weights; both tie their embeddings
    "demo": ["model.tokenizer_path=null", "data.chat_template=chatml", "training.learning_rate=2e-3"],
    "qwen2": ["quant=int8", "training.learning_rate=1e-2"],
}


def use(adapter: Path, rows: Path, folder: Path) -> dict[str, str | int]:
    """Every command on this rank, with what it printed."""
    prompts = folder / "prompts.jsonl"
    found: dict[str, str | int] = {}
    commands = {
        "one": (generate.main, [f"prompt={PROMPTS[0]}", f"max_new_tokens={NUM_NEW}"]),
        "file": (generate.main, [f"prompts={prompts}", f"max_new_tokens={NUM_NEW}", "batch_size=1"]),
        "sampled": (generate.main, [f"prompts={prompts}", f"max_new_tokens={NUM_NEW}", "temperature=1", "seed=3"]),
        "chat": (chat.main, [f"max_new_tokens={NUM_NEW}"]),
        "loss": (evaluate.main, [f"data.path={rows}", f"data.cache_folder={folder}", "training.max_length=64"]),
    }
    for name, (main, arguments) in commands.items():
        sys.stdin = io.StringIO("\n".join(TURNS) + "\n")
        found[name] = printed_by(main, [f"adapter={adapter}", *arguments])
    return found


def use_all(adapters: dict[str, Path], rows: Path, folder: Path) -> dict[str, dict[str, str | int]]:
    return {case: use(adapter, rows, folder) for case, adapter in adapters.items()}


@pytest.fixture(scope="module")
def bases(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {"demo": DEMO, "qwen2": checkpoint("qwen2")}


@pytest.fixture(scope="module")
def adapters(bases: dict[str, Path], rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    few = ["training.max_steps=4", "training.max_length=96"]
    cases = {
        case: settings(bases[case], rows, *few, f"run.folder={folder / case}", *more) for case, more in CASES.items()
    }
    run_ranks(2, train_all, cases)
    return {case: folder / case / "adapter" for case in CASES}


@pytest.fixture(scope="module")
def used(adapters: dict[str, Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """`used(num_ranks)`: what rank 0 printed, by case and command."""
    folder = tmp_path_factory.mktemp("used")
    rows_of_prompts = [{"prompt": PROMPTS[0], "id": 7}, {"messages": [{"role": "user", "content": PROMPTS[1]}]}]
    rows_of_prompts.append({"prompt": PROMPTS[2]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows_of_prompts))

    def run(num_ranks: int):
        first, *others = run_ranks(num_ranks, use_all, adapters, rows, folder)
        assert all(
            not text for other in others for case in other.values() for text in case.values()
        )  # rank 0 alone speaks
        return first

    return once(run)


@pytest.fixture(scope="module")
def stock(adapters: dict[str, Path], bases: dict[str, Path]):
    """`stock(case)`: base and adapter by transformers, bitsandbytes and PEFT."""

    def load(case: str) -> nn.Module:
        base = load_stock(bases[case], load_config([f"model.path={bases[case]}", *CASES[case]]).quant)
        return peft.PeftModel.from_pretrained(base, adapters[case]).eval()

    return once(load)


def greedy(model: nn.Module, tokens: list[int], tokenizer) -> str:
    ids = torch.tensor([tokens])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_stock_libraries(used, stock, adapters, case: str, num_ranks: int):
    tokenizer, model = AutoTokenizer.from_pretrained(adapters[case]), stock(case)
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[1]}], add_generation_prompt=True, return_dict=False
    )
    prompts = [tokenizer(PROMPTS[0])["input_ids"], turn, tokenizer(PROMPTS[2])["input_ids"]]
    expected = [greedy(model, tokens, tokenizer) for tokens in prompts]
    found = used(num_ranks)[case]
    assert found["one"] == expected[0] + "\n"
    rows = [json.loads(line) for line in found["file"].splitlines()]
    assert [row["completion"] for row in rows] == expected
    assert rows[0]["id"] == 7  # what else a row has is kept
    assert case != "demo" or len(set(expected)) == 3


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chat_keeps_resets_and_instructs(used, stock, adapters, num_ranks: int):
    tokenizer, model = AutoTokenizer.from_pretrained(adapters["demo"]), stock("demo")
    system = {"role": "system", "content": "Be brief."}
    messages, expected = [], []
    for turn in TURNS:
        if turn.startswith("/"):
            messages = [system]
            continue
        messages.append({"role": "user", "content": turn})
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        expected.append(greedy(model, tokens, tokenizer))
        messages.append({"role": "assistant", "content": expected[-1]})
    assert used(num_ranks)["demo"]["chat"] == "".join(reply + "\n" for reply in expected)


def test_the_model_card_tells_of_the_run(adapters, rows: Path):
    card = (adapters["demo"] / "README.md").read_text()
    for part in (
        "# LoRA adapter for `base`",
        ": 4 steps.",
        f"| `{rows.name}` | 399 |",  # one of the 400 is there twice
        "No held-out rows were evaluated.",
        "| training rows | ",
        "| base weights | `nf4` |",
        "| training.learning_rate | `0.002` |",
        "Prompts are given as they are, without a chat template.",
        "--enable-lora --max-lora-rank 8 ",
    ):
        assert part in card, part
    assert str(rows.parent) not in card and str(DEMO) not in card and "base_model:" not in card
    assert "trained_on: prompt_completion\n" in (adapters["demo"] / "qlora_fsdp.yaml").read_text()


def test_sampling_differs_from_greedy_and_repeats(used):
    assert used(1)["demo"]["sampled"] != used(1)["demo"]["file"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_losses_are_those_of_stock_libraries(used, stock, rows: Path, num_ranks: int):
    figures = json.loads(used(num_ranks)["qwen2"]["loss"])
    loss, num_targets = stock_loss(stock("qwen2"), rows)
    assert figures["num_target_tokens"] == num_targets
    assert figures["loss"] == pytest.approx(loss, abs=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))


CHOICES = {"output_type": "multiple_choice", "doc_to_choice": ["old town", "mat", "rain fell over"]}
TASKS: dict[str, dict[str, Any]] = {  # of every kind of request that lm-eval makes, some by more than one rank
    "choice": {**CHOICES, "doc_to_target": "{{answer}}", "metric_list": ["acc", "acc_norm"], "num_fewshot": 1},
    "ending": {"output_type": "loglikelihood", "doc_to_target": " {{ending}}", "metric_list": ["perplexity", "acc"]},
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{prompt}}",
        "metric_list": ["word_perplexity", "bits_per_byte"],
    },
    "completion": {
        "output_type": "generate_until",
        "doc_to_target": "{{completion}}",
        "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": NUM_NEW},
        "metric_list": ["exact_match"],
    },
}


def test_tasks_of_lm_eval_score_as_by_its_own_model(adapters, stock, tmp_path: Path):
    """Two ranks share three rows, so that one runs out of them. The reference is lm-eval itself on stock libraries."""
    evaluator, models = pytest.importorskip("lm_eval.evaluator"), pytest.importorskip("lm_eval.models.huggingface")
    tokenizer, model = AutoTokenizer.from_pretrained(adapters["demo"]), stock("demo")
    rows = []
    for number, prompt in enumerate(["the cat sat", "old town and birds sang on", "a " * 40 + "mat"]):
        completion = greedy(model, tokenizer(prompt)["input_ids"], tokenizer) if number else "nothing of the kind"
        rows.append({"prompt": prompt, "completion": completion, "answer": number, "ending": "and the town"})
    write_lines(tmp_path / "rows.jsonl", rows)
    data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    files = []
    for name, task in TASKS.items():
        metrics = [{"metric": metric} for metric in task["metric_list"]]
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        task = {"doc_to_text": "{{prompt}}", "fewshot_split": "test", **common, **task, "metric_list": metrics}
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(json.dumps(task))  # JSON is YAML
    reference = models.HFLM(model, tokenizer=tokenizer, backend="causal", batch_size=2, max_length=64)
    expected = evaluator.simple_evaluate(reference, tasks=list(map(str, files)), bootstrap_iters=0)["results"]
    arguments = [f"adapter={adapters['demo']}", f"tasks={','.join(map(str, files))}", "batch_size=2", "max_length=64"]
    for num_ranks in (1, 2):
        printed, *others = run_ranks(num_ranks, printed_by, evaluate.main, arguments)
        assert not any(others)
        found = json.loads(printed)["tasks"]
        for name, task in TASKS.items():
            for metric in task["metric_list"]:
                (key,) = (key for key in expected[name] if key.startswith(f"{metric},"))
                assert found[name][key] == pytest.approx(expected[name][key], rel=1e-5), f"{name} {metric}"
    assert found["completion"]["exact_match,none"] == pytest.approx(2 / 3)


def texts_at_a_time(arguments: list[str]) -> tuple[str, list[int]]:
    """What an evaluation prints, and how many texts each call writes."""
    numbers, complete = [], Completer.complete

    def note(self: Completer, requests: list[Request]) -> None:
        numbers.append(len(requests))
        complete(self, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Completer, "complete", note)
        return printed_by(evaluate.main, arguments), numbers


def test_a_sharded_model_writes_as_many_texts_of_tasks_at_a_time_as_a_whole_one(adapters, tmp_path: Path):
    """Not as few as transformers gets at a time for likelihoods."""
    pytest.importorskip("lm_eval")
    lines = [{"prompt": f"{word} sat", "completion": "x"} for word in "abcdefghijkl"]
    data = {"data_files": {"test": str(write_lines(tmp_path / "rows.jsonl", lines))}, "cache_dir": str(tmp_path)}
    task = {"task": "texts", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    task |= {**TASKS["completion"], "doc_to_text": "{{prompt}}", "metric_list": [{"metric": "exact_match"}]}
    (tmp_path / "texts.yaml").write_text(json.dumps(task))
    arguments = [f"adapter={adapters['qwen2']}", f"tasks={tmp_path / 'texts.yaml'}"]
    assert [numbers for _, numbers in run_ranks(2, texts_at_a_time, arguments)] == [[12], [12]]


def finish_at_other_times() -> None:
    """Rank 1 writes for longer than a rank is waited for."""
    from qlora_fsdp.inference.lm_eval import ModelInStep

    Meeting.new_port()
    processes = start_processes(timeout_seconds=2, use_cpu=True)
    model = ModelInStep(Mock(), processes)
    model.is_sharded = True
    time.sleep(4 * processes.rank)
    model.keep_step()
    stop_processes()


def test_ranks_without_texts_wait_for_those_that_write():
    """Ranks that share one copy of the model may have fewer or shorter ones than those that share another."""
    pytest.importorskip("lm_eval")
    run_ranks(2, finish_at_other_times)


def fail_alone(adapter: Path) -> NoReturn:
    """Generate, where rank 1 alone can't read the prompts; as under torchrun, the store outlives the ranks."""
    os.environ |= {"MASTER_PORT": os.environ["MEETING_PORT"], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if os.environ["RANK"] == "1":
        generate._read_rows = lambda settings: (_ for _ in ()).throw(DataError("prompts=a.jsonl can't be read here."))
    sys.exit(generate.main([f"adapter={adapter}", "prompt=rain"]))


def test_an_error_of_one_rank_ends_all_with_it_told_once(adapters, tmp_path: Path):
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = StartedRanks(logs, fail_alone, adapters["qwen2"])
    try:
        deadline = time.monotonic() + 600
        for process in ranks.processes:
            process.join(max(0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks.processes] == [2, 2]
    finally:
        ranks.kill()
    output = "".join(log.read_text() for log in logs)
    assert output.count("Error: ") == output.count("prompts=a.jsonl can't be read here.") == 1


def use_damaged(adapter: Path, rows: Path) -> list[tuple[int, str]]:
    """Exit code of each command, and what it says."""
    found = []
    for main, arguments in (
        (evaluate.main, [f"data.path={rows}"]),
        (generate.main, ["prompt=rain"]),
        (chat.main, []),
        *([(merge.main, [f"out={adapter}-merged"])] if os.environ.get("WORLD_SIZE", "1") == "1" else []),
    ):
        Meeting.new_port()
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            found.append((main([f"adapter={adapter}", *arguments]), said.getvalue()))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_adapter_with_nan_is_refused(adapters, rows: Path, tmp_path: Path, num_ranks: int):
    """Of two ranks it is rank 1 that finds it."""
    damaged = Path(shutil.copytree(adapters["demo"], tmp_path / "damaged"))
    weights = load_file(damaged / "adapter_model.safetensors")
    key = sorted(weights)[1]
    weights[key][0, 0], weights[key][0, 1] = math.nan, -math.inf
    save_file(weights, damaged / "adapter_model.safetensors")
    by_rank = run_ranks(num_ranks, use_damaged, damaged, rows)
    assert [code for found in by_rank for code, _ in found] == [2] * len(by_rank) * len(by_rank[0]), by_rank
    for _, said in by_rank[0]:
        assert said.count("Error: ") == said.count(f"{key} has 2 NaN or infinite values") == 1
    assert not (tmp_path / "damaged-merged").exists()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        ({"init_lora_weights": "pissa"}, "has init_lora_weights=pissa, which also changes the base's weights"),
        ({"init_lora_weights": "olora"}, "has init_lora_weights=olora, which also changes the base's weights"),
        ({"alora_invocation_tokens": [1, 2]}, "has alora_invocation_tokens=[1, 2], which is not here"),
        ({"lora_bias": True}, "has lora_bias=True, which is not here"),
    ],
)
def test_adapters_that_peft_computes_otherwise(
    capsys: pytest.CaptureFixture[str], rows: Path, tmp_path: Path, other: dict[str, Any], part: str
):
    """Their tensors fit those of a plain adapter, or nearly: the results would be others, without a word."""
    peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **other).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    assert evaluate.main(["model=tiny", f"adapter={tmp_path}", f"data.path={rows}"]) == 2
    printed = capsys.readouterr().err
    assert part in printed and "et adapter to" in printed and "Traceback" not in printed


@pytest.mark.parametrize("chosen", [{"layers_to_transform": [1]}, {"exclude_modules": r".*layers\.0\..*"}])
def test_adapters_of_some_layers(
    bases, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: dict[str, Any]
):
    """What PEFT adapts by them is told by the adapter's tensors."""
    losses = []
    for name, layers in (("some", chosen), ("named", {"target_modules": ["layers.1.self_attn.q_proj"]})):
        torch.manual_seed(0)
        config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | layers)
        model = peft.get_peft_model(load_stock(bases["qwen2"], QuantConfig(load_in_4bit=False)), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.3)
        model.save_pretrained(tmp_path / name)
        data = [f"data.path={rows}", f"data.cache_folder={tmp_path}", "training.max_length=64"]
        base = [f"model.path={bases['qwen2']}", "model.tokenizer_path=bytes", "quant=none"]
        assert evaluate.main([f"adapter={tmp_path / name}", *base, *data]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("module", "arguments", "parts"),
    [
        ("generate", ["adapter=/nowhere", "prompt=a"], ["adapter=/nowhere holds no adapter", "Set adapter to"]),
        (
            "generate",
            ["promt=a", "adapter=/"],
            ["promt=a is not a setting. Did you mean prompt?", "adapter=/ holds no"],
        ),
        (
            "generate",
            ["model=tiny", "max_new_tokens=0"],
            ["max_new_tokens=0 must", "prompt and prompts are both missing"],
        ),
        ("chat", ["temperature=warm"], ["temperature=warm must be a number"]),
        ("chat", [], ["model.path=null names no model. Set adapter to the folder that training wrote; or, without"]),
        ("evaluate", ["model=tiny"], ["data.path=null names no data"]),
        (
            "evaluate",
            ["model=tiny", "data=random", "max_length=64", "limit=5", "apply_chat_template=true"],
            [
                "max_length=64 has no effect without tasks=. For data set training.max_length=N.",
                "limit=5 has no effect without tasks=. For data set data.split=train[:N].",
                "apply_chat_template=true has no effect without tasks=. Leave it out.",
            ],
        ),
        (
            "evaluate",
            ["model=tiny", "data=random", "data.eval_fraction=0.1"],
            ["data.eval_fraction=0.1 would leave the held-out rows out, and evaluate those that training used."],
        ),
        (
            "evaluate",
            ["model=tiny", "data.path=demo/chats.jsonl", "data.eval_path=demo/chats_eval.jsonl"],
            ["is not read: the rows of data.path are evaluated. Set data.path=demo/"],
        ),
        (  # a group of settings, not tasks= misspelt
            "evaluate",
            ["model=tiny", "task=sequence_classification", "model.path=/"],
            ["task.labels=null names too few", "model.path=/ is not read: model=tiny makes its weights up"],
        ),
        (
            "generate",
            ["model=tiny", "prompt=a", "raw=true", "max_new_tokens=3000"],
            ["row 1: 2 tokens and max_new_tokens=3000 are more than the 2,048 positions that the model knows"],
        ),
        ("generate", ["model=tiny", "prompt=a", "seed=99999999999999"], ["must be from 0 to 2147483647. Set seed=0."]),
        ("generate", ["model=tiny", "prompt=caf\udce9"], ["prompt has bytes that are no UTF-8. Type it in UTF-8."]),
        ("chat", ["model=tiny", "system=caf\udce9"], ["system has bytes that are no UTF-8. Type it in UTF-8."]),
        (
            "chat",
            ["model=tiny", "prompt=hi", "out=a.txt"],
            ["prompt=hi is a setting of generate", "out=a.txt is a setting of generate: a chat reads what you type"],
        ),
        ("generate", ["model=tiny", "prompt=a", "out=/no/a.jsonl"], ["out=/no/a.jsonl can't be written: No such"]),
        ("evaluate", ["model=tiny", "data=random", "out=/"], ["out=/ can't be written: it is a folder"]),
        ("evaluate", ["model=tiny", "data=random", "out=/dev/null"], ["out=/dev/null can't be written: it is no file"]),
    ],
)
def test_bad_input_is_named(capsys: pytest.CaptureFixture[str], module: str, arguments: list[str], parts: list[str]):
    assert {"chat": chat, "evaluate": evaluate, "generate": generate}[module].main(arguments) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    for part in parts:
        assert part in printed


def test_a_base_that_lies_elsewhere_is_told_as_the_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As on the machine of somebody who was given the adapter."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/bob/base"}')
    (tmp_path / "adapter_model.safetensors").touch()
    assert generate.main([f"adapter={tmp_path}", "prompt=a"]) == 2
    expected = f"/home/bob/base does not exist. adapter={tmp_path} was trained on it. Set model.path to where that"
    assert expected in capsys.readouterr().err
    assert generate.main([f"adapter={tmp_path}", "prompt=a", "model.path=/nowhere"]) == 2
    assert "trained on it" not in capsys.readouterr().err


def test_chat_goes_on_after_what_it_can_not_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    lines = b"/more\n" + b"a" * 2048 + b"\nnot UTF-8: caf\xe9\n/quit\nnot read\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    assert chat.main(["model=tiny", "max_new_tokens=2"]) == 0
    printed, said = capsys.readouterr()
    assert printed.startswith("/more is none of /help, /reset, /system TEXT, /exit\nError: the conversation has 2,")
    assert "the model knows 2,048 positions. /reset forgets it.\n" in printed and printed.count("\n") >= 3
    assert "1 rank on cpu, chat template: chatml" in said
