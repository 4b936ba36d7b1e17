"""tracking.num_generations: what a model in training writes at evaluations is what transformers and PEFT write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import peft
import pytest
import torch

from qlora_fsdp.decoding.completer import Completer, Request
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.by_rows import ByRows
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.preferences import write_pairs
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import load_stock
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
NUM_TOKENS = 8


# Ranks that share the model write all texts together, others each their share. Of pairs, the chosen answer stands
# beside the completion. Rows of 3 ranks do not divide evenly, and groups of scales lie across them.
CASES = {
    "FULL_SHARD": (2, "llama", ["quant=none"]),
    "NO_SHARD": (2, "llama", ["quant=none", "fsdp.sharding_strategy=NO_SHARD"]),
    "pairs": (2, "llama", ["quant=none", "fsdp.sharding_strategy=NO_SHARD", "task=preference"]),
    "groups of ranks": (4, "llama", ["quant=none", "fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.hybrid_shard_size=2"]),
    "layers that stay gathered": (2, "llama", ["fsdp.sharding_strategy=SHARD_GRAD_OP"]),
    "uneven rows": (3, "llama", ["quant.bnb_4bit_use_double_quant=true"]),
    "tied embeddings": (2, "qwen2", []),
    "embeddings in int8": (2, "llama", ["quant.embeddings=int8"]),
    "quantized experts": (2, "qwen3_moe", ["quant.bnb_4bit_use_double_quant=true", "lora.target_modules=[q_proj]"]),
    "experts that ranks can't share": (3, "qwen3_moe", ["quant=none", "lora.target_modules=[q_proj]"]),
    "DoRA": (2, "llama", ["quant=none", "lora.use_dora=true"]),
}
BY_PASSES = {"experts that ranks can't share": "4 experts can't be shared by 3 ranks", "DoRA": "need whole weights"}


@pytest.fixture(scope="module")
def trained(
    checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[str]]:
    """`trained(case)`: the settings of a run that has ended; all runs on a number of ranks share one world."""
    base = tmp_path_factory.mktemp("generations")
    pairs = write_pairs(base / "pairs.jsonl")

    def argv(case: str) -> list[str]:
        num_ranks, family, more = CASES[case]
        data = pairs if "task=preference" in more else rows
        few = ["training.precision=float32", "training.max_steps=6", f"training.global_batch_size={num_ranks}"]
        few += ["data.eval_fraction=0.1", "training.eval_every_steps=3", "training.learning_rate=0.02"]
        few += ["tracking.num_generations=3", f"tracking.generation_tokens={NUM_TOKENS}"]
        return settings(checkpoint(family, torch.float32), data, *few, f"run.folder={base / case}", *more)

    @once
    def world(num_ranks: int) -> None:
        run_ranks(num_ranks, train_all, {case: argv(case) for case in CASES if CASES[case][0] == num_ranks})

    def find(case: str) -> list[str]:
        world(CASES[case][0])
        return argv(case)

    return find


@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_stock_generate(case: str, trained: Callable[[str], list[str]]):
    config = load_config(trained(case))
    model, folder = Path(config.model.path), Path(config.run.folder)
    lines = read_lines(folder / "generations.jsonl")
    assert [line["step"] for line in lines] == [0] * 3 + [3] * 3 + [6] * 3
    expected = {tuple(row.values())[:2] for row in read_lines(Path(config.data.path))}
    assert all((line["prompt"], line["reference"]) in expected for line in lines)

    stock = load_stock(model, config.quant)
    assert [line["completion"] for line in lines[:3]] == [complete(stock, line["prompt"]) for line in lines[:3]]
    trained = peft.PeftModel.from_pretrained(stock, folder / "adapter")
    assert [line["completion"] for line in lines[6:]] == [complete(trained, line["prompt"]) for line in lines[6:]]
    assert lines[0]["completion"] != lines[6]["completion"]
    page = (folder / "report.html").read_text()
    assert "<h2>What the model wrote</h2>" in page and "<th>step 0</th><th>step 6</th>" in page
    said = (folder / "train.log").read_text()
    assert ("a pass through the model" in said) is (case in BY_PASSES) and BY_PASSES.get(case, "") in said


WHOLE = "lora.modules_to_save=[embed_tokens,lm_head]"


def copied(model: TaskModel, processes: Processes) -> list[str]:
    """The matrices of the base's embeddings and layers of which a rank would have the whole to write text."""
    wholes = {id(param) for param, _ in ByRows(model).copies if param.ndim > 1}
    names = {name for name, param in model.base.named_parameters() if id(param) in wholes}
    return sorted(name for name in names if "lora_" not in name)


