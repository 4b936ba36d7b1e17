"""A real vLLM on the CPU applies the adapters that this project trains, and answers as `generate` does.

Every family is a tiny model of random weights with an adapter that has learned two sentences. What is served is what
the end of the run says: the adapter itself, or what `merge write=adapter` writes. `make test-serving` sets vLLM up.

Mixtures (qwen3_moe, qwen3_5_moe) do not answer here: as soon as adapters are enabled, vLLM computes experts by Triton
kernels alone (`select_unquantized_moe_backend`, in 0.32.0), which a CPU does not have, whatever layers are adapted. Of
these it is shown that vLLM has a place for every layer of the adapter, and puts into its kernels' buffers what stock
PEFT adds to the weights of the experts.

Of the formats that `merge quantize=...` writes for vLLM, its kernels for a CPU take int4 and fp8 of dense models: these
answer too, with the probabilities that transformers computes from the same files.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from qlora_fsdp import generate, merge
from qlora_fsdp.inference.merge_formats import find_package_problem
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import composing_quickly
from tests.serving.training import train

ROOT = Path(__file__).parents[2]
SERVING = ROOT / ".serving"
IS_INSTALLED = (SERVING / ".installed").exists()
HAS_FORMATS = find_package_problem() is None
pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="there is no vLLM here: make test-serving installs it, where it can"),
    pytest.mark.slow,
]
SENTENCES = ["the cat sat on a mat while rain fell", "birds sang over the old town"]
PROMPT = "the cat"
END = 257
MAX_TOKENS = 24
# vLLM's kernels for a CPU want heads of 64, and linear heads of 128 in bfloat16.
TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 258,
    "bos_token_id": 256,
    "eos_token_id": END,
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 128,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [],
}
DELTA = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA4 = {
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 264,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}


@dataclass(frozen=True)
class Case:
    """A model with an adapter that is served.

    Attributes:
        family: the model's type.
        values: of its config.
        dtype: in which both sides compute.
        is_original: whether the files are as the model's makers publish them; else as transformers' class has them.
        has_experts: whether it is a mixture, for which nothing is generated.
        formats: in which it is merged and served too.
    """

    family: str
    values: dict[str, Any]
    dtype: str = "float32"
    is_original: bool = True
    has_experts: bool = False
    formats: tuple[str, ...] = ()

    @property
    def sees_images(self) -> bool:
        return "vision_config" in self.values

    @property
    def options(self) -> dict[str, Any]:
        """Of vLLM's engine."""
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}} if self.sees_images else {}


