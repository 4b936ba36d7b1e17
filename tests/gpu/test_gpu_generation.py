"""Steps recorded as CUDA graphs write the texts that launched kernels write, and that transformers writes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from qlora_fsdp.decoding.completer import Completer, Request
from qlora_fsdp.decoding.sampling import Sampling
from qlora_fsdp.layers.decode_linear import product_with_codes
from qlora_fsdp.layers.quantized_format import Format
from qlora_fsdp.layers.quantized_linear import QuantizedLinear

GPU = torch.device("cuda", 0)
NUM_NEW = 40


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Llama 3's structure with small widths, in float32: with random weights, logits of bfloat16 have ties."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=896, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    return model.eval().to(GPU)


def prompts(number: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 60, (number,), generator=generator).tolist()
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]


def complete(model: PreTrainedModel, sampling: Sampling, number: int, captures: bool) -> list[list[int]]:
    torch.manual_seed(5)
    completer = Completer(model, GPU, sampling, [7, 8, 9], 0, max_slots=4, captures=captures)
    requests = [Request(prompt, NUM_NEW - index % 3) for index, prompt in enumerate(prompts(number))]
    completer.complete(requests)
    assert completer.steps is not None and (completer.steps.graph is not None) is captures
    return [request.completion for request in requests]


@pytest.mark.parametrize("number", [1, 4, 11])
def test_recorded_steps_write_what_launched_ones_and_transformers_write(model: PreTrainedModel, number: int) -> None:
    recorded = complete(model, Sampling(), number, captures=True)
    assert recorded == complete(model, Sampling(), number, captures=False)
    for index, (prompt, completion) in enumerate(zip(prompts(number), recorded, strict=True)):
        ids = torch.tensor([prompt], device=GPU)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW - index % 3,
            do_sample=False, eos_token_id=[7, 8, 9], pad_token_id=0,
        )  # fmt: skip
        assert completion == output[0, len(prompt) :].tolist()


def test_a_recorded_step_draws_new_tokens_each_time_and_repeats_by_seed(model: PreTrainedModel) -> None:
    sampling = Sampling(temperature=5.0, top_p=0.9)
    first = complete(model, sampling, 4, captures=True)
    assert first == complete(model, sampling, 4, captures=True)
    assert first != complete(model, Sampling(), 4, captures=True)
    assert any(len(set(text)) > 3 for text in first)


def test_memory_is_given_back(model: PreTrainedModel) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU)
    completer = Completer(model, GPU, Sampling(), [], 0, max_slots=4)
    completer.complete([Request([5, 6, 7], NUM_NEW)])
    assert torch.cuda.memory_allocated(GPU) > before
    completer.release()
    assert torch.cuda.memory_allocated(GPU) - before < 2**20


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 32])
def test_products_with_codes_are_those_with_the_dequantized_weight(rows: int, double_quant: bool) -> None:
    torch.manual_seed(rows)
    format = Format("nf4", double_quant)
    layer = QuantizedLinear(512, 9216, True, format, torch.bfloat16, GPU)
    codes, absmax = format.quantize_rows(torch.randn(9216, 512, device=GPU, dtype=torch.bfloat16))
    layer.codes.data.copy_(codes.view(layer.codes.dtype))
    if double_quant:
        scales, nested = format.quantize_scales(absmax)
        layer.scales.data.view(torch.uint8).copy_(scales.view(torch.uint8))
        layer.nested_scales.data.copy_(nested)
    else:
        layer.scales.data.copy_(absmax)
    assert layer.bias is not None
    layer.bias.data.normal_()
    x = torch.randn(rows, 512, device=GPU, dtype=torch.bfloat16)
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    found = product_with_codes(layer, x)
    assert (found - expected).abs().max() / expected.abs().max() < 0.01
