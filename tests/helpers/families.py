"""Small models of every class that transformers has for text: a run of each, beside stock libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    Mistral3Config,
    PretrainedConfig,
)

from qlora_fsdp.common.errors import UserError
from qlora_fsdp.model.trials.miniature import miniature
from tests.helpers.checkpoints import FAMILIES, OTHER_FAMILIES, RECENT_FAMILIES, SHAPE, write_checkpoint
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_here

VISION = {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
# Gemma 3n's matrices of 4 columns can't be split into blocks of 64. Jamba calls dt_proj only in stock quantized models:
# there its adapter is trained, and here all-linear leaves it out.
MORE = {
    "gemma3n_text": ["quant.llm_int8_skip_modules=[lm_head,correction_coefs,prediction_coefs]"],
    "jamba": ["lora.exclude_modules=[dt_proj]"],
}
# At Adam's own 1e-8 an element whose gradient is 1e-9 by chance moves by what rounding makes of it, up to a whole step.
EPS = 1e-6
GLM_V: dict[str, object] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
}
QWEN_VL: dict[str, object] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
}
# What the defaults of a class leave open, or state for no model: values of published configs, of the text part.
OPEN: dict[str, dict[str, object]] = {
    "glm4v": GLM_V,
    "glm4v_moe": GLM_V,
    "glm46v": GLM_V,
    "glm_ocr": GLM_V,
    "glmga": GLM_V,
    "qwen2_vl": QWEN_VL,
    "qwen2_5_vl": QWEN_VL,
    "qwen2_5_omni_thinker": QWEN_VL,
    "ministral": {"head_dim": 128},
    "ernie4_5_vl_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}},
    "dots1": {
        **{"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "hunyuan_vl": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
}
TOKENS = ("vocab_size", "vocab_size_per_layer_input", "pad_token_id", "bos_token_id", "eos_token_id")
# Sizes of towers for images and sound, which no text goes through, by parts of the names that configs give them.
LAYERS = ("depth", "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers")
WIDTHS = ("hidden_size", "embed_dim", "d_model", "intermediate_size", "mlp_dim", "ffn_dim", "projection_dim")
HEADS = ("num_heads", "num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


def every_family() -> list[str]:
    """transformers' names of all causal language models and all models that answer about images with text."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return sorted({config.model_type for mapping in mappings for config in mapping})


def make_config(family: str) -> PretrainedConfig:
    """A tiny config: from the tables of the tests, or from the default config of its class."""
    known = FAMILIES | OTHER_FAMILIES | RECENT_FAMILIES
    if family == "mistral3":
        text = {**SHAPE, "head_dim": 16, "model_type": "mistral"}
        return Mistral3Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    if family in known:
        return AutoConfig.for_model(family, **SHAPE | known[family], initializer_range=0.1)
    whole = CONFIG_MAPPING[family]()
    text_config = whole.get_text_config()
    text_config.update(OPEN.get(family, {}))
    if text_config is whole or (_is_causal(whole) and _is_causal(text_config)):
        return _small_text(text_config)
    return _small_multimodal(whole, text_config)


def _is_causal(config: PretrainedConfig) -> bool:
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def _small_text(config: PretrainedConfig) -> PretrainedConfig:
    small = miniature(config, max_length=64)
    values = {key: SHAPE.get(key, SHAPE["vocab_size"]) for key in TOKENS if hasattr(small, key)}
    if hasattr(small, "initializer_range"):
        values["initializer_range"] = 0.1
    if "is_decoder" in small.to_dict():  # an encoder by default, whose tokens see later ones
        values["is_decoder"] = True
    small.update(values)
    return small


def _small_multimodal(whole: PretrainedConfig, text_config: PretrainedConfig) -> PretrainedConfig:
    """A config whose text part is small as a text model's is, and whose towers have a layer or two."""
    small = deepcopy(whole)
    for key, part in list(_parts_of(whole)):
        if part is text_config:
            setattr(small, key, _small_text(part))
        else:
            getattr(small, key).update(_small_tower(part.to_dict()))
    small.tie_word_embeddings = small.get_text_config().tie_word_embeddings = False
    return small


