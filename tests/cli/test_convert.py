"""`qlora-fsdp convert`: files in the shapes of other projects' published examples, through the real command."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.convert.__main__ import convert_file, main
from qlora_fsdp.config.convert.common_settings import NOT_KNOWN
from qlora_fsdp.config.data_sets import all_paths
from qlora_fsdp.config.reading.compose import load_config
from tests.cli.launch import run_forked

FOLDER = Path(__file__).parents[1] / "helpers" / "other_projects"
FILES = sorted(FOLDER.glob("*/*.y*ml"))
RUNS = [file for file in FILES if file.parent.name != "accelerate"]
ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def test_there_is_a_dozen_of_each_project() -> None:
    for project in ("axolotl", "llama_factory", "trl"):
        assert len([file for file in RUNS if file.parent.name == project]) >= 12


@pytest.mark.parametrize("file", RUNS, ids=name_of)
def test_what_is_converted_passes_our_checks(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Local files and adapters that a file names are stood in for; nothing else is told."""
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load(file.read_text())
    (tmp_path / "saves/llama3-8b/lora/sft").mkdir(parents=True)
    (tmp_path / "saves/llama3-8b/lora/sft/adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], "base_model_name_or_path": "x", "r": 8})
    )
    (tmp_path / "saves/llama3-8b/lora/sft/adapter_model.safetensors").write_bytes(b"")
    text = convert_file(file)
    values = yaml.safe_load(text)
    for path in named_files(values):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(ROW)
    assert main([str(file), "out=ours.yaml"]) == 0
    assert (tmp_path / "ours.yaml").read_text() == text
    told = capsys.readouterr().err
    assert "Next: qlora-fsdp preflight --config ours.yaml" in told
    # An adapter to start from is no real one, and says so.
    notes = [line for line in told.splitlines() if line.startswith("Note: ") and "lora.start" not in line]
    assert notes == []
    assert NOT_KNOWN not in text
    if "start" not in values.get("lora", {}):
        config = load_config(["--config", "ours.yaml"])
        assert check_settings(config) == []
        assert all_paths(config.data)
    for line in re.findall(r"^#   (?!  )(.+)", text, re.MULTILINE):  # what is left out stood there
        assert line.partition(":")[0].split(".")[0] in {*given, "adapter", "dataset", "dataset_info", "use_peft"}


def named_files(values: Mapping[str, Any]) -> list[str]:
    data = values["data"]
    paths = [data.get("path"), data.get("eval_path"), *data.get("mix", {})]
    flat = [each for path in paths for each in (path if isinstance(path, list) else [path])]
    return [path for path in flat if path is not None and Path(path).suffix in (".json", ".jsonl")]


