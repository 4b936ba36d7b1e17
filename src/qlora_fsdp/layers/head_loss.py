"""The output head together with the loss, so that the logits of all tokens never exist at once.

Tokens go through the head in chunks. With a frozen head, forward computes the gradient of the hidden states in the same
pass, so that backward needs neither the logits nor the head. The idea is that of Liger's fused linear cross-entropy
(arXiv:2410.10989). On a GPU one kernel turns a chunk of logits into losses and gradients
(kernels/triton_cross_entropy.py).

Each token's loss is returned by itself, because a preference loss weighs each answer by a factor that follows from the
sum of its tokens' losses. That costs nothing: a token's loss depends only on its own hidden state. So backward
multiplies the gradient that forward has kept by this factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import assert_never

from qlora_fsdp.common.sizes import IGNORE_INDEX, PIECE_BYTES, loss_chunk
from qlora_fsdp.layers.divergence import FrozenHead
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.token_rows import TokenRows, join_columns, plain_table
from qlora_fsdp.runtime.rows import gather_pieces, gather_whole, local_tensor, shard_group

LossKernel = Literal["triton", "liger", "torch"]
Reduction = Literal["sum", "none", "with_entropy"]
BYTES_A_LOGIT = 16  # of a piece's logits, exponentials and slopes in float32, which exist together


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the output of its head before the loss: `cap * tanh(factor * logits / cap)`.

    Attributes:
        factor: Granite and Cohere scale their logits.
        cap: Gemma 2 caps them; None for no cap.
    """

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """The logits of the model, in the dtype and shape of the head's."""
        if self.factor != 1.0:
            logits = self.factor * logits
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


UNCHANGED = LogitTransform()


