"""`lora.start`: adapters of stock PEFT are trained on, at any number of ranks, as stock libraries train them on."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from qlora_fsdp.config.schema import Config, ProblemType
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.tasks.referenced import FrozenCopy
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.classification import LABELS, write_labelled_rows
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import RanksFailed, once, run_ranks
from tests.helpers.reference import global_batches, load_stock_adapter, save_stock_adapter, train_stock
from tests.helpers.runs import logits_of, settings, train_all, train_here

pytestmark = pytest.mark.distributed
INPUT_IDS = torch.arange(80).view(2, 40) * 3 % 256
NUM_STEPS = 3
WEIGHTS = "adapter_model.safetensors"

# What stock PEFT is told, by case: family, LoraConfig, and what our run is told besides.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora, ranks that differ": (
        "llama",
        {"target_modules": "all-linear", "r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
    ),
    "dora, a trained head": (
        "llama",
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "modules_to_save": ["lm_head"]},
    ),
    "some layers": (
        "qwen2",
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "alpha_pattern": {"up_proj": 3}},
    ),
    "experts": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "new tokens": (
        "llama",
        {"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [259, 260], "lm_head": [259, 260]}},
    ),
    "new tokens of the head beside whole embeddings": (
        "llama",
        {
            "target_modules": ["v_proj"],
            "modules_to_save": ["embed_tokens"],
            "trainable_token_indices": {"lm_head": [259, 260]},
        },
    ),
    "tokens in any order": (
        "llama",
        {
            "target_modules": ["v_proj"],
            "trainable_token_indices": {"lm_head": [9, 3, 260], "embed_tokens": [3, 260, 9]},
        },
    ),
}
STRATEGIES = {"full_shard": (2, []), "no_shard": (2, ["fsdp=no_shard"]), "one rank": (1, [])}
WHOLE = ("rslora, ranks that differ", "new tokens")  # where each rank has all: one of each way to read an adapter
TRIED = [(case, strategy) for strategy in STRATEGIES for case in (CASES if strategy == "full_shard" else WHOLE)]


def logits(model: TaskModel, processes: Processes) -> Tensor:
    return logits_of(model, INPUT_IDS.to(processes.device))


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    found = {}
    for number, (case, (family, options)) in enumerate(CASES.items()):
        found[case] = save_stock_adapter(checkpoint(family, torch.float32), options, folder / f"{number}")
    return found


@pytest.fixture(scope="module")
def argv(
    checkpoint: Callable[..., Path], rows: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[str]]:
    folder = tmp_path_factory.mktemp("runs")

    def make(case: str, kind: str, *more: str) -> list[str]:
        base = checkpoint(CASES[case][0], torch.float32)
        own = [text for text in settings(base, rows) if not text.startswith("lora.")]
        name = f"run.folder={folder / f'{list(CASES).index(case)}-{kind}'}"
        return [*own, f"lora.start={adapters[case]}", f"training.max_steps={NUM_STEPS}", name, *more]

    return make


@pytest.fixture(scope="module")
def trained(argv: Callable[..., list[str]]) -> Callable[[str], dict[tuple[str, str], Any]]:
    """By strategy, what each case found: logits at a rate of nothing ('start'), and the losses of steps ('train')."""

    @once
    def run(strategy: str) -> dict[tuple[str, str], Any]:
        num_ranks, more = STRATEGIES[strategy]
        still = ["training.max_steps=1", "training.learning_rate=1e-30", *more]  # a rate of 0 is refused
        cases = [case for case, tried in TRIED if tried == strategy]
        starts = {case: argv(case, f"{strategy}-start", *still) for case in cases}
        trains = {case: argv(case, f"{strategy}-train", *more) for case in cases}
        found = run_ranks(num_ranks, start_and_train, starts, trains)[0]
        return {(case, kind): value for kind, values in found.items() for case, value in values.items()}

    return run


@pytest.fixture(scope="module")
def stock_losses(argv: Callable[..., list[str]], adapters: dict[str, Path]) -> Callable[[str], list[float]]:
    """Losses of the reference, each computed once."""

    @cache
    def find(case: str) -> list[float]:
        config = load_config(argv(case, "stock"))
        stock = load_stock_adapter(Path(config.model.path), adapters[case], config.quant)
        return train_stock(stock, global_batches(config), config)

    return find


def start_and_train(starts: dict[str, list[str]], trains: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    return {"start": train_all(starts, logits), "train": train_all(trains)}


@pytest.mark.parametrize(("case", "strategy"), TRIED)
def test_the_start_is_the_adapter(trained, argv, adapters: dict[str, Path], strategy: str, case: str):
    """At a rate of nothing we compute what stock PEFT computes with the old adapter, and write that very adapter."""
    ours = trained(strategy)[case, "start"].inspected
    config = load_config(argv(case, f"{strategy}-start"))
    result = Path(config.run.folder) / "adapter"
    old, new = load_file(adapters[case] / WEIGHTS), load_file(result / WEIGHTS)
    for table, tokens in CASES[case][1].get("trainable_token_indices", {}).items():  # ours ascend
        key = next(key for key in old if f"{table}.token_adapter" in key)
        old[key] = old[key][torch.tensor(tokens).argsort()]
    assert old.keys() == new.keys() and all(torch.equal(old[key].float(), new[key]) for key in old)
    for folder in (adapters[case], result):
        stock = load_stock_adapter(Path(config.model.path), folder, config.quant).eval()
        with torch.no_grad():
            expected = stock(input_ids=INPUT_IDS).logits
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("case", "strategy"), TRIED)
def test_training_goes_on_as_with_stock_libraries(trained, stock_losses, strategy: str, case: str):
    assert trained(strategy)[case, "train"].losses == pytest.approx(stock_losses(case), abs=1e-5)


def frozen_and_changed(model: TaskModel, processes: Processes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits at first; with other values; with the copy in place; and with the other values again."""
    at_first, frozen = logits(model, processes), FrozenCopy(model)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                local_tensor(param).add_(0.05)
    changed = logits(model, processes)
    model(batch_of_ones(processes))  # of which layers stay gathered, unless they are freed after forward
    with frozen.in_place():
        in_place = logits(model, processes)
    return at_first, changed, in_place, logits(model, processes)


