"""Bad input ends in exit code 2 and one message that names value, reason and setting; no traceback, no hang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.launch import Launch

CONTRADICTION = {"FSDP_OFFLOAD_PARAMS": "true"}

# Case: arguments ({models} and {rows} are folders of the fixture), what the message must hold, and the environment.
CASES: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "no model folder": (["model.path=/nowhere/model"], ["model.path=/nowhere/model", "does not exist"], {}),
    "file cut short": (["model.path={models}/short"], ["model-00001-of-", "cut short", "model.path="], {}),
    "other shapes": (
        ["model.path={models}/shapes"],
        ["model.layers.0.mlp.gate_proj.weight: [128, 64] in the file, [192, 64] by the config", "model.path"],
        {},
    ),
    "storage dtype": (
        ["quant.bnb_4bit_quant_storage=float16"],
        ["quant.bnb_4bit_quant_storage=float16", "does not fit the compute dtype", "Set quant.bnb_4bit_quant_storage="],
        {},
    ),
    "pissa": (["lora.init_lora_weights=pissa"], ["lora.init_lora_weights=pissa", "packed", "Set lora.init_lora"], {}),
    "unknown target": (["lora.target_modules=[q_prj]"], ["lora.target_modules", "q_prj fits no module", "q_proj"], {}),
    "contradiction": ([], ["FSDP_OFFLOAD_PARAMS=true", "fsdp.cpu_offload=false"], CONTRADICTION),
    "no usable row": (
        ["data.path={rows}/bad.jsonl"],
        ["no usable row", "bad.jsonl:1 (keys are x;", "data.format"],
        {},
    ),
    "unwritable folder": (["run.folder=/proc/here/run"], ["run.folder=/proc/here/run", "can't be written"], {}),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path], rows: Path
) -> dict[str, tuple[int, Launch]]:
    """Every case's exit code and process: two run at a time."""
    folder = tmp_path_factory.mktemp("bad")
    good, models = checkpoint("llama"), folder / "models"
    for name in ("short", "shapes"):
        shutil.copytree(good, models / name)
    first = min((models / "short").glob("model-*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    config = json.loads((models / "shapes" / "config.json").read_text())
    (models / "shapes" / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    (folder / "bad.jsonl").write_text('{"x": 1}\n\n')

    def run(case: str) -> tuple[int, Launch]:
        arguments, _, environment = CASES[case]
        base = [f"model.path={good}", "model.tokenizer_path=bytes", f"data.path={rows}", f"data.cache_folder={folder}"]
        filled = [argument.format(models=models, rows=folder) for argument in arguments]
        launch = Launch(folder / case.replace(" ", "_"), "python", *base, *filled, environment=environment)
        return launch.finish(), launch

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_one_message_and_exit_code_2(case: str, ended: dict[str, tuple[int, Launch]]) -> None:
    exit_code, launch = ended[case]
    assert exit_code == 2, launch.output
    assert len(launch.errors) == 1, launch.output
    for part in CASES[case][1]:
        assert part in launch.errors[0]
    assert "Traceback" not in launch.output
    assert "Warning" not in launch.output
    assert "Loaded in" not in launch.output, "found only after the weights were loaded"
