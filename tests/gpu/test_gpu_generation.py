"""Steps recorded as CUDA graphs write the texts that launched kernels write, and that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3_5TextConfig

from qlora_fsdp.decoding.completer import Completer, Request
from qlora_fsdp.decoding.sampling import Sampling
from qlora_fsdp.layers.decode_linear import DecodeLayers, product_with_codes
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.by_rows import ByRows
from tests.helpers.fused import make_parts
from tests.helpers.quantized import make_quantized
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_all

GPU = torch.device("cuda", 0)
NUM_NEW = 40


SIZES: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Llama 3's structure with small widths, in float32: with random weights, logits of bfloat16 have ties."""
    return build(LlamaConfig(**SIZES))


def build(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
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
    check_recorded(model, number)


def test_states_of_delta_rules_are_kept_by_recorded_steps() -> None:
    """Qwen 3.5's structure."""
    kinds = ["linear_attention", "full_attention"] * 2
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2}
    config = Qwen3_5TextConfig(**SIZES, **sizes, head_dim=32, linear_num_value_heads=4, layer_types=kinds)
    check_recorded(build(config), 11)


def check_recorded(model: PreTrainedModel, number: int) -> None:
    """Recorded steps, launched ones and transformers write the same."""
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
    torch.ones(8, 8, device=GPU, dtype=torch.bfloat16).mm(torch.ones(8, 8, device=GPU, dtype=torch.bfloat16))
    before = torch.cuda.memory_allocated(GPU)  # cuBLAS's workspace, which stays, among it
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
    layer = make_quantized(torch.randn(9216, 512, device=GPU, dtype=torch.bfloat16), format, bias=True)
    assert layer.bias is not None
    x = torch.randn(rows, 512, device=GPU, dtype=torch.bfloat16)
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    found = product_with_codes(layer, x)
    assert (found - expected).abs().max() / expected.abs().max() < 0.01


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_adapted_layers_in_branches_of_a_graph(rows: int) -> None:
    """The graph sees the adapters as `refresh` has written them last."""
    ours, reference = make_parts(Format("nf4"), "silu", torch.bfloat16, "cuda")
    layers, x = DecodeLayers(ours), torch.randn(rows, 128, device=GPU).bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), layers.in_use():
        launched = ours(x)
        with torch.cuda.graph(graph):
            recorded = ours(x)
    for found in (launched, recorded, recorded):
        graph.replay()
        expected = reference(x.cpu().double()).detach()
        assert (found.cpu() - expected).norm() < 1e-2 * expected.norm()
        if found is launched:
            continue
        for name, parameter in ours.named_parameters():
            if "lora_" in name:
                parameter.data += 0.1
                reference.get_parameter(name).data += 0.1
        layers.refresh()


@pytest.mark.parametrize("number", [1, 3])
def test_prompts_of_a_shape_that_comes_again_are_recorded(model: PreTrainedModel, number: int) -> None:
    completer = Completer(model, GPU, Sampling(), [7, 8, 9], 0, max_slots=4)
    expected = complete(model, Sampling(), 4, captures=False)
    num_graphs = []
    for chosen in (slice(number), slice(number), slice(1, 1 + number), slice(number)):
        requests = [Request(prompt, NUM_NEW - index % 3) for index, prompt in enumerate(prompts(4))][chosen]
        completer.complete(requests)
        assert [request.completion for request in requests] == expected[chosen]
        assert completer.steps is not None
        num_graphs.append(len(completer.steps.prompts.graphs))
    assert num_graphs == [0, 1, 1, 1]


def complete_both_ways(model: TaskModel, processes: Processes) -> list[list[list[int]]]:
    """Texts of a model that has just been trained, and is as training left it: recorded, and launched."""
    model.eval()
    found = []
    for captures in (True, False):
        by_rows = ByRows(model) if isinstance(model, FSDPModule) else None
        completer = Completer(model.base, processes.device, Sampling(), [257], 0, captures=captures, by_rows=by_rows)
        requests = [Request([256, *text.encode()], NUM_NEW) for text in ("the cat", "rain fell over the old")]
        completer.complete(requests)
        if processes.device.type == "cuda":
            assert completer.steps is not None and (completer.steps.graph is not None) is captures
        completer.release()
        found.append([request.completion for request in requests])
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_texts_of_a_model_in_training(
    checkpoint: Callable[..., Path], rows: Path, tmp_path: Path, num_gpus: int, family: str
) -> None:
    """Its layers are fused and its micro-batches recorded; evaluations in between have written texts already.

    Two GPUs share the model, and write each text together.
    """
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    argv = settings(checkpoint(family), rows, f"run.folder={tmp_path / 'run'}", "data.eval_fraction=0.1")
    argv += ["training.eval_every_steps=6", "tracking.num_generations=2", "tracking.generation_tokens=24"]
    for trained in run_ranks(num_gpus, train_all, {"run": argv}, complete_both_ways):
        recorded, launched = trained["run"].inspected
        assert recorded == launched and any(recorded)
    lines = [json.loads(line) for line in (tmp_path / "run" / "generations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [step for step in (0, 6, 12, 18, 20) for _ in range(2)]