class HeadLoss:
    """The forward of an output layer that computes the loss if it is given targets, and logits otherwise.

    Args:
        head: hidden size -> vocabulary; may be adapted or trained (PEFT's wrappers). On meta or not, but not sharded.
        transform: what the model does to the head's logits. A factor is applied to the hidden states, which are fewer;
            so a head with a bias must have none.
        kernel: what computes the loss of a frozen head: our Triton kernel or Liger's, both on a GPU, or torch.

    Attributes:
        is_frozen_linear: whether the head is a plain or int8 linear layer that is not trained, maybe with rows of new
            tokens beside it. Its weight is then gathered here, into one buffer, and backward does not need it.
        whole_weight: the weight of a plain linear layer, if it need not be gathered (sharding/peer_weights.py).
        in_pieces: whether some thousand rows of an int8 head are dequantized at a time, and its weight never exists as
            a whole.
    """

    whole_weight: Tensor | None = None
    in_pieces = False

    def __init__(self, head: nn.Module, transform: LogitTransform, kernel: LossKernel) -> None:
        self.head = cast(nn.Linear, plain_table(head))
        self.logits = head.forward
        self.factor = transform.factor
        self.softcap = transform.cap
        self.kernel = kernel
        is_int8 = type(self.head) is QuantizedLinear and self.head.format.quant_type == "int8"
        self.is_frozen_linear = is_int8 or (type(self.head) is nn.Linear and not self.head.weight.requires_grad)
        self.new_rows = cast(TokenRows, head.token_adapter) if self.head is not head else None
        self.vocab_size = next(m.out_features for m in head.modules() if isinstance(m, nn.Linear))

    def __call__(
        self, hidden_BLD: Tensor, targets_BL: Tensor | None = None, reduction: Reduction = "sum", smoothing: float = 0.0
    ) -> Tensor:
        """The loss -log p(target), and 0 for targets that are -100, in float32. Without targets, the logits.

        Args:
            hidden_BLD: final hidden states in the compute dtype.
            targets_BL: int64, the token that follows each position.
            reduction: `sum` over all targets, a scalar; `none`, the loss of each token, [B, L]; or `with_entropy`,
                [2, B, L], the losses and, without gradient, the entropies of what is predicted, in nats and 0 where
                there is no target. Liger has `sum` alone.
            smoothing: part of a token's loss that is the mean over the vocabulary in place of the target's. Liger has
                none.
        """
        if targets_BL is None:
            return self.logits(hidden_BLD)  # type: ignore[no-any-return]
        if self.factor != 1.0:
            hidden_BLD = hidden_BLD * self.factor
        losses = self._losses(hidden_BLD.flatten(0, 1), targets_BL.flatten(), reduction, smoothing)
        match reduction:
            case "sum":
                return losses.sum()
            case "none":
                return losses.view(targets_BL.shape)
            case "with_entropy":
                return losses.view(2, *targets_BL.shape)
            case _:
                assert_never(reduction)

    def _losses(self, hidden: Tensor, targets: Tensor, reduction: Reduction, smoothing: float) -> Tensor:
        """The loss of each token, [B * L], or of Liger's kernel the sum of all; with entropies [2, B * L]."""
        wants_entropy = reduction == "with_entropy"
        if self.is_frozen_linear:
            if self.in_pieces and isinstance(self.head, QuantizedLinear) and self.new_rows is None:
                own_bias = None if self.head.bias is None else gather_whole(self.head.bias, hidden.device)
                found = _PiecewiseHeadLoss.apply(  # type: ignore[no-untyped-call]
                    hidden, self.head, own_bias, targets, self.softcap, wants_entropy, smoothing
                )
                return torch.stack(found) if wants_entropy else found[0]
            weight, bias = self._frozen_weights(hidden.device)
            if self.new_rows is None and self.kernel == "liger":
                assert reduction == "sum" and smoothing == 0.0
                return _liger_loss(hidden, weight, bias, targets, self.softcap)
            if self.new_rows is None and self.kernel == "triton":
                found = _FusedHeadLoss.apply(  # type: ignore[no-untyped-call]
                    hidden, weight, bias, targets, self.softcap, wants_entropy, smoothing
                )
                return torch.stack(found) if wants_entropy else found[0]
            new = (None, None) if self.new_rows is None else (self.new_rows.rows, self.new_rows.replaced)
            found = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, targets, self.softcap, loss_chunk(self.vocab_size), *new, wants_entropy, smoothing
            )
            return torch.stack(found) if wants_entropy else found[0]
        chunk = loss_chunk(self.vocab_size)
        losses = [
            checkpoint(self._chunk_losses, h, t, wants_entropy, smoothing, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
        ]
        return torch.cat(losses, -1)

    def _frozen_weights(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The whole weight and bias of a frozen linear head."""
        weight = self.whole_weight
        if weight is None:
            weight = _gather_weight(self.head, device)
        bias = None if self.head.bias is None else gather_whole(self.head.bias, device)
        return weight, bias

    def as_frozen(self, device: torch.device) -> FrozenHead:
        """The frozen linear head, whole, for the divergence from a teacher. Collective where it is in shards."""
        weight, bias = self._frozen_weights(device)
        return FrozenHead(weight, bias, self.factor, self.softcap)

    def _chunk_losses(self, hidden: Tensor, targets: Tensor, wants_entropy: bool, smoothing: float) -> Tensor:
        logits = LogitTransform(cap=self.softcap)(self.logits(hidden).float())
        losses = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing
        )
        return torch.stack([losses, entropies_of(logits.detach(), targets)]) if wants_entropy else losses


def entropies_of(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The entropy of what each row of float32 logits predicts, in nats: float32 [N]; 0 where there is no target."""
    log_probs = logits_NV.log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)  # 0 times -inf is NaN
    return entropies * (targets_N != IGNORE_INDEX)


def _gather_weight(layer: nn.Module, device: torch.device) -> Tensor:
    """The whole weight of a linear layer on `device`, without autograd; int8 codes are dequantized.

    Codes are gathered in pieces, so that there is one buffer of the weight's size and no second one.
    """
    if not isinstance(layer, QuantizedLinear):
        return gather_whole(cast(nn.Linear, layer).weight, device)
    out = torch.empty(layer.out_features, layer.in_features, dtype=layer.compute_dtype, device=device)
    for first, piece in _weight_pieces(layer, device):
        out[first : first + len(piece)] = piece
    return out


def _weight_pieces(layer: QuantizedLinear, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """The weight of an int8 layer in pieces: the first row of each, and its dequantized rows. Collective.

    A piece has at most PIECE_BYTES of codes on any number of ranks, so that the plan, which is made for one, is right.
    """
    most = max(1, PIECE_BYTES // layer.in_features)
    held = [local_tensor(part) for part in (layer.codes, layer.scales)]
    for first, (codes, scales) in gather_pieces(held, layer.out_features, shard_group(layer.codes), device):
        for start in range(0, len(scales), most):
            parts = {"codes": codes[start : start + most], "scales": scales[start : start + most]}
            num_rows = len(parts["scales"])
            yield first + start, layer.format.dequantize(parts, num_rows, layer.in_features, layer.compute_dtype)


def _liger_loss(
    hidden_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, targets_N: Tensor, softcap: float | None
) -> Tensor:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    options = (None, IGNORE_INDEX, 0.0, 0.0, "sum", softcap)
    return cast(Tensor, LigerFusedLinearCrossEntropyFunction.apply(hidden_ND, weight_VD, targets_N, bias, *options)[0])


class _PiecewiseHeadLoss(torch.autograd.Function):
    """As `_FrozenHeadLoss`, of a head whose rows are dequantized some thousand at a time, each once.

    The gradient of a token's hidden state is sum_v p_v slope_v W_v less the target's slope_t W_t. As in attention by
    tiles (arXiv:2205.14135), a piece adds exp(logit - top) W_v, and what was added before is scaled where the largest
    logit so far (`top`) grows; the division by the sum of the exponentials comes last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: QuantizedLinear,
        bias: Tensor | None,
        targets_N: Tensor,
        softcap: float | None,
        wants_entropy: bool = False,
        smoothing: float = 0.0,
    ) -> tuple[Tensor, ...]:
        device = hidden_ND.device
        num_tokens = len(hidden_ND)
        wants_grad = ctx.needs_input_grad[0]
        top_N = torch.full((num_tokens,), -torch.inf, dtype=torch.float32, device=device)
        sum_N = torch.zeros_like(top_N)  # of exp(logit - top)
        target_logit_N = torch.zeros_like(top_N)
        logit_sum_N = torch.zeros_like(top_N) if smoothing else None
        expected_N = torch.zeros_like(top_N) if wants_entropy else None  # sum of exp(logit - top) logit
        pull_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants_grad else None
        target_row_ND = torch.zeros_like(hidden_ND) if wants_grad else None
        smooth_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants_grad and smoothing else None
        for first, weight_RD in _weight_pieces(head, device):
            own_bias = None if bias is None else bias[first : first + len(weight_RD)]
            chunk = loss_chunk(len(weight_RD), BYTES_A_LOGIT)
            for start in range(0, num_tokens, chunk):
                rows = slice(start, start + chunk)
                logits = F.linear(hidden_ND[rows], weight_RD, own_bias).float()
                if softcap is not None:
                    logits.div_(softcap).tanh_().mul_(softcap)
                slope = None if softcap is None else 1.0 - (logits / softcap) ** 2
                place = targets_N[rows] - first
                is_here = (place >= 0) & (place < len(weight_RD))
                place = place.clamp(0, len(weight_RD) - 1)
                found = logits.gather(1, place.unsqueeze(1)).squeeze(1)
                target_logit_N[rows] = torch.where(is_here, found, target_logit_N[rows])
                if logit_sum_N is not None:
                    logit_sum_N[rows] += logits.sum(1)
                top = torch.maximum(top_N[rows], logits.amax(1))
                scale = (top_N[rows] - top).exp_()
                top_N[rows] = top
                weights = (logits - top.unsqueeze(1)).exp_()
                sum_N[rows] = sum_N[rows] * scale + weights.sum(1)
                if expected_N is not None:
                    expected_N[rows] = expected_N[rows] * scale + (weights * logits).sum(1)
                del logits  # or it would be there while the gradient is made
                if pull_ND is not None and target_row_ND is not None:
                    if slope is not None:
                        weights.mul_(slope)
                    pull_ND[rows] *= scale.unsqueeze(1)
                    pull_ND[rows] += weights.to(weight_RD.dtype) @ weight_RD
                    target_row = weight_RD[place]
                    target_row_ND[rows] = torch.where(is_here.unsqueeze(1), target_row, target_row_ND[rows])
                if smooth_ND is not None:
                    flat = torch.ones_like(weights) if slope is None else slope
                    smooth_ND[rows] += flat.to(weight_RD.dtype) @ weight_RD
                del weights, slope
        norm_N = top_N + sum_N.log()
        reached_N = target_logit_N
        if logit_sum_N is not None:
            reached_N = (1.0 - smoothing) * target_logit_N + smoothing / head.out_features * logit_sum_N
        valid_N = targets_N != IGNORE_INDEX
        losses_N = (norm_N - reached_N) * valid_N
        entropies_N = None if expected_N is None else (norm_N - expected_N / sum_N) * valid_N
        grad_ND = None
        if pull_ND is not None and target_row_ND is not None:
            target_N = torch.full_like(top_N, 1.0 - smoothing)
            if softcap is not None:
                target_N *= 1.0 - (target_logit_N / softcap) ** 2
            pull_ND /= sum_N.unsqueeze(1)
            pull_ND -= target_N.unsqueeze(1) * target_row_ND
            if smooth_ND is not None:
                pull_ND -= smooth_ND.mul_(smoothing / head.out_features)
            pull_ND *= valid_N.unsqueeze(1)
            grad_ND = pull_ND.to(hidden_ND.dtype)
        ctx.save_for_backward(grad_ND)
        return _outputs(ctx, losses_N, entropies_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_ND,) = ctx.saved_tensors
        return (grad_ND.float() * grads[0].unsqueeze(1)).to(grad_ND.dtype), None, None, None, None, None, None


class _FusedHeadLoss(torch.autograd.Function):
    """Each token's cross-entropy through a frozen linear head on a GPU, and the gradient of its hidden state.

    Shapes: as in `_FrozenHeadLoss`. A chunk of logits is held in the compute dtype alone: one kernel reads it, computes
    in float32, and puts the gradient in its place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_N: Tensor,
        softcap: float | None,
        wants_entropy: bool = False,
        smoothing: float = 0.0,
    ) -> tuple[Tensor, ...]:
        from qlora_fsdp.layers.kernels.triton_cross_entropy import cross_entropy

        wants_grad = ctx.needs_input_grad[0]
        grad_ND = torch.empty_like(hidden_ND) if wants_grad else None
        losses_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        entropies_N = torch.empty_like(losses_N) if wants_entropy else None
        chunk = loss_chunk(len(weight_VD), hidden_ND.element_size())
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            logits = F.linear(hidden_ND[rows], weight_VD, bias)
            entropies = None if entropies_N is None else entropies_N[rows]
            cross_entropy(logits, targets_N[rows], losses_N[rows], softcap, wants_grad, entropies, smoothing)
            if grad_ND is not None:
                torch.mm(logits, weight_VD, out=grad_ND[rows])
            del logits  # or it would be there while the next chunk is made
        ctx.save_for_backward(grad_ND)
        return _outputs(ctx, losses_N, entropies_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_ND,) = ctx.saved_tensors
        return (grad_ND.float() * grads[0].unsqueeze(1)).to(grad_ND.dtype), None, None, None, None, None, None


def _outputs(ctx: Any, losses_N: Tensor, entropies_N: Tensor | None) -> tuple[Tensor, ...]:
    """What a loss returns: losses, and entropies if there are some, which have no gradient."""
    if entropies_N is None:
        return (losses_N,)
    ctx.mark_non_differentiable(entropies_N)
    return losses_N, entropies_N


class _FrozenHeadLoss(torch.autograd.Function):
    """Each token's cross-entropy through a frozen linear head, and the gradient of its hidden state.

    Shapes: hidden_ND, weight_VD, targets_N, new_KD; N tokens, D hidden size, V vocabulary, K trained rows of new tokens
    in float32. The first of these rows are for the token ids `replaced`, the others for the ids from V on.
    """

    # Many arguments, because autograd sees only tensors that are arguments of their own.
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_N: Tensor,
        softcap: float | None,
        chunk: int,
        new_KD: Tensor | None,
        replaced: Tensor | None,
        wants_entropy: bool = False,
        smoothing: float = 0.0,
    ) -> tuple[Tensor, ...]:
        wants_grad = ctx.needs_input_grad[0]
        grad_ND = torch.empty_like(hidden_ND) if wants_grad else None
        grad_NK = None
        if wants_grad and new_KD is not None:
            grad_NK = hidden_ND.new_zeros(len(hidden_ND), len(new_KD), dtype=torch.float32)
        cast_KD = None if new_KD is None else new_KD.to(hidden_ND.dtype)
        losses_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        entropies_N = torch.empty_like(losses_N) if wants_entropy else None
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden = hidden_ND[rows]
            targets = targets_N[rows]
            logits = F.linear(hidden, weight_VD, bias).float()
            if cast_KD is not None:
                logits = join_columns(logits, F.linear(hidden, cast_KD).float(), cast(Tensor, replaced))
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            valid = (targets != IGNORE_INDEX).unsqueeze(1)
            index = targets.clamp(min=0).unsqueeze(1)
            norm = torch.logsumexp(logits, 1, keepdim=True)
            expected = logits.gather(1, index)
            if smoothing:
                expected = (1.0 - smoothing) * expected + smoothing * logits.mean(1, keepdim=True)
            losses_N[rows] = ((norm - expected) * valid).squeeze(1)
            if entropies_N is not None:
                entropies_N[rows] = entropies_of(logits, targets)
            if grad_ND is not None:
                slope = None if softcap is None else 1.0 - (logits / softcap) ** 2
                grad = logits.sub_(norm).exp_()  # softmax
                if smoothing:
                    grad.sub_(smoothing / grad.shape[1])
                grad.scatter_add_(1, index, grad.new_full((1, 1), smoothing - 1.0).expand(len(index), 1))
                grad.mul_(valid)
                if slope is not None:
                    grad.mul_(slope)
                grad_NV = grad[:, : len(weight_VD)]
                if cast_KD is not None and grad_NK is not None:
                    grad_new = torch.cat([grad_NV[:, replaced], grad[:, len(weight_VD) :]], 1)
                    grad_NK[rows] = grad_new
                    grad_NV.index_fill_(1, cast(Tensor, replaced), 0.0)
                grad_ND[rows] = grad_NV.to(weight_VD.dtype) @ weight_VD
                if cast_KD is not None:
                    grad_ND[rows] += grad_new.to(cast_KD.dtype) @ cast_KD
                del grad, grad_NV, slope
            del logits  # or it would be there while the next chunk is made
        ctx.save_for_backward(grad_ND, grad_NK, None if grad_NK is None else hidden_ND)
        return _outputs(ctx, losses_N, entropies_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, grad_NK, hidden_ND = ctx.saved_tensors
        factors = grads[0].unsqueeze(1)
        grad_KD = None if grad_NK is None else (grad_NK * factors).t() @ hidden_ND.float()
        return (grad_ND.float() * factors).to(grad_ND.dtype), None, None, None, None, None, grad_KD, None, None, None
