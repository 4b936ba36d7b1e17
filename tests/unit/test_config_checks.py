"""What is refused, and with which words: by the configuration alone, by the launch, by accelerate's environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from tests.helpers.quick_config import check, load_config

from qlora_fsdp.common.errors import ConfigError, DeviceError
from qlora_fsdp.config.checks.check_launch import check_launch_environment, follow_launcher
from qlora_fsdp.config.checks.check_settings import Needs, check_settings, check_world
from qlora_fsdp.config.schema import Config, ShardingStrategy
from qlora_fsdp.config.settings import all_settings
from qlora_fsdp.config.world import World, round_default
from qlora_fsdp.data.files.row_files import COMPRESSIONS, READERS, TEXT_SUFFIXES
from qlora_fsdp.records.check_run_folder import check_run, mark

CLASSIFY = "task=sequence_classification data=default data.path=org/name"
DRY_RUN = ["model=tiny", "data=random", "training.max_steps=10"]
GPU = World(num_ranks=8, local_num_ranks=4, device_type="cuda", has_fp8=True)


def configure(*overrides: str) -> Config:
    return load_config([*DRY_RUN, *overrides])


def complaints(config: Config, world: World = GPU) -> list[str]:
    problems = [*check_run(config), *check_world(config, world)]
    assert all(problem.setting in all_settings() for problem in problems)
    return [str(problem) for problem in problems]


def test_dry_run_has_no_problem() -> None:
    assert complaints(configure()) == []


def test_a_system_prompt_is_for_rows_of_conversations_and_for_prompts() -> None:
    settings = ["task=preference", "data=default", "data.system_prompt=x", "data.path=org/name"]
    (message,) = complaints(configure(*settings))
    assert "data.system_prompt=x has no effect with task.name=preference" in message
    without_rows = check_settings(configure(*settings, "data.path=null"), Needs(optional=("data.path",)))  # `generate`
    assert without_rows == []


def test_a_config_that_would_not_be_read_is_refused() -> None:
    own = ["model=custom", "model.path=org/name", "data=default", "data.path=org/name", "model.config.rms_norm_eps=0.1"]
    (message,) = complaints(configure(*own))
    assert "model.config={rms_norm_eps: 0.1} has no effect on model.weights=checkpoint" in message
    assert complaints(configure(*own, "model.weights=random")) == []


def test_every_kind_of_file_that_is_read_is_missed() -> None:
    for suffix in (*READERS, *TEXT_SUFFIXES, *(f".jsonl{suffix}" for suffix in COMPRESSIONS)):
        (problem,) = complaints(configure(f"data.eval_path=held_out{suffix}"))
        assert f"held_out{suffix} does not exist" in problem


def test_wandb_is_missed_before_the_run_where_a_key_turns_it_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("checks.check_model", "trackers"):
        monkeypatch.setattr(f"qlora_fsdp.config.{module}.find_spec", lambda name: None)
    monkeypatch.setenv("HOME", str(tmp_path))  # without .netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert complaints(configure("tracking=wandb")) == []
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    expected = "tracking.report_to=[wandb] needs the package wandb, which is not installed."
    assert [problem.startswith(expected) for problem in complaints(configure("tracking=wandb"))] == [True]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("quant.load_in_8bit=true", "quant.load_in_8bit=true contradicts quant.load_in_4bit=true."),
        ("model=custom", "model.path=null names no model."),
        ("model=custom model.weights=random", "model.weights=random has no config"),
        ("model.path=/no/where", "model.path=/no/where does not exist."),
        ("model.path=./nowhere", "model.path=./nowhere does not exist."),
        ("model.path=~/no/where", "model.path=~/no/where does not exist."),
        ("model.tokenizer_path=/no/where", "model.tokenizer_path=/no/where does not exist."),
        ("data.path=/no/chats", "data.path=/no/chats does not exist"),
        ("data.path=chats.jsonl", "data.path=chats.jsonl does not exist, seen from"),
        ("data.eval_path=./held_out.csv", "data.eval_path=./held_out.csv does not exist"),
        ("data.path=gone/*.jsonl", "data.path=gone/*.jsonl matches no file, seen from"),
        ("data.path=gone/*.jsonl", "to a folder, whose files are all read, or to a list of files. For several data"),
        ("data.path=[org/a,gone.jsonl]", "data.path=[org/a,gone.jsonl] names gone.jsonl, which does not exist"),
        ("data.path=[/no(1).jsonl,b]", "names /no(1).jsonl, which does not exist"),
        ("data.path=[]", "data.path=[] must be text or a list such as [a,b] or null. Set data.path to a file"),
        ("data.eval_path={a: 3}", "data.eval_path={a: 3} must be text or a list"),
        ("data.columns={question:prompt}", "Did you mean data.columns={prompt: question}?"),
        ("data.columns={promt:a}", "renames promt, which no form of rows has. The names to set are messages, role"),
        ("data=default data.path=null", "data.path=null names no data."),
        ("tokenizer.add_tokens=[a,b,a]", "names a token twice, or one that tokenizer.add_special_tokens names too: a."),
        ("tokenizer.add_tokens=['']", "has a token that is empty."),
        ("lora.target_modules='(['", "has ([, which is no regular expression: unterminated character set"),
        ("lora.rank_pattern={*q_proj: 4}", "has *q_proj, which is no regular expression: nothing to repeat"),
        ("quant.llm_int8_skip_modules=['*lm_head']", "has *lm_head, which is no regular expression"),
        ("data.chat_template=chatml2", "is neither a file nor one of alpaca, chatml, llama3."),
        (f"data.chat_template='{'{{ messages }}' * 30}'", "is neither a file nor one of alpaca, chatml, llama3."),
        ("compute.cuda_graph=maybe", "compute.cuda_graph=maybe must be true, false or auto."),
        ("training.packing=always", "training.packing=always must be true, false or auto."),
        (
            "memory.keep_dequantized=always",
            "memory.keep_dequantized=always must be true, false or run. Set memory.keep_dequantized=true.",
        ),
        ("memory.keep_dequantized=RUN", "must be true, false or run. Set memory.keep_dequantized=run."),
        ("memory.keep_dequantized=off", "must be true, false or run. Set memory.keep_dequantized=false."),
        ("memory.keep_dequantized=1", "must be true, false or run. Set memory.keep_dequantized=true."),
        ("memory.keep_dequantized='true'", "must be true, false or run. Leave out the quotes."),
        ("training.packing=null", "must be true, false or auto. Set training.packing=false."),
        ("task.labels=[a,b]", "task.labels=[a,b] has no effect with task.name=causal_lm."),
        (
            "task=sequence_classification task.labels=[a,b]",
            "data.format=random has no effect with task.name=sequence_classification",
        ),
        (f"{CLASSIFY}", "task.labels=null names too few labels."),
        (f"{CLASSIFY} task.labels=[a,a]", "task.labels=[a,a] names a label twice."),
        (f"{CLASSIFY} task.labels=[a,b] training.packing=true", "training.packing=true can't be used with task.name="),
        (
            f"{CLASSIFY} task.labels=[a,b] task.class_weights=[1]",
            "task.class_weights=[1] is neither `balanced` nor a positive number for each of the 2 labels.",
        ),
        (
            f"{CLASSIFY} task.problem_type=regression task.class_weights=balanced",
            "task.class_weights=balanced has no effect on a regression.",
        ),
        (
            "task=token_classification data=default data.path=org/name task.labels=[a] task.problem_type=regression",
            "task.problem_type=regression can't be used with task.name=token_classification: a word has one label.",
        ),
        ("training.eval_every_steps=5", "training.eval_every_steps=5 has no data to evaluate on."),
        ("training.max_steps=null", "training.max_steps=null sets no end"),
        (
            "training.deterministic=true model.attn_implementation=flash_attention_4",
            "model.attn_implementation=flash_attention_4 adds gradients in any order",
        ),
        ("training.precision=float16", "training.precision=float16 needs loss scaling"),
        (
            "training.precision=bfloat16 quant.bnb_4bit_compute_dtype=float32",
            "quant.bnb_4bit_compute_dtype=float32 contradicts training.precision=bfloat16",
        ),
        (
            "quant.embeddings=int8 lora.modules_to_save=[lm_head]",
            "quant.embeddings=int8 keeps codes, which can't be trained, and lora.modules_to_save has lm_head",
        ),
        ("quant.bnb_4bit_compute_dtype=float16", "quant.bnb_4bit_compute_dtype=float16 needs loss scaling"),
        ("compute=fp8 quant.bnb_4bit_compute_dtype=float32", "compute.matmul=fp8 gives bfloat16"),
        ("compute=fp8 quant=int8", "compute.matmul=fp8 works on nf4 and fp4 weights alone"),
        ("compute=fp8 training.precision=float32", "compute.matmul=fp8 gives bfloat16"),
        ("lora.init_lora_weights=1", "lora.init_lora_weights=1 is not an initialisation"),
        ("lora.init_lora_weights=pissa", "lora.init_lora_weights=pissa starts from the base weights"),
        ("lora.init_lora_weights=pissa_niter_16", "which are packed codes here"),
        ("lora.init_lora_weights=loftq quant=none", "rounds away, and nothing is quantized. Set lora.init"),
        ("lora.init_lora_weights=LoftQ lora.use_dora=true", "is not for DoRA"),
        ("lora.init_lora_weights=loftq model.cache_quantized=true", "needs the full weights"),
        ("lora.init_lora_weights=loftq task=preference", "the reference is the base without it"),
        ("lora.init_lora_weights=olora quant=none", "of which a rank has only a part"),
        ("lora.init_lora_weights=orthogonal lora.r=3", "lora.init_lora_weights=orthogonal needs even ranks"),
        ("lora.init_lora_weights=Orthogonal lora.r=5", "needs even ranks, and one is 5."),
        ("lora.init_lora_weights=false", "is not an initialisation that leaves the base model as it is."),
        ("lora.target_modules=[]", "is neither a list of names nor a regular expression."),
        ("lora.target_modules=3", "is neither a list of names nor a regular expression."),
        ("lora.rank_pattern={q_proj: 0}", "has a value that is not positive."),
        ("fsdp=no_shard fsdp.cpu_offload=true", "fsdp.cpu_offload=true needs shards to offload"),
        ("fsdp=offload optim=adamw_8bit", "optim.name=adamw_8bit keeps its state on the GPU"),
        ("fsdp.hybrid_shard_size=4", "has no effect with fsdp.sharding_strategy=auto."),
        ("fsdp=shard_grad_op fsdp.reshard_after_forward=true", "fsdp.reshard_after_forward=true contradicts"),
        ("fsdp=hybrid_shard fsdp.hybrid_shard_size=3", "does not divide 8 ranks. Set fsdp.hybrid_shard_size=4."),
        ("memory.tile_tokens=many", "memory.tile_tokens=many must be a whole number, auto or null."),
        ("memory.tile_tokens=8", "memory.tile_tokens=8 must be finite and at least 64."),
        ("memory.tile_tokens=512 lora.lora_dropout=0.1", "and lora.lora_dropout would drop other values then."),
        ("optim.betas=[0.9]", "optim.betas=[0.9] must be two numbers"),
        ("optim.warmup_steps=10", "leaves no step after the warmup"),
        (
            "training.global_batch_size=7 training.micro_batch_size=2",
            "training.global_batch_size=7 is not a multiple of micro_batch_size 2 x 8 ranks = 16. "
            "Set training.global_batch_size=16.",
        ),
        ("training.global_batch_size=39", "Set training.global_batch_size=40."),
        ("run.folder=''", "run.folder= is empty."),
    ],
)
def test_refused(overrides: str, expected: str) -> None:
    parts = [overrides] if "{" in overrides else overrides.split()
    (message,) = complaints(configure(*parts))
    assert expected in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.path=org/a", "data.mix={org/b:1}"], "data.path=org/a contradicts data.mix={org/b: 1"),
        (["data.mix={org/a:1,org/b:0}"], "names org/b, which has a weight that is not positive."),
        (["data.path=org/a", "data.streaming=true", "training.max_steps=null"], "data.streaming=true needs an end"),
        (["data.path=org/a", "data.streaming=true", "data.eval_fraction=0.1"], "can't be held out of data that is"),
        (["data.path=org/a", "data.streaming=true", "data.near_duplicates=0.8"], "near_duplicates=0.8 needs all rows"),
        (["data.path=org/a", "data.streaming=true", "data.seed=0"], "data.seed=0 needs all rows"),
        (["data.decontaminate=true"], "data.decontaminate=true has no evaluation data to compare with."),
        (["data.max_tokens=64", "training.max_length=64"], "has no effect: rows are cut at training.max_length=64."),
        (["data.min_tokens=65", "training.max_length=64"], "leaves no row: training.max_length=64 is below it."),
        (["data.min_tokens=9", "data.max_tokens=8"], "leaves no row: data.max_tokens=8 is below it."),
        (["data.near_duplicates=1"], "data.near_duplicates=1.0 must be"),
        (["data.path=org/a", "data.streaming=true", "data.max_rows=9"], "data.max_rows=9 is drawn from all rows"),
        (["data.mix={a.jsonl:1}"], "names a.jsonl, which does not exist, seen from"),
        (["data.mix={org/a:{weight:-1}}"], "names org/a, which has a weight that is not positive."),
        (
            ["data.mix={org/a:{wieght:1}}"],
            "names org/a, which has wieght, and the settings of a data set are weight, max",
        ),
        (["data.mix={org/a:many}"], "names org/a, which has 'many', which is neither a weight nor a mapping"),
        (["data.mix={org/a:{max_rows:0}}"], "has max_rows=0, which is no whole number of at least 1."),
        (["data.mix={org/a:{columns:{question:prompt}}}"], "renames question, which no form of rows has."),
        (["data.mix={org/a:{split:'train[5'}}"], "whose split train[5 is neither the name of a split nor a slice"),
        (["data.split='train[a:]'"], "is neither the name of a split nor a slice such as train[:5000]"),
        (["data.split='train[5:2]'"], "data.split=train[5:2] has no rows, because it ends where it begins or before."),
        (["data.split='[100%:]'"], "has no rows, because it ends where it begins or before."),
        (["data.mix={org/a:{split:'train[-2:-2]'}}"], "whose split train[-2:-2] has no rows, because it ends"),
        (["data.eval_split=test"], "has no effect without data.eval_path."),
        (["data.mix={a: 1}", "data.mix_until=0"], "data.mix_until=0 must be finite and at least 1."),
        (
            ["data.mix={a: 1}", "data.mix_until=longer"],
            "data.mix_until=longer must be a whole number, longest or shortest.",
        ),
        (["data.mix={a: {format: chats}}"], "which has format=chats, which is none of auto, messages"),
        (["data.mix={a: {chat_template: none}}"], "whose chat_template is neither a file nor one of"),
        (["data.mix_until=shortest"], "data.mix_until=shortest has no effect on one data set."),
        (
            ["data.mix={org/a:{max_rows:5}}", "data.streaming=true"],
            "has max_rows of data sets, which data.streaming=true",
        ),
        (
            ["data.mix={org/a:1}", "data.mix_until=shortest", "data.streaming=true"],
            "needs the lengths of all data sets",
        ),
    ],
)
def test_mixes_and_streams_that_are_refused(overrides: list[str], expected: str) -> None:
    (message,) = complaints(configure("data=default", *overrides))
    assert expected in message


def test_a_split_that_the_files_here_do_not_have_is_refused(tmp_path: Path) -> None:
    """`test` of a file would be all of its rows, those that are trained on too."""
    rows, saved = tmp_path / "rows.jsonl", tmp_path / "saved"
    rows.write_text('{"text": "a"}\n')
    by_name = {name: datasets.Dataset.from_list([{"text": "a"}]) for name in ("train", "extra")}
    datasets.DatasetDict(by_name).save_to_disk(str(saved))
    (problem,) = complaints(configure("data=default", f"data.path={rows}", "data.split=test"))
    assert problem == (
        f"data.split=test is no split of {rows}, which has no splits: all its rows are train. Leave data.split out."
    )
    (problem,) = complaints(configure(f"data.eval_path={rows}", "data.eval_split='test[:2]'"))
    assert "data.eval_split=test[:2] is no split of" in problem
    (problem,) = complaints(configure("data=default", f"data.mix={{{rows}: {{split: test}}, org/a: 1}}"))
    assert f"data.mix.{rows}.split=test is no split of" in problem
    (problem,) = complaints(configure("data=default", f"data.mix={{{rows}: 1}}", "data.split=test"))
    assert f"data.split=test is no split of {rows}" in problem
    (problem,) = complaints(configure("data=default", f"data.path={saved}", "data.split=test"))
    assert "which has extra, train. Set it to one of these." in problem
    own = ["data=default", f"data.path={saved}", "data.split='extra[:1]'", f"data.eval_path={rows}"]
    assert complaints(configure(*own)) == complaints(configure("data=default", "data.path=org/a", "data.split=x")) == []


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "-inf"])
def test_numbers_must_be_finite_and_in_range(text: str) -> None:
    (message,) = complaints(configure(f"training.learning_rate={text}"))
    assert "must be finite and greater than 0. Set training.learning_rate=0.0002, the default" in message


def test_every_number_has_a_range() -> None:
    config = configure()
    keys = [key for key, setting in all_settings().items() if setting.type in (int, float)]
    for section, _, name in (key.partition(".") for key in keys):
        setattr(getattr(config, section), name, -3)
    assert [m.partition("=-3 must be finite")[0] for m in complaints(config) if "must be finite" in m] == keys


def test_hub_names_and_existing_paths_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    (tmp_path / "my-llama").mkdir()
    paths = ["model.path=my-llama", "data.path=chats.jsonl", "data.format=auto"]
    assert complaints(configure(*paths, "model.weights=checkpoint")) == []
    assert "model=tiny makes its weights up" in complaints(configure(*paths))[0]
    assert complaints(load_config(["model.path=org/llama", "data.path=org/chats"])) == []


@pytest.mark.parametrize(
    ("override", "world", "expected"),
    [
        ("training.precision=bfloat16", replace(GPU, has_bf16=False), "this GPU does not compute in bfloat16"),
        ("compute=fp8", replace(GPU, has_fp8=False), "only Ada, Hopper and later GPUs multiply in fp8"),
        ("model.attn_implementation=varlen", World(), "runs on GPUs only"),
        ("fsdp=hybrid_shard", replace(GPU, num_ranks=6), "(groups of 4) does not divide 6 ranks."),
    ],
)
def test_refused_by_the_device_only(override: str, world: World, expected: str) -> None:
    config = configure(override)
    assert complaints(config) == []
    (message,) = complaints(config, world)
    assert expected in message


@pytest.mark.parametrize(
    ("num_slices", "num_ranks", "more", "expected"),
    [
        (3, 8, [], "does not divide 8 ranks into groups that share sequences. Set it to one of 1, 2, 4, 8, or"),
        (16, 8, [], "does not divide 8 ranks"),
        (
            2,
            8,
            ["task=preference", "data.format=auto", "data.path=org/x"],
            "can't be used with task.name=preference: a",
        ),
        (2, 8, ["training.router_aux_loss_coef=0.1"], "can't be used with training.router_aux_loss_coef=0.1: a rank"),
        (2, 8, ["model.attn_implementation=sdpa"], "Set distributed.context_parallel=1, or model.attn_implementation="),
        (2, 8, ["training.global_batch_size=6"], "is not a multiple of 4 groups of ranks. Set training.global_batch"),
        ("two", 8, [], "must be a whole number or auto. Set distributed.context_parallel=auto, the default."),
    ],
)
def test_ranks_that_cannot_share_sequences(
    num_slices: int | str, num_ranks: int, more: list[str], expected: str
) -> None:
    world = World(num_ranks, 0, num_ranks, 0, device_type="cuda")
    found = complaints(configure(f"distributed.context_parallel={num_slices}", *more), world)
    assert [problem for problem in found if expected in problem], found
    assert complaints(configure("distributed.context_parallel=2", "training.global_batch_size=4"), world) == []


def test_all_problems_are_raised_at_once() -> None:
    config = configure("training.global_batch_size=7", "lora.init_lora_weights=eva", "lora.r=0")
    with pytest.raises(ConfigError, match="3 settings can't be used") as caught:
        check(config, GPU)
    settings = [problem.what for problem in caught.value.problems]
    assert settings == ["lora.r=0", "lora.init_lora_weights=eva", "training.global_batch_size=7"]


def test_a_command_hears_of_what_it_needs_alone() -> None:
    config = configure("data=default", "data.path=null", "lora.r=0", "checkpoint.keep_best=1")
    assert [problem.setting for problem in check_settings(config)] == ["lora.r", "data.path", "checkpoint.keep_best"]

    def heard(needs: Needs) -> list[str]:
        return [problem.setting for problem in check_settings(config, needs)]

    assert heard(Needs(plans_only=True)) == ["lora.r", "checkpoint.keep_best"]
    assert heard(Needs(optional=("data.path", "lora.r"))) == ["lora.r", "checkpoint.keep_best"]  # lora.r is not null


class TestRunFolder:
    def test_finished_run_is_kept_unless_told(self, tmp_path: Path) -> None:
        mark(tmp_path)
        (tmp_path / "adapter").mkdir()
        summary = {"status": "finished", "steps": 5, "final_loss": 2.5}
        for more, told in (({}, "loss 2.5000"), ({"eval_loss": 3.5}, "evaluation loss 3.5000")):
            (tmp_path / "summary.json").write_text(json.dumps(summary | more))
            (message,) = complaints(configure(f"run.folder={tmp_path}"))
            assert f"already holds a finished run (5 steps, {told}, its adapter in {tmp_path}/adapter). Set " in message
            assert "Set another run.name= or run.folder=, or run.overwrite=true to replace it." in message
            assert message.endswith(f" set another run.name= and lora.start={tmp_path}/adapter.")
        assert complaints(configure(f"run.folder={tmp_path}", "run.overwrite=true")) == []

    @pytest.mark.parametrize("summary", ['{"status": "stopped"}', "", "[]"])
    def test_unfinished_run_may_go_on(self, tmp_path: Path, summary: str) -> None:
        mark(tmp_path)
        (tmp_path / "summary.json").write_text(summary)
        assert complaints(configure(f"run.folder={tmp_path}")) == []

    def test_what_no_run_wrote_is_kept(self, tmp_path: Path) -> None:
        """An adapter that was copied there, or a folder of something else: a run would replace it at its end."""
        (tmp_path / "adapter").mkdir()
        (tmp_path / "config.yaml").write_text("mine")
        for more in ([], ["run.overwrite=true"]):
            (message,) = complaints(configure(f"run.folder={tmp_path}", *more))
            assert f"run.folder={tmp_path} holds adapter, config.yaml, of no run. Set another run.name=" in message
        mark(tmp_path)  # a run has begun here
        assert complaints(configure(f"run.folder={tmp_path}")) == []

    def test_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        (message,) = complaints(configure(f"run.folder={tmp_path}/{'x' * 300}"))
        assert "can't be made: File name too long. Set a shorter run.name=" in message
        (message,) = complaints(configure(f"run.folder={tmp_path}/file/run"))
        assert f"can't be made: {tmp_path}/file is a file." in message

    def test_no_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # The superuser may write anywhere, so ask for the answer that others get.
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
        (message,) = complaints(configure(f"run.folder={tmp_path}/a/b"))
        assert f"can't be written: no permission in {tmp_path}." in message


class TestWorld:
    def test_reads_what_the_launchers_set(self) -> None:
        environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        world = World.from_environment(environ)
        assert (world.rank, world.num_ranks, world.local_rank, world.local_num_ranks) == (5, 8, 1, 4)
        world = World.from_environment({})
        assert (world.rank, world.num_ranks, world.local_rank, world.local_num_ranks) == (0, 1, 0, 1)

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x is not a number"),
            ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
            ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
            ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 does not fit WORLD_SIZE=2"),
        ],
    )
    def test_contradictions(self, environ: dict[str, str], expected: str) -> None:
        with pytest.raises(DeviceError, match=expected):
            World.from_environment(environ)


@pytest.mark.parametrize(
    ("num_ranks", "more", "total"),
    [
        (1, [], 16),
        (8, [], 16),
        (3, [], 15),
        (5, [], 15),
        (32, [], 32),
        (8, ["training.micro_batch_size=4"], 32),
        (1, ["training.micro_batch_size=5"], 15),
        (2, ["training.micro_batch_size=2", "training.global_batch_size=null"], None),
        (2, ["training.global_batch_size=20"], 20),
    ],
)
def test_the_default_batch_fits_any_number_of_ranks(num_ranks: int, more: list[str], total: int | None) -> None:
    config, note = round_default(configure(*more), num_ranks)
    assert config.training.global_batch_size == total
    assert (note is not None) == (total not in (16, 20, None))
    if note is not None:
        assert f"training.global_batch_size={total}, the multiple of" in note
    world = World(num_ranks, 0, num_ranks, 0)
    assert check_world(configure(*more), world) == []


def test_a_batch_that_was_chosen_is_not_rounded() -> None:
    (problem,) = check_world(configure("training.global_batch_size=20"), World(3, 0, 3, 0))
    assert str(problem).endswith("is not a multiple of 3 ranks. Set training.global_batch_size=21.")


class TestLaunchEnvironment:
    @pytest.fixture
    def launch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
        """The environment that accelerate itself makes of a config file."""
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_multi_gpu_env

        monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)

        def launch(**settings: Any) -> dict[str, str]:
            file = tmp_path / "accelerate.yaml"
            given = {"distributed_type": "FSDP", "num_machines": 1, "num_processes": 2, "machine_rank": 0, **settings}
            file.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **given}))
            args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
            args, _, _ = _validate_launch_command(args)
            return prepare_multi_gpu_env(args)

        return launch

    @pytest.mark.parametrize("fsdp_config", [{}, {"fsdp_version": 2}, {"fsdp_auto_wrap_policy": "NO_WRAP"}])
    def test_accelerates_own_defaults_contradict_nothing(
        self, launch: Callable[..., dict[str, str]], fsdp_config: dict[str, Any]
    ) -> None:
        environ = launch(fsdp_config=fsdp_config)
        assert environ["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"  # accelerate does write its defaults
        for overrides in ([], ["fsdp=offload", "memory=keep"], ["fsdp=no_shard"], ["fsdp=shard_grad_op"]):
            assert check_launch_environment(configure(*overrides), environ) == []
        assert check_launch_environment(configure(), {}) == []

    @pytest.mark.parametrize(
        ("settings", "overrides", "agreeing", "names"),
        [
            ({"fsdp_offload_params": True}, [], ["fsdp=offload"], "FSDP_OFFLOAD_PARAMS=true fsdp.cpu_offload=false"),
            (
                {"fsdp_sharding_strategy": 2},
                ["fsdp=full_shard"],
                ["fsdp=shard_grad_op"],
                "FSDP_SHARDING_STRATEGY=2 fsdp.sharding_strategy=FULL_SHARD",
            ),
            (
                {"fsdp_sharding_strategy": "HYBRID_SHARD"},
                ["fsdp=no_shard"],
                ["fsdp=hybrid_shard"],
                "FSDP_SHARDING_STRATEGY=HYBRID_SHARD fsdp.sharding_strategy=NO_SHARD",
            ),
            (
                {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
                [],
                ["fsdp=shard_grad_op"],
                "FSDP_RESHARD_AFTER_FORWARD=false fsdp.reshard_after_forward=null",
            ),
            (
                {"fsdp_activation_checkpointing": True},
                ["memory=keep"],
                [],
                "FSDP_ACTIVATION_CHECKPOINTING=true memory.activations=none",
            ),
            (
                {"mixed_precision": "fp16"},
                [],
                None,
                "ACCELERATE_MIXED_PRECISION=fp16 training.precision=auto",
            ),
            (
                {"mixed_precision": "bf16"},
                ["training.precision=float32"],
                [],
                "ACCELERATE_MIXED_PRECISION=bf16 training.precision=float32",
            ),
            ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, [], None, "ACCELERATE_DYNAMO_BACKEND=INDUCTOR"),
        ],
    )
    def test_contradiction_names_both(
        self,
        launch: Callable[..., dict[str, str]],
        settings: dict[str, Any],
        overrides: list[str],
        agreeing: list[str] | None,
        names: str,
    ) -> None:
        fsdp = {key: value for key, value in settings.items() if key.startswith("fsdp")}
        environ = launch(fsdp_config=fsdp, **{key: value for key, value in settings.items() if key not in fsdp})
        (problem,) = check_launch_environment(configure(*overrides), environ)
        assert all(name in str(problem) for name in names.split())
        if agreeing is not None:
            assert check_launch_environment(configure(*agreeing), environ) == []

    @pytest.mark.parametrize("written", ["NO_SHARD", "3", "no_shard"])
    def test_sharding_that_an_accelerate_config_names_counts_in_the_place_of_auto(self, written: str) -> None:
        environ = {"FSDP_SHARDING_STRATEGY": written}
        config = follow_launcher(configure("run.name=a"), environ)
        assert config.fsdp.sharding_strategy is ShardingStrategy.NO_SHARD
        assert check_launch_environment(config, environ) == []
        full = follow_launcher(configure(), {"FSDP_SHARDING_STRATEGY": "FULL_SHARD"})
        assert full.fsdp.sharding_strategy is ShardingStrategy.FULL_SHARD
        typed = configure("fsdp=shard_grad_op")
        assert follow_launcher(typed, environ) is typed and len(check_launch_environment(typed, environ)) == 1
        unknown = {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}
        assert len(check_launch_environment(follow_launcher(configure(), unknown), unknown)) == 1
        assert follow_launcher(configure(), {}).fsdp.sharding_strategy is ShardingStrategy.auto

    def test_variables_set_by_hand(self) -> None:
        environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "WORLD_SIZE": "2"}
        deepspeed, accumulation = sorted(map(str, check_launch_environment(configure(), environ)), reverse=True)
        assert "asks for DeepSpeed" in deepspeed
        assert "contradicts training.global_batch_size=16" in accumulation
        assert "Set training.global_batch_size=8" in accumulation
        del environ["ACCELERATE_USE_DEEPSPEED"]
        assert check_launch_environment(configure("training.global_batch_size=8"), environ) == []
