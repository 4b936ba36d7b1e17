"""How a command starts, before torch is there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from qlora_fsdp.common.startup import quick_imports


def test_scipy_is_hidden_while_the_libraries_are_imported_and_then_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scipy = pytest.importorskip("scipy")
    with quick_imports():
        assert sys.modules["scipy"] is scipy, "what is imported already is not taken away"
    monkeypatch.delitem(sys.modules, "scipy")
    monkeypatch.setitem(sys.modules, "transformers", sys)
    with quick_imports():
        assert find_spec("scipy") is not None, "transformers, which is there already, may have seen it"
    monkeypatch.delitem(sys.modules, "transformers")
    with quick_imports(), quick_imports():
        assert find_spec("scipy") is None
    assert find_spec("scipy") is not None


@pytest.mark.parametrize(
    ("redirection", "shown"), [(">&- <&-", ""), ("", "\\u65e5"), ("2>&-", "\\u65e5")], ids=["stdout", "none", "stderr"]
)
def test_closed_streams_and_an_ascii_locale_end_no_command(redirection: str, shown: str) -> None:
    code = "from qlora_fsdp.common.startup import begin; import sys; begin(); print(sys.stdin.isatty(), '\u65e5');"
    code += "sys.stdout.flush(); sys.stderr.flush()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "CODE": code, "PYTHON": sys.executable}
    command = ["bash", "-c", f'"$PYTHON" -c "$CODE" {redirection}']
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0 and done.stderr == "" and done.stdout.strip().endswith(shown), done.stderr


def test_closed_streams_are_open_to_the_processes_that_a_command_starts() -> None:
    code = "from qlora_fsdp.common.startup import begin; import subprocess, sys; begin(); "
    code += "sys.exit(subprocess.call([sys.executable, '-c', 'import sys; sys.stdout.name + sys.stderr.name']))"
    environment = os.environ | {"CODE": code, "PYTHON": sys.executable}
    assert subprocess.run(["bash", "-c", '"$PYTHON" -c "$CODE" >&- 2>&-'], env=environment, check=False).returncode == 0


def test_libraries_do_not_see_the_package_by_which_they_fetch_code(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("def get_kernel(*_, **__): raise SystemExit('code is fetched')\n")
    code = """
from qlora_fsdp.common.startup import begin
begin()
from importlib.util import find_spec
assert find_spec("kernels") is None
from transformers.utils import is_kernels_available
import bitsandbytes
assert not is_kernels_available()
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
