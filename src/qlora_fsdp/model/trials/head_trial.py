"""Find out, with a small model, what a model does to the output of its head.

Only for logits that are the head's output, maybe scaled or capped, can the loss be computed a chunk of tokens at a time
(layers/head_loss.py). Configs give the scale of logits under several names, and families read the same name in opposite
ways: Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it. So the factor is measured, and then it is
shown where it comes from, because a small model might have another one than its large relative.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.runtime.hardware import is_shortage

Differs = Callable[[Tensor, Tensor], bool]


class HeadTrial:
    """A small model, a row, and the row's logits.

    Args:
        model: the small model, in training mode.
        config: the config at its real size.
        row: tokens, int64 [L], on the model's device.
        logits: what the model makes of them, float32 [L, vocabulary].
        build: makes a model with the same weights of another config.
        differ: whether logits differ by more than rounding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PretrainedConfig,
        row: Tensor,
        logits: Tensor,
        build: Callable[[PretrainedConfig], PreTrainedModel],
        differ: Differs,
    ) -> None:
        self.model, self.config, self.row, self.logits = model, config, row, logits
        self.build, self.differ = build, differ

    def transform(self) -> LogitTransform | None:
        """What makes the model's logits of its head's output; None if they are made in another way.

        Raises:
            Exception: the model has no such parts, or parts that want to be called in another way.
        """
        embeddings, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        decoder = self.model.get_decoder()
        ids = self.row[None]
        ways = [{"input_ids": ids}]
        if type(embeddings) is nn.Embedding:  # then CausalLM looks the tokens up itself
            ways.append({"inputs_embeds": embeddings(ids)})
        outputs = [head(decoder(**way, use_cache=False).last_hidden_state)[0] for way in ways]
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        factor = 1.0 if cap is not None else self._factor(outputs[0])
        found = None if factor is None else LogitTransform(factor, cap)
        if found is None or any(self.differ(found(output), self.logits) for output in outputs):
            return None
        has_bias = getattr(head, "bias", None) is not None
        return None if has_bias and found.factor != 1.0 else found  # HeadLoss scales the hidden states, and no bias

    def _factor(self, output: Tensor) -> float | None:
        """What the head's output is multiplied by: 1, or a number of the real config or its inverse; else None."""
        if not self.differ(output, self.logits):
            return 1.0
        head, logits = output.double().flatten(), self.logits.double().flatten()
        measured = float(head @ logits / (head @ head))
        small, real = self.model.config.to_dict(), self.config.to_dict()
        for name, value in small.items():
            if type(value) not in (int, float) or not value or real.get(name) != value:
                continue
            for factor, power in ((float(value), 1), (1.0 / value, -1)):
                if abs(measured - factor) <= 1e-5 * abs(factor) and self._follows(name, value, power):
                    return factor
        return None

    def _follows(self, name: str, value: float, power: int) -> bool:
        """Whether logits are twice or half as large when the config's value is doubled, and all else is as it was."""
        changed = deepcopy(self.model.config)
        try:
            setattr(changed, name, 2 * value)
            logits = self.build(changed)(input_ids=self.row[None], use_cache=False).logits[0]
        except Exception as error:  # the number is a size, equal to the factor by chance, that fits no others
            if is_shortage(error):
                raise
            return False
        return not self.differ(logits, self.logits * 2.0**power)
