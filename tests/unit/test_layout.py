"""The folders of the package: who may import whom, and what lies at the top."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import SLOW_FILES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "qlora_fsdp"


def test_imports_run_downwards_and_in_no_circle() -> None:
    """The contracts in pyproject.toml."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_only_commands_lie_at_the_top() -> None:
    """What a user types behind `qlora-fsdp`, and nothing else."""
    modules = [file for file in PACKAGE.glob("*.py") if file.stem != "__init__"]
    assert len(modules) <= 11
    for file in modules:
        assert 'if __name__ == "__main__":' in file.read_text(encoding="utf-8"), f"{file.name} is no command"


def test_the_files_that_are_marked_slow_are_there() -> None:
    """A file under a new name would be part of `make test` again."""
    files = {f"{folder}/test_{name}.py" for folder, names in SLOW_FILES.items() for name in names}
    assert not {file for file in files if not (ROOT / "tests" / file).exists()}
