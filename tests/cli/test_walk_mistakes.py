"""Mistakes of a walk through README and the ten jobs, each through the command: one message, exit code 2, no traceback.

Those of a first hour are in test_mistakes.py. Here are words of other programs, numbers as people write them,
rows for another task, rewards that fail, adapters in place of models, and files that would be written over.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qlora_fsdp.__main__ import main
from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import SCRIPT, child_environment, run_forked
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import write_lines

TRAIN = ["train", "model=tiny", "data=rows.jsonl", "training.max_steps=1", "training.max_length=64"]
CLASSIFY = [*TRAIN, "task=sequence_classification"]
GRPO = [*TRAIN, "task=grpo", "rollout.max_completion_length=4", "rollout.num_generations=2"]

# What is typed, and what the message holds. These end before torch is imported.
TYPED: list[tuple[list[str], list[str]]] = [
    # The command line
    (["tarin", "model=tiny"], ["tarin is no command. Did you mean qlora-fsdp train?"]),
    (["train", "--model", "tiny", "data=rows.jsonl"], ["without dashes", "Write model=tiny."]),
    (["train", "model", "=", "tiny"], ["has spaces around the equals sign", "Write model=tiny."]),
    (["train", "model==tiny", "data=rows.jsonl"], ["model==tiny has two equals signs. Write model=tiny."]),
    ([*TRAIN, "lora.r==8"], ["lora.r==8 has two equals signs. Write lora.r=8."]),
    ([*TRAIN, "run.name="], ["run.name= has no value."]),
    (["train", "--config", "folder"], ["folder can't be read: Is a directory. Name a YAML file"]),
    (["train", "--config", "a.yaml", "--config", "b.yaml"], ["--config is given 2 times."]),
    (["evalute", "adapter=a"], ["Did you mean qlora-fsdp evaluate?"]),
    (["--train", "model=tiny"], ["--train is no command. Did you mean qlora-fsdp train?"]),
    (["resume", "outputs/run"], ["Type the command of the run again: it goes on from its last checkpoint."]),
    ([*TRAIN, "--resume"], ["--resume is no option", "Write checkpoint.resume=VALUE."]),
    (["train", "--hlep"], ["--hlep is no option", "Did you mean --help?"]),
    (["train", "-c", "run.yaml"], ["-c run.yaml is no option here. Write --config FILE.yaml."]),
    (["train", "run.yaml"], ["run.yaml is not of the form key=value. Did you mean --config run.yaml?"]),
    (["train", "--config", "one.yaml"], ["training.max_steps=one must be a whole number or null."]),
    (["train", "--config", "eight.yaml"], ["lora=8 is no option of lora: it has attention, default."]),
    (["generate", "adapter=a", "prompt=a", "prompt=b"], ["prompt=b sets prompt for the second time."]),
    # Values
    ([*TRAIN, "training.learning_rate=0,0002"], ["for a number with a fraction write training.learning_rate=0.0002"]),
    ([*TRAIN, "training.learning_rate=2e-4f"], ["must be a number. Set training.learning_rate=0.0002."]),
    (
        [*TRAIN, "training.max_length=2k"],
        ["training.max_length=2k must be a whole number. Set training.max_length=2048"],
    ),
    ([*TRAIN, "training.seed=-1"], ["at least 0 and less than 2147483648. Set training.seed=0"]),
    ([*TRAIN, "data.eval_fraction=5%"], ["data.eval_fraction=5% must be a number. Set data.eval_fraction=0.05."]),
    ([*TRAIN, "lora.lora_dropout=1.5"], ["lora.lora_dropout=1.5 must be", "less than 1"]),
    ([*TRAIN, "optim.lr_scheduler_type=cosin"], ["Set optim.lr_scheduler_type=cosine."]),
    ([*TRAIN, "launch.num_processes=0"], ["launch.num_processes=0 must be", "at least 1"]),
    ([*TRAIN, "data.format=alpacca"], ["data.format=alpacca must be one of auto, messages"]),
    ([*TRAIN, "quant.load_in_4bit=maybe"], ["quant.load_in_4bit=maybe must be true or false."]),
    ([*TRAIN, "lora.target_modules=5"], ["lora.target_modules=5 is neither a list of names nor a regular expression."]),
    ([*TRAIN, "training.packing=maybe"], ["training.packing=maybe must be true, false or auto."]),
    ([*TRAIN, "data.columns=prompt"], ["data.columns=prompt must be a mapping", "data.columns='{prompt: question,"]),
    ([*TRAIN, "optim.betas=[0.9,1.5]"], ["optim.betas=[0.9,1.5] must be two numbers from 0 to below 1."]),
    ([*TRAIN, "training.num_epochs=0"], ["training.num_epochs=0.0 must be finite and greater than 0."]),
    ([*TRAIN, "lora.lora_alpha=-16"], ["lora.lora_alpha=-16.0 must be finite and greater than 0."]),
    ([*TRAIN, "checkpoint.every_steps=0"], ["checkpoint.every_steps=0 must be finite and at least 1."]),
    ([*TRAIN, "training.learning_rate=1e-4,2e-4"], ["gives several values to one run. For a sweep add -m."]),
    ([*TRAIN, "optim.warmup_steps=100"], ["leaves no step after the warmup: the run has 1 step."]),
    ([*TRAIN, "training.early_stopping_patience=3"], ["has no effect without training.eval_every_steps."]),
    ([*TRAIN, "tracking.report_to=wandb"], ["must be a list such as [a,b]. Set tracking.report_to=[wandb]."]),
    ([*TRAIN, "run.name=../elsewhere"], ["run.name=../elsewhere is no name of a folder in outputs/.", "run.folder"]),
    ([*TRAIN, "run.name=' '"], ["run.name=  is no name of a folder in outputs/."]),
    (["train", "model=tiny", "data=rows.jsonl,more.jsonl"], ["for a list write data.path=[rows.jsonl,more.jsonl]"]),
    ([*TRAIN, "optim=lion"], ["optim=lion is no option of optim", "Did you mean optim=lion_8bit?"]),
    ([*TRAIN, "optim.loraplus_lr_ratio=-1"], ["optim.loraplus_lr_ratio=-1.0 must be finite and greater than 0."]),
    ([*TRAIN, "task.label_smoothing_factor=1"], ["must be finite and at least 0 and less than 1."]),
    (
        [*TRAIN, "optim.lr_scheduler_kwargs={min_lr_rate: 0.5}"],
        ["names min_lr_rate, and optim.lr_scheduler_type=cosine has no such argument: it has none."],
    ),
    (
        [*TRAIN, "optim.lr_scheduler_type=warmup_stable_decay", "optim.lr_scheduler_kwargs={decay_ratio: 2}"],
        ["has decay_ratio=2, which must be from 0 to 1. 0.2 is the default of decay_ratio."],
    ),
    (
        [*TRAIN, "quant=int8", "quant.bnb_4bit_quant_type=fp4"],
        ["quant.bnb_4bit_quant_type=fp4 has no effect with quant.load_in_4bit=false."],
    ),
    (["preflight", "model=tiny", "hardware=1.5xh100"], ["hardware=1.5xh100 is no GPU", "Did you mean 1xh100?"]),
    (["status", "folder"], ["No run is in "]),
    (["convert", "one.yaml"], ["has settings of no project that is known here. Say whose it is: of=axolotl"]),
    # Tasks by the names of their methods
    ([*TRAIN, "task=sft"], ["task=sft is no option", "Did you mean task=causal_lm?"]),
    ([*TRAIN, "task=dpo"], ["Did you mean task=preference preference.loss=dpo?"]),
    ([*TRAIN, "task=kto"], ["Did you mean task=preference preference.loss=kto?"]),
    ([*TRAIN, "task=classification"], ["Did you mean task=sequence_classification?"]),
    ([*TRAIN, "task=ner"], ["Did you mean task=token_classification?"]),
    ([*TRAIN, "task=preference", "preference.loss=dppo"], ["must be one of dpo, ipo", "Set preference.loss=dpo."]),
    ([*TRAIN, "grpo.beta=0.1"], ["grpo.beta=0.1 has no effect with task.name=causal_lm. Set task=grpo too"]),
    # The default, which changes nothing: the rows would be trained on as they are.
    ([*TRAIN, "preference.loss=dpo"], ["preference.loss=dpo has no effect with task.name=causal_lm. Set task=pref"]),
    ([*TRAIN, "task.labels=[a,b]"], ["task.labels=[a,b] has no effect with task.name=causal_lm."]),
    ([*TRAIN, "task=preference", "reward.functions=[exact_match]"], ["has no effect with task.name=preference."]),
    (CLASSIFY, ["task.labels=null names too few labels. Set task.labels="]),
    ([*CLASSIFY, "task.labels=[a,a]"], ["task.labels=[a,a] names a label twice."]),
    # Rewards
    (GRPO, ["reward.functions=[] names no function", "Set reward.functions=[rewards.py:NAME]"]),
    ([*GRPO, "reward.functions=rewards.py:good"], ["must be a list", "Set reward.functions=[rewards.py:good]."]),
    ([*GRPO, "reward.functions=[rewards.py]"], ["has rewards.py, which is neither FILE.py:NAME nor built in"]),
    ([*GRPO, "reward.functions=[exact_matc]"], ["has exact_matc", "built in are exact_match"]),
    ([*GRPO, "reward.functions=[other.py:good]"], ["the file other.py does not exist, seen from"]),
    ([*GRPO, "reward.functions=[exact_match]", "reward.weights=[1,2]"], ["has 2 numbers, and reward.functions 1."]),
    ([*GRPO, "reward.functions=[exact_match]", "rollout.num_generations=1"], ["rollout.num_generations=1 must be"]),
    (
        [*GRPO, "reward.functions=[exact_match]", "rollout.max_completion_length=64"],
        ["rollout.max_completion_length=64 leaves no room for a prompt", "Set it below 64."],
    ),
]


@pytest.fixture
def walkers_folder(own_process: None) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("rewards.py").write_text("def good(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    Path("one.yaml").write_text("model: tiny\ndata: rows.jsonl\ntraining: {max_steps: one}\n")
    Path("eight.yaml").write_text("model: tiny\ndata: rows.jsonl\nlora: 8\n")
    Path("folder").mkdir()


@pytest.mark.usefixtures("walkers_folder")
@pytest.mark.parametrize(("argv", "parts"), TYPED, ids=lambda value: " ".join(value[-2:]))
def test_what_is_typed_wrongly_is_answered(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("\nError: ") and not printed.out
    assert printed.err.count("Error: ") == 1 and len(printed.err) < 1000
    for part in parts:
        assert part in printed.err


REWARDS = """
def fails(completions, **kwargs):
    raise ValueError("no such thing")

