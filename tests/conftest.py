"""Which tests are slow, and in which order they run. What they share is in tests/helpers/shared.py."""

from __future__ import annotations

from pathlib import Path

import pytest

# Tests of whole runs and commands whose files take over 20 seconds each on two cores, by CI's junit file. They are
# marked slow as a whole, because the tests of a file share what they start. `make test` still compares losses, bytes
# and resumed runs on several ranks, and runs most tests of attacks and all unit tests; `make test-all`, which CI calls,
# runs these too.
ROOT = Path(__file__).parent
SLOW_FILES = {
    "cli": [
        *(
            "bad_input",
            "chat",
            "clusters",
            "convert",
            "documented_runs",
            "expert_mistakes",
            "interrupts",
            "lost_ranks",
            "mistakes",
        ),
        *("out_of_memory", "preflight", "preflight_models", "python", "sweeps", "train_on", "walk_mistakes"),
    ],
    "distributed": [
        *("classification", "context_parallel", "expert_adapters", "expert_bytes", "expert_losses", "failed_passes"),
        *("initialization", "left_out", "merge", "new_tokens", "other_families", "plan_bytes", "preferences"),
        *("prequantized", "quantized_cache", "reload", "rewards", "start", "use"),
    ],
    "security": ["working_folder"],
}


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, so that the workers end together (`make test`); the many short unit tests come last.

    The long ones of each folder are spread evenly: commands often wait for one another, ranks of a run seldom.
    """
    files: dict[Path, dict[Path, None]] = {}
    for item in items:
        files.setdefault(item.path.parent, {})[item.path] = None
    places = {path: number / len(paths) for paths in files.values() for number, path in enumerate(paths)}
    items.sort(key=lambda item: 1.0 if "unit" in item.path.parts else places[item.path])
    slow = {ROOT / folder / f"test_{name}.py" for folder, names in SLOW_FILES.items() for name in names}
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    """Loads the fixtures, but not where pytest-xdist only hands files to workers: the libraries take 5 seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.helpers.shared")
