"""Mistakes that people make in their first hour, each through the command: one message, the last thing on the screen.

It names what was typed and what to type instead. The exit code is 2, or what docs/errors.md says. There is no
traceback, and nothing waits for anything.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qlora_fsdp.__main__ import main
from tests.cli.launch import ROOT, Command, ForkedLaunch, Launch

CHAT = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}
TRAIN = ["train", "model=tiny", "data=random", "training.max_steps=1"]
BASE = ROOT / "demo" / "base"  # a base model, whose tokenizer has no chat template
CHATS = ["train", "model=tiny", "data=chats.jsonl"]

# What is typed, and what the message holds. These end before torch is imported.
TYPED: list[tuple[list[str], list[str]]] = [
    # Models
    (["train", "model=llama3-8b-instruct"], ["model=llama3-8b-instruct is no option", "model=llama3.1-8b-instruct?"]),
    (["train", "model=https://huggingface.co/Qwen/Qwen3-8B"], ["is an address", "Set model.path=Qwen/Qwen3-8B,"]),
    (["train", "data=chats.jsonl"], ["model.path=null names no model", "Set model to a preset"]),
    (["preview", "data=chats.jsonl"], ["model.path=null names no model", "Set model to a preset"]),
    (["preview", "-m", "model=tiny", "data=chats.jsonl"], ["-m makes sweeps of qlora-fsdp train alone."]),
    (["preflight", "hardware=1x24gib", "model=tiny", "data.mix={a.jsonl: 0}"], ["data.mix=", "names a.jsonl, which"]),
    (["preflight", "-m", "model=tiny"], ["-m makes sweeps of qlora-fsdp train alone."]),
    (["train", "model=./mine", "data=chats.jsonl"], ["model.path=./mine does not exist", "Set model.path to a folder"]),
    ([*TRAIN, "model.dtype=bfloat16"], ["model.dtype=bfloat16 is not a setting", "model has: "]),
    # Data
    (["train", "model=tiny", "data=chat.jsonl"], ["data.path=chat.jsonl does not exist, seen from", "Set data.path"]),
    ([*CHATS, "data.columns={prompts: question}"], ["data.columns", "prompts", "prompt"]),
    ([*CHATS, "data.chat_template=chat-ml"], ["data.chat_template=chat-ml is neither a file nor one of", "chatml"]),
    (["train", "model=tiny", "chats.jsonl"], ["chats.jsonl is not of the form key=value", "data=chats.jsonl?"]),
    ([*CHATS, "data.eval_fraction=5"], ["data.eval_fraction=5.0 must be", "less than 1", "Set data.eval_fraction="]),
    ([*CHATS, "data.loss_on=assistant"], ["data.loss_on=assistant must be one of completion, last, all"]),
    ([*CHATS, "data.max_rows=0"], ["data.max_rows=0 must be", "at least 1"]),
    (
        ["train", "model=tiny", "data.mix={chats.jsonl: 0}"],
        ["names chats.jsonl, which has a weight that is not positive"],
    ),
    ([*CHATS, "training.eval_every_steps=5"], ["training.eval_every_steps=5 has no data to evaluate on"]),
    # Names of other programs
    ([*TRAIN, "lora.rank=8"], ["lora.rank=8 is not a setting. Did you mean lora.r?"]),
    ([*TRAIN, "lora_alpha=16"], ["lora_alpha=16 is not a setting. Did you mean lora.lora_alpha?"]),
    ([*TRAIN, "training.epochs=3"], ["training.epochs=3 is not a setting. Did you mean training.num_epochs?"]),
    ([*TRAIN, "training.batch_size=4"], ["Did you mean training.micro_batch_size?"]),
    ([*TRAIN, "training.per_device_train_batch_size=4"], ["Did you mean training.micro_batch_size?"]),
    ([*TRAIN, "training.gradient_accumulation_steps=4"], ["Did you mean training.global_batch_size?"]),
    ([*TRAIN, "training.max_seq_length=4096"], ["Did you mean training.max_length?"]),
    ([*TRAIN, "load_in_4bit=true"], ["load_in_4bit=true is not a setting. Did you mean quant.load_in_4bit?"]),
    ([*TRAIN, "optimizer=lion"], ["optimizer=lion is not a setting. Did you mean optim.name?"]),
    ([*TRAIN, "kernels.glu=torch"], ["kernels.glu=torch is no setting any more. Set kernels.liger=true"]),
    ([*TRAIN, "quant=4bit"], ["quant=4bit is no option of quant", "Did you mean quant=nf4?"]),
    ([*TRAIN, "optim=adamw8bit"], ["optim=adamw8bit is no option", "Did you mean optim=adamw_8bit?"]),
    ([*TRAIN, "optim=paged_adamw_8bit"], ["optim.name=paged_adamw_8bit has pages", "Set optim=adamw_8bit."]),
    ([*TRAIN, "optim=paged_adamw_32bit"], ["which only CUDA has. Set optim=adamw."]),
    ([*TRAIN, "training.neftune_noise_alpha=5"], ["Did you mean task.neftune_noise_alpha?"]),
    ([*TRAIN, "task=preference", "task.neftune_noise_alpha=5"], ["task.neftune_noise_alpha=5", "task.name=causal_lm"]),
    (
        [*TRAIN, "task.loss_type=dft", "task.label_smoothing_factor=0.1"],
        ["label_smoothing_factor=0.1", "task.loss_type"],
    ),
    (
        [*TRAIN, "task.loss_type=dft", "kernels.cross_entropy=liger"],
        ["Liger's kernel sums", "kernels.cross_entropy=auto"],
    ),
    ([*TRAIN, "training.group_by_length=true"], ["training.group_by_length=true", "training=padded"]),
    ([*TRAIN, "fsdp=FULL_SHARD"], ["fsdp=FULL_SHARD is no option of fsdp", "Did you mean fsdp=full_shard?"]),
    ([*TRAIN, "tracking=weights"], ["tracking=weights is no option of tracking", "Set tracking to one of these"]),
    # Values
    ([*TRAIN, "training.learning_rate=fast"], ["training.learning_rate=fast must be a number", "=0.0002"]),
    ([*TRAIN, "training.learning_rate=-1e-4"], ["training.learning_rate=-0.0001 must be", "greater than 0"]),
    ([*TRAIN, "training.learning_rate=2e-4,"], ["training.learning_rate=2e-4, must be a number", "=0.0002"]),
    ([*TRAIN, "lora.r=16.5"], ["lora.r=16.5 must be a whole number. Set lora.r=16."]),
    ([*TRAIN, "lora.r=0"], ["lora.r=0 must be", "Set lora.r=16"]),
    ([*TRAIN, "lora.target_modules=q_proj,v_proj"], ["for a list write lora.target_modules=[q_proj,v_proj]"]),
    (
        [*TRAIN, "lora.target_modules=[q_proj,v_proj"],
        ["expected ',' or ']', but got '<stream end>'. Write lora.target_m"],
    ),
    ([*TRAIN, "lora.init_lora_weights=gausian"], ["gausian is no initialisation of PEFT's. Did you mean gaussian?"]),
    ([*TRAIN, "optim.warmup_ratio=10"], ["optim.warmup_ratio=10.0 must be", "less than 1"]),
    ([*TRAIN, "training.max_length=1"], ["training.max_length=1 must be", "at least 2"]),
    ([*TRAIN, "launch.num_processes=two"], ["launch.num_processes=two must be a whole number or null"]),
    ([*TRAIN, "launch.devices=0"], ["launch.devices=0 is no setting any more. Set the variable CUDA_VISIBLE_DEVICES"]),
    ([*TRAIN, "slurm.time=24h", "hydra/launcher=slurm"], ["slurm.time=24h is no time limit. Set slurm.time=24:00:00"]),
    # Files and folders
    ([*TRAIN, "run.folder=chats.jsonl"], ["run.folder=chats.jsonl", "is a file. Set run.folder to another folder"]),
    ([*TRAIN, "checkpoint.resume=outputs"], ["checkpoint.resume=outputs is no checkpoint", "Set checkpoint.resume="]),
    (["train", "--config", "my.yml"], ["my.yml can't be read: No such file or directory", "Name a YAML file"]),
    (["train", "--config", "tab.yaml"], ["tab.yaml can't be read: line 2", "cannot start any token"]),
    (["train", "--config", "list.yaml"], ["list.yaml can't be read: it holds no lines such as"]),
    (["train", "--config", "flat.yaml"], ["learning_rate=0.0001 is not a setting. Did you mean training.learning_rat"]),
    # Other commands
    (["preflight", "model=llama3-8b"], ["hardware= is missing", "Set hardware=1x24gib"]),
    (["preflight", "model=llama3-8b", "hardware=a100x8"], ["hardware=a100x8 is no GPU", "8xa100-80g?"]),
    (["preflight", "model=llama3-8b", "hardware=0x24gib"], ["hardware=0x24gib is no GPU", "Did you mean 1x24gib?"]),
    (["chat", "adapter=run"], ["adapter=run holds no adapter", "Set adapter=run/adapter"]),
    (["chat"], ["model.path=null names no model. Set adapter to the folder that training wrote"]),
    (["generate", "adapter=run/adapter", "prompt=a", "temprature=0.7"], ["Did you mean temperature?"]),
    (["evaluate", "adapter=nowhere", "data=chats.jsonl"], ["adapter=nowhere holds no adapter", "set adapter=FOLDER"]),
    (["merge", "out=merged"], ["names no model. Set adapter to the folder that training wrote"]),
    (["push", "adapter=run/adapter"], ["repo is not set. Set repo=ORG/NAME."]),
    (["status", "nowhere"], ["nowhere is not there. Name a run.folder"]),
    (["report", "nowhere"], ["nowhere is not there. Name a run.folder"]),
]


@pytest.fixture
def peoples_folder(own_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has what people have."""
    monkeypatch.setattr("qlora_fsdp.preflight.visible_hardware", lambda: None)
    Path("chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    Path("tab.yaml").write_text("model: tiny\n\tdata: random\n")
    Path("list.yaml").write_text("- model: tiny\n")
    Path("flat.yaml").write_text("model: tiny\nlearning_rate: 1e-4\n")
    Path("outputs").mkdir()
    Path("run/adapter").mkdir(parents=True)
    Path("run/adapter/adapter_config.json").write_text("{}")
    Path("run/adapter/adapter_model.safetensors").touch()


@pytest.mark.usefixtures("peoples_folder")
@pytest.mark.parametrize(("argv", "parts"), TYPED, ids=lambda value: " ".join(value[-2:]))
def test_a_mistake_is_answered(argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("\nError: ") and not printed.out
    assert len(printed.err) < 1000, "short enough to be read"
    for part in parts:
        assert part in printed.err


# Mistakes that a run finds: what is typed, ranks, exit code, and what the message holds. {folder} is the fixture's.
FOUND: dict[str, tuple[list[str], int, int, list[str]]] = {
    "empty file": (["data.path={folder}/empty.jsonl"], 1, 2, ["empty.jsonl", "data."]),
    "indented JSON": (
        ["data.path={folder}/indented.jsonl"],
        1,
        2,
        ["indented.jsonl has a JSON object over", "jq -c ."],
    ),
    "a spreadsheet": (["data.path={folder}/chats.xlsx"], 1, 2, ["chats.xlsx is of no known kind", "Use one of .jsonl"]),
    "an empty folder": (["data.path={folder}/none"], 1, 2, ["data.path=", "/none is a folder with no file of .jsonl"]),
    "chats without a template": (
        [f"model.path={BASE}", "model.tokenizer_path=null", "data.path={folder}/chats.jsonl"],
        1,
        2,
        ["data.chat_template"],
    ),
    "prompts that fill the sequence": (
        ["data.path={folder}/long.jsonl"],
        1,
        2,
        ["no usable row", "long.jsonl:1 (within 64 tokens)", "training.max_length"],
    ),
    "only pickled weights": (["model.path={folder}/pickled"], 1, 2, ["/pickled", "safetensors"]),
    "a file of the model is missing": (["model.path={folder}/partial"], 2, 2, ["model-00002-of-", "model.path="]),
    "held-out rows of no use": (["data.eval_path={folder}/useless.jsonl"], 2, 2, ["no usable row", "data.eval_path"]),
    "nothing to adapt": (
        ["lora.target_modules=[norm]"],
        2,
        2,
        ["lora.target_modules=[norm] fits a layer that is not linear", "Set lora.target_modules=all-linear"],
    ),
    "a learning rate of 1e30": (
        ["training.learning_rate=1e30", "training.max_steps=4", "optim.warmup_ratio=0"],
        2,
        5,
        ["training.learning_rate"],
    ),
}
# The same through the command that starts ranks.
STARTED: dict[str, tuple[list[str], list[str]]] = {
    "empty file on two ranks": (["data={folder}/empty.jsonl", "launch.num_processes=2"], ["empty.jsonl", "data."]),
    "misspelt": (["lora.rank=8", "launch.num_processes=2"], ["lora.rank=8 is not a setting. Did you mean lora.r?"]),
    "three sequences on two ranks": (
        ["training.global_batch_size=3", "launch.num_processes=2"],
        ["training.global_batch_size=3 is not a multiple of 2 ranks"],
    ),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path], rows: Path
) -> Iterator[dict[str, tuple[int, Command]]]:
    """Every case's exit code and command."""
    folder, model = tmp_path_factory.mktemp("mistakes"), checkpoint("llama")
    (folder / "empty.jsonl").touch()
    (folder / "none").mkdir()
    (folder / "indented.jsonl").write_text(json.dumps(CHAT, indent=2))
    (folder / "useless.jsonl").write_text('{"a": 1}\n')
    (folder / "chats.xlsx").write_bytes(b"PK\x03\x04")
    (folder / "long.jsonl").write_text(json.dumps({"prompt": 100 * "a", "completion": "b"}) + "\n")
    (folder / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    shutil.copytree(model, folder / "partial")
    min((folder / "partial").glob("model-00002-of-*")).unlink()
    (folder / "pickled").mkdir()
    shutil.copy(model / "config.json", folder / "pickled")
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    base = [f"data.cache_folder={folder / 'cache'}", "training.max_length=64"]
    own = [f"model.path={model}", "model.tokenizer_path=bytes", f"data.path={rows}"]

    def fill(arguments: list[str]) -> list[str]:
        return [argument.format(folder=folder) for argument in arguments]

    started = {
        case: Launch(folder / case, "qlora-fsdp", "model=tiny", *base, *fill(arguments))
        for case, (arguments, _) in STARTED.items()
    }
    others = {}
    for case, (arguments, num_ranks, *_) in FOUND.items():
        command = ForkedLaunch(folder / case, num_ranks, *base, *own, *fill(arguments))
        others[case] = (command.finish(), command)
    yield others | {case: (command.finish(), command) for case, command in started.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("case", [*FOUND, *STARTED])
def test_a_mistake_ends_the_run_with_its_message(case: str, ended: dict[str, tuple[int, Command]]) -> None:
    exit_code, command = ended[case]
    _, _, expected, parts = FOUND.get(case) or ([], 2, 2, STARTED[case][1] if case in STARTED else [])
    assert exit_code == expected, command.output
    assert "Traceback" not in command.output
    assert len(command.errors) == 1, command.output
    assert command.output.endswith(command.errors[0]), command.output
    for part in parts:
        assert part in command.errors[0]
