"""`qlora-fsdp`: its commands, and command lines as they are mistyped. Each gets one message."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.launch import ROOT

from qlora_fsdp import __version__
from qlora_fsdp.__main__ import COMMANDS, main
from qlora_fsdp.launch import run_accelerate

if sys.version_info >= (3, 11):
    import tomllib

BASE = ["train", "model=tiny", "data=random", "training.max_steps=1", "launch.dry_run=true"]


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no tomllib")
def test_the_command_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"qlora-fsdp": "qlora_fsdp.__main__:command"} and project["version"] == __version__


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {name} " in page for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qlora-fsdp {__version__}\n"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "doctor"])
def test_every_command_has_a_help_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([name, "--help"]) == 0
    except SystemExit as exit:
        assert exit.code == 0
    page = capsys.readouterr().out
    assert "usage:" in page and f"qlora-fsdp {name}" in page and "python -m qlora_fsdp" not in page
    assert max(map(len, page.splitlines())) <= 120 and not re.search(r"guanaco\S", page)
    assert name in COMMANDS


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["trian"], "trian is no command. Did you mean qlora-fsdp train?"),
        (["xyz"], "xyz is no command. The commands are train, preflight, "),
        (["model=tiny"], "model=tiny is no command. Name one first: qlora-fsdp train model=tiny ..."),
        (
            [*BASE, "lr", "=", "1e-4"],
            "lr = 1e-4 has spaces around the equals sign, which make it several words. Write l",
        ),
        ([*BASE, "lora.r=", "8"], "Write lora.r=8."),
        ([*BASE, "lora.r", "=8"], "Write lora.r=8."),
        ([*BASE, "--model", "tiny"], "--model tiny is no option: settings are written without dashes and with an"),
        ([*BASE, "--model", "tiny"], "Write model=tiny."),
        ([*BASE, "-model=tiny"], "Write model=tiny."),
        ([*BASE, "-cn", "mine"], "-cn mine is no option here. Write --config FILE.yaml."),
        ([*BASE, "--config-path=conf"], "Write --config-dir FOLDER."),
        ([*BASE, "--learning-rate", "1e-4"], "Write training.learning_rate=1e-4."),
        ([*BASE, "--training.seed=-1"], "Write training.seed=-1."),
        ([*BASE, "--frobnicate"], "Write frobnicate=VALUE if that is a setting; --help lists the options."),
        ([*BASE, "lora.r"], "lora.r has no value. Write lora.r=VALUE."),
        ([*BASE, "run.name="], "run.name= has no value. Write run.name=VALUE, or leave it out."),
        ([*BASE, "llama3-8b"], "llama3-8b is not of the form key=value. Did you mean model=llama3-8b?"),
        ([*BASE, "launch.parallel=2"], "launch.parallel=2 is for sweeps. Add -m, or leave it out."),
        ([*BASE, "launch.config_file=/nowhere"], "launch.config_file=/nowhere is no file, seen from "),
        (
            [*BASE, "launch.devices=[0]"],
            "launch.devices=[0] is no setting any more. Set the variable CUDA_VISIBLE_DEVICES",
        ),
        ([*BASE, "launch.num_processes=2", "training.global_batch_size=3"], "training.global_batch_size="),
        (["generate", "adapter=x", "launch.num_processes=0"], "launch.num_processes=0 must be"),
    ],
)
def test_what_is_mistyped(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and printed.err.startswith("\nError: ") and not printed.out


def test_ranks_that_would_be_started(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert main(BASE) == main([*BASE, "launch.num_processes=2"]) == main([*BASE, "launch.num_processes=1"]) == 0
    assert main(["generate", "prompt=a", "launch.num_processes=2", "launch.dry_run=true"]) == 0
    all_of_them, two, one, generate = capsys.readouterr().out.splitlines()
    assert all_of_them.startswith("CUDA_VISIBLE_DEVICES=2,3,5 ") and " --num_processes 3 " in all_of_them
    assert all_of_them.endswith(" -m qlora_fsdp.train model=tiny data=random training.max_steps=1")
    assert two.startswith("CUDA_VISIBLE_DEVICES=2,3 ") and " --num_processes 2 " in two
    assert one.startswith("CUDA_VISIBLE_DEVICES=2 ")
    assert generate.endswith(" -m qlora_fsdp.generate prompt=a")
    assert main([*BASE, "launch.num_processes=4"]) == 2
    assert "launch.num_processes=4 is more than 3 GPUs." in capsys.readouterr().err


def test_the_process_that_starts_ranks_imports_neither_torch_nor_accelerate(tmp_path: Path) -> None:
    code = f"import sys; from qlora_fsdp.__main__ import main; main({[*BASE, 'launch.num_processes=2']})\n"
    code += "assert not {'torch', 'accelerate', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "run_accelerate" in done.stdout, done.stderr


def test_a_tab_completes_commands_groups_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    def complete(line: str) -> list[str]:
        assert main(["completion", line]) == 0
        return capsys.readouterr().out.splitlines()

    assert complete("qlora-fsdp pre") == ["predict ", "preflight ", "prepare ", "preview "]
    assert complete("qlora-fsdp train model=tiny lora.r") == ["lora.r=", "lora.rank_pattern="]
    assert complete("qlora-fsdp train quant=n") == ["quant=nf4 ", "quant=none ", "quant=nvfp4 "]
    assert complete("qlora-fsdp generate ada") == ["adapter="]
    assert complete("qlora-fsdp push mod") == [] and complete("qlora-fsdp push ada") == ["adapter="]
    assert complete("qlora-fsdp merge wr") == ["write="] and complete("qlora-fsdp preflight hard") == ["hardware="]
    assert complete("qlora-fsdp train fsdp.cpu_offload=") == ["fsdp.cpu_offload=false ", "fsdp.cpu_offload=true "]
    assert complete("qlora-fsdp train memory.keep_dequantized=") == [
        f"memory.keep_dequantized={value} " for value in ("false", "run", "true")
    ]
    for line in ("train data.path=x", "train --config ", "status "):
        assert complete(f"qlora-fsdp {line}") == [], "the shell completes names of files"
    assert main(["completion"]) == 0
    shell = f"qlora-fsdp() {{ printf 'model=llama3-8b \\nmodel=llama3-70b \\n'; }}\n{capsys.readouterr().out}"
    shell += "COMP_LINE='qlora-fsdp train model=ll'; COMP_POINT=${#COMP_LINE}; _qlora_fsdp\n"
    shell += "printf '<%s>' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout == "<llama3-8b ><llama3-70b >", done.stderr


@pytest.mark.parametrize(
    ("exit_code", "expected", "said"),
    [
        (
            -9,
            6,
            "\nError: rank 1 was ended by SIGKILL: process 7 said no word. If it was for want of memory, dmesg says",
        ),
        (-11, 6, "\nError: rank 1 was ended by SIGSEGV: process 7 said no word. Lines above may say more.\n"),
        (-15, 143, "\nInterrupted by SIGTERM. No run was going on.\n"),
        (130, 130, "\nInterrupted by SIGINT. No run was going on.\n"),
        (1, 1, ""),
    ],
)
def test_what_is_said_where_no_rank_could(
    exit_code: int, expected: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_accelerate.RankFailed(1, exit_code, 7).explain() == expected
    printed = capsys.readouterr().err
    assert printed.startswith(said) and bool(printed) == bool(said)
