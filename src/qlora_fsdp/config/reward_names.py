"""How functions that reward answers are named: FILE.py:NAME, or a word for one that is built in."""

from __future__ import annotations

from collections.abc import Mapping

# Those that are built in. Their docstrings in training/rewards/built_in.py say what each gives.
BUILT_IN = (
    "exact_match",
    "ends_with_answer",
    "regex_match",
    "think_format",
    "soft_overlong",
    "matches_schema",
    "math_equal",
)

# Packages that these need, by the name that they are imported by, and how they are installed.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "matches_schema": ("jsonschema", "jsonschema"),
    "math_equal": ("math_verify", "math-verify[antlr4_13_2]"),
}


def split_function(name: str) -> tuple[str | None, str]:
    """The file and the function of a name; None for the file of one that is built in."""
    file, colon, function = name.rpartition(":")
    return (file, function) if colon and file.endswith(".py") else (None, name)


def model_name(folder: str) -> str:
    """What a reward model is called in figures: its run, for its folder is called adapter as all are."""
    parts = [part for part in folder.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    named = [part for part in parts if part != "adapter"]
    return (named or parts or [folder])[-1]


def short_name(name: str) -> str:
    """What a function is called in figures."""
    return split_function(name)[1]
