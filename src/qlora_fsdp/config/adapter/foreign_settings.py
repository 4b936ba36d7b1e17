"""Which settings a file may carry that somebody else may have written.

An adapter's folder brings settings of its own, and it may have been downloaded. Whoever wrote it describes a model:
which base the adapter belongs to, and how that was quantized. They do not decide what this machine runs, reads, writes
or connects to. So a setting counts only if its field says so (`Files.adapters`) and if it is a plain value; anything
else is refused by name.

A file of settings that the user names, `--config my.yaml`, may set what its fields let it. As such files are passed on
too, they hold no more than settings: nothing that reads the environment, nothing that Hydra or a model would run. What
decides which code runs or who is connected to (`Files.none`), such as code that comes with a model or a job script's
commands, counts only where the user types it or has it in a folder of `--config-dir`. Imports no torch.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from typing_extensions import assert_never

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.text import printable, shorten
from qlora_fsdp.config.bounded_yaml import read_small_text, read_yaml
from qlora_fsdp.config.schema import Files
from qlora_fsdp.config.schema.former import FORMER
from qlora_fsdp.config.settings import all_settings, show

REMOTE_CODE = "model.trust_remote_code"

# Notes beside the settings: the form of the rows, by which prompts are written; what tells the base from others; the
# SHA-256 of the weights that a preference's training started from, which its loss compares with; that of the rows which
# the run has kept for the reports of merges; and the format whose rounding the adapter corrects, as that of the only
# base that it belongs to (lora.init_lora_weights=loftq).
TRAINED_ON = "trained_on"
BASE_FINGERPRINT = "base_fingerprint"
STARTED_FROM = "started_from"
REPORT_ROWS = "report_rows"
CORRECTED_FORMAT = "corrected_format"
NOTES = (TRAINED_ON, BASE_FINGERPRINT, STARTED_FROM, REPORT_ROWS, CORRECTED_FORMAT)

MAX_DEPTH = 8  # of lists and mappings inside one another, in a value
_OTHER_SETTING = re.compile(r"\$\{[a-z]\w*(?:\.\w+)+\}")  # plain ${section.name}


@cache
def described() -> tuple[str, ...]:
    """Returns the settings that an adapter's file may have: they describe the model that the adapter belongs to."""
    return tuple(key for key, setting in all_settings().items() if setting.files is Files.adapters)


def read_foreign_settings(file: Path) -> tuple[dict[str, dict[str, Any]], bool]:
    """Reads the settings in a YAML file that somebody else may have written.

    Returns:
        The settings by section and name, all of them allowed and plain; and whether the file asks for
        `model.trust_remote_code`, which is not among them.

    Raises:
        ConfigError: the file can't be read, or holds anything that is not allowed. Names every such setting.
    """
    try:
        values = read_yaml(file, allows_aliases=False)
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    if not isinstance(values, dict):
        raise _unreadable(file, ValueError("it holds no sections with settings"))
    problems: list[Problem] = []
    kept: dict[str, dict[str, Any]] = {}
    for section, names in values.items():
        if section in NOTES and isinstance(names, str):
            continue
        if section not in {key.partition(".")[0] for key in described()} or not isinstance(names, dict):
            problems.append(_not_allowed(file, str(section), names))
            continue
        kept[section] = {}
        for name, value in names.items():
            key = f"{section}.{name}"
            if key in FORMER:
                continue
            known = all_settings().get(key)
            match Files.users if known is None else known.files:
                case Files.adapters:
                    kept[section][name] = value
                    problems += unplain_problems(file, key, value)
                case Files.users:
                    problems.append(_not_allowed(file, key, value))
                case Files.skipped | Files.none:  # what becomes of the latter is said at `remote_code_problem`
                    continue
                case unknown:
                    assert_never(unknown)
    refuse(problems)
    model = values.get("model", {})
    return kept, model.get("trust_remote_code") not in (None, False)


def find_forbidden(values: Mapping[str, Mapping[str, Any]], file: Path) -> Iterator[Problem]:
    """Yields what a file of settings holds that is no setting, or one that only the user may type."""
    for section, names in values.items():
        for name, value in names.items():
            key = f"{section}.{name}"
            known = all_settings().get(key)
            if known is not None and known.files is Files.none and value not in (None, False, [], {}, known.default):
                yield _only_typed(file, key, value)
            else:
                yield from unplain_problems(file, key, value, allows_other_settings=True)


