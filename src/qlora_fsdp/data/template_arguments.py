"""What every render of a chat template is given beside the conversation: `data.template_arguments`.

Templates of models that think look at `enable_thinking`, and others at names of their own. The tokenizer of a run
remembers the arguments, as it has the template and is at hand wherever a conversation is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

_REMEMBERED = "_template_arguments"  # an attribute of the tokenizer, which is copied and sent to workers with it


def remember_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    """Lets the tokenizer remember what its chat template is given."""
    setattr(tokenizer, _REMEMBERED, dict(arguments))


def template_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the tokenizer's chat template is given beside the messages, the tools and the special tokens."""
    remembered: dict[str, Any] = getattr(tokenizer, _REMEMBERED, {})
    return dict(remembered)