def batch_of_ones(processes: Processes) -> Batch:
    ones, starts = torch.ones((1, 8), dtype=torch.int64), torch.tensor([0, 8], dtype=torch.int32)
    return Batch(ones, ones, torch.arange(8)[None], starts, 8).to(processes.device)


def test_a_frozen_copy_computes_what_the_adapter_did(argv: Callable[..., list[str]]):
    strategies = {
        "full_shard": [],
        "shard_grad_op": ["fsdp=shard_grad_op"],
        "no_shard": ["fsdp=no_shard"],
        "offload": ["fsdp=offload"],
    }
    case = "dora, a trained head"
    runs = {name: argv(case, f"frozen-{name}", "training.max_steps=1", *more) for name, more in strategies.items()}
    for name, run in run_ranks(2, train_all, runs, frozen_and_changed)[0].items():
        at_first, changed, in_place, again = run.inspected
        assert torch.equal(at_first, in_place) and torch.equal(changed, again), name
        assert (at_first - changed).abs().max() > 1e-2


def interrupt_and_go_on(run: list[str], adapter: Path) -> tuple[list[float], list[float]]:
    """Losses of a whole run, and of one that goes on from a checkpoint of step 2 once the adapter is gone."""
    whole = train_here([*run[:-1], f"{run[-1]}-whole"]).losses
    train_here([*run, "training.max_steps=3", "checkpoint.every_steps=2"])
    summary = Path(run[-1].removeprefix("run.folder=")) / "summary.json"
    if os.environ["RANK"] == "0":
        summary.unlink()  # as if it had been killed there
        shutil.rmtree(adapter)
    allowed = "checkpoint.allow_changes=[training.max_steps]"
    return whole, train_here([*run, "run.overwrite=false", allowed]).losses