def leaves(completions, **kwargs):
    raise SystemExit(3)

def column(completions, solution, **kwargs):
    return [1.0 for _ in completions]

def same(completions, **kwargs):
    return [1.0 for _ in completions]

def few(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["good" for _ in completions]
"""
RUN = ["train", "model=base", "training.max_length=64", "training.max_steps=1", "training.global_batch_size=2"]
RUN += ["data.cache_folder=cache", "run.overwrite=true"]
ANSWERS = [*RUN, "task=grpo", "data=sums.jsonl", "rollout.max_completion_length=4", "rollout.num_generations=2"]
SFT = "adapter=outputs/sft/adapter"
LABELS = "adapter=outputs/labels/adapter"
RESUMED = ["checkpoint.resume=outputs/sft/checkpoints/step-00000001", "training.max_steps=2", "data=rows.jsonl"]

# What a command finds once it looks at files: what is typed, and what its message holds.
FOUND: dict[str, tuple[list[str], list[str]]] = {
    "a reward that fails": (
        [*ANSWERS, "reward.functions=[rewards.py:fails]"],
        ["rewards.py:fails raised ValueError: no such thing (rewards.py:3), for the answer", "Correct it there."],
    ),
    "a reward that ends its process": (
        [*ANSWERS, "reward.functions=[rewards.py:leaves]"],
        ["the process of rewards.py:leaves has ended by itself (exit code 3). Correct it there."],
    ),
    "a reward of a column that is not there": (
        [*ANSWERS, "reward.functions=[rewards.py:column]"],
        ["rewards.py:column asks for solution, which is no column of the rows (columns besides the prompt: answer)."],
    ),
    "a reward that is not in its file": (
        [*ANSWERS, "reward.functions=[rewards.py:god]"],
        ["rewards.py:god can't be loaded: rewards.py has no function god; it has fails, leaves, "],
    ),
    "a file of rewards that can't be run": (
        [*ANSWERS, "reward.functions=[broken.py:good]"],
        ["broken.py:good can't be loaded: broken.py can't be run: SyntaxError: "],
    ),
    "a reward model that is none": (
        [*ANSWERS, "reward.models=[outputs/sft/adapter]"],
        ["has no score with one output: it is no reward model. Set reward.models to"],
    ),
    "chats to compare": (
        [*RUN, "task=preference", "data=rows.jsonl"],
        ["no usable row", "no chosen and no rejected", "data.columns={chosen: NAME}"],
    ),
    "pairs to write text": (
        [*RUN, "data=pairs.jsonl"],
        ["answers to compare; set task=preference or task=reward"],
    ),
    "texts for labels of words": (
        [*RUN, "task=token_classification", "task.labels=[even,odd]", "data=labels.jsonl"],
        ["no tokens (keys: text, label; data.columns={tokens: NAME} says which it is)"],
    ),
    "words for numbers": (
        [*RUN, "task=sequence_classification", "task.problem_type=regression", "data=labels.jsonl"],
        ["label is 'even', not a finite number"],
    ),
    "semicolons": (
        [*RUN, "data=semicolons.csv"],
        ["semicolons.csv has ';' between its columns", "Save it with commas as .csv"],
    ),
    "rows packed under the name of text": (
        [*RUN, "data=packed.jsonl"],
        ["packed.jsonl is no text: by its first bytes it is packed by gzip (.gz). Give it the name of what it is."],
    ),
    "a word for a module that is near": (
        [*RUN, "lora.target_modules=q_prj", "data=rows.jsonl"],
        ["fits no module of LlamaForCausalLM. Did you mean lora.target_modules=[q_proj]?"],
    ),
    "an adapter's name with a letter less": (
        ["generate", "adapter=outputs/sft/adaptr", "prompt=a"],
        ["holds no adapter: there is no such folder. Did you mean adapter=outputs/sft/adapter?"],
    ),
    "resumed from a run that keeps no checkpoint": (
        [*RUN[:-1], "data=rows.jsonl", "checkpoint.resume=outputs/labels"],
        ["keeps checkpoints only with checkpoint.every_steps", "outputs/labels/adapter in place of checkpoint.resume"],
    ),
    "a GGUF file": (
        [*RUN, "model.path=model.gguf", "data=rows.jsonl"],
        ["is a GGUF file, which is not read. Set model"],
    ),
    "an adapter for a model": (
        [*RUN, "model.path=outputs/sft/adapter", "data=rows.jsonl"],
        ["It is an adapter: set model.path to its base, and lora.start=outputs/sft/adapter"],
    ),
    "a model for an adapter": (["generate", "adapter=base", "prompt=a"], ["adapter=base holds no adapter"]),
    "an adapter of another model": (
        ["train", "model=tiny", *RUN[2:], "lora.start=outputs/sft/adapter", "data=rows.jsonl"],
        ["does not fit the model (28 tensors). Set model.path to the model that it was trained on"],
    ),
    "an adapter of another task": (
        [*RUN, "lora.start=outputs/labels/adapter", "data=rows.jsonl"],
        ["does not fit the model (1 tensor). It has a head of another task: set task to the one"],
    ),
    "another rank than the start's": (
        [*RUN, "lora.start=outputs/sft/adapter", "lora.r=32", "data=rows.jsonl"],
        ["lora.r=32 contradicts lora.start=outputs/sft/adapter, whose adapter has lora.r=16. Leave lora.r out"],
    ),
    "resumed with another rank": (
        [*RUN[:-1], *RESUMED, "lora.r=8"],
        ["lora.r=8 was 16 when", "Set lora.r=16, or checkpoint.resume=none"],
    ),
    "resumed with another rate": (
        [*RUN[:-1], *RESUMED, "training.learning_rate=1e-3"],
        ["training.learning_rate=0.001 was 0.0002 when", "checkpoint.allow_changes=[training.learning_rate]"],
    ),
    "a classifier that is to write": (["generate", LABELS, "prompt=a"], ["writes no text"]),
    "predictions over their rows": (
        ["predict", SFT, "data=rows.jsonl", "out=./rows.jsonl"],
        ["out=./rows.jsonl is the file that is read, which would be written over. Set out to another file."],
    ),
    "predictions over one of their files": (
        ["predict", SFT, "data.path=[rows.jsonl]", "out=rows.jsonl"],
        ["out=rows.jsonl is the file that is read"],
    ),
    "predictions over rows of a pattern": (
        ["predict", SFT, "data.path='row*.jsonl'", "out=rows.jsonl"],
        ["out=rows.jsonl is the file that is read"],
    ),
    "figures over their rows": (
        ["evaluate", SFT, "data=rows.jsonl", "out=rows.jsonl"],
        ["out=rows.jsonl is the file that is read"],
    ),
    "figures over rows of a folder": (
        ["evaluate", SFT, "data.path=.", "out=rows.jsonl"],
        ["out=rows.jsonl is the file that is read"],
    ),
    "completions over their prompts": (
        ["generate", SFT, "prompts=rows.jsonl", "out=rows.jsonl"],
        ["out=rows.jsonl is the file that is read"],
    ),
    "predictions in no folder": (
        ["predict", SFT, "data=rows.jsonl", "out=nowhere/said.csv"],
        ["out=nowhere/said.csv can't be written: No such file or directory. Set out to a file in a folder"],
    ),
    "predictions of a kind that is not known": (
        ["predict", SFT, "data=rows.jsonl", "out=said.txt"],
        ["out=said.txt has an unknown ending. Set out to a file .jsonl or .csv."],
    ),
    "a merge over the base": (["merge", SFT, "out=base"], ["out=base is not empty. Set out to a new folder."]),
    "a merge where nothing can be written": (
        ["merge", SFT, "out=/proc/merged"],
        ["out=/proc/merged can't be written: ", "or set out to a folder that you may write to."],
    ),
    "a file that is not there to convert": (
        ["convert", "nowhere.yml"],
        ["nowhere.yml can't be read: No such file or directory. Name a YAML file of settings."],
    ),
    "a section twice": (["train", "--config", "twice.yaml"], ["line 4: lora stands there twice."]),
    "resumed with other rows": (
        [*RUN[:-1], *RESUMED[:-1], "data=labels.jsonl"],
        ["data.path=labels.jsonl was rows.jsonl when", "checkpoint.resume=none to start anew."],
    ),
    "resumed from a checkpoint that is not there": (
        [*RUN[:-1], "data=rows.jsonl", "checkpoint.resume=latest"],
        ["checkpoint.resume=latest is no checkpoint: it does not exist. Set checkpoint.resume=auto, the default"],
    ),
    "a finished run's name": (
        [*RUN[:-1], "data=rows.jsonl", "run.name=sft"],
        ["run.folder=outputs/sft already holds a finished run (2 steps, loss ", "Set another run.name="],
    ),
    "a rate of experts that are not there": (
        [*RUN, "data=rows.jsonl", "optim.expert_learning_rate=1e-4"],
        ["optim.expert_learning_rate=0.0001 is about nothing: none of these are trained."],
    ),
    "a config.json that is empty": (
        [*RUN, "model=empty", "data=rows.jsonl"],
        ["model.path=empty: its config can't be"],
    ),
    "a tokenizer that is cut": ([*RUN, "model=cut", "data=rows.jsonl"], ["No tokenizer could be loaded from cut: "]),
    "weights that are cut": ([*RUN, "model=torn", "data=rows.jsonl"], ["cut short inside its header (100 bytes)"]),
    "a file for a model": ([*RUN, "model=rows.jsonl", "data=rows.jsonl"], ["model.path=rows.jsonl is a file."]),
    "a run for its adapter": (["generate", "adapter=outputs/sft", "prompt=a"], ["Set adapter=outputs/sft/adapter."]),
    "an empty prompt": (["generate", SFT, "prompt="], ['prompt is empty. Set prompt="...", or raw=true']),
    "a temperature below zero": (["generate", SFT, "prompt=a", "temperature=-1"], ["must be from 0 to 100."]),
    "answers longer than the model": (
        ["generate", SFT, "prompt=a", "max_new_tokens=100000"],
        ["are more than the 256 positions that the model knows. Set max_new_tokens lower."],
    ),
    "a merge into its adapter": (["merge", SFT, f"out={SFT[8:]}"], [f"out={SFT[8:]} is not empty."]),
    "a report where nothing can be written": (
        ["report", "outputs/sft", "--output", "/proc/report.html"],
        ["/proc/report.html can't be written: No such file or directory. Name another with --output."],
    ),
    "too few rewards": (
        [*ANSWERS, "reward.functions=[rewards.py:few]"],
        ["rewards.py:few returned 1 rewards for 4 answers. Correct it there."],
    ),
    "a reward in words": ([*ANSWERS, "reward.functions=[rewards.py:words]"], ["returned 'good', which is no number,"]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, an adapter that writes text, with a checkpoint, one that classifies, and people's files."""
    folder = tmp_path_factory.mktemp("walk")
    byte_tokenizer().save_pretrained(make_checkpoint("llama", folder / "base", torch.float32))
    numbers = range(20)
    write_lines(folder / "rows.jsonl", [{"prompt": f"{n}: ", "completion": "the cat"} for n in numbers])
    write_lines(folder / "pairs.jsonl", [{"prompt": f"{n}: ", "chosen": "yes", "rejected": "no"} for n in numbers])
    write_lines(folder / "labels.jsonl", [{"text": f"{n}", "label": ("even", "odd")[n % 2]} for n in numbers])
    write_lines(folder / "sums.jsonl", [{"prompt": f"{n} + 1 = ", "answer": f"{n + 1}"} for n in numbers])
    (folder / "semicolons.csv").write_text("prompt;completion\na;b\n")
    (folder / "packed.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "broken.py").write_text("def good(completions, **kwargs:\n    return 1\n")
    (folder / "twice.yaml").write_text("model: base\nlora:\n  r: 8\nlora:\n  r: 16\n")
    for name in ("empty", "cut", "torn"):
        shutil.copytree(folder / "base", folder / name)
    (folder / "empty" / "config.json").write_text("")
    (folder / "cut" / "tokenizer.json").write_text("{")
    weights = min((folder / "torn").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    labels = ["task=sequence_classification", "task.labels=[even,odd]", "data=labels.jsonl"]
    saved = ["training.max_steps=2", "checkpoint.every_steps=1", "data=rows.jsonl"]
    for name, more in (("sft", saved), ("labels", labels)):
        code, printed = run_forked(folder, *RUN, *more, f"run.name={name}")
        assert code == 0, printed
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("case", FOUND)
def test_what_a_command_finds_is_answered(case: str, place: Path) -> None:
    argv, parts = FOUND[case]
    rows = (place / "rows.jsonl").read_bytes()
    code, printed = run_forked(place, *argv)
    assert code == 2, printed
    assert "Traceback" not in printed
    message = printed.rpartition("\nError: ")[2]
    assert printed.count("\nError: ") == 1, printed
    for part in parts:
        assert part in message, printed
    assert (place / "rows.jsonl").read_bytes() == rows


@pytest.mark.distributed
def test_a_setting_that_is_typed_twice_is_told(place: Path) -> None:
    code, printed = run_forked(place, *RUN, "data=rows.jsonl", "lora.r=4", "lora.r=8")
    assert code == 0 and "Note: lora.r=4 has no effect: lora.r=8 is typed behind it" in printed, printed
    code, printed = run_forked(place, *RUN, "data=rows.jsonl", "lora.r=8", "lora.r=8")
    assert code == 0 and "has no effect" not in printed, printed


@pytest.mark.distributed
def test_a_command_that_failed_at_its_first_row_is_in_the_way_of_no_other(place: Path) -> None:
    code, printed = run_forked(place, "predict", LABELS, "data=rows.jsonl", "out=said.csv")
    assert code == 2 and "no text (keys: prompt, completion" in printed, printed
    code, printed = run_forked(place, "predict", LABELS, "data=labels.jsonl", "out=said.csv")
    assert code == 0 and (place / "said.csv").read_text().count("\n") == 21, printed


@pytest.mark.distributed
def test_answers_that_are_all_rewarded_alike_are_told_at_the_end(place: Path) -> None:
    code, printed = run_forked(place, *ANSWERS, "reward.functions=[rewards.py:same]")
    assert code == 0, printed
    assert "Note: The gradients of the first and of the last steps are 0" in printed.partition("Finished")[2], printed


@pytest.mark.distributed
def test_a_hub_that_does_not_answer_is_asked_once_for_data(place: Path) -> None:
    """Its libraries ask for half a minute, and say so each time. A process of its own reads where the hub is."""
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *RUN, "data=org/rows"],
        env=child_environment() | nobody,
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "it can't be reached (" in done.stderr and "and its cache has none. Check the name" in done.stderr
    assert "Retry" not in done.stderr and "thrown while" not in done.stderr
