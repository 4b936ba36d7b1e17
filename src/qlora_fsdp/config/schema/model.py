"""The base model, how its weights are quantized, and the adapters that are trained on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from typing_extensions import assert_never

from qlora_fsdp.config.schema.facets import ALWAYS, Files, Hosts, Owner, Run, above, at_least, setting, when


class Weights(Enum):
    checkpoint = "checkpoint"
    random = "random"


class AttnImplementation(Enum):
    auto = "auto"
    varlen = "varlen"
    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"
    flash_attention_4 = "flash_attention_4"

    @property
    def is_for_gpus(self) -> bool:
        """Whether it runs on GPUs only."""
        match self:
            case (
                AttnImplementation.varlen | AttnImplementation.flash_attention_2 | AttnImplementation.flash_attention_4
            ):
                return True
            case AttnImplementation.auto | AttnImplementation.sdpa | AttnImplementation.eager:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def may_share_sequences(self) -> bool:
        """Whether ranks can share a sequence: it is told where rows start, and needs no mask, which is of a slice."""
        match self:
            case AttnImplementation.auto | AttnImplementation.varlen | AttnImplementation.flash_attention_4:
                return True
            case AttnImplementation.sdpa | AttnImplementation.eager | AttnImplementation.flash_attention_2:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def is_repeatable(self) -> bool:
        """Whether it can add gradients in one order (training.deterministic)."""
        match self:
            case AttnImplementation.flash_attention_4:
                return False
            case AttnImplementation.auto | AttnImplementation.varlen | AttnImplementation.sdpa:
                return True
            case AttnImplementation.eager | AttnImplementation.flash_attention_2:
                return True
            case unknown:
                assert_never(unknown)


@dataclass
class ModelConfig:
    # Short name of the model, for messages.
    name: str = setting("custom", Run.same, ALWAYS, files=Files.adapters, owner=Owner.base)
    # A folder with config.json and safetensors files, or a hub name such as meta-llama/Meta-Llama-3-8B.
    path: str | None = setting(
        None,
        Run.other,
        ALWAYS,
        files=Files.adapters,
        owner=Owner.base,
        other_names=("model_name_or_path", "base_model"),
        hosts=Hosts.place,
        is_planned=False,
        is_common=True,
    )
    # Branch, tag or commit of a hub model.
    revision: str | None = setting(None, Run.other, ALWAYS, files=Files.adapters, owner=Owner.base)
    # Where the tokenizer is, if it is not beside the model. `bytes` is a built-in tokenizer whose tokens are bytes.
    tokenizer_path: str | None = setting(
        None, Run.other, ALWAYS, files=Files.adapters, owner=Owner.base, hosts=Hosts.place, is_planned=False
    )
    # `random` initialises the weights randomly, from the model's config alone. This is for dry runs at real size, and
    # needs no download.
    weights: Weights = setting(Weights.checkpoint, Run.other, ALWAYS, files=Files.adapters, owner=Owner.base)
    # Attention kernel. `auto` is flash_attention_4 where it is installed, on a Hopper or Blackwell GPU; else varlen,
    # where torch and the GPU have it; else sdpa, or eager for models that transformers has no sdpa for.
    attn_implementation: AttnImplementation = setting(
        AttnImplementation.auto,
        Run.same,
        ALWAYS,
        files=Files.adapters,
        owner=Owner.run,
        other_names=("flash_attention", "flash_attn"),
    )
    # Keep the quantized weights in files, in bitsandbytes' format. Later runs and the other jobs of a sweep then load
    # these: they are a quarter of the bytes, and quantized already. The first run that needs them writes them.
    cache_quantized: bool = setting(False, Run.same, ALWAYS, files=Files.adapters, owner=Owner.run)
    # Folder of these files. With several nodes, a disk of each node is best. null: ~/.cache/qlora_fsdp/quantized
    cache_folder: str | None = setting(None, Run.same, ALWAYS, files=Files.skipped, owner=Owner.run, hosts=Hosts.place)
    # Run model code that comes with the model's files. Set it only for models that you trust. It counts where you set
    # it yourself, and never in the settings that come with an adapter.
    trust_remote_code: bool = setting(False, Run.same, ALWAYS, files=Files.none, owner=Owner.run)
    # The transformers config of the model (model_type, hidden_size, ...). A preset states it, so that preflight and
    # `model.weights=random` need no download. If model.path is set to something else than the preset's, the config.json
    # there counts, and must be of the same model. With model=custom it is for `model.weights=random`: used alone if it
    # has a model_type and model.path is no local folder, else over the config.json in model.path.
    config: dict[str, Any] = setting(
        {}, Run.other, ALWAYS, files=Files.adapters, owner=Owner.base, example="'{num_hidden_layers: 4}'"
    )
    # Scaled rotary embeddings, for rows longer than the model was made for (docs/long-rows.md). As transformers'
    # rope_scaling: {rope_type: yarn, factor: 4.0}, with rope_type yarn, linear or llama3, and what else the type takes.
    # Empty: what the model has.
    rope_scaling: dict[str, Any] = setting(
        {}, Run.other, ALWAYS, files=Files.adapters, owner=Owner.run, example="'{rope_type: yarn, factor: 4.0}'"
    )


@dataclass
class TokenizerConfig:
    # New tokens, which the tokenizer then never splits. Only their rows of the embeddings and of the head are trained
    # (PEFT's trainable_token_indices), unless lora.modules_to_save names the embeddings or the head. A new row starts
    # at the mean of the old ones. A token that the tokenizer already has is trained from the row that it has.
    add_tokens: list[str] = setting([], Run.fixed, ALWAYS, files=Files.adapters)
    # The same, as special tokens: they are left out when text is decoded with skip_special_tokens.
    add_special_tokens: list[str] = setting([], Run.fixed, ALWAYS, files=Files.adapters)


class QuantType4bit(Enum):
    nf4 = "nf4"
    fp4 = "fp4"


class CompressedFormat(Enum):
    none = "none"
    int4 = "int4"
    fp8 = "fp8"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"


class EmbeddingStorage(Enum):
    none = "none"
    int8 = "int8"


class Dtype(Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


_IN_4_BITS = when("quant.load_in_4bit", True)


@dataclass
class QuantConfig:
    # Quantize linear layers to 4 bits (QLoRA, arXiv:2305.14314).
    load_in_4bit: bool = setting(True, Run.other, ALWAYS, files=Files.adapters)
    # Quantize linear layers to 8 bits: int8 codes with one fp32 scale per row (the weights of LLM.int8,
    # arXiv:2208.07339).
    load_in_8bit: bool = setting(False, Run.other, ALWAYS, files=Files.adapters)
    # Quantize linear layers to a format of compressed-tensors, which vLLM serves (`merge quantize=...`). `int4`:
    # integers, symmetric, with a scale for each group of a row. `fp8`: float8_e4m3fn with a scale for each row.
    # `mxfp4`: 4-bit floats with a power of two for each 32 weights of a row, as gpt-oss is published in. `nvfp4`: 4-bit
    # floats with a scale in 8 bits for each 16 weights of a row, and one scale of the whole weight.
    compressed_tensors: CompressedFormat = setting(CompressedFormat.none, Run.other, ALWAYS, files=Files.adapters)
    # Weights of a row that share a scale: 32, 64 or 128.
    group_size: int = setting(
        32,
        Run.other,
        when("quant.compressed_tensors", CompressedFormat.int4, fix="quant=int4"),
        files=Files.adapters,
        bounds=at_least(32),
    )
    # Code book of the 4-bit codes.
    bnb_4bit_quant_type: QuantType4bit = setting(QuantType4bit.nf4, Run.other, _IN_4_BITS, files=Files.adapters)
    # Quantize the scales too, which saves 0.37 bits per weight.
    bnb_4bit_use_double_quant: bool = setting(True, Run.other, _IN_4_BITS, files=Files.adapters)
    # dtype of the matrix products. `auto` follows training.precision. If training.precision is auto, another value here
    # sets both. float16 is refused.
    bnb_4bit_compute_dtype: Dtype = setting(Dtype.auto, Run.other, ALWAYS, files=Files.adapters)
    # How frozen input embeddings and a frozen output head are stored, and tables that have something of each token for
    # every layer (Gemma 4 E2B and E4B). `none`: in training.precision. `int8`: as codes with one fp32 scale per row, in
    # half the memory. A head and embeddings that share a weight stay as they are.
    embeddings: EmbeddingStorage = setting(EmbeddingStorage.none, Run.other, ALWAYS, files=Files.adapters)
    # Linear layers to leave unquantized, by their names or by the ends of these. null leaves out the output head, as
    # transformers does.
    llm_int8_skip_modules: list[str] | None = setting(None, Run.other, ALWAYS, files=Files.adapters)

    @property
    def base_format(self) -> str | None:
        """The format of quantized linear layers, as `quant=...` names it; None: they are not quantized."""
        if self.compressed_tensors is not CompressedFormat.none:
            return str(self.compressed_tensors.value)
        if self.load_in_8bit:
            return "int8"
        return str(self.bnb_4bit_quant_type.value) if self.load_in_4bit else None


@dataclass
class LoraConfig:
    # Train on from a saved adapter: the folder of a LoRA adapter, of this project's or PEFT's. Its weights are where
    # this run's adapter starts, and all other settings of this section but lora_dropout are its own: what is written
    # may not contradict them. Without a model named, its base is the model. null: a new adapter.
    start: str | None = setting(None, Run.other, ALWAYS, files=Files.users, owner=Owner.run, hosts=Hosts.place)
    # Start on a base with other weights than those that the adapter of start was trained on, in the same shapes.
    other_base: bool = setting(False, Run.same, when("lora.start"), owner=Owner.run)
    # Rank of the adapters.
    r: int = setting(
        16,
        Run.fixed,
        ALWAYS,
        files=Files.users,
        owner=Owner.adapter,
        bounds=at_least(1),
        other_names=("rank", "lora_r"),
        is_common=True,
    )
    # The adapters' output is scaled by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora.
    lora_alpha: float = setting(
        32,
        Run.other,
        ALWAYS,
        files=Files.users,
        owner=Owner.adapter,
        bounds=above(0),
        other_names=("alpha",),
        is_common=True,
    )
    # Dropout on the adapters' input.
    lora_dropout: float = setting(
        0.0, Run.other, ALWAYS, files=Files.users, owner=Owner.run, bounds=at_least(0, below=1)
    )
    # The linear layers to adapt: a list of names or of ends of names; a regular expression; or `all-linear`, which is
    # all that a gradient reaches and that PEFT adapts. The tokens' embeddings may be named too: [q_proj,embed_tokens].
    target_modules: Any = setting(
        "all-linear",
        Run.fixed,
        ALWAYS,
        files=Files.users,
        owner=Owner.adapter,
        other_names=("lora_target", "lora_target_modules"),
    )
    # Whether target_modules mean the experts of a mixture of experts too, each of which then gets its own adapter.
    experts: bool = setting(True, Run.fixed, ALWAYS, files=Files.users, owner=Owner.adapter)
    # Names, or ends of names, of layers that target_modules should not match.
    exclude_modules: list[str] | None = setting(None, Run.fixed, ALWAYS, files=Files.users, owner=Owner.adapter)
    # Modules that are trained in full and saved with the adapter, e.g. a classification head.
    modules_to_save: list[str] | None = setting(None, Run.fixed, ALWAYS, files=Files.users, owner=Owner.adapter)
    # true (Kaiming A, zero B), gaussian, or orthogonal. `loftq` (arXiv:2310.08659): B A is what is nearest to the error
    # of quantization, as PEFT's replace_lora_weights_loftq computes it, so that the model starts nearer to the full
    # one. Such an adapter belongs to a base that is quantized so (docs/use.md). Other initialisations of PEFT's would
    # change the base, and are refused by name.
    init_lora_weights: Any = setting(True, Run.other, ALWAYS, files=Files.users, owner=Owner.adapter)
    # Rank-stabilized scaling (arXiv:2312.03732).
    use_rslora: bool = setting(False, Run.other, ALWAYS, files=Files.users, owner=Owner.adapter)
    # Weight-decomposed LoRA (arXiv:2402.09353).
    use_dora: bool = setting(False, Run.fixed, ALWAYS, files=Files.users, owner=Owner.adapter)
    # Ranks that differ from r: {name or regular expression: rank}.
    rank_pattern: dict[str, int] = setting(
        {}, Run.fixed, ALWAYS, files=Files.users, owner=Owner.adapter, example="'{q_proj: 8}'"
    )
    # Alphas that differ from lora_alpha: {name or regular expression: alpha}.
    alpha_pattern: dict[str, float] = setting(
        {}, Run.other, ALWAYS, files=Files.users, owner=Owner.adapter, example="'{q_proj: 16}'"
    )

    @property
    def corrects_rounding(self) -> bool:
        """Whether adapters start from the error of the base's quantization: none do that start from a saved one."""
        return self.start is None and str(self.init_lora_weights).lower() == "loftq"