@pytest.mark.parametrize("case", ["dora, a trained head", "new tokens"])
def test_a_resumed_run_needs_the_adapter_no_more(argv, adapters: dict[str, Path], tmp_path: Path, case: str):
    adapter = shutil.copytree(adapters[case], tmp_path / "adapter")
    own = [text for text in argv(case, "resumed", "optim.lr_scheduler_type=constant") if "run.folder" not in text]
    run = [*own, f"lora.start={adapter}", "training.max_steps=4", f"run.folder={tmp_path / 'run'}"]
    whole, rest = run_ranks(2, interrupt_and_go_on, run, adapter)[0]
    assert len(whole) == 4 and rest == whole[2:]
    figures = json.loads((tmp_path / "run" / "summary.json").read_text())["started_from"]
    assert figures["adapter"] == str(adapter) and len(figures["sha256"]) == 64


def test_what_the_result_says_of_its_start(trained, argv: Callable[..., list[str]], adapters: dict[str, Path]):
    case = "new tokens"
    trained("one rank")
    run = Path(load_config(argv(case, "one rank-train")).run.folder)
    card = (run / "adapter" / "README.md").read_text()
    assert f"{NUM_STEPS} steps on from the adapter `{adapters[case].parent.name}/{adapters[case].name}`" in card
    assert f"Note: The adapter starts from {adapters[case]}." in (run / "train.log").read_text()
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    assert tokenizer.convert_tokens_to_ids("</call>") == 260


PREFERENCES = {
    "before training": (2, []),
    "in each step": (2, ["preference.precompute=false"]),
    "in each step, layers stay gathered": (2, ["preference.precompute=false", "fsdp=shard_grad_op"]),
    "in each step, on one rank": (1, ["preference.precompute=false"]),
}


