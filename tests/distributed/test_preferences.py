"""Preferences: losses and figures of stock libraries at 1 to 4 ranks, packed and padded, precomputed and not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import write_lines
from tests.helpers.preferences import stock_figures, write_judged, write_pairs
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import save_stock_adapter
from tests.helpers.runs import Trained, settings, train_all

pytestmark = pytest.mark.distributed
NUM_STEPS = 4
LOSS, START = "preference.loss=", "lora.start=ADAPTER"
CASES = {
    "dpo, ten steps": ["training.max_steps=10"],
    "dpo, padded": ["training.packing=false", "preference.beta=0.3"],
    "dpo, reference in the step": ["preference.precompute=false", "memory.activations=full"],
    "dpo, padded, reference in the step": ["training.packing=false", "preference.precompute=false"],
    "conservative dpo": ["preference.label_smoothing=0.2", "data.eval_fraction=0.2", "training.eval_every_steps=2"],
    "dpo with likelihood": ["preference.sft_weight=0.5", "memory.activations=selective"],
    "dpo, cut rows": ["training.max_length=32"],
    "ipo": [f"{LOSS}ipo"],
    "hinge": [f"{LOSS}hinge", "fsdp.reshard_after_forward=false", "preference.precompute=false"],
    "robust": [f"{LOSS}robust", "preference.label_smoothing=0.1"],
    "simpo": [f"{LOSS}simpo", "preference.simpo_gamma=0.5"],
    "cpo": [f"{LOSS}cpo"],
    "cpo, padded": [f"{LOSS}cpo", "preference.sft_weight=0.0", "training.packing=false"],
    "orpo": [f"{LOSS}orpo", "lora.modules_to_save=[lm_head]"],
    "kto": [f"{LOSS}kto", "preference.desirable_weight=1.5"],
    "kto, cut rows": [f"{LOSS}kto", "training.max_length=32"],
    "kto, padded, reference in the step": [f"{LOSS}kto", "training.packing=false", "preference.precompute=false"],
    "kto from an adapter, reference in the step": [f"{LOSS}kto", START, "preference.precompute=false"],
}
# On one rank, where four sequences are computed at once: what differs in how these are laid out, not in the loss alone.
ON_ONE = (
    *("dpo, ten steps", "dpo, padded", "dpo, reference in the step", "dpo, padded, reference in the step"),
    *("conservative dpo", "dpo, cut rows", "kto", "kto, padded, reference in the step"),
)
# A step of twelve sequences, which three and four ranks share.
MORE_RANKS = ["training.global_batch_size=12", "training.max_steps=2"]
ON_MORE = {
    "dpo, twelve": MORE_RANKS,
    "dpo, padded, twelve": ["training.packing=false", "preference.precompute=false", *MORE_RANKS],
    "kto, twelve": [f"{LOSS}kto", *MORE_RANKS],
}
# Runs that go on from a checkpoint, with empty caches: the reference is what the model was before its first step.
RESUMED = {
    "dpo resumed": [],
    "dpo from an adapter resumed": [START],
    "kto resumed": [f"{LOSS}kto", "training.packing=false"],
}
MICRO = {1: 4, 2: 1, 3: 2, 4: 1}  # sequences a rank a forward pass: on two ranks a step is two of these


def cases_on(num_ranks: int) -> Iterable[str]:
    return {1: ON_ONE, 2: CASES}.get(num_ranks, ON_MORE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    make_checkpoint("llama", folder / "model")
    write_pairs(folder / "pairs.jsonl")
    write_judged(folder / "judged.jsonl")
    save_stock_adapter(folder / "model", {"r": 8, "target_modules": ["q_proj", "up_proj"]}, folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def argv(folder: Path) -> Callable[[str, int], list[str]]:
    """`argv(case, num_ranks)`: the settings of a case."""

    def make(case: str, num_ranks: int) -> list[str]:
        more = [text.replace("ADAPTER", str(folder / "adapter")) for text in (CASES | ON_MORE | RESUMED)[case]]
        rows = folder / ("judged.jsonl" if case.startswith("kto") else "pairs.jsonl")
        run = folder / f"{case.replace(' ', '_').replace(',', '')}-{num_ranks}"
        own = ["task=preference", f"training.max_steps={NUM_STEPS}", f"training.micro_batch_size={MICRO[num_ranks]}"]
        return [*settings(folder / "model", rows), *own, f"run.folder={run}", *more]

    return make


@pytest.fixture(scope="module")
def runs(argv: Callable[[str, int], list[str]]) -> Callable[[int], list[dict[Any, Trained]]]:
    """`runs(num_ranks)`: every case on so many ranks."""

    def run(num_ranks: int) -> list[dict[Any, Trained]]:
        wanted = {case: argv(case, num_ranks) for case in cases_on(num_ranks)}
        for case in RESUMED if num_ranks == 2 else ():
            plain, folder = argv(case, 2), Path(load_config(argv(case, 2)).run.folder)
            wanted[case, "straight"] = [*plain, "checkpoint.every_steps=2", f"data.cache_folder={folder}-cache"]
            places = [f"run.folder={folder}-on", f"data.cache_folder={folder}-on-cache"]
            wanted[case, "resumed"] = [*plain, *places, f"checkpoint.resume={folder}/checkpoints/step-00000002"]
        return run_ranks(num_ranks, train_all, wanted)

    return once(run)


def lines_of(argv: list[str], kind: str = "loss") -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl that have a figure."""
    file = Path(load_config(argv).run.folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if kind in line]


