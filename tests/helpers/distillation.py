"""Runs of task=distill: a base, adapters that teach, and prompts with answers and with hints for the teacher."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from tests.helpers.answers import answer_settings
from tests.helpers.checkpoints import SHAPE, VOCAB, make_checkpoint, write_checkpoint
from tests.helpers.lines import write_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_here

TARGETS = "lora.target_modules=[q_proj,up_proj]"  # of the teacher; the run adapts all linear layers


def write_taught(file: Path, num_rows: int = 8) -> Path:
    """Prompts with an answer of some bytes, and with what the teacher gets in their place."""
    rows = []
    for number in range(num_rows):
        prompt = f"{number} plus {number * 7 % 10}"
        hinted = f"{'so ' * (number % 3)}{prompt} is {number + number * 7 % 10}: "
        rows.append({"prompt": prompt, "completion": f" is {number}", "hinted": hinted, "weight": number % 4})
    return write_lines(file, rows)


def make_teacher(folder: Path) -> None:
    """A base in `model`, and in `teacher` the run of an adapter on it, which is far from zero."""
    make_checkpoint("llama", folder / "model")
    rows = [{"prompt": f"{number} plus", "completion": f" {number * 3} or so"} for number in range(20)]
    file = write_lines(folder / "taught.jsonl", rows)
    own = ["quant=none", f"run.folder={folder / 'teacher'}", "training.max_steps=4", TARGETS]
    own += ["lora.r=4", "lora.lora_alpha=12", "training.learning_rate=2e-2"]
    argv = settings(folder / "model", file, *own, packing=False)
    run_ranks(1, train_here, [text for text in argv if text != "lora.r=8"])


def distill_settings(folder: Path, name: str, *more: str) -> list[str]:
    """The command line of six steps of four prompts with an answer each; without a teacher, which `more` names."""
    made = answer_settings(folder / "model", folder, name, "quant=none")
    own = [text for text in made if not text.startswith(("task=", "reward.", "rollout.num", "data.path="))]
    rows = write_taught(folder / "asked.jsonl")
    for group in ("fsdp=", "quant="):
        if any(text.startswith(group) for text in more):
            own = [text for text in own if not text.startswith(group)]
    return ["task=distill", *own, f"data.path={rows}", *more]


def by_adapter(folder: Path) -> str:
    """The setting of the teacher that `make_teacher` has made."""
    return f"distill.teacher_adapter={folder / 'teacher' / 'adapter'}"


def make_teacher_model(folder: Path) -> None:
    """Another base in `teacher_model`: wider and deeper, with tied tables that have rows for 16 tokens more."""
    wider = {"hidden_size": 128, "num_hidden_layers": 3, "vocab_size": VOCAB + 16}
    config = AutoConfig.for_model("qwen2", **SHAPE | wider, tie_word_embeddings=True, initializer_range=0.1)
    write_checkpoint(config, folder / "teacher_model", seed=3)


def by_model(folder: Path) -> str:
    """The setting of the teacher that `make_teacher_model` has made."""
    return f"distill.teacher_model={folder / 'teacher_model'}"