@pytest.fixture(scope="module")
def pairs(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with two answers, of which one is chosen."""
    file, found = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", read_lines(rows)
    both = zip(found[::2], found[1::2], strict=True)
    lines = [{"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"]} for a, b in both]
    return write_lines(file, (line for line in lines if line["chosen"] != line["rejected"]))


def stock_dpo(policy: nn.Module, reference: nn.Module, config: Config) -> list[float]:
    """Losses of DPO (arXiv:2305.18290, equation 7) with two stock models, an answer at a time."""
    params = [param for param in policy.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, config.training.learning_rate, weight_decay=0.0)
    policy.train()
    losses = []
    for answers in global_batches(config):
        pairs = list(zip(answers[::2], answers[1::2], strict=True))
        total = 0.0
        for chosen, rejected in pairs:
            with torch.no_grad():
                before = answer_log_prob(reference, *chosen) - answer_log_prob(reference, *rejected)
            now = answer_log_prob(policy, *chosen) - answer_log_prob(policy, *rejected)
            loss = -F.logsigmoid(0.1 * (now - before)) / len(pairs)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def answer_log_prob(model: nn.Module, tokens: list[int], mask: list[bool]) -> Tensor:
    ids = torch.tensor([tokens])
    logps = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logps[torch.tensor(mask[1:])].sum()


@pytest.fixture(scope="module")
def dpo(argv: Callable[..., list[str]], pairs: Path) -> Callable[..., list[str]]:
    """The command line of a run of DPO."""
    own = ["task=preference", f"data.path={pairs}", "training.learning_rate=1e-2"]
    return lambda name, *more: argv("dora, a trained head", f"dpo-{name}", *own, *more)


@pytest.fixture(scope="module")
def dpo_losses(dpo: Callable[..., list[str]], adapters: dict[str, Path]) -> list[float]:
    """Losses of the reference, which are the same wherever ours has its own."""
    config, adapter = load_config(dpo("stock")), adapters["dora, a trained head"]
    policy, reference = (load_stock_adapter(Path(config.model.path), adapter, config.quant) for _ in range(2))
    return stock_dpo(policy, reference.eval(), config)


@pytest.mark.parametrize("where", PREFERENCES)
def test_the_start_is_the_reference_of_preferences(dpo, dpo_losses: list[float], where: str):
    num_ranks, more = PREFERENCES[where]
    losses = run_ranks(num_ranks, train_here, dpo(list(PREFERENCES).index(where), *more))[0].losses
    assert losses == pytest.approx(dpo_losses, abs=1e-5)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and abs(losses[-1] - losses[0]) > 1e-3


def train_classifiers(first: list[str], on: list[str]) -> None:
    train_here(first)
    train_here(on)


def test_a_classifier_starts_from_a_language_models_adapter_and_from_its_own(
    checkpoint: Callable[..., Path], adapters: dict[str, Path], tmp_path: Path
):
    """The first has a new head, and the second that of the first."""
    case = "rslora, ranks that differ"
    rows = write_labelled_rows(tmp_path / "rows.jsonl", ProblemType.single_label_classification, 20)
    own = [text for text in settings(checkpoint("llama", torch.float32), rows) if not text.startswith(("lora", "run"))]
    own += ["task=sequence_classification", f"task.labels=[{','.join(LABELS)}]", "training.packing=false"]
    first = [*own, f"lora.start={adapters[case]}", "training.max_steps=2", f"run.folder={tmp_path / 'first'}"]
    result = tmp_path / "first" / "adapter"
    still = ["training.max_steps=1", "training.learning_rate=1e-30", f"run.folder={tmp_path / 'on'}"]
    run_ranks(2, train_classifiers, first, [*own, f"lora.start={result}", *still])
    before, after = load_file(result / WEIGHTS), load_file(tmp_path / "on" / "adapter" / WEIGHTS)
    assert before.keys() == after.keys() == {*load_file(adapters[case] / WEIGHTS), "base_model.model.score.weight"}
    assert all(torch.equal(before[key], after[key]) for key in before)


REFUSALS: dict[str, tuple[list[str], str]] = {
    "targets": (["lora.target_modules=all-linear"], "and leave lora.target_modules out"),
    "tokens": (["tokenizer.add_tokens=[<new>]"], "leave out tokenizer.add_tokens"),
    "not a number": ([], "lora_B.weight has 1 NaN or infinite value. Set lora.start to an intact copy"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused(argv, adapters: dict[str, Path], tmp_path: Path, name: str):
    more, message = REFUSALS[name]
    adapter = shutil.copytree(adapters["some layers"], tmp_path / "adapter")
    if name == "not a number":
        tensors = load_file(adapter / WEIGHTS)
        next(value for key, value in tensors.items() if key.endswith("lora_B.weight"))[0, 0] = torch.nan
        save_file(tensors, adapter / WEIGHTS)
    run = [*argv("some layers", f"refused-{name}", *more), f"lora.start={adapter}"]
    with pytest.raises(RanksFailed, match=message.replace("(", r"\(")):
        run_ranks(2, train_here, run)


def test_other_weights_under_the_same_name_are_refused(checkpoint, trained, argv, tmp_path: Path):
    """An adapter of ours knows its base by its weights."""
    case = "rslora, ranks that differ"
    trained("one rank")
    sft = Path(load_config(argv(case, "one rank-train")).run.folder) / "adapter"
    base = checkpoint(CASES[case][0], torch.float32)
    moved = shutil.copytree(base, tmp_path / "moved")
    run = [*argv(case, "moved", "training.max_steps=1"), f"lora.start={sft}", f"model.path={moved}"]
    assert len(run_ranks(1, train_here, run)[0].losses) == 1
    other = tmp_path / "other" / base.name
    make_checkpoint(CASES[case][0], other, torch.float32, seed=1)
    with pytest.raises(RanksFailed, match="holds other weights than those that lora"):
        run_ranks(1, train_here, [*run, f"model.path={other}"])