def test_no_rank_copies_embeddings_head_or_layers(checkpoint: Callable[..., Path], rows: Path):
    """FSDP gives the head, a unit of its own, another class. Falcon's linear layers have one of their own."""
    cases = {"llama": ("llama", []), "trained whole": ("llama", [WHOLE]), "falcon": ("falcon", ["quant=none"])}
    runs = {case: settings(checkpoint(f), rows, "training.packing=auto", *more) for case, (f, more) in cases.items()}
    found = run_ranks(2, train_all, runs, copied, False)[0]
    assert {case: run.inspected for case, run in found.items()} == {case: [] for case in cases}


def test_a_head_that_is_trained_writes_in_the_dtype_of_its_input(
    checkpoint: Callable[..., Path], rows: Path, tmp_path: Path
):
    """Its weights are float32."""
    argv = settings(checkpoint("llama"), rows, WHOLE, "training.precision=bfloat16", "training.max_steps=1")
    argv += ["data.eval_fraction=0.1", "tracking.num_generations=1", f"run.folder={tmp_path / 'run'}"]
    run_ranks(2, train_all, {0: [*argv, f"tracking.generation_tokens={NUM_TOKENS}"]})
    assert len(read_lines(tmp_path / "run" / "generations.jsonl")) == 2
    assert "a pass through the model" not in (tmp_path / "run" / "train.log").read_text()


def train_with_one_short(argv: list[str]) -> None:
    """Rank 1 of the world has no memory for a cache."""
    complete = Completer.complete

    def complete_or_fail(completer: Completer, requests: list[Request]) -> None:
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        complete(completer, requests)

    with patch.object(Completer, "complete", complete_or_fail):
        train_all({0: argv})


def test_a_rank_without_memory_writes_by_passes_and_rank_0_says_so(
    checkpoint: Callable[..., Path], rows: Path, tmp_path: Path
):
    argv = settings(checkpoint("llama"), rows, "training.max_steps=1", "data.eval_fraction=0.1")
    argv += ["fsdp.sharding_strategy=NO_SHARD", "tracking.num_generations=2", f"run.folder={tmp_path / 'run'}"]
    run_ranks(2, train_with_one_short, argv)
    assert len(read_lines(tmp_path / "run" / "generations.jsonl")) == 4
    said = (tmp_path / "run" / "train.log").read_text()
    assert "a pass through the model for every token: CUDA out of memory. Tried to allocate 2 GiB" in said


def fail_in_the_middle(model: TaskModel, processes: Processes) -> bool:
    """Whether a model is afterwards as it was before."""

    def state() -> list[tuple[object, ...]]:
        return [
            (
                vars(module).get("forward"),
                {name: id(param) for name, param in module._parameters.items()},
                list(module._forward_pre_hooks.items()),
                list(module._forward_hooks.items()),
                getattr(module, "padding_idx", None),
            )
            for module in model.modules()
        ]

    by_rows, before = ByRows(model), state()
    with pytest.raises(RuntimeError, match="indices"), by_rows.in_use():
        assert state() != before
        model.base(torch.tensor([[0.5]]))
    return state() == before


def test_an_error_while_text_is_written_leaves_the_model_as_it_was(checkpoint: Callable[..., Path], rows: Path):
    argv = settings(checkpoint("llama"), rows)
    assert [rank[0].inspected for rank in run_ranks(2, train_all, {0: argv}, fail_in_the_middle, False)] == [True] * 2


def test_completions_end_with_a_table_of_positions(checkpoint: Callable[..., Path], tmp_path: Path):
    """The model has embeddings of 256 positions, and a prompt takes 250 of them."""
    lines = [{"prompt": letter * 249, "completion": " b"} for letter in "abcd"]
    rows, folder = write_lines(tmp_path / "rows.jsonl", lines), tmp_path / "run"
    argv = settings(checkpoint("opt", torch.float32), rows, "training.max_steps=1", packing=False)
    argv += ["training.max_length=256", "data.eval_fraction=0.5", "tracking.num_generations=1", f"run.folder={folder}"]
    run_ranks(1, train_all, {"run": argv})
    assert [len(line["completion"]) <= 6 for line in read_lines(folder / "generations.jsonl")] == [True, True]


def complete(model: torch.nn.Module, prompt: str) -> str:
    """By transformers' own greedy search, with its cache."""
    ids = torch.tensor([[256, *prompt.encode()]])
    output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=257)
    tokens = [token for token in output[0, ids.shape[1] :].tolist() if token < 256]
    return bytes(tokens).decode(errors="replace")
