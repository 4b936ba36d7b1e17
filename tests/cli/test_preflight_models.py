"""Which model and GPUs `python -m qlora_fsdp.preflight` plans for: presets, folders, hub models; the visible GPUs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import AutoConfig

from qlora_fsdp import preflight
from qlora_fsdp.config.model_config import read_config_json
from qlora_fsdp.config.schema import ModelConfig
from qlora_fsdp.model.find import make_config

TINY = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ON = "hardware=1x24gib"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert preflight.main([ON, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("Error: ") and "\n" not in error
    return error


def test_experts_that_stay_in_full_precision_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' code for Llama 4 has experts that nothing else may compute: those of every layer are counted.

    With our own code for its blocks they are quantized.
    """
    sizes = {"model_type": "llama4_text", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320}
    folder = write(tmp_path / "mine", {**sizes, **heads, "intermediate_size_mlp": 256, "num_local_experts": 16})
    assert preflight.main([ON, f"model.path={folder}", "training.max_length=128"]) == 0
    assert "stay in" not in capsys.readouterr().out
    monkeypatch.setattr("qlora_fsdp.model.build.compute_chosen_experts", lambda model: None)
    assert preflight.main([ON, f"model.path={folder}", "training.max_length=128"]) == 0
    num_bytes = 2 * 8 * 16 * (128 * 2 * 256 + 256 * 128)
    said = capsys.readouterr().out
    assert f"stay in bfloat16 ({num_bytes / 2**20:.1f} MiB)" in said and "8 modules such as model.layers.0" in said


def test_numbers_that_json_does_not_have_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    AutoConfig.for_model("granitemoehybrid", time_step_limit=(0.0, math.inf)).save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    values = read_config_json(tmp_path / "config.json", ModelConfig(path=str(tmp_path)))
    assert values["time_step_limit"] == [0.0, math.inf]
    assert make_config(values, "granite").time_step_limit == AutoConfig.from_pretrained(tmp_path).time_step_limit


@pytest.mark.parametrize("before", [[], ["experiment=dry_run"]])
def test_a_folder_is_planned_by_its_own_config(
    before: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "mine", TINY)
    assert preflight.main([ON, *before, f"model.path={folder}"]) == 0
    assert f"Fits: {folder} (0.12 M parameters)" in capsys.readouterr().out


def test_a_model_that_the_settings_describe_is_called_by_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    described = ", ".join(f"{key}: {value}" for key, value in TINY.items())
    argv = [ON, "experiment=dry_run", "model=custom", f"model.config={{{described}}}", "model.tokenizer_path=bytes"]
    assert preflight.main(argv) == 0
    assert f"Fits: the {TINY['model_type']} of model.config (0.12 M" in capsys.readouterr().out


def test_a_preset_is_not_mixed_with_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "mine", TINY)
    for more in ([], ["experiment=dry_run"], ["model.weights=random"]):
        error = refusal(capsys, *more, "model=llama3-8b", f"model.path={folder}")
        assert f"model.path={folder} is another model than model=llama3-8b: hidden_size is 64 and not 4096" in error
        assert "and 3 more figures. Leave model=llama3-8b out" in error
    assert "model_type is mixtral" in refusal(
        capsys, "model=llama3-8b", f"model.path={write(tmp_path / 'mixtral', TINY | {'model_type': 'mixtral'})}"
    )


def test_figures_of_ones_own_go_over_a_folders_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TINY | {"model_type": "gemma3_text", "head_dim": 16}
    folder = write(tmp_path / "mine", {"model_type": "gemma3", "text_config": text})
    more = ["experiment=dry_run", "model.config.num_hidden_layers=20"]
    assert preflight.main([ON, *more, f"model.path={folder}"]) == 0
    assert "activations of 20 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TINY | {"hidden_size": "64"}, "hidden_size='64' is no whole number from 0"),
        (TINY | {"hidden_size": -64}, "hidden_size=-64 is no whole number from 0"),
        (TINY | {"vocab_size": True}, "vocab_size=True is no whole number from 0"),
        (TINY | {"num_hidden_layers": 1e6}, "num_hidden_layers=1000000.0 is no whole number from 0"),
        (
            TINY | {"num_hidden_layers": 10**6},
            "num_hidden_layers=1000000 is no whole number from 0 to 4,096",
        ),
        (TINY | {"num_key_value_heads": [1] * 1000}, "its config can't be used"),
        ([1, 2], "is damaged (it holds a list, and not an object)"),
        ("[" * 100_000, "is damaged (it is nested too deeply)"),
        ("{", "is damaged (Expecting property name"),
        (f'{{"hidden_size": 1{"0" * 5000}}}', "is damaged (Exceeds the limit"),
        ({"model_type": "gemma3", "text_config": 5}, "its config can't be used"),
        (
            {"model_type": "vit"},
            "can't be built as AutoModelForCausalLM",
        ),
    ],
)
def test_a_config_that_is_no_model(
    config: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, f"model.path={write(tmp_path / 'mine', config)}")


