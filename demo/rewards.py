"""What `make demo-grpo` rewards: letters in the order of the alphabet.

A function gets lists of the same length, one entry for each answer, and returns a number for each (docs/grpo.md).
`answer` is the column of that name of demo/letters.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_place(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The share of an answer's words that are the wanted ones in their places; 1 for the whole answer alone."""
    rewards = []
    for text, wanted in zip(completions, answer, strict=True):
        words = text.split()
        letters = wanted.split()
        num_right = sum(word == letter for word, letter in zip(words, letters, strict=False))
        rewards.append(num_right / max(len(words), len(letters)))
    return rewards
