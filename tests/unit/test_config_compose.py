"""From the command line and YAML to a typed configuration."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.helpers import quick_config

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config import recorded, trackers
from qlora_fsdp.config.reading.command_line import conf_folder, default_options, group_options
from qlora_fsdp.config.reading.compose import load_config, register_schema, to_yaml
from qlora_fsdp.config.schema import Dtype, LossOn, QuantType4bit, ShardingStrategy, Weights
from qlora_fsdp.config.settings import all_settings, example_of, value_of
from qlora_fsdp.config.world import World

GROUPS = [group for group in default_options() if group != "experiment"]
OPTIONS = [(group, option) for group in GROUPS for option in group_options(group, [conf_folder()])]
OTHERS = [(group, option) for group, option in OPTIONS if group != "model" or option == "custom"]
DRY_RUN = ["model=tiny", "data=random", "training.max_steps=1"]


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value)


@pytest.fixture(autouse=True)
def own_hidden_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in place of values with a `${...}` is kept for the process, which is one run's elsewhere."""
    monkeypatch.setattr(recorded, "_hidden_texts", {})


@pytest.mark.parametrize(("group", "option"), OTHERS, ids=lambda part: part)
def test_every_option_composes_and_validates(group: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The presets of models are in test_config_models.py, which needs what they compose for more."""
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())  # mlflow and trackio are not installed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    without = [override for override in DRY_RUN if not override.startswith(f"{group}=")]
    own_data = ["data.path=org/name"] if (group, option) == ("data", "default") else []
    own_data += ["data=default", "data.path=org/name", "task.labels=[a,b]"] if option.endswith("classification") else []
    if option == "grpo":
        own_data = ["data=default", "data.path=org/name", "reward.functions=[exact_match]"]
    if option == "distill":
        own_data = ["data=default", "data.path=org/name", "distill.teacher_prompt=hinted"]
    own_model = ["model.path=org/name"] if (group, option) == ("model", "custom") else []
    world = World(has_fp8=option == "fp8", device_type="cuda" if option.startswith("paged") else "cpu")
    quick_config.check(load_config([*without, f"{group}={option}", *own_data, *own_model]), world)


@pytest.mark.parametrize("option", group_options("experiment", [conf_folder()]))
def test_every_experiment_composes_and_validates(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # the demo's paths are seen from there
    needed = {
        "qlora_paper": ["model=llama3-8b", "data.path=org/name"],
        "dry_run": ["model=llama3-8b"],
        # Its script makes model and data
        "demo_preference": [
            "model.path=demo/base",
            "data.path=demo/docstrings.jsonl",
            "data.eval_path=demo/docstrings_eval.jsonl",
        ],
        "demo_grpo": [
            "data.path=demo/docstrings.jsonl",
            "data.eval_path=demo/docstrings_eval.jsonl",
            "lora.start=null",
            "reward.functions=[exact_match]",
        ],
    }
    own = [f"run.folder={tmp_path / 'new'}", *needed.get(option, [])]
    quick_config.check(load_config([f"experiment={option}", *own]), World(num_ranks=2))


def test_overrides_win_over_the_experiment_which_wins_over_groups() -> None:
    config = load_config(["experiment=dry_run", "model=llama3-70b", "training.max_steps=3", "quant=int8"])
    assert config.run.folder == "outputs/dry_run-llama3-70b"
    assert config.model.config["num_hidden_layers"] == 80
    assert config.model.weights is Weights.random
    assert config.training.max_steps == 3
    assert (config.quant.load_in_4bit, config.quant.load_in_8bit) == (False, True)


def test_the_dtype_of_4_bit_products_is_the_precision_where_that_is_open() -> None:
    asked = ["model=tiny", "quant.bnb_4bit_compute_dtype=float32"]
    assert load_config(asked).training.precision is Dtype.float32
    assert load_config([*asked, "training.precision=bfloat16"]).training.precision is Dtype.bfloat16  # refused later
    assert load_config([*asked, "quant=int8"]).training.precision is Dtype.auto
    assert load_config(["model=tiny"]).training.precision is Dtype.auto


def test_mappings_take_keys_of_the_users_own() -> None:
    config = load_config(
        ["lora.rank_pattern={layers.0.q_proj: 8}", "+lora.alpha_pattern.k_proj=4", "model.config.rope_scaling.factor=2"]
    )
    assert config.lora.rank_pattern == {"layers.0.q_proj": 8}
    assert config.lora.alpha_pattern == {"k_proj": 4.0}
    assert config.model.config == {"rope_scaling": {"factor": 2}}


def test_every_mapping_has_an_example_that_a_shell_hands_on() -> None:
    mappings = {key for key, setting in all_settings().items() if setting.default == {}}
    assert {key for key, setting in all_settings().items() if setting.facets.example} == mappings
    for key in mappings:
        (typed,) = shlex.split(example_of(key))
        launcher = [f"hydra/launcher={key.partition('.')[0]}"] if key.startswith(("skypilot.", "kubernetes.")) else []
        assert value_of(quick_config.load_config([typed, *launcher]), key) == yaml.safe_load(typed.partition("=")[2])


@pytest.mark.parametrize("path", ["~/a.jsonl", "/data/a=b (1).jsonl", "/data/ä.jsonl", "/it's/a.jsonl", "s\\t.jsonl"])
def test_paths_need_no_quotes(path: str) -> None:
    assert load_config([f"data.path={path}"]).data.path == path


def test_lists_and_mappings_of_paths() -> None:
    for path in ("rows/**/*.jsonl", "part-[0-3].jsonl", "https://host/a.jsonl?x=1&y=2"):
        assert load_config([f"data.path={path}"]).data.path == path
    assert load_config(["data.path=[a (1).jsonl,s3://b/*.jsonl]"]).data.path == ["a (1).jsonl", "s3://b/*.jsonl"]
    mix = load_config(['data.mix={"s3://b/a (1).jsonl": 1, "*.jsonl": 2.5, code/: 3}']).data.mix
    assert mix == {"s3://b/a (1).jsonl": 1.0, "*.jsonl": 2.5, "code/": 3.0}
    assert load_config(['data.columns={prompt: "my, question"}']).data.columns == {"prompt": "my, question"}
    assert load_config(["data.mix={über.jsonl: 1}"]).data.mix == {"über.jsonl": 1}


@pytest.mark.parametrize("text", ["[<|im_start|>, <|im_end|>]", "['<|im_start|>','<|im_end|>']"])
def test_new_tokens_need_no_quotes(text: str) -> None:
    config = load_config([*DRY_RUN, f"tokenizer.add_tokens={text}"])
    assert config.tokenizer.add_tokens == ["<|im_start|>", "<|im_end|>"]
    assert load_config([*DRY_RUN, 'tokenizer.add_tokens=[a=b,"c"]']).tokenizer.add_tokens == ["a=b", "c"]
    assert load_config([*DRY_RUN, "lora.target_modules=.*(q|v)_proj"]).lora.target_modules == ".*(q|v)_proj"


@pytest.mark.parametrize("text", ["1.10", "1e3", "true", "1_000", "007", "a 1.10", "12e4567"])
def test_a_text_that_looks_like_a_number_stays_as_it_is(text: str) -> None:
    assert load_config([f"run.name={text}"]).run.name == text
    config = load_config([f"task.labels=[{text}, b]", f"data.columns={{prompt: {text}}}", f"data.path={text}"])
    assert (config.task.labels, config.data.columns, config.data.path) == ([text, "b"], {"prompt": text}, text)


def test_a_text_may_be_made_of_a_number_of_another_setting() -> None:
    assert load_config(["run.name=${lora.lora_dropout}", "lora.lora_dropout=0.10"]).run.name == "0.1"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("lora.rnk_pattern=1", "Did you mean lora.rank_pattern?"),
        ("+lora.rnk_pattern=1", "Did you mean lora.rank_pattern?"),
        ("++lora.rnk_pattern=1", "Did you mean lora.rank_pattern?"),
        ("lora.dropout=0.1", "Did you mean lora.lora_dropout?"),
        ("optim.learning_rate=1e-4", "Did you mean training.learning_rate?"),
        ("training.gradient_accumulation_steps=4", "Did you mean training.global_batch_size?"),
        ("lr=1e-4", "Did you mean training.learning_rate?"),
        ("experimnt=dry_run", "Did you mean experiment?"),
        ("run.xyz=1", "run has: name, folder, overwrite."),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_name(override: str, hint: str) -> None:
    typed = override.lstrip("+").replace("1e-4", "0.0001")
    assert refusal(*DRY_RUN, override) == f"{typed} is not a setting. {hint}"


def test_plus_before_a_group_is_accepted() -> None:
    assert load_config(["+quant=fp4", "+experiment=dry_run"]).quant.bnb_4bit_quant_type is QuantType4bit.fp4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lora.r=abc", "lora.r=abc must be a whole number. Set lora.r=16."),
        ("lora.r=null", "lora.r=null must be a whole number. Set lora.r=16."),
        ("lora.r.x=1", "lora.r={x: 1} must be a whole number. Set lora.r=16."),
        ("fsdp.cpu_offload=7", "must be true or false. Set fsdp.cpu_offload=false."),
        ("fsdp.cpu_offload=1", "fsdp.cpu_offload=1 must be true or false. Set fsdp.cpu_offload=true."),
        ("fsdp.cpu_offload=maybe", "must be true or false. Set fsdp.cpu_offload=false."),
        (
            "training.max_steps=many",
            "must be a whole number or null. Set such a value, or leave training.max_steps out.",
        ),
        ("training.max_steps=2.6", "must be a whole number or null. Set training.max_steps=3."),
        ("optim.betas=0.9", "must be a list of numbers such as [0.9,0.999]."),
        ("lora.rank_pattern={q: x}", "must be a mapping {name: whole number}."),
        ("lora.rank_pattern=[q_proj]", "lora.rank_pattern=[q_proj] must be a mapping {name: whole number}."),
        ("optim.betas={}", "optim.betas={} must be a list of numbers such as [0.9,0.999]."),
        ("data.mix=[]", "data.mix=[] must be a mapping {key: value}."),
        ("model.rope_scaling=yarn", "as in model.rope_scaling='{rope_type: yarn, factor: 4.0}', or leave "),
        (
            "training.precision=bf16",
            "must be one of auto, bfloat16, float16, float32. Set training.precision=bfloat16.",
        ),
        (
            "tracking.wandb_mode=true",
            "tracking.wandb_mode=true must be one of auto, online, offline, disabled. Set tracking.wandb_mode=online.",
        ),
        ("optim.lr_scheduler_type=constant_with_warmup", "Set optim.lr_scheduler_type=constant."),
        ("tracking.wandb_mode=off", "Set tracking.wandb_mode=disabled."),
        ("memory.activations=false", "Set memory.activations=none."),
        ("kernels.cross_entropy=false", "Set kernels.cross_entropy=torch."),
        ("fsdp.sharding_strategy=full_shard", "Set fsdp.sharding_strategy=FULL_SHARD."),
        (
            "quant=nf5",
            "is no option of quant: it has fp4, fp8, int4, int8, mxfp4, nf4, none, nvfp4. Did you mean quant=nf4?",
        ),
        ("model=llama3-7b", "Did you mean model=llama3-70b?"),
        ("model=qwen2.5-7b", "Did you mean model=qwen2.5-7b-base or model=qwen2.5-7b-instruct?"),
        ("quant={load_in_4bit: true}", "is no option of quant"),
        ("lora.r", "lora.r has no value. Write lora.r=VALUE."),
        (
            "lora.rank_pattern={a",
            "can't be read: expected ',' or '}', but got '<stream end>'. Write it as lora.rank_pattern='{q_proj: 8}'.",
        ),
        ("tracking.report_to=wandb", "must be a list such as [a,b]. Set tracking.report_to=[wandb]."),
        ("lora.r=8,", "lora.r=8, must be a whole number. Set lora.r=16."),
        ("tokenizer.add_tokens=[a,b", "can't be read: expected ',' or ']', but got '<stream end>'. Write "),
        ("~lora.r", "removes a setting, which is not possible."),
        ("lora.r=8,16", "gives several values to one run. For a sweep add -m."),
        ("memory.keep_dequantized=true,run", "gives several values to one run. For a sweep add -m."),
        ("quant.llm_int8_skip_modules=a,b", "add -m, for a list write quant.llm_int8_skip_modules=[a,b]."),
        ("data.path=a.jsonl,b.jsonl", "data.path='\"a.jsonl,b.jsonl\"'. For several data sets set data.mix='{"),
        ("data.path=a.jsonl,b.jsonl", "for a list write data.path=[a.jsonl,b.jsonl]"),
        ("run.name=${model.nme}", "can't be resolved"),
        ("run.name=${now:%H}", "reads the clock on every rank"),
        ("run.name=${oc.env:NOT_THERE}", "Set the variable, or write ${oc.env:NAME,VALUE}"),
        (r"tracking.project='a\${x}'", "has ${ in its text, which OmegaConf takes for a reference. Leave it out."),
        ("run.folder=m\udce4", "has bytes that are no UTF-8. Type it in UTF-8, or rename what it names."),
        ("data.path=[a.jsonl,m\udce4.jsonl]", "has bytes that are no UTF-8."),
        ("run.name=${lora.r", "run.name=${lora.r can't be read: no viable alternative at input"),
        ("lora@x=default", "can't be composed: Could not override 'lora@x'. Did you mean to override lora?"),
        ("hydra.foo=1", "can't be composed: Could not override 'hydra.foo'. To append to your config use "),
        ("quant=nf4,int8", "quant=nf4,int8 gives several values to one run. For a sweep add -m."),
        ("data=null", "data=null is no option of data: it has default, random. Set data to one of these."),
        ("experiment=null", "experiment=null is no option of experiment"),
        ("hydra/sweeper=null", "hydra/sweeper=null names no option. Leave hydra/sweeper out."),
        ("experiment=null", "Leave experiment out for none."),
        ("run=3", "run=3 is not a setting. run has: name, folder, overwrite."),
    ],
)
def test_unusable_override_is_one_clear_error(override: str, expected: str) -> None:
    message = refusal(*DRY_RUN, override)
    assert expected in message
    assert "\n" not in message


def test_all_mistakes_are_reported_at_once() -> None:
    message = refusal("quant=nf5", "lora.rank=8", "training.learning_rate=abc", "+foo=1")
    assert message.startswith("4 settings can't be used:")
    message = refusal(*DRY_RUN, "lora.rank=8", "training.max_length=0")
    assert "lora.rank=8" in message
    assert "training.max_length=0" in message


class TestOwnFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "it's mine"
        (folder / "experiment").mkdir(parents=True)
        (folder / "team").mkdir()
        (folder / "team" / "a.yaml").write_text("# @package _global_\ntraining: {seed: 7}\n")
        return folder

    def load(self, folder: Path, text: str, *overrides: str):
        (folder / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text)
        return load_config([*DRY_RUN, "--config-dir", str(folder), "experiment=mine", *overrides])

    def test_experiment_and_group_of_ones_own(self, folder: Path) -> None:
        config = self.load(folder, "defaults: [override /quant: int8]\nlora: {r: 4}\n", "team=a")
        assert (config.quant.load_in_8bit, config.lora.r, config.training.seed) == (True, 4, 7)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("lora: {rank: 4}\n", "lora.rank=4 is not a setting. Did you mean lora.r?"),
            ("lora: {r: four}\n", "lora.r=four must be a whole number. Set lora.r=16."),
            ("lora: 4\n", "lora=4 is not a setting."),
            (
                "defaults: [override /quant: nf5]\n",
                "Could not find 'quant/nf5' Available options in 'quant': fp4 fp8 int4 int8 mxfp4",
            ),
            ("defaults: [override /qant: nf4]\n", "can't be composed"),
            ("run: {name: 1.10}\n", "must be text, and what is written there is read as a number. Put it in quotes."),
            ("task: {labels: [no, yes]}\n", "and what is written there is read as true or false. Put it in quotes."),
            ("lora: {r: 4\n", "mine.yaml can't be read: line 3: expected"),
        ],
    )
    def test_mistake_in_it_is_one_clear_error(self, folder: Path, text: str, expected: str) -> None:
        with pytest.raises(ConfigError) as caught:
            self.load(folder, text)
        assert expected in str(caught.value)

    def test_an_experiment_that_stays_in_its_own_group_is_told_the_line_it_lacks(self, folder: Path) -> None:
        (folder / "experiment" / "no_line.yaml").write_text("defaults: [override /quant: int8]\n")
        with pytest.raises(ConfigError, match=r"In 'experiment/no_line': .* with the line `# @package _global_`"):
            load_config([*DRY_RUN, "--config-dir", str(folder), "experiment=no_line"])

    @pytest.mark.parametrize("text", ["5", "false", "[a]", "text"])
    def test_a_file_without_settings_is_refused(self, folder: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"mine\.yaml can't be read: it holds no lines such as"):
            self.load(folder, text)

    @pytest.mark.parametrize("written", ["010", "0x10", "0o17", "1_000", "12:30:45", "+7", "2026-11-25"])
    def test_text_in_a_file_stays_as_it_is_written(self, folder: Path, tmp_path: Path, written: str) -> None:
        text = f"run: {{name: {written}}}\ntask: {{labels: [{written}, b]}}\nslurm: {{time: 24:00:00}}\n"
        (tmp_path / "my.yaml").write_text(text)
        for config in (self.load(folder, text), load_config([*DRY_RUN, "--config", str(tmp_path / "my.yaml")])):
            assert (config.run.name, config.task.labels) == (written, [written, "b"])
            assert config.slurm.time == "24:00:00"

    def test_whole_numbers_in_a_file_may_have_underscores(self, folder: Path) -> None:
        config = self.load(folder, "training: {max_length: 1_024, seed: 007}\n")
        assert (config.training.max_length, config.training.seed) == (1024, 7)
        with pytest.raises(ConfigError, match="max_length=0x10 must be a whole number"):
            self.load(folder, "training: {max_length: 0x10}\n")

    def test_its_options_are_checked_and_listed_too(self, folder: Path) -> None:
        assert "it has a." in refusal(*DRY_RUN, "--config-dir", str(folder), "team=b")
        assert "is not a folder" in refusal(*DRY_RUN, "--config-dir", str(folder / "no"))


def test_printed_configuration_makes_the_same_one_again(tmp_path: Path) -> None:
    config = load_config(["model=qwen3-8b", "quant=fp4", "data.loss_on=all", "lora.target_modules=[q_proj]"])
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "again.yaml").write_text("# @package _global_\n" + to_yaml(config))
    assert load_config(["--config-dir", str(tmp_path), "experiment=again"]) == config
    assert (config.data.loss_on, config.training.precision) == (LossOn.all, Dtype.auto)


def test_cfg_prints_on_rank_0_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            load_config(["--cfg", "job", "model=tiny", "fsdp=offload"])
        assert not caught.value.code
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed is None if rank == "1" else printed["fsdp"]["cpu_offload"] is True


def test_unknown_option_of_the_command_line() -> None:
    assert "--lora-r=3 is no option: settings are written without dashes" in refusal("--lora-r=3")


def test_help_is_complete_and_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from qlora_fsdp.config.reading.compose import load_config\n"
        "try: load_config(['--help'])\n"
        "finally: print('HEAVY', {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert "HEAVY set()" in out
    assert all(option in out for _, option in OPTIONS)
    assert "experiment=dry_run" in out


def test_hydra_main_composes_the_same_and_writes_nothing(tmp_path: Path) -> None:
    program = (
        "import hydra; from qlora_fsdp.config.reading.command_line import conf_folder\n"
        "from qlora_fsdp.config.reading.compose import *\n"
        "from qlora_fsdp.config.reading.compose import register_schema\n"
        "register_schema()\n"
        "def run(composed):\n"
        "    config, problems = read_config(composed)\n"
        "    assert not problems\n"
        "    print(to_yaml(config), end='')\n"
        "hydra.main(version_base='1.3', config_path=str(conf_folder()), config_name='config')(run)()"
    )
    command = [sys.executable, "-c", program, "model=tiny"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    with quick_config.composing_anew():
        assert result.stdout == to_yaml(load_config(["model=tiny"]))
    assert list(tmp_path.iterdir()) == []


def test_schema_can_be_registered_twice() -> None:
    register_schema()
    register_schema()
    with quick_config.composing_anew():
        assert load_config(["fsdp=no_shard"]).fsdp.sharding_strategy is ShardingStrategy.NO_SHARD


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["quant=int8", "lora.rank_pattern={q_proj: 3}", "+lora.alpha_pattern.k_proj=4", "lora.target_modules=[a,b]"],
        [
            "experiment=dry_run",
            "optim=adamw_8bit",
            "fsdp=offload",
            "run.name=${model.path}-1",
            "data.eval_path='a (1)'",
        ],
    ],
)
def test_the_quick_way_of_other_tests_gives_the_same(more: list[str]) -> None:
    argv = [*DRY_RUN, *more]
    mistaken = [*argv, "lora.rr=8", "optim=adm"]
    with quick_config.composing_anew():
        composed = load_config(argv)
        refused = refusal(*mistaken)
    assert quick_config.load_config(argv) == quick_config.load_config(argv) == composed
    with pytest.raises(ConfigError) as caught:
        quick_config.load_config(mistaken)
    assert str(caught.value) == refused
