"""Bad input ends in exit code 2 and one message that names value, reason and setting; no traceback, no hang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.launch import Command, ForkedLaunch, Launch

CONTRADICTION = {"FSDP_OFFLOAD_PARAMS": "true"}

# Real commands, of which one ends before the libraries load and one after; the others run where they have loaded.
STARTED = ["contradiction", "file cut short"]

# Case: arguments ({models} and {rows} are folders of the fixture), what the message must hold, and the environment.
CASES: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "no model folder": (["model.path=/nowhere/model"], ["model.path=/nowhere/model", "does not exist"], {}),
    "file cut short": (["model.path={models}/short"], ["model-00001-of-", "cut short", "model.path="], {}),
    "other shapes": (
        ["model.path={models}/shapes"],
        ["model.layers.0.mlp.gate_proj.weight: [128, 64] in the file, [192, 64] by the config", "model.path"],
        {},
    ),
    "former setting": (
        ["quant.bnb_4bit_quant_storage=float16"],
        ["quant.bnb_4bit_quant_storage=float16 is no setting any more", "Leave it out"],
        {},
    ),
    "pissa": (["lora.init_lora_weights=pissa"], ["lora.init_lora_weights=pissa", "packed", "Set lora.init_lora"], {}),
    "unknown target": (["lora.target_modules=[q_prj]"], ["lora.target_modules", "q_prj fits no module", "q_proj"], {}),
    "contradiction": ([], ["FSDP_OFFLOAD_PARAMS=true", "fsdp.cpu_offload=false"], CONTRADICTION),
    "no usable row": (
        ["data.path={rows}/bad.jsonl"],
        ["no usable row", "bad.jsonl:1", "data.format"],
        {},
    ),
    "unwritable folder": (["run.folder=/proc/here/run"], ["run.folder=/proc/here/run", "can't be written"], {}),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path], rows: Path
) -> dict[str, tuple[int, Command]]:
    """Every case's exit code and command; the started ones run meanwhile."""
    folder = tmp_path_factory.mktemp("bad")
    good, models = checkpoint("llama"), folder / "models"
    for name in ("short", "shapes"):
        shutil.copytree(good, models / name)
    first = min((models / "short").glob("model-*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    config = json.loads((models / "shapes" / "config.json").read_text())
    (models / "shapes" / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    (folder / "bad.jsonl").write_text('{"x": 1}\n\n')
    base = [f"model.path={good}", "model.tokenizer_path=bytes", f"data.path={rows}", f"data.cache_folder={folder}"]

    def start(case: str) -> Command:
        arguments, _, environment = CASES[case]
        argv = [*base, *(argument.format(models=models, rows=folder) for argument in arguments)]
        own = folder / case.replace(" ", "_")
        if case in STARTED:
            return Launch(own, "python", *argv, environment=environment)
        return ForkedLaunch(own, 1, *argv)

    started = {case: start(case) for case in STARTED}
    others = {}
    for case in (case for case in CASES if case not in STARTED):
        command = start(case)
        others[case] = (command.finish(), command)
    return others | {case: (command.finish(), command) for case, command in started.items()}


@pytest.mark.parametrize("case", CASES)
def test_one_message_and_exit_code_2(case: str, ended: dict[str, tuple[int, Command]]) -> None:
    exit_code, command = ended[case]
    assert exit_code == 2, command.output
    assert len(command.errors) == 1, command.output
    for part in CASES[case][1]:
        assert part in command.errors[0]
    assert "Traceback" not in command.output
    assert "Warning" not in command.output
    assert "Loaded " not in command.output, "found only after the weights were loaded"
