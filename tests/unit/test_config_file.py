"""`--config my.yaml`, what `model=` and `data=` also take, and the data of those who name none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.helpers.quick_config import load_config

from qlora_fsdp import evaluate, preflight
from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.reading.command_line import conf_folder
from qlora_fsdp.config.reading.compose import load_config as load_from_files
from qlora_fsdp.config.reading.compose import to_yaml
from qlora_fsdp.config.schema import DEFAULT_DATA, LrScheduler, Optimizer
from qlora_fsdp.train import main

MINE = """
model: tiny
data: random
optim: {lr_scheduler_type: constant, name: adamw}
training.max_steps: 7
training:
  learning_rate: 1e-4
lora: {r: 4, rank_pattern: {q_proj: 2}}
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(MINE)
    return tmp_path / "my.yaml"


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFile:
    def test_settings_and_options_by_their_names(self, mine: Path) -> None:
        config = load_from_files(["--config", str(mine), "lora.r=8"])
        assert (config.model.name, config.training.max_steps, config.lora.r) == ("tiny", 7, 8)
        assert (config.training.learning_rate, config.lora.rank_pattern) == (1e-4, {"q_proj": 2})
        assert load_config(["--config=my.yaml", "lora.r=8"]) == config

    def test_an_option_that_is_typed_wins_over_what_the_file_says_of_it(self, mine: Path) -> None:
        mine.write_text(MINE + "quant: {bnb_4bit_quant_type: fp4, embeddings: int8}\ntracking: {report_to: [mlflow]}\n")
        file = ["--config", "my.yaml"]
        config = load_config([*file, "optim=adamw_8bit", "quant=int8", "tracking=none", "model=llama3-8b"])
        assert (config.optim.name, config.optim.lr_scheduler_type) == (Optimizer.adamw_8bit, LrScheduler.constant)
        assert (config.quant.load_in_8bit, config.quant.embeddings.value) == (True, "none")
        assert (config.tracking.report_to, config.model.name) == ([], "llama3-8b")

    def test_the_file_wins_over_the_experiment_that_it_picks(self, mine: Path) -> None:
        mine.write_text(MINE + "experiment: qlora_paper\n")
        config = load_config(["--config", "my.yaml"])
        assert (config.lora.r, config.lora.lora_dropout, config.training.max_steps) == (4, 0.1, 7)
        assert refusal("--config", "my.yaml", "experiment=dry_run").startswith("experiment can't be used with --config")

    def test_a_runs_own_config_is_such_a_file(self, mine: Path) -> None:
        config = load_config(["model=qwen3-8b", "data.mix={a: 1, b: 2}", "task.labels=null", "lora.target_modules=[q]"])
        (mine.parent / "config.yaml").write_text(to_yaml(config, as_written=True))
        assert load_config(["--config", "config.yaml"]) == config
        assert load_config(["--config", "config.yaml", "run.name=second"]).run.folder == "outputs/second"

    def test_paths_and_hub_names(self, mine: Path) -> None:
        mine.write_text("model: org/name\ndata: chats.jsonl\ndata.format: text\n")
        config = load_config(["--config", "my.yaml"])
        assert (config.model.path, config.data.path, config.data.format.value) == ("org/name", "chats.jsonl", "text")
        mine.write_text("model: org/name\ndata: [chats.jsonl, more/]\n")
        assert load_config(["--config", "my.yaml"]).data.path == ["chats.jsonl", "more/"]

    def test_jobs_of_a_sweep_read_it(self, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mine.write_text(MINE + "model.revision: abc\nexperiment: qlora_paper\n")
        assert main(["-m", "--config", "my.yaml", "lora.r=8,16", "launch.dry_run=true"]) == 0
        commands = capsys.readouterr().out.splitlines()
        arguments = [command.partition("qlora_fsdp.train ")[2].split() for command in commands]
        assert [a[:3] for a in arguments] == [["--config", str(mine), f"lora.r={r}"] for r in (8, 16)]
        job = load_config(arguments[0])
        assert (job.lora.r, job.model.name, job.model.revision, job.training.max_steps) == (8, "tiny", "abc", 7)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("lora: {rank: 4}", "lora.rank=4 is not a setting. Did you mean lora.r?"),
            ("sequence_len: 4", "sequence_len=4 is not a setting. Did you mean training.max_length?"),
            ("base_model: a/b", "base_model=a/b is not a setting. Did you mean model.path?"),
            ("max_steps: 4", "max_steps=4 is not a setting. Did you mean training.max_steps?"),
            ("lora: {r: four}", "lora.r=four must be a whole number. Set lora.r=16."),
            ("lora: [1]", "lora=[1] is not a setting."),
            ("quant: nf5", "quant=nf5 is no option of quant"),
            ("training: {max_steps: 1, max_steps: 2}", "my.yaml can't be read: line 1: max_steps stands there twice."),
            ("a: [", "my.yaml can't be read: line 1: expected the node content"),
            ("- a", "my.yaml can't be read: it holds no lines such as `training.max_steps: 100`."),
            ("defaults: [override /quant: int8]", "Write `quant: int8` in place of `override /quant: int8`"),
        ],
    )
    def test_a_mistake_in_it_is_one_clear_error(self, mine: Path, text: str, expected: str) -> None:
        mine.write_text(text)
        assert expected in refusal("--config", "my.yaml", "model=tiny", "data=random", "training.max_steps=1")

    def test_it_is_named_where_it_was_meant(self, mine: Path) -> None:
        assert "Did you mean --config my.yaml?" in refusal("my.yaml")
        assert refusal("--config", "no.yaml") == (
            f"--config {mine.parent}/no.yaml can't be read: No such file or directory. Name a YAML file with settings."
        )
        assert "--config is given 2 times." in refusal("--config", "my.yaml", "--config", "my.yaml")

    def test_other_commands_take_it(self, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mine.write_text("model: llama3-8b\ntraining: {max_length: 512}\n")
        assert preflight.main(["hardware=1x80gib", "--config", str(mine)]) == 0
        assert "x 512 tokens" in capsys.readouterr().out
        mine.write_text("model: tiny\ndata: no.jsonl\n")
        assert evaluate.main(["--config", str(mine)]) == 2
        assert "data.path=no.jsonl does not exist" in capsys.readouterr().err


class TestShorthands:
    @pytest.mark.parametrize("name", ["org/name", "/models/a (1)", "~/m", "./m", "here"])
    def test_a_model_by_its_path_or_hub_name(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "here").mkdir()
        config = load_config([f"model={name}"])
        assert (config.model.path, config.model.name, config.model.config) == (name, "custom", {})

    def test_it_wins_over_the_option_that_an_experiment_picks(self) -> None:
        config = load_config(["experiment=dry_run", "model=org/name", "data=chats.jsonl"])
        assert (config.model.path, config.model.config, config.data.path) == ("org/name", {}, "chats.jsonl")

    def test_a_misspelt_name_is_still_one(self) -> None:
        message = refusal("model=llama3-7b")
        assert message.endswith("Did you mean model=llama3-70b? For a path or a hub name set model.path=llama3-7b.")

    def test_in_a_sweep(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").touch()
        argv = ["-m", "model=a/b,c/d", f"data={tmp_path}/a.jsonl", "launch.dry_run=true"]
        assert main(argv) == 0
        assert re.findall(r" model.path=(\S+) ", capsys.readouterr().out) == ["a/b", "c/d"]


class TestDefaultData:
    def test_it_is_the_schemas_and_the_options(self) -> None:
        assert DEFAULT_DATA in (conf_folder() / "data" / "default.yaml").read_text()
        config = load_config(["model=llama3-70b"])
        assert config.data.path == DEFAULT_DATA and check_settings(config) == []

    @pytest.mark.parametrize("typed", ["data=random", "data.format=random", "data.mix={a: 1}"])
    def test_what_is_typed_takes_its_place(self, typed: str) -> None:
        assert load_config(["model=tiny", typed]).data.path is None

    def test_labels_are_asked_for(self) -> None:
        config = load_config(["model=tiny", "task=sequence_classification", "task.labels=[a,b]"])
        (problem,) = check_settings(config)
        assert str(problem).startswith(f"data.path={DEFAULT_DATA} is the default and has no labels")

    def test_preflight_says_what_the_run_would_train_on(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert preflight.main(["model=llama3-8b", "hardware=1x80gib"]) == 0
        assert f"the run would train on {DEFAULT_DATA}, the default; data.path= names" in capsys.readouterr().out
        assert DEFAULT_DATA in json.loads((tmp_path / "preflight.json").read_text())["num_tokens_from"]

    def test_a_sweep_and_a_batch_job_train_on_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        for how in (["-m", "lora.r=8,16"], ["hydra/launcher=slurm"]):
            assert main([*how, "model=llama3-70b", "launch.dry_run=true"]) == 0
            assert "model=llama3-70b" in capsys.readouterr().out

    def test_a_run_says_so_first_and_asks_for_other_data_where_the_hub_is_out_of_reach(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(*_: object, **__: object) -> None:
            raise ConnectionError("no way there")

        monkeypatch.setattr("datasets.load_dataset", load)
        assert main(["model=tiny", f"run.folder={tmp_path}"]) == 2
        first = (tmp_path / "train.log").read_text().partition("\n")[0]
        assert f", on {DEFAULT_DATA}, the default: data.path= names yours" in first
        fix = "no way there. It is the default where no data is named: set data.path to your own file, folder or hub"
        assert fix in capsys.readouterr().err

    def test_nothing_is_evaluated_on_it_by_itself(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert evaluate.main(["model=tiny"]) == 2
        assert "data.path=null names no data." in capsys.readouterr().err
