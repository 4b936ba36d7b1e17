"""Texts at which a completion ends, such as an end marker that is several tokens: transformers' `stop_strings`.

What ends an answer is one token with most models. Others are trained with a chat template whose end marker is plain
text to their tokenizer, and they say it token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import GenerationConfig, PreTrainedTokenizerBase


def stop_strings(config: GenerationConfig) -> list[str]:
    """The texts that end a completion, besides the tokens that do."""
    found = config.stop_strings
    if found is None:
        return []
    return [found] if isinstance(found, str) else list(found)


class StopStrings:
    """Ends a completion after the token with which one of some texts is complete.

    As with transformers' StopStringCriteria, the text may begin within a token and end within one, and may be cut into
    tokens in any way. It has to be in the completion: what the prompt ends with is no part of it.

    Args:
        tokenizer: writes the tokens as text.
        texts: at which completions end; empty ones are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = [text for text in texts if text]
        # However a text is cut, each of its tokens has a byte of it at least.
        self.num_tokens = max((len(text.encode()) for text in self.texts), default=0)

    def __call__(self, tokens: list[int]) -> bool:
        """Whether a completion that did not end before its last token ends with it."""
        if not self.texts:
            return False
        end = str(self.tokenizer.decode(tokens[-self.num_tokens :]))
        return any(text in end for text in self.texts)

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