def _only_typed(file: Path, key: str, value: Any) -> Problem:
    """What is said of a setting that no file decides which somebody may have passed on."""
    words = value if isinstance(value, str) else json.dumps(value, default=str)
    typed = printable(shlex.quote(f"{key}={words}"))
    reason, fix = "decides what is run here or who is connected to.", f"Remove it; if you want it, type {typed}."
    if key == REMOTE_CODE:
        reason = "would let code that comes with a model run here, which only you can allow."
        fix = f"Remove it; if you trust the model, type {typed}."
    return Problem(quote_setting(file, key, value), reason, fix)


def remote_code_problem(file: Path, base: str) -> Problem:
    """Returns the problem of a file that asks for `model.trust_remote_code`, which the user has not typed."""
    reason = f"would let code that comes with {shorten(base)} run here, which only you can allow."
    return Problem(quote_setting(file, REMOTE_CODE, True), reason, f"If you trust that code, type {REMOTE_CODE}=true.")


def read_base_model(adapter: Path, setting: str = "adapter") -> str | None:
    """Reads the name of the base model from an adapter's adapter_config.json; None if it names none.

    Raises:
        ConfigError: the file can't be read, or the name is no plain text.
    """
    file = adapter / "adapter_config.json"
    try:
        base = json.loads(read_small_text(file))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"has an adapter_config.json that can't be read: {shorten(repr(error))}."
        raise ConfigError([Problem(show(setting, adapter), reason, "Copy or download it again.")]) from None
    if base is None:
        return None
    reasons = [reason for _, _, reason in _find_unplain("base_model_name_or_path", base)]
    if not isinstance(base, str):
        reasons = ["is not the name of a model."]
    if reasons:
        fix = "Set model.path to the base model yourself."
        raise ConfigError([Problem(quote_setting(file, "base_model_name_or_path", base), reasons[0], fix)])
    return str(base)


def unplain_problems(file: Path, key: str, value: Any, *, allows_other_settings: bool = False) -> Iterator[Problem]:
    """Yields what is wrong with the value that a file gives to a setting."""
    for place, found, reason in _find_unplain(key, value, allows_other_settings):
        fix = f"Remove it from the file, or type {printable(key)}=... yourself."
        yield Problem(quote_setting(file, place, found), reason, fix)


def _find_unplain(
    place: str, value: Any, allows_other_settings: bool = False, depth: int = 0
) -> Iterator[tuple[str, Any, str]]:
    """Where something is more than a plain value, what that is, and why it is refused."""
    if depth > MAX_DEPTH:
        yield place, "...", f"is nested more than {MAX_DEPTH} deep."
    elif isinstance(value, dict):
        for name, item in value.items():
            inner = f"{place}.{name}"
            if not isinstance(name, (str, int)) or "${" in str(name):
                yield inner, item, "has a name that is no plain text."
            elif str(name) == "auto_map" or "_implementation" in str(name):
                yield inner, item, "names code to run, which only you can allow."
            elif is_instruction(str(name)):
                yield inner, item, "is an instruction to Hydra, and not a setting."
            else:
                yield from _find_unplain(inner, item, allows_other_settings, depth + 1)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _find_unplain(f"{place}[{number}]", item, allows_other_settings, depth + 1)
    elif isinstance(value, str) and ("${" in _without_other_settings(value, allows_other_settings) or value == "???"):
        others = "" if allows_other_settings else "other settings, or "
        yield place, value, f"is no plain value: ${{...}} reads {others}your environment."
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield place, value, "is no plain value."


def is_instruction(name: str) -> bool:
    """Whether a key, such as `_target_`, tells Hydra what to do. No setting has such a name."""
    return name.startswith("_") and name.endswith("_")


def _without_other_settings(value: str, allows_other_settings: bool) -> str:
    return _OTHER_SETTING.sub("", value) if allows_other_settings else value


def _not_allowed(file: Path, key: str, value: Any) -> Problem:
    reason = "is not for an adapter's file to set: it may only describe the model that the adapter belongs to."
    return Problem(
        quote_setting(file, key, value), reason, "Remove it from the file; if you want it, type it yourself."
    )


def _unreadable(file: Path, error: Exception) -> ConfigError:
    reason = f"can't be read: {shorten(' '.join(str(error).split()), 400)}."
    return ConfigError([Problem(str(file), reason, "Copy the adapter again, or remove this file.")])


def quote_setting(file: Path, key: str, value: Any) -> str:
    """Returns a setting in a file of others for a message."""
    return f"{file}: {shorten(show(key, value))}"
