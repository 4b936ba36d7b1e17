"""Layers that are computed together against plain autograd and PEFT's own layers, in float64; and the Triton kernels
against plain torch, through Triton's interpreter."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from importlib import import_module
from types import ModuleType

import pytest
import torch
from tests.helpers.fused import WIDTH, Part, adapt, differences, make_parts, quantize
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from qlora_fsdp.layers import mlp as gated_mlp
from qlora_fsdp.layers.kernels import GateInputs
from qlora_fsdp.layers.lora import SharedInput
from qlora_fsdp.layers.norm import FrozenNorm, NormAndResidual, NormKind, is_rms_norm
from qlora_fsdp.layers.quantized.format import Format, code_book, dynamic_map
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.rewire import fuse_layers, recompute_norms

NF4 = Format("nf4", double_quant=True)


def fused_parts(format: Format = NF4, activation: str = "silu", mlp: type[torch.nn.Module] = LlamaMLP):
    ours, reference = make_parts(format, activation, torch.float32, "cpu", mlp)
    assert fuse_layers(ours) == 2
    return ours, reference


@pytest.mark.parametrize("mlp", [LlamaMLP, Phi3MLP])  # gate and up apart; as one layer
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("format", [NF4, Format("int8")], ids=str)
def test_output_and_gradients(format: Format, activation: str, mlp: type[torch.nn.Module]):
    assert max(differences(*fused_parts(format, activation, mlp)).values()) < 1e-5


@pytest.mark.parametrize("mlp", [LlamaMLP, Phi3MLP])
@pytest.mark.parametrize("recompute", [False, True])
def test_with_norms_made_again(recompute: bool, mlp: type[torch.nn.Module]):
    ours, reference = fused_parts(mlp=mlp)
    recompute_norms(ours.base_model.model)
    call = partial(checkpoint, use_reentrant=False) if recompute else None
    errors = differences(ours, reference, call) if call else differences(ours, reference)
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Glm4RMSNorm", True),
        ("LigerRMSNormForGlm4", True),  # Liger's in place of it
        ("Qwen3NextRMSNormGated", False),  # called with a gate
        ("LayerNorm", False),
    ],
)
def test_rms_norms_are_known_by_their_class(name: str, expected: bool):
    assert is_rms_norm(type(name, (torch.nn.Module,), {})()) is expected


def test_norms_made_again_keep_no_activation_alive():
    ours, _ = fused_parts()
    recompute_norms(ours.base_model.model)
    x = torch.randn(3, 50, 128)
    alive = weakref.ref(x)
    with torch.no_grad():
        ours(x)
    del x
    assert alive() is None


def kept(model: torch.nn.Module) -> list[Tensor]:
    tensors: dict[int, Tensor] = {}
    x = torch.randn(3, 50, 128, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return [tensor for tensor in tensors.values() if not isinstance(tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("mlp", [LlamaMLP, Phi3MLP])
def test_what_is_kept_for_backward(mlp: type[torch.nn.Module]):
    """Of the MLP: gate and up side by side, and nothing else as wide."""
    ours, _ = fused_parts(mlp=mlp)
    wide = [tensor for tensor in kept(ours) if tensor.shape[-1] in (WIDTH, 2 * WIDTH)]
    assert [tuple(tensor.shape) for tensor in wide if tensor.numel() > 8 * WIDTH] == [(150, 2 * WIDTH)]


def test_dropout_and_switched_off_adapters_take_the_plain_path():
    ours, reference = fused_parts()
    x = torch.randn(2, 9, 128)
    with ours.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(ours(x).double(), reference(x.double()), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours(x).double(), reference(x.double()), rtol=1e-5, atol=1e-4)


def test_a_layer_called_with_another_tensor_is_computed_alone():
    ours, reference = fused_parts()
    part: Part = ours.base_model.model
    other = reference.base_model.model
    x, z = torch.randn(2, 9, 128), torch.randn(2, 9, 128)
    for name, tensor in (("q_proj", x), ("k_proj", z), ("v_proj", x), ("q_proj", x), ("v_proj", x)):
        found, expected = getattr(part, name)(tensor), getattr(other, name)(tensor.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert isinstance(part.q_proj.group, SharedInput)


def test_norms_of_heads_copy_nothing():
    """Gemma 3 transposes heads before it normalizes them; Qwen 3 after."""
    attention = torch.nn.Module()
    attention.q_norm = Gemma3RMSNorm(32)
    attention.q_norm.weight.data.normal_()
    x, plain = torch.randn(2, 5, 3, 32), copy.deepcopy(attention)
    fuse_layers(attention)
    seen: list[bool] = []
    attention.q_norm._norm = lambda x: (seen.append(x.is_contiguous()), plain.q_norm._norm(x))[1]
    for heads in (x.transpose(1, 2), x):
        torch.testing.assert_close(attention.q_norm(heads), plain.q_norm(heads), rtol=0, atol=0)
        assert attention.q_norm(heads).stride() == heads.stride()
    assert seen == [True] * 4


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=128, intermediate_size=192, num_attention_heads=2, num_hidden_layers=1)
        config._attn_implementation = "sdpa"
        self.rotary, self.layer = LlamaRotaryEmbedding(config), LlamaDecoderLayer(config, 0)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.layer(x, position_embeddings=positions)


def test_small_adapters_reach_the_residual_stream():
    """In bfloat16, where the stream is a thousand times what adapters add: it must not round away, but on average."""
    torch.manual_seed(0)
    plain = Layer()
    quantized = copy.deepcopy(plain).bfloat16()
    quantize(plain, quantized, NF4, torch.bfloat16)
    ours, reference = adapt(quantized, ours=True), adapt(plain, ours=False).double()
    params = dict(ours.named_parameters())
    for name, param in reference.named_parameters():
        if "lora_" in name:
            is_last = "o_proj" in name or "down_proj" in name
            params[name].data = torch.randn(param.shape) * (0.006 if is_last else 0.0)
            param.data = params[name].detach().double()
    fuse_layers(ours)
    x = torch.randn(16, 128, 128).mul(8).bfloat16()
    with torch.no_grad():
        added = [model(values).double() for model, values in ((ours, x), (reference, x.double()))]
        with ours.disable_adapter(), reference.disable_adapter():
            found, expected = added[0] - ours(x).double(), added[1] - reference(x.double())
    assert expected.std() < 0.001 * x.std()
    assert float((found * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.1)


@pytest.fixture(scope="module")
def triton_modules() -> tuple[ModuleType, ModuleType]:
    """The kernels' modules; tests/helpers/shared.py has switched Triton's interpreter on."""
    pytest.importorskip("triton")
    return tuple(import_module(f"qlora_fsdp.layers.kernels.{name}") for name in ("triton_gate", "triton_dequantize"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
class TestTritonKernels:
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_gate(self, triton_modules, monkeypatch: pytest.MonkeyPatch, activation: str):
        triton_gate, _ = triton_modules
        tiles = triton_gate.GateTiles(rows=32, columns=32, num_warps=4, num_stages=1)
        for name in ("FORWARD", "ALONG", "DOWN"):
            monkeypatch.setattr(triton_gate, name, tiles)
        for name in ("MIN_PROGRAMS", "MIN_BACKWARD_PROGRAMS"):
            monkeypatch.setattr(triton_gate, name, 6)  # so that columns are split
        monkeypatch.setattr(
            triton_gate, "MAX_ROWS", 64
        )  # so that there are two launches, the first of which splits rows
        torch.manual_seed(0)
        gate_up, h, grad_h_down = torch.randn(70, 320), torch.randn(70, 14), torch.randn(70, 5)
        small = (torch.randn(160, 8), torch.randn(160, 6), torch.randn(5, 160))
        inputs = GateInputs(gate_up, h, *small, activation)
        torch.testing.assert_close(
            triton_gate.forward(inputs),
            gated_mlp.gate_forward(inputs),
            rtol=1e-4,
            atol=1e-3,
        )
        exact = [x.double().requires_grad_() for x in (gate_up, h, *small)]
        act, h_down = gated_mlp.gate_forward(GateInputs(*exact, activation))
        grad_act = torch.arange(70.0 * 160).view(70, 160).cos()
        expected = torch.autograd.grad([act, h_down], exact, [grad_act.double(), grad_h_down.double()])
        scalings = (2.0, 0.5)
        monkeypatch.setattr(gated_mlp, "_fits_kernels", lambda _: True)
        for max_rank_down in (0, 8):  # along rows, and down columns
            monkeypatch.setattr(triton_gate, "MAX_RANK_DOWN", max_rank_down)
            grad_gate_up = gate_up.clone()
            inputs = GateInputs(grad_gate_up, h, *small, activation)
            grads = gated_mlp.gate_backward(inputs, grad_act.clone(), grad_h_down, scalings)
            found = [grad_gate_up, grads.h_NR, grads.b_gate / scalings[0], grads.b_up / scalings[1], grads.a_down]
            torch.testing.assert_close(found, [x.float() for x in expected], rtol=1e-4, atol=2e-3)

    def test_convert(self, triton_modules):
        """More tensors than one launch takes, some longer than a block; a target may lie inside another tensor."""
        kernel = import_module("qlora_fsdp.layers.kernels.triton_convert")
        torch.manual_seed(0)
        sources = [torch.randn(rows, 70) for rows in (16, 1, 33, 16, 2, 8, 64)]
        whole = torch.zeros(sum(map(len, sources)) + 1, 70, dtype=torch.float16)
        factors = [1.0, 2.0, 0.3, 1.0, 7.0, 0.125, 2**0.5]
        kernel.convert(sources, whole[:-1].split([len(source) for source in sources]), factors)
        expected = [(source * factor).half() for source, factor in zip(sources, factors, strict=True)]
        assert torch.equal(whole, torch.cat([*expected, torch.zeros(1, 70).half()]))

    @pytest.mark.parametrize("softcap", [None, 2.0])
    @pytest.mark.parametrize(("wants_grad", "smoothing"), [(True, 0.0), (False, 0.0), (True, 0.3)])
    def test_cross_entropy(
        self, triton_modules, monkeypatch: pytest.MonkeyPatch, softcap, wants_grad: bool, smoothing: float
    ):
        kernel = import_module("qlora_fsdp.layers.kernels.triton_cross_entropy")
        monkeypatch.setattr(kernel, "MAX_BLOCK", 32)  # so that a row has several blocks, the last of them not full
        torch.manual_seed(0)
        logits, targets = 3 * torch.randn(5, 101), torch.tensor([0, 100, -100, 31, 64])
        exact = logits.double().requires_grad_()
        capped = exact if softcap is None else softcap * torch.tanh(exact / softcap)
        options = {"ignore_index": -100, "reduction": "none", "label_smoothing": smoothing}
        expected = torch.nn.functional.cross_entropy(capped, targets, **options)
        expected.sum().backward()
        before, losses, entropies = logits.clone(), torch.full((5,), -1.0), torch.full((5,), -1.0)
        kernel.cross_entropy(before.clone(), targets, losses, softcap, wants_grad, entropies, smoothing)
        spread = torch.distributions.Categorical(logits=capped.detach()).entropy() * (targets != -100)
        torch.testing.assert_close(entropies.double(), spread, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
        losses.fill_(-1.0)
        kernel.cross_entropy(logits, targets, losses, softcap, wants_grad, smoothing=smoothing)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logits.double(), exact.grad if wants_grad else before.double(), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("width", [96, 2500])  # several rows a program, and one
    @pytest.mark.parametrize("kind", [NormKind(1e-5, 0.0, True), NormKind(1e-5, 1.0, False)])
    def test_norms(self, triton_modules, kind: NormKind, width: int):
        torch.manual_seed(0)
        x, residual_grad = torch.randn(2, 13, width), torch.randn(2, 13, width)
        weight, found, expected = torch.randn(width), [], []
        values = x.clone().requires_grad_()
        y, again = NormAndResidual.apply(values, weight, kind)
        (y.square().sum() + (again * residual_grad).sum()).backward()
        found += [y.detach().double(), values.grad.double()]
        values = x.clone().requires_grad_()
        FrozenNorm.apply(values, weight, kind).square().sum().backward()
        found.append(values.grad.double())
        exact = x.double().requires_grad_()
        y = (weight.double() + kind.offset) * exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + kind.eps)
        (grad,) = torch.autograd.grad(y.square().sum(), exact)
        expected += [y.detach(), grad + residual_grad.double(), grad]
        for mine, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("double_quant", [False, True])
    @pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
    def test_dequantize(self, triton_modules, double_quant: bool, storage: torch.dtype):
        _, kernels = triton_modules
        format = Format("nf4" if double_quant else "fp4", double_quant, storage=storage)
        layer = QuantizedLinear(320, 70, False, format, torch.float32, device="cpu")
        codes, scales = format.quantize_rows(torch.randn(70, 320))
        nested = None
        if double_quant:
            scales, nested = format.quantize_scales(scales)
            layer.nested_scales.copy_(nested)
        layer.codes.copy_(codes)
        layer.scales.copy_(scales)
        books = code_book(format.quant_type, codes.device), dynamic_map(codes.device)
        found = kernels.dequantize(codes, scales, nested, books, 64, torch.empty(70, 320))
        torch.testing.assert_close(found, layer.weight.detach(), rtol=1e-6, atol=0)
        some = torch.zeros(2, 9, 200)  # of two matrices of 35 rows, 9 rows and 192 columns each
        kernels.dequantize(codes, scales, nested, books, 64, some[:, :, :192], origin=(5, 64))
        torch.testing.assert_close(some[:, :, :192], found.view(2, 35, 320)[:, 5:14, 64:256])
        assert not some[:, :, 192:].any()
        for axis, factors in zip(("row", "column"), layer.fp8_scales(), strict=True):
            out = torch.empty(70, 320) if axis == "row" else torch.empty(320, 70)
            layer.fill_fp8(factors.reciprocal(), out, axis)
            assert out.abs().max() <= 448.01
            found = out * factors[:, None] if axis == "row" else (out * factors.repeat_interleave(64)[:, None]).t()
            torch.testing.assert_close(found, layer.weight.detach(), rtol=1e-5, atol=1e-7)