def _parts_of(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield key, value


def _small_tower(values: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if key in LAYERS:
            small[key] = 1
        elif key in HEADS:
            small[key] = 2
        elif key.endswith(WIDTHS):
            small[key] = min(value, 64)
        elif key == "vocab_size":
            small[key] = min(value, SHAPE["vocab_size"])
    depths = {value for key, value in values.items() if key in LAYERS}
    for key, value in values.items():
        if isinstance(value, list) and len(value) in depths:  # an entry for each layer
            small[key] = value[:1]
    for key, value in values.items():  # layers of the tower whose outputs the text gets
        is_list = isinstance(value, list) and value and all(isinstance(item, int) for item in value)
        if is_list and key.endswith(("indexes", "indices")):
            small[key] = [0]
    return small


@dataclass
class Found:
    """What a family's runs showed.

    Attributes:
        losses: of each step, by the policy of activations.
        log: the lines that the runs logged.
        error: why there are no losses; None if there are.
    """

    losses: dict[str, list[float]]
    log: list[str]
    error: str | None = None

    @property
    def why_padded(self) -> str | None:
        """Why rows are padded; None if they are packed."""
        found = [re.search(r"rows of \w+ are padded: (.*)", line) for line in self.log]
        return next((match.group(1) for match in found if match is not None), None)

    @property
    def is_packed(self) -> bool:
        return self.why_padded is None

    @property
    def why_launched(self) -> str | None:
        """Why kernels are launched one by one on a GPU; None if steps are recorded as CUDA graphs."""
        launched = next((line for line in self.log if "launched one by one" in line), None)
        recorded = any("recorded as a CUDA graph for" in line for line in self.log)
        return launched if launched is not None or recorded else "no line of the log says that steps are recorded"

    def line(self, family: str, difference: float | None) -> str:
        """One line for the user; the difference is relative."""
        if self.error is not None:
            return f"{family:20} {self.error}"
        model = next(line for line in self.log if line.startswith("Model: "))
        attention = re.search(r"(\w+) attention", model)
        kernels = re.search(r"Liger kernels: ([^;]*)", model)
        assert attention is not None and kernels is not None
        how = "recorded" if self.why_launched is None else "launched"
        packing = "packed" if self.is_packed else "padded"
        name = attention.group(1).removeprefix("qlora_fsdp_")
        shown = "no reference" if difference is None else f"{difference:.1e}"
        why = f"  {self.why_launched or ''}"
        return f"{family:20} trains  {packing}  {how}  {name:10} {kernels.group(1):24} {shown}{why}"


def try_family(family: str, folder: Path, steps: int, policies: Sequence[str], more: Sequence[str] = ()) -> Found:
    """The runs of one family, in a process of their own.

    Args:
        family: transformers' name.
        folder: has rows.jsonl; its checkpoint and runs come here.
        steps: of each run.
        policies: of activations, one run each.
        more: settings beside the common ones.
    """
    found = Found({}, [])
    try:
        checkpoint = write_checkpoint(make_config(family), folder / family)
    except Exception as error:
        found.error = f"no tiny model: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return found
    try:
        for policy in policies:
            argv = [*arguments(checkpoint, folder, steps), f"memory.activations={policy}", *more]
            found.losses[policy] = train_here(argv).losses
            lines = (folder / f"{family}-run" / "train.log").read_text().splitlines()
            found.log += [line.partition("  ")[2] for line in lines]  # without the time
    except UserError as error:
        found.error = f"refused: {' '.join(str(error).split())}"
    except Exception as error:
        found.error = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


def arguments(checkpoint: Path, folder: Path, steps: int, packing: str = "auto") -> list[str]:
    """The command line of a run."""
    more = [f"training.max_steps={steps}", f"optim.eps={EPS}", f"training.packing={packing}"]
    own_folders = [f"run.folder={folder / checkpoint.name}-run", f"data.cache_folder={folder / checkpoint.name}-cache"]
    return settings(checkpoint, folder / "rows.jsonl", *more, *own_folders, *MORE.get(checkpoint.name, []))


def reference(family: str, folder: Path, steps: int, is_packed: bool, more: Sequence[str] = ()) -> list[float]:
    """Losses of stock libraries on the CPU, in a process of their own."""
    return stock_losses([*arguments(folder / family, folder, steps, str(is_packed).lower()), *more])


def each(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    gpu: bool,
    limit_seconds: float,
    at_a_time: int,
) -> list[Any]:
    """The results of calls in processes of their own, some at a time; or, as a text, why there is none."""

    def call(args: tuple[Any, ...]) -> Any:
        try:
            (result,) = run_ranks(1, function, *args, gpu=gpu, timeout_seconds=limit_seconds)
        except RanksFailed as error:
            return f"failed: {_last_error(str(error))}"
        return result

    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(call, calls))


def _last_error(told: str) -> str:
    """Of what ranks said, the line that names the error."""
    lines = [line for line in told.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines)[-1 if errors else 0][:400]


def largest_difference(run: Found, expected: Sequence[float]) -> float:
    """The largest relative difference of a loss."""
    pairs = [pair for losses in run.losses.values() for pair in zip(losses, expected, strict=True)]
    return max(abs(loss - stock) / stock for loss, stock in pairs)
