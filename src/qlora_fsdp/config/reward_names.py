"""How functions that reward answers are named: FILE.py:NAME, or a word for one that is built in."""

from __future__ import annotations

from collections.abc import Mapping

# Those that are built in, and what each gives (training/rewards/built_in.py).
BUILT_IN: Mapping[str, str] = {
    "exact_match": "1 where the answer is the row's `answer`, but for outer space",
    "ends_with_answer": "1 where the last line of the answer has the row's `answer` as its last word",
    "regex_match": "1 where the row's `pattern` is found in the answer",
    "think_format": "1 where the answer is <think>, thoughts, </think> and then words",
    "soft_overlong": "0, below it in the last fifth of max_completion_length, and -1 where that is used up",
    "matches_schema": "1 where the answer is JSON that the row's `schema` allows",
    "math_equal": "1 where the answer's last result equals the row's `answer`, by math-verify",
}


# Packages that these need, by the name that they are imported by, and how they are installed.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "matches_schema": ("jsonschema", "jsonschema"),
    "math_equal": ("math_verify", "math-verify[antlr4_13_2]"),
}


def split_function(name: str) -> tuple[str | None, str]:
    """The file and the function of a name; None for the file of one that is built in."""
    file, colon, function = name.rpartition(":")
    return (file, function) if colon and file.endswith(".py") else (None, name)


def short_name(name: str) -> str:
    """What a function is called in figures."""
    return split_function(name)[1]
