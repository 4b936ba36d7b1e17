"""How a command starts, before torch is there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

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


LOOK_FOR_MODELS = """
from qlora_fsdp.common.startup import quick_imports
with quick_imports():
    import transformers.models
from transformers.utils import import_utils
num_read, file = import_utils.create_import_structure_from_path.cache_info().misses, transformers.models.__file__
import_utils.create_import_structure_from_path.cache_clear()
expected = import_utils.define_import_structure.__wrapped__(file)
assert num_read < 1.2 * import_utils.create_import_structure_from_path.cache_info().misses, num_read
lazy = import_utils._LazyModule("transformers.models", file, expected)
assert transformers.models._class_to_module == lazy._class_to_module and len(lazy._class_to_module) > 1000
assert transformers.models._modules == lazy._modules
"""


def test_transformers_looks_for_its_models_once_and_finds_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK_FOR_MODELS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