def seeing(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The values of the config of a model that sees images too, of which the text part is trained."""
    return {"text_config": {**TEXT, **text}, "vision_config": TOWER, **more}


QWEN3_MOE = {**TEXT, **EXPERTS}
# Published files of this family have all experts of a layer in one tensor, as transformers' class has them.
QWEN3_5_MOE = seeing({**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64}, tie_word_embeddings=False)
MISTRAL3 = {
    "text_config": {**TEXT, "model_type": "mistral"},
    "vision_config": {**TOWER, "model_type": "pixtral"},
    "tie_word_embeddings": False,
}
FORMATS = ("int4", "fp8")
# Of a log-probability. To compute in bfloat16 moves transformers' own by up to 0.26; the adapter moves them by 7.
ATOL_16_BITS = 0.5
NO_INT4_HERE = "cpu_gemm_wna16"  # the operator, of which vLLM's builds for other CPUs have nothing
CASES = {
    "llama": Case("llama", TEXT, formats=FORMATS),
    "qwen3": Case("qwen3", TEXT),
    "qwen3_5": Case("qwen3_5", seeing(DELTA, tie_word_embeddings=False), "bfloat16"),
    "gemma3": Case("gemma3", seeing({"sliding_window": 64, "query_pre_attn_scalar": 64})),
    "gemma4": Case("gemma4", seeing(GEMMA4, audio_config=None)),
    "mistral3": Case("mistral3", MISTRAL3),
}
MIXTURES = {
    "qwen3_moe": Case("qwen3_moe", QWEN3_MOE, has_experts=True),
    "qwen3_5_moe": Case("qwen3_5_moe", QWEN3_5_MOE, "bfloat16", is_original=False, has_experts=True),
}


@dataclass(frozen=True)
class Served:
    """What both sides do.

    Attributes:
        folder: holds `base`, `run`, the export (`for-vllm`), and vLLM's products of experts' matrices (`experts.pt`).
        chosen: the folder that the end of the run names: `adapter` or `for-vllm`.
        ours: what `generate` writes with the adapter; empty for a mixture.
        theirs: what vLLM answers (tests/serving/serve.py).
    """

    folder: Path
    chosen: str
    ours: str
    theirs: dict[str, Any]


def make_base(case: Case, folder: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.family, **case.values)
    auto_class = AutoModelForImageTextToText if case.sees_images else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, save_original_format=case.is_original)
    return folder


def make_job(name: str, case: Case, folder: Path, rows: Path) -> dict[str, Any]:
    """Train an adapter, write it for servers where that is asked for, and describe what vLLM is to do."""
    base = make_base(case, folder / "base")
    train(base, folder / "run", rows, "model.tokenizer_path=bytes")
    adapters = {"adapter": str(folder / "run" / "adapter")}
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert "not_served_because" not in summary
    if "not_served_as_it_is_because" in summary:
        exported = {"for-vllm": str(folder / "for-vllm")}
        arguments = [f"adapter={adapters['adapter']}", f"out={exported['for-vllm']}", "write=adapter"]
        assert merge.main(arguments) == 0
        adapters = exported if case.has_experts else adapters | exported
    return {
        "name": name,
        "base": str(base),
        "dtype": case.dtype,
        "prompt": [256, *PROMPT.encode()],
        "max_tokens": MAX_TOKENS,
        "adapters": adapters,
        "options": case.options,
        "experts": str(folder / "experts.pt") if case.has_experts else None,
    }


def make_merged_job(job: dict[str, Any], format: str) -> dict[str, Any]:
    """Merge the adapter of a job in a format of servers, and describe what vLLM is to do with it."""
    folder = Path(job["base"]).parent / format
    arguments = [f"adapter={job['adapters']['adapter']}", f"out={folder}", f"quantize={format}"]
    assert merge.main(arguments) == 0
    return {**job, "name": f"{job['name']} {format}", "base": str(folder), "dtype": "bfloat16", "adapters": {}}


def generated(argv: list[str]) -> str:
    """What `generate` prints, without the end of the line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert generate.main(argv) == 0
    return printed.getvalue().removesuffix("\n")


def selected(request: pytest.FixtureRequest) -> dict[str, Case]:
    """The cases of the tests that this session runs."""
    own = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    names = {item.callspec.params["name"] for item in own if hasattr(item, "callspec")}
    return {name: case for name, case in (CASES | MIXTURES).items() if name in names or name == IGNORED}


IGNORED = "qwen3_5"


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """All cases: while one is trained here, vLLM serves those before it."""
    place = tmp_path_factory.mktemp("served")
    rows = write_lines(place / "rows.jsonl", [{"prompt": "", "completion": text} for text in SENTENCES] * 8)
    jobs: dict[str, dict[str, Any]] = {}
    ours: dict[str, str] = {}
    cases = selected(request)
    command = [SERVING / "bin" / "python", ROOT / "tests" / "serving" / "serve.py"]
    pipe = subprocess.PIPE
    with (
        (place / "server.log").open("w") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=place) as server,
        composing_quickly(),
    ):
        assert server.stdin is not None and server.stdout is not None
        for name, case in cases.items():
            folder = place / name
            jobs[name] = make_job(name, case, folder, rows)
            server.stdin.write(json.dumps(jobs[name]) + "\n")
            for format in case.formats if HAS_FORMATS else ():
                merged = make_merged_job(jobs[name], format)
                server.stdin.write(json.dumps(merged) + "\n")
            server.stdin.flush()
            if case.has_experts:
                continue
            asked = [f"adapter={folder / 'run' / 'adapter'}", f"prompt={PROMPT}", "raw=true"]
            asked += [f"max_new_tokens={MAX_TOKENS}", f"training.precision={case.dtype}"]
            ours[name] = generated(asked)
        server.stdin.close()
        lines = [line.removeprefix("ANSWER ") for line in server.stdout if line.startswith("ANSWER ")]
    assert server.returncode == 0, (place / "server.log").read_text()[-2000:]
    theirs = {answer.pop("name"): answer for answer in map(json.loads, lines)}
    return {
        name: Served(Path(job["base"]).parent, list(job["adapters"])[-1], ours.get(name, ""), theirs[name])
        for name, job in jobs.items()
    } | {
        name: Served(place / name.split()[0] / name.split()[1], "", ours[name.split()[0]], answer)
        for name, answer in theirs.items()
        if name not in jobs
    }


