"""Llama 4's experts, computed for the tokens that chose them, so that they are quantized and adapted like others.

transformers lets others compute the experts of most models, but not these: each token is multiplied by its score of
every expert, nearly all of them zero, and all experts compute all tokens. An expert gives zero for a token of zeros,
because it has no biases. So it is the same function to send a token only to those it chose.

The score multiplies an expert's input here, not its output as in other models. An activation lies between the two, so
tokens are multiplied before the grouped products, whose own routing weights are then 1.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from qlora_fsdp.layers.experts.forward import experts_forward


class Llama4Experts(Llama4TextExperts):
    """transformers' experts with the attributes and the call that fused experts have in other models.

    Attributes:
        is_transposed: what PEFT takes the weights for. It finds no such attribute in transformers' class, so that its
            A has the columns of a weight, and B the rows.
        sums_over_rows: how the weights are used: y = x W.
    """

    has_gate = True
    has_bias = False
    has_post_expert_norm = False
    is_transposed = False
    sums_over_rows = True

    def _apply_gate(self, y_SU: Tensor) -> Tensor:
        gate, up = y_SU.chunk(2, dim=-1)
        activated: Tensor = up * self.act_fn(gate)
        return activated

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """x_TH, each token's experts [T, K] and their weights [T, K] -> y_TH."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class Llama4Moe(Llama4TextMoe):
    """transformers' block of router, experts and shared expert; each token goes to the K experts it chose."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] -> y [T, H] and the router's logits [T, E]."""
        x_TH = hidden_states.reshape(-1, self.hidden_dim)
        scores_TE, logits_TE = self.router(x_TH)
        w_TK, index_TK = scores_TE.topk(self.top_k, dim=1)
        x_SH = (x_TH.unsqueeze(1) * w_TK.unsqueeze(2)).flatten(0, 1)
        y_SH = self.experts(x_SH, index_TK.reshape(-1, 1), x_SH.new_ones(len(x_SH), 1))
        y_TH = y_SH.view(len(x_TH), self.top_k, -1).sum(1)
        return self.shared_expert(x_TH) + y_TH, logits_TE


OWN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {Llama4TextExperts: Llama4Experts, Llama4TextMoe: Llama4Moe}


def compute_chosen_experts(model: nn.Module) -> None:
    """Let Llama 4's blocks of experts compute what tokens chose; other models stay as they are.

    Args:
        model: on meta or not; changed in place. Parameters, their names and their layout stay.
    """
    for module in model.modules():
        if type(module) in OWN_CLASSES:
            module.__class__ = OWN_CLASSES[type(module)]
