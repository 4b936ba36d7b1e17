"""Texts at which a completion ends, such as an end marker that is several tokens: transformers' `stop_strings`.

What ends an answer is one token with most models. Others are trained with a chat template whose end marker is plain
text to their tokenizer, and they say it token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria

from qlora_fsdp.data.tokenizer import ContainedTokenizer


def stop_strings(config: GenerationConfig) -> list[str]:
    """The texts that end a completion, besides the tokens that do."""
    found = config.stop_strings
    if found is None:
        return []
    return [found] if isinstance(found, str) else list(found)


class StopStrings:
    """Ends a completion after the token with which one of some texts is complete.

    As with transformers' StopStringCriteria, the text may begin within a token and end within one, and may be cut into
    tokens in any way. It has to be in the completion: what the prompt ends with is no part of it. The tokenizer is
    somebody else's file: where its decoder has regular expressions, it decodes in the process for such files.

    Args:
        tokenizer: writes the tokens as text.
        texts: at which completions end; empty ones are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self.tokenizer = ContainedTokenizer(tokenizer)
        self.texts = [text for text in texts if text]
        # However a text is cut, each of its tokens has a byte of it at least.
        self.num_tokens = max((len(text.encode()) for text in self.texts), default=0)

    def __call__(self, tokens: list[int]) -> bool:
        """Whether a completion that did not end before its last token ends with it."""
        return self.have_ended([tokens])[0]

    def have_ended(self, completions: Sequence[Sequence[int]]) -> list[bool]:
        """Whether completions that did not end before their last token end with it, by one call of the tokenizer."""
        if not self.texts or not completions:
            return [False] * len(completions)
        ends = self.tokenizer.decode_all([tokens[-self.num_tokens :] for tokens in completions])
        return [any(text in end for text in self.texts) for end in ends]

    def cut(self, completion: str) -> str:
        """A completion as text without the one of the texts that ends it, as end tokens are left out of it too."""
        places = [completion.rfind(text) for text in self.texts]
        found = [place for place in places if place >= 0]
        return completion[: min(found)] if found else completion

    def num_sure(self, text: str) -> int:
        """How many characters of a growing completion are surely said: what follows may become one of the texts."""
        for place in range(len(text)):
            rest = text[place:]
            if any(stop.startswith(rest) for stop in self.texts):
                return place
        return len(text)


class StopsOfGenerate(StoppingCriteria):
    """`StopStrings` for transformers' `generate`, in place of its own, which reads the whole vocabulary by the decoder.

    Args:
        stops: the texts.
        prompt_length: tokens of the padded prompts.
    """

    def __init__(self, stops: StopStrings, prompt_length: int) -> None:
        self.stops = stops
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **others: object) -> Tensor:
        """Which rows end with their last token: bool [num_rows]."""
        ends = input_ids[:, self.prompt_length :][:, -self.stops.num_tokens :]  # only they are copied from a GPU
        return torch.tensor(self.stops.have_ended(ends.tolist()), device=input_ids.device)