EXPECTED = {
    "axolotl/qlora-alpaca": {
        "model.path": "NousResearch/Llama-3.2-1B",
        "quant.load_in_4bit": True,
        "lora.r": 16,
        "lora.lora_alpha": 32,
        "lora.lora_dropout": 0.05,
        "training.max_length": 2048,
        "training.global_batch_size": 4 * 2 * 2,
        "training.learning_rate": 2e-4,
        "training.packing": None,
        "data.path": "teknium/GPT4-LLM-Cleaned",
        "data.eval_fraction": 0.1,
        "optim.warmup_ratio": 0.1,
        "run.folder": "./outputs/qlora-out",
    },
    "axolotl/lora-chat-template": {
        "quant.load_in_8bit": True,
        "quant.load_in_4bit": False,
        "optim.name": "adamw_8bit",
        "lora.target_modules": "all-linear",
        "training.learning_rate": 2e-4,
        "training.packing": False,
        "data.chat_template": "llama3",
    },
    "axolotl/qlora-fsdp-70b": {"fsdp.cpu_offload": True, "optim.name": None, "training.max_length": 512},
    "axolotl/dpo": {
        "task.name": "preference",
        "preference.loss": "dpo",
        "preference.beta": 0.2,
        "data.columns": {"messages": "conversation"},
    },
    "axolotl/dpo-intel": {
        "preference.loss": "ipo",
        "data.mix": {
            "Intel/orca_dpo_pairs": {
                "weight": 1.0,
                "chat_template": "chatml",
                "columns": {"prompt": "question"},
            },
            "argilla/ultrafeedback-binarized-preferences": {
                "weight": 1.0,
                "chat_template": "chatml",
                "columns": {
                    "prompt": "instruction",
                    "chosen": "chosen_response",
                    "rejected": "rejected_response",
                },
            },
        },
        "optim.lr_scheduler_type": "constant",
        "optim.warmup_steps": 10,
    },
    "axolotl/kto": {"preference.loss": "kto", "preference.beta": 0.5, "preference.desirable_weight": 0.2},
    "axolotl/orpo": {"preference.loss": "orpo", "preference.beta": 0.1},
    "axolotl/reward": {"task.name": "reward"},
    "axolotl/local-completions": {
        "model.trust_remote_code": None,
        "data.path": "texts/part1.jsonl",
        "data.columns": {"text": "body"},
        "data.format": "text",
        "data.eval_path": "texts/held_out.jsonl",
        "lora.use_rslora": True,
        "training.max_steps": 400,
        "training.eval_every_steps": 100,
        "checkpoint.every_steps": 100,
        "checkpoint.keep_last": 3,
    },
    "axolotl/pretraining": {
        "data.streaming": True,
        "data.name": "en",
        "optim.lr_scheduler_type": "cosine_with_min_lr",
        "optim.lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "tracking.report_to": ["wandb"],
        "tracking.project": "c4",
    },
    "axolotl/several-data-sets": {
        "data.mix": {"mlabonne/FineTome-100k": {"weight": 1.0, "split": "train[:20%]"}, "chats/own.jsonl": 1.0},
        "data.template_arguments": {"enable_thinking": False},
        "lora.use_dora": True,
        "optim.loraplus_lr_ratio": 16,
        "optim.betas": [0.9, 0.95],
        "optim.eps": 1e-5,
        "optim.max_grad_norm": 0.5,
        "tracking.report_to": ["tensorboard"],
    },
    "axolotl/long-rows-user-format": {
        "data.columns": {"instruction": "question", "output": "answer"},
        "distributed.context_parallel": 2,
        "data.bad_rows": "skip",
        "lora.experts": True,
    },
    "axolotl/whole-model": {
        "data.loss_on": "all",
        "tokenizer.add_tokens": ["<|tool|>"],
        "data.chat_template": "chatml",
    },
    "llama_factory/lora-sft": {
        "data.format": "messages",
        "data.path": ["data/identity.json", "data/alpaca_en_demo.json"],
        "data.max_rows": 1000,
        "quant.load_in_4bit": False,
        "lora.r": 8,
        "lora.lora_alpha": 16,
        "training.global_batch_size": 1 * 8 * 2,
        "training.num_epochs": 3.0,
        "training.packing": False,
        "run.name": "sft",
    },
    "llama_factory/qlora-bnb": {"quant.load_in_4bit": True, "quant.bnb_4bit_use_double_quant": False},
    "llama_factory/dpo": {"task.name": "preference", "preference.loss": "dpo", "preference.beta": 0.1},
    "llama_factory/simpo": {
        "preference.loss": "simpo",
        "preference.beta": 2.5,
        "preference.simpo_gamma": 0.5,
        "preference.sft_weight": 0.1,
    },
    "llama_factory/kto": {"preference.loss": "kto", "preference.undesirable_weight": 1.3},
    "llama_factory/reward": {"task.name": "reward"},
    "llama_factory/pretrain": {"data.path": "data/c4_demo.jsonl", "training.packing": None, "data.format": "text"},
    "llama_factory/neat-packing": {
        "training.packing": None,
        "data.loss_on": "last",
        "data.eval_fraction": 0.1,
        "data.template_arguments": {"enable_thinking": False},
        "training.eval_every_steps": 500,
    },
    "llama_factory/plus": {
        "optim.loraplus_lr_ratio": 16.0,
        "lora.modules_to_save": ["embed_tokens", "lm_head"],
        "lora.target_modules": ["q_proj", "v_proj"],
        "optim.name": "paged_adamw_8bit",
        "training.seed": 7,
    },
    "llama_factory/mixed-streaming": {
        "data.mix": {
            "data/identity.json": {"weight": 0.3, "format": "messages"},
            "data/alpaca_en_demo.json": {"weight": 0.7, "format": "messages"},
        },
        "data.mix_until": "shortest",
        "data.streaming": True,
        "lora.start": "saves/llama3-8b/lora/sft",
        "run.name": "second",
    },
    "llama_factory/unsloth-ds": {
        "data.path": "team/rows",
        "data.name": "small",
        "data.max_rows": 500,
        "data.columns": {"instruction": "question", "output": "answer"},
        "data.loss_on": "all",
    },
    "trl/sft-lora": {
        "training.global_batch_size": 2 * 8 * 2,
        "training.packing": None,
        "training.max_length": 1024,
        "optim.lr_scheduler_type": "linear",
        "optim.warmup_ratio": 0.0,
        "data.eval_split": "test",
        "hub.push": True,
        "hub.repo": "team/qwen-sft",
    },
    "trl/sft-qlora": {
        "quant.bnb_4bit_use_double_quant": True,
        "data.columns": {"text": "output"},
        "optim.lr_scheduler_type": "constant",
        "training.global_batch_size": 4 * 2,
    },
    "trl/handbook-sft": {
        "data.mix": {"HuggingFaceH4/ultrachat_200k": {"weight": 1.0, "split": "train_sft"}},
        "data.eval_split": "test_sft",
        "checkpoint.keep_last": 1,
        "training.num_epochs": 1,
    },
    "trl/handbook-dpo": {"preference.beta": 0.01, "data.eval_split": "test_prefs", "lora.r": 128},
    "trl/dpo-ipo": {"preference.loss": "ipo", "preference.precompute": False, "training.learning_rate": 5e-6},
    "trl/dpo-robust": {
        "preference.loss": "robust",
        "preference.label_smoothing": 0.1,
        "preference.sft_weight": 1.0,
        "training.learning_rate": 1e-6,
    },
    "trl/kto": {"preference.loss": "kto", "optim.warmup_ratio": 0.1, "preference.undesirable_weight": 1.33},
    "trl/reward": {"task.name": "reward", "lora.modules_to_save": ["score"], "training.num_epochs": 1.0},
    "trl/sft-dora-gptoss": {"optim.lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "training.global_batch_size": 32},
    "trl/sft-whole-model": {
        "optim.name": "adafactor",
        "task.neftune_noise_alpha": 5,
        "data.loss_on": "all",
        "optim.betas": [0.9, 0.99],
        "optim.lr_scheduler_type": "cosine",
    },
    "trl/sft-streaming": {"data.streaming": True, "training.max_steps": 1000, "training.eval_every_steps": None},
    "accelerate/fsdp-qlora": {"launch.num_processes": 2, "fsdp.cpu_offload": True},
    "accelerate/fsdp2": {"memory.activations": "full", "training.precision": "bfloat16"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_settings_have_their_counterparts(name: str) -> None:
    (file,) = FOLDER.glob(f"{name}.y*ml")
    values = yaml.safe_load(convert_file(file, gpus=2))
    for key, expected in EXPECTED[name].items():
        section, _, setting = key.partition(".")
        assert values.get(section, {}).get(setting) == expected, key


LEFT_OUT = {
    "axolotl/whole-model": ["adapter: null", "optimizer: muon", "lr_scheduler: one_cycle"],
    "axolotl/reward": ["chat_template: gemma", "num_labels: 1"],
    "axolotl/local-completions": ["trust_remote_code: true"],
    "llama_factory/unsloth-ds": ["rope_scaling: linear", "use_unsloth: true", "val_size: 100", "deepspeed: examples"],
    "trl/sft-whole-model": ["use_peft: false", "lr_scheduler_type: inverse_sqrt"],
    "trl/sft-streaming": ["eval_steps: 0.1"],
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_has_no_counterpart_is_a_comment_with_a_reason(name: str) -> None:
    (file,) = FOLDER.glob(f"{name}.y*ml")
    lines = convert_file(file).splitlines()
    for wanted in LEFT_OUT[name]:
        (number,) = [number for number, line in enumerate(lines) if line.startswith(f"#   {wanted}")]
        assert re.match(r"#     \w.+", lines[number + 1])


def test_an_unknown_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("base_model: a/b\nadapter: lora\nof_tomorrow: {x: 1}\n")
    assert f"#   of_tomorrow: {{x: 1}}\n#     {NOT_KNOWN}\n" in convert_file(tmp_path / "a.yml")


def test_secrets_of_a_file_are_not_written(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(
        "base_model: a/b\nadapter: lora\nhf_hub_token: hf_ONE\nhub_token: hf_TWO\nwandb_api_key: three\n"
    )
    text = convert_file(tmp_path / "a.yml")
    assert "hf_ONE" not in text and "hf_TWO" not in text and "three" not in text
    assert "#   hub_token: (a secret)" in text


@pytest.mark.parametrize("name", ["reward_funcs: [a]", "num_generations: 8", "use_vllm: true"])
def test_files_of_grpo_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have beta and max_prompt_length too, by which files of DPO are known."""
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(f"model_name_or_path: a/b\ndataset_name: c/d\nbeta: 0.1\n{name}\n")
    assert main(["a.yml", "of=trl"]) == 2
    assert re.search("is of GRPO or RLOO, whose files are not converted", capsys.readouterr().err)


def test_the_real_command_converts_and_the_result_can_be_planned(tmp_path: Path) -> None:
    file = FOLDER / "axolotl" / "qlora-fsdp-70b.yml"
    code, printed = run_forked(tmp_path, "convert", str(file), "out=ours.yaml", "gpus=2")
    assert code == 0 and "Written to ours.yaml" in printed, printed
    code, printed = run_forked(tmp_path, "convert", str(FOLDER / "trl" / "kto.yaml"))
    assert code == 0 and printed.startswith("# From kto.yaml (trl kto), by qlora-fsdp convert.\n"), printed
    ours = tmp_path / "ours.yaml"
    ours.write_text(ours.read_text().replace("casperhansen/llama-3-70b-fp16", "null").replace("path: null", "name: x"))
    code, printed = run_forked(tmp_path, "preflight", "model=llama3-70b", "hardware=2x24gib", "--config", "ours.yaml")
    assert code == 0 and printed.startswith("Fits: "), printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.yml"], r"none\.yml can't be read"),
        (["other.yml"], "has settings of no project that is known here. Say whose it is: of=axolotl"),
        (["bad.yml"], "has a value of another kind than axolotl's"),
        (["other.yml", "gpus=x"], "gpus=x must be a whole number of at least 1"),
        (["other.yml", "of=torchtune"], "of=torchtune is no setting of this command. Set of to one of axolotl"),
        (["a.yml", "b.yml"], "takes one file, and 2 are named"),
    ],
)
def test_mistakes_are_told(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yml").write_text("a: 1\n")
    Path("bad.yml").write_text("base_model: a/b\ndatasets: [1]\n")
    assert main(words) == 2
    assert re.search(message, capsys.readouterr().err)


def test_accelerate_files_of_other_projects_run_or_say_what_differs(tmp_path: Path) -> None:
    """PEFT's fsdp_config_qlora.yaml asks for offload, which is a setting here; a TPU's is refused."""
    typed = ["model=tiny", "data=random", "training.max_steps=1", "training.max_length=64"]
    files = FOLDER / "accelerate"
    code, printed = run_forked(tmp_path, "train", *typed, f"launch.config_file={files / 'tpu.yaml'}")
    assert code == 2 and "has distributed_type: XLA, which is for TPUs" in printed, printed
    code, printed = run_forked(tmp_path, "convert", str(files / "tpu.yaml"))
    assert code == 2 and "distributed_type: XLA is for TPUs, and qlora-fsdp runs on NVIDIA GPUs." in printed
    code, printed = run_forked(tmp_path, "train", *typed, f"launch.config_file={files / 'fsdp-qlora.yaml'}")
    assert code == 2 and "FSDP_OFFLOAD_PARAMS=true contradicts fsdp.cpu_offload=false" in printed
    assert "Set fsdp=offload" in printed and "Traceback" not in printed
    code, printed = run_forked(
        tmp_path, "train", *typed, "fsdp=offload", f"launch.config_file={files / 'fsdp-qlora.yaml'}"
    )
    assert code == 0 and "Finished: 1 step" in printed, printed
    code, printed = run_forked(tmp_path, "train", *typed, "run.name=two", f"launch.config_file={files / 'fsdp2.yaml'}")
    assert code == 0 and "Finished: 1 step" in printed, printed


def test_numbers_in_quotes_are_numbers(tmp_path: Path) -> None:
    """YAML reads `"2e-4"` as text, and those projects make a number of it; names of digits stay text."""
    (tmp_path / "a.yaml").write_text(
        'model_name_or_path: a/b\nlearning_rate: "2e-4"\nnum_train_epochs: "3"\nper_device_train_batch_size: "2"\n'
        'lora_r: "8"\nload_in_4bit: "false"\nuse_peft: "true"\nwarmup_steps: "10"\nrun_name: "1.10"\n'
        'dataset_name: a/c\nneftune_noise_alpha: "5"\nloss_type: dft\nlabel_smoothing_factor: "0"\n'
    )
    values = yaml.safe_load(convert_file(tmp_path / "a.yaml", trainer="sft"))
    training, optim, task = values["training"], values["optim"], values["task"]
    assert (training["learning_rate"], training["num_epochs"], training["global_batch_size"]) == (2e-4, 3, 2)
    assert (values["lora"]["r"], values["quant"]["load_in_4bit"], optim["warmup_steps"]) == (8, False, 10)
    assert (values["run"]["name"], task["neftune_noise_alpha"], task["loss_type"]) == ("1.10", 5, "dft")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ('format: "{instruction}"', {"columns": {"prompt": "question", "completion": "answer"}}),
        ('format: "Q: {instruction}"', {"columns": {"instruction": "question", "output": "answer"}}),
    ],
)
def test_prompts_without_words_of_a_format_stay_as_they_are(tmp_path: Path, more: str, expected: Any) -> None:
    """And not in Alpaca's prompt. A format with words of its own is told."""
    (tmp_path / "a.yml").write_text(
        "base_model: a/b\ndatasets:\n- path: rows.jsonl\n  type:\n    field_instruction: question\n"
        f"    field_output: answer\n    {more}\n"
    )
    written = convert_file(tmp_path / "a.yml")
    assert {key: yaml.safe_load(written)["data"][key] for key in expected} == expected
    assert ("format" in written) == ("Q:" in more)
