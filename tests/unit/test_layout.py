"""The folders of the package: who may import whom, and what lies at the top."""

from __future__ import annotations

import ast
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
    assert len(modules) <= 12
    for file in modules:
        assert 'if __name__ == "__main__":' in file.read_text(encoding="utf-8"), f"{file.name} is no command"


# Modules of the folders above that take a whole configuration: they check it, settle what is open, or record it.
WITH_CONFIG = {
    "inference/trained",
    "memory/plan_run",
    "memory/workload",
    "model/run_tokenizer",
    "model/settle",
    "records/check_run_folder",
    "runtime/run_command",
    "tracing/model_tracer",
    "training/prepare",
    "training/run",
    "training/start_adapter",
    "training/teacher",
}


def test_a_configuration_ends_where_a_run_begins() -> None:
    """What lies below gets a spec of its own subject, and can't see the other settings (docs/design.md)."""
    found = set()
    for file in PACKAGE.glob("*/**/*.py"):
        name = file.relative_to(PACKAGE).with_suffix("").as_posix()
        imported = {
            each.name
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module == "qlora_fsdp.config.schema"
            for each in node.names
        }
        if "Config" in imported and name.partition("/")[0] not in ("config", "launch", "predict", "python"):
            found.add(name)
    assert found == WITH_CONFIG


def test_the_files_that_are_marked_slow_are_there() -> None:
    """A file under a new name would be part of `make test` again."""
    files = {f"{folder}/test_{name}.py" for folder, names in SLOW_FILES.items() for name in names}
    assert not {file for file in files if not (ROOT / "tests" / file).exists()}
