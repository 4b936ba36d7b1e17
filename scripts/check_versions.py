"""Test the oldest and the newest supported versions together, and write the table that `doctor` reads.

usage: python scripts/check_versions.py [--folder DIR] [--python oldest=python3.10] [oldest] [newest]

`oldest` has pyproject.toml's lower bounds of five libraries (torch, transformers, peft, accelerate, bitsandbytes),
`newest` is constraints.txt. Each gets a virtual environment in DIR, made once (gigabytes: a torch of its own), and runs
a short set of tests there: bytes and losses against stock libraries, in one process and two. A combination that passes
goes into src/qlora_fsdp/versions.json; one that fails is named, is listed there as known to be bad, and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src" / "qlora_fsdp" / "versions.json"
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
TESTS = (
    "tests/unit/test_adapters.py",
    "tests/unit/test_library_errors.py",
    "tests/unit/test_quantized.py",
    "tests/distributed/test_prequantized.py",
)
DESCRIBE = (
    "import json, platform; from importlib.metadata import version; "
    f"print(json.dumps({{'python': platform.python_version()}} | {{n: version(n) for n in {LIBRARIES!r}}}))"
)


def lower_bounds(text: str) -> dict[str, str]:
    """By library, the `==` requirement that its `>=` in pyproject.toml promises: 2.11 is 2.11.0."""
    bounds = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)"', text, re.MULTILINE))
    return {name: f"{name}=={bounds[name] + '.0' * (2 - bounds[name].count('.'))}" for name in LIBRARIES}


def starts(python: str) -> bool:
    """Whether there is such a Python: pyenv has commands for versions that are not switched on."""
    return shutil.which(python) is not None and not subprocess.run([python, "-V"], capture_output=True).returncode


def make_environment(name: str, python: str, folder: Path) -> Path:
    """The combination's Python, with everything installed."""
    home = folder / name
    found = home / "bin" / "python"
    if (home / ".ready").is_file():
        return found
    subprocess.run([python, "-m", "venv", home], check=True)
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if name == "oldest":
        oldest = lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        pinned = [line for line in pinned if line.partition("==")[0] not in oldest] + list(oldest.values())
    (home / "constraints.txt").write_text("\n".join(pinned) + "\n", encoding="utf-8")
    install: list[str | Path]
    install = [found, "-m", "pip", "install", "--quiet", "-c", home / "constraints.txt", "-e", f"{ROOT}[dev]"]
    subprocess.run(install, check=True)
    (home / ".ready").touch()
    return found


def passes(name: str, python: Path) -> bool:
    """Run the tests; print which versions broke, if they do."""
    described = subprocess.run([python, "-c", DESCRIBE], capture_output=True, text=True, check=True)
    versions = {key: text.partition("+")[0] for key, text in json.loads(described.stdout).items()}
    shown = ", ".join(f"{key} {version}" for key, version in versions.items())
    print(f"{name}: {shown}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([python, "-m", "pytest", "-q", *TESTS], cwd=ROOT, env=environment, check=False)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    today = datetime.now(tz=timezone.utc).date().isoformat()
    table["known_bad"] = [entry for entry in table["known_bad"] if entry["versions"] != versions]
    if done.returncode:
        print(f"{name} BROKE: {shown}", flush=True)
        reason = "tests of scripts/check_versions.py failed"
        table["known_bad"].append({"versions": versions, "date": today, "reason": reason})
    else:
        entries = {entry["name"]: entry for entry in table["tested"]}
        entries[name] = {"name": name, "date": today, "versions": versions}
        table["tested"] = [entries[key] for key in ("oldest", "newest") if key in entries]
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return done.returncode == 0


def main() -> int:
    """Test each combination. The exit code: 1 if one broke."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").partition("usage: ")[2])
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("names", nargs="*", default=[])
    options = parser.parse_args()
    pythons = {"oldest": "python3.10", "newest": "python3"} | dict(text.split("=", 1) for text in options.python)
    names = options.names or list(pythons)
    absent = [f"--python {name}={pythons[name]}" for name in names if not starts(pythons[name])]
    if absent:
        parser.error(f"{', '.join(absent)}: there is no such Python. Name another.")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    passed = [passes(name, make_environment(name, pythons[name], folder)) for name in names]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