class Hub(BaseHTTPRequestHandler):
    """Stands for the hub: one model, one that is gated, and silence."""

    asked: ClassVar[list[str]] = []
    silence = threading.Event()

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/org/silent/"):
            self.silence.wait()
        elif self.path.startswith("/org/gated/"):
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif self.path in ("/org/tiny/resolve/main/config.json", "/org/llama/resolve/main/config.json"):
            content = json.dumps(TINY).encode()
            self._answer(200, content, {"X-Repo-Commit": "0" * 40, "ETag": '"1"'})
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Hub.silence.set()
    server.shutdown()
    server.server_close()


def test_hub_models(hub: str, tmp_path: Path) -> None:
    """config.json alone is downloaded, and later it is read from the cache. One process does all that has a network; a
    second one has none."""
    program = (
        "import sys, json\n"
        "from qlora_fsdp import preflight\n"
        "for arguments in json.loads(sys.argv[1]): print('=====', preflight.main(arguments), flush=True)"
    )

    def run(runs: list[list[str]], **environment: str) -> list[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        kept |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1"} | environment
        words = [sys.executable, "-c", program, json.dumps([[ON, *each] for each in runs])]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": True}
        return subprocess.run(words, cwd=tmp_path, env=kept, **both).stdout.split("=====")  # type: ignore[call-overload]

    names = ["tiny", "llama", "gated", "none", "silent"]
    tiny, preset, gated, none, silent, _ = run(
        [["experiment=dry_run", "model.path=org/tiny"], ["model=llama3-8b", "model.path=org/llama"]]
        + [[f"model.path=org/{name}"] for name in names[2:]]
    )
    assert "Fits: org/tiny (0.12 M parameters)" in tiny
    assert "model.path=org/llama is another model than model=llama3-8b: hidden_size is 64 and not 4096" in preset
    assert "model.path=org/gated is gated, and you have no access. Accept its terms on https://hugging" in gated
    assert "model.path=org/none is no folder here, and no model on the hub that you can see" in none
    assert "model.path=org/silent is no folder here, and its config.json can't be had (ReadTimeout" in silent
    assert {path.rpartition("/")[2] for path in Hub.asked if path.startswith("/org/")} == {"config.json"}

    Hub.asked.clear()
    offline, unknown, _ = run([["model.path=org/tiny"], ["model.path=org/other"]], HF_HUB_OFFLINE="1")
    assert "Fits: org/tiny (0.12 M parameters)" in offline
    assert "model.path=org/other is no folder here, and its config.json can't be had (OfflineMode" in unknown
    assert "`hf download org/other config.json --local-dir FOLDER`" in unknown
    assert Hub.asked == []


SMI = """#!/bin/sh
echo '0, GPU-aaaa, 143771, NVIDIA H200'
echo '1, GPU-bbbb, 143771, NVIDIA H200'
echo '2, GPU-cccc, 12288, NVIDIA TITAN Z'
"""


@pytest.mark.parametrize(
    ("visible", "first_line"),
    [
        ("0,1", "on 2 x h200 needs"),
        ("GPU-b", "on 1 x h200 needs"),
        (None, "on 3 x NVIDIA TITAN Z needs"),
        ("", "Error: hardware= is missing, and nvidia-smi finds no GPU here. Set hardware=1x24gib"),
    ],
)
def test_the_visible_gpus_are_meant_where_no_hardware_is_named(
    visible: str | None,
    first_line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    preflight.main(["model=smollm2-135m-instruct"])
    captured = capsys.readouterr()
    assert first_line in (captured.out + captured.err).strip().partition("\n")[0]