def text_of(tokens: list[int]) -> str:
    """What `generate` would print of an answer: up to the end token, without special tokens."""
    until_end = tokens[: tokens.index(END)] if END in tokens else tokens
    return bytes(token for token in until_end if token < 256).decode(errors="replace")


def find_log_probabilities(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """What transformers computes in `dtype` for each place of an answer: [tokens, vocabulary], float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prompt = torch.tensor([256, *PROMPT.encode()])
    with torch.no_grad():
        logits = model(torch.cat([prompt, tokens])[None]).logits
    return logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_is_applied_and_answers_as_generate_does(served: dict[str, Served], name: str):
    found = served[name]
    assert "error" not in found.theirs, found.theirs["error"]
    answer = found.theirs[found.chosen]
    assert answer["passed_over"] == []
    assert answer["tokens"] != found.theirs["base"], "vLLM answers as the base does"
    assert text_of(answer["tokens"]) == found.ours


@pytest.mark.skipif(not HAS_FORMATS, reason="the package compressed-tensors is not installed")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["llama"])
def test_a_merged_model_answers_in_a_format_of_servers(served: dict[str, Served], name: str, format: str):
    found = served[f"{name} {format}"]
    if NO_INT4_HERE in found.theirs.get("error", ""):
        pytest.skip("vLLM's kernel for int4 on a CPU asks for AVX-512, which this CPU does not have")
    assert "error" not in found.theirs, found.theirs["error"]
    tokens = torch.tensor(found.theirs["base"])
    exact = find_log_probabilities(found.folder, tokens, torch.float32)
    of_tokens = exact.gather(1, tokens.unsqueeze(1))[:, 0]
    torch.testing.assert_close(torch.tensor(found.theirs["logprobs"]), of_tokens, rtol=0, atol=ATOL_16_BITS)
    assert (of_tokens >= exact.amax(-1) - ATOL_16_BITS).all()  # the likeliest, but for what 16 bits round
    of_base = find_log_probabilities(found.folder.parent / "base", tokens, torch.float32)
    without_adapter = of_base.gather(1, tokens.unsqueeze(1))[:, 0]
    assert (without_adapter - of_tokens).abs().max() > 4 * ATOL_16_BITS, "a model without the adapter would pass too"


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_gets_what_stock_peft_adds_to_it(served: dict[str, Served], name: str):
    found = served[name]
    assert "error" not in found.theirs, found.theirs["error"]
    assert found.theirs[found.chosen]["passed_over"] == []
    model = AutoModelForCausalLM.from_pretrained(found.folder / "base", dtype=torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(model, found.folder / "run" / "adapter").merge_and_unload()
    products = torch.load(found.folder / "experts.pt")
    names = [key for key in before if ".experts." in key]
    assert len(names) == len(products) == 4
    for key in names:
        expected = merged.state_dict()[key] - before[key]
        (product,) = (value for own, value in products.items() if own.endswith(key.removeprefix("model.")))
        assert expected.abs().max() > 1e-2
        torch.testing.assert_close(product, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_what_is_for_peft_alone_is_passed_over_in_silence(served: dict[str, Served]):
    """Why `merge write=adapter` is needed, and that the first test would see an adapter that is not applied."""
    found = served[IGNORED]
    assert found.chosen == "for-vllm"
    assert found.theirs["adapter"]["passed_over"]
    assert found.theirs["adapter"]["tokens"] == found.theirs["base"]