@pytest.mark.parametrize(("case", "num_ranks"), [(case, n) for n in MICRO for case in cases_on(n)], ids=str)
def test_stock_libraries_give_the_same_figures(runs, argv, case: str, num_ranks: int) -> None:
    runs(num_ranks)
    expected, lines = stock_of(tuple(argv(case, 1))), lines_of(argv(case, num_ranks))
    assert len(lines) == len(expected) == load_config(argv(case, 1)).training.max_steps
    for line, figures in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(figures["loss"], abs=1e-5)
        assert {name: line[name] for name in figures} == pytest.approx(figures, abs=1e-5, rel=1e-5)
    assert expected[0]["loss"] != pytest.approx(expected[-1]["loss"], abs=1e-3)


stock_of = once(lambda argv: stock_figures(argv))


@pytest.mark.parametrize("case", ["dpo, ten steps", "kto"])
def test_one_and_two_ranks_save_the_same_adapter(runs, argv, case: str) -> None:
    runs(1), runs(2)
    one, two = (
        load_file(Path(load_config(argv(case, n)).run.folder) / "adapter/adapter_model.safetensors") for n in (1, 2)
    )
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name] - two[name]).abs().max() < 2e-4


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_same_bit_for_bit(runs, argv, case: str) -> None:
    found = runs(2)[0]
    assert found[case, "resumed"].losses == found[case, "straight"].losses[2:]
    folder = load_config(argv(case, 2)).run.folder
    straight, resumed = (Path(f"{folder}{end}", "adapter/adapter_model.safetensors") for end in ("", "-on"))
    assert straight.read_bytes() == resumed.read_bytes()


def test_evaluation_has_the_figures_of_held_out_pairs(runs, argv) -> None:
    runs(1), runs(2)
    one, two = (lines_of(argv("conservative dpo", n), "eval_loss") for n in (1, 2))
    assert [line["step"] for line in one] == [0, 2, 4]
    assert one[0]["eval_rewards/margins"] == 0
    assert 0 < one[-1]["eval_rewards/accuracies"] <= 1
    assert one[-1]["eval_rewards/margins"] == pytest.approx(
        one[-1]["eval_rewards/chosen"] - one[-1]["eval_rewards/rejected"], abs=1e-5
    )
    for first, second in zip(one, two, strict=True):
        del first["eval_seconds"], second["eval_seconds"]
        assert first == pytest.approx(second, abs=1e-5, rel=1e-5)


# A run and one after it, which may not take the first one's reference: they differ in this.
OTHER_REFERENCES = {
    "scaled positions": ([], ["model.rope_scaling={rope_type:linear,factor:4.0}"]),
    "another config of the same weights": ([], ["model.path=OTHER"]),
    "answers to other prompts that are cut": (
        [f"{LOSS}kto", "data.path=UNLIKE", "training.max_length=40"],
        [f"{LOSS}kto", "data.path=UNLIKE", "training.max_length=64"],
    ),
}


@pytest.mark.parametrize("case", OTHER_REFERENCES)
def test_a_reference_of_something_else_is_not_taken_from_the_cache(folder: Path, tmp_path: Path, case: str) -> None:
    other = shutil.copytree(folder / "model", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    unlike = [  # no row is cut, but prompts with other answers are
        {"prompt": "a" * 30 if n % 2 else "b", "completion": "c" if n % 2 else f"{n}" + "d" * 30, "label": n % 4 < 2}
        for n in range(8)
    ]
    write_lines(tmp_path / "unlike.jsonl", unlike)

    def argv(name: str, cache: str, more: list[str]) -> list[str]:
        own = ["task=preference", "training.max_steps=3", f"run.folder={tmp_path / name}"]
        more = [text.replace("OTHER", str(other)).replace("UNLIKE", str(tmp_path / "unlike.jsonl")) for text in more]
        plain = settings(folder / "model", folder / "pairs.jsonl")
        return [*plain, *own, f"data.cache_folder={tmp_path / cache}", *more]

    first, second = OTHER_REFERENCES[case]
    wanted = {"first": ("cache", first), "second": ("cache", second), "alone": ("empty", second)}
    run_ranks(1, train_all, {name: argv(name, *how) for name, how in wanted.items()})
    found, expected = (lines_of(argv(name, *wanted[name])) for name in ("second", "alone"))
    for line, other_line in zip(found, expected, strict=True):
        for name in ("loss", "rewards/margins", *(["kl"] if "kto" in second[0] else [])):
            assert line[name] == other_line[name]
