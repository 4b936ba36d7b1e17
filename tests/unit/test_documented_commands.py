"""Every command of README.md, docs/ and examples/ is one that works: its settings compose and pass their checks.

What needs a GPU, a download or hours is checked without: files that the text only supposes are stood in for, and what
is trained is not trained. tests/cli/test_stranger.py runs README's first run for real. A command that is neither
checked here nor on the list of those that can't be fails the test.
"""

from __future__ import annotations

import json
import re
import shlex
from argparse import ArgumentTypeError
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from qlora_fsdp import preflight
from qlora_fsdp.__main__ import COMMANDS
from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.adapter.adapter_config import SETTINGS_FILE
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.convert.__main__ import convert_file
from qlora_fsdp.config.reading.commands import CommandSettings, load_command, saved_settings
from qlora_fsdp.config.reading.compose import load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Other programs, which no test can run: they install, download, log in, serve, or change the shell.
OTHER_PROGRAMS = ("pip ", "hf ", "vllm ", "eval ", "make ", "git ", "sbatch ")
# Commands of ours without settings; tests/unit/test_command_line.py asks each for its --help.
WITHOUT_SETTINGS = ("doctor", "status", "report", "schema", "completion")
ANY_RUN = "model=tiny data=chats.jsonl"  # what `...` stands for, and lines that have settings alone
LAUNCHERS = ("accelerate launch ", "torchrun ", "python -m qlora_fsdp.launch.run_accelerate ", "python ")


@dataclass(frozen=True)
class Documented:
    """A command as it stands on a page."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:70]}"


def find_commands(page: Path) -> list[Documented]:
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        values: dict[str, str] = {}
        for line in block.replace("\\\n", " ").splitlines():
            for name, value in values.items():
                line = line.replace(f"${name}", value)
            words = shlex.join(shlex.split(line, comments=True)) if not line.startswith("eval") else line
            if assigned := re.fullmatch(r"(\w+)=(.*)", line):
                values[assigned[1]] = assigned[2].strip("\"'")
            elif words:
                found.append(Documented(page.name, words))
    return found


OF_LAUNCHERS = ("hydra", "slurm.", "skypilot.", "kubernetes.")
SAVED = {"peft_type": "LORA", "target_modules": ["q_proj"], "base_model_name_or_path": None}  # by PEFT, at least
DOCUMENTED = [command for page in PAGES for command in find_commands(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages suppose that one has: files of rows, an adapter, and settings of one's own."""
    folder = tmp_path_factory.mktemp("user")
    row = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    names = {name for command in DOCUMENTED for name in re.findall(r"\b[\w/]+\.jsonl\b", command.text)}
    for name in names | {"held_out.jsonl"}:
        (folder / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (folder / name.lstrip("/")).write_text(row)
    for run, task in {"run": "causal_lm", "first": "causal_lm", "sft": "causal_lm", "grpo": "grpo"}.items():
        adapter = folder / "outputs" / run / "adapter"
        adapter.mkdir(parents=True)
        (adapter / SETTINGS_FILE).write_text(saved_settings(load_config(["model=tiny", "data=random", f"task={task}"])))
        (adapter / "adapter_config.json").write_text(json.dumps(SAVED))
        save_file({}, adapter / "adapter_model.safetensors")
    (folder / "qwen3").mkdir()
    shape = load_config(["model=qwen3-8b"]).model.config
    (folder / "qwen3" / "config.json").write_text(json.dumps(dict(shape)))
    (folder / "my_conf" / "slurm").mkdir(parents=True)
    (folder / "scores").mkdir()
    (folder / "scores" / "scores.json").write_text("{}")
    (folder / "my_conf" / "slurm" / "my_cluster.yaml").write_text("partition: gpu\n")
    (folder / "qlora.yml").write_text("base_model: org/model\nadapter: qlora\ndatasets: [{path: org/rows}]\n")
    (folder / "run.yaml").write_text("model: llama3.1-8b-instruct\ndata: org/rows\n")  # what may become of it
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    return folder


def parse(text: str) -> tuple[str, list[str]]:
    """The command of ours that a line runs, and its settings.

    Raises:
        ArgumentTypeError: it runs none.
    """
    words = shlex.split(text.replace(" ... ", f" {ANY_RUN} "))
    if all("=" in word for word in words):
        return "train", [*ANY_RUN.split(), *words]
    if words[0] == "qlora-fsdp":
        return words[1], words[2:]
    if text.startswith(LAUNCHERS):
        for place, word in enumerate(words):
            if word == "-m" and (module := words[place + 1]).startswith("qlora_fsdp."):
                names = [name for name, (of, _) in COMMANDS.items() if of.removesuffix(".__main__") == module]
                if names:
                    return names[0], words[place + 2 :]
    raise ArgumentTypeError(text)


def one_job(settings: list[str]) -> list[str]:
    """The settings of a sweep's or a batch job's first run."""
    own = [text for text in settings if text not in ("-m", "--multirun") and not text.startswith(OF_LAUNCHERS)]
    own = [re.sub(r"=tag\(log,interval\(([^,]+),.*", r"=\1", text) for text in own]
    own = [text if "[" in text or "{" in text else text.partition(",")[0] for text in own]
    return [text for text in own if not text.startswith("launch.")]


def is_supposed(problem: Problem) -> bool:
    """Whether it is about a file that only the page's reader has."""
    is_missing = any(text in problem.reason for text in ("does not exist", "matches no file"))
    return is_missing or problem.setting == "checkpoint.resume"


def check(name: str, settings: list[str], folder: Path) -> None:
    """Fails where the command's settings do not compose or can't be used."""
    if name in WITHOUT_SETTINGS:
        return
    if name == "preflight":
        assert preflight.preflight(settings, folder / "preflight.json") in (0, preflight.DOES_NOT_FIT)
        return
    if name == "convert":
        convert_file(Path(settings[0]))
        return
    if name == "train":
        problems = check_settings(load_config(one_job(settings)))
    else:
        module = import_module(COMMANDS[name][0])
        kinds = [value for value in vars(module).values() if isinstance(value, type)]
        (kind,) = [k for k in kinds if issubclass(k, CommandSettings) and k.__module__ == module.__name__]
        own = [text for text in settings if not text.startswith("launch.")]
        problems = check_settings(load_command(own, kind, "", uses_default_data=True)[1])
        problems = [problem for problem in problems if problem.setting in " ".join(own)]
    assert [problem for problem in problems if not is_supposed(problem)] == []


@pytest.mark.parametrize("command", DOCUMENTED, ids=str)
def test_a_documented_command_works(command: Documented, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.text.startswith(OTHER_PROGRAMS):
        return
    script = re.match(r"python ((?:benchmarks|scripts)/\S+\.py)", command.text)
    if script is not None:
        assert (ROOT / script[1]).is_file()
        return
    monkeypatch.chdir(folder)
    name, settings = parse(command.text)
    assert name in COMMANDS
    check(name, settings, folder)


def test_every_command_is_documented() -> None:
    texts = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in COMMANDS if not re.search(rf"qlora-fsdp {name}\b", texts)] == []


def test_make_targets_exist() -> None:
    made = {command.text.split()[1] for command in DOCUMENTED if command.text.startswith("make ")}
    makefile = (ROOT / "Makefile").read_text()
    assert made and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in made)


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
