"""Every setting, its type, its default and its bounds. YAML under conf/ only chooses other values.

Names follow `BitsAndBytesConfig` (quant), `LoraConfig` (lora) and FSDP (fsdp) wherever these have one. The comment
above a field is its documentation: docs/configuration.md is generated from this module. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from typing_extensions import assert_never


@dataclass(frozen=True)
class Bounds:
    """The finite numbers that a setting takes: those from `low` on, or above it if `low` is excluded, below `high`."""

    low: float
    includes_low: bool
    high: float

    def allow(self, value: float) -> bool:
        """Whether a setting may have this value."""
        return self.low < value < self.high or (self.includes_low and value == self.low)

    def __str__(self) -> str:
        text = f"at least {self.low:g}" if self.includes_low else f"greater than {self.low:g}"
        return text + (f" and less than {self.high:g}" if math.isfinite(self.high) else "")


def bounds(*, at_least: float | None = None, above: float | None = None, below: float = math.inf) -> dict[str, Bounds]:
    """The metadata of a field whose numbers are bounded; give either `at_least` or `above`."""
    low = above if at_least is None else at_least
    assert low is not None, "a bounded setting has a lower bound"
    return {"bounds": Bounds(low, at_least is not None, below)}


# The metadata of a field that takes text or a list of texts.
TEXT_OR_LIST = {"text_or_list": True}


class MixUntil(Enum):
    longest = "longest"
    shortest = "shortest"


class MixBy(Enum):
    rows = "rows"
    tokens = "tokens"


class TaskName(Enum):
    causal_lm = "causal_lm"
    preference = "preference"
    reward = "reward"
    sequence_classification = "sequence_classification"
    token_classification = "token_classification"


class ProblemType(Enum):
    single_label_classification = "single_label_classification"
    multi_label_classification = "multi_label_classification"
    regression = "regression"


class PreferenceLoss(Enum):
    dpo = "dpo"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"
    simpo = "simpo"
    cpo = "cpo"
    orpo = "orpo"
    kto = "kto"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with what it was before training."""
        return self not in (PreferenceLoss.simpo, PreferenceLoss.cpo, PreferenceLoss.orpo)

    @property
    def is_paired(self) -> bool:
        """Whether a row of the data has two answers, of which one was chosen; else one, with a label."""
        return self is not PreferenceLoss.kto


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


class QuantType4bit(Enum):
    nf4 = "nf4"
    fp4 = "fp4"


class EmbeddingStorage(Enum):
    none = "none"
    int8 = "int8"


class QuantStorage(Enum):
    auto = "auto"
    uint8 = "uint8"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Dtype(Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class ShardingStrategy(Enum):
    auto = "auto"
    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    HYBRID_SHARD = "HYBRID_SHARD"
    NO_SHARD = "NO_SHARD"


class Activations(Enum):
    auto = "auto"
    none = "none"
    selective = "selective"
    every_k = "every_k"
    full = "full"
    offload = "offload"


class MatmulKind(Enum):
    dequantized = "dequantized"
    fp8 = "fp8"


class Kernel(Enum):
    auto = "auto"
    liger = "liger"
    torch = "torch"


class Dequantizer(Enum):
    bitsandbytes = "bitsandbytes"
    triton = "triton"


class DataFormat(Enum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    prompt_completion = "prompt_completion"
    instruction = "instruction"
    text = "text"
    random = "random"


class LossOn(Enum):
    completion = "completion"
    all = "all"


class BadRows(Enum):
    error = "error"
    skip = "skip"
    truncate = "truncate"


class OnBadStep(Enum):
    stop = "stop"
    skip = "skip"
    rollback = "rollback"


class Optimizer(Enum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"


class LrScheduler(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class WandbMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class TrackerName(Enum):
    wandb = "wandb"
    tensorboard = "tensorboard"
    mlflow = "mlflow"
    trackio = "trackio"


@dataclass
class RunConfig:
    # Name of the run. It is also the last part of the default folder, and the run's name in W&B.
    name: str = "run"
    # The run folder. Everything that the run writes is in it.
    folder: str = "outputs/${run.name}"
    # Start anew in a folder that already holds a run. Its files are replaced, checkpoints included.
    overwrite: bool = False


@dataclass
class TaskConfig:
    # What the model learns. `causal_lm` is the next token. `preference` is which of two answers was chosen, {"prompt":
    # ..., "chosen": ..., "rejected": ...}. `reward` learns the same by a number for each answer, which a new head gives
    # (Bradley and Terry's loss); a row may have a "margin" that the numbers are to differ by. The other two train a new
    # head on the labels of whole rows, {"text": ..., "label": ...}, or of words, {"tokens": [...], "labels": [...]}.
    name: TaskName = TaskName.causal_lm
    # Whether a row has one label, any number of labels (a list), or numbers. The names are those of transformers.
    problem_type: ProblemType = ProblemType.single_label_classification
    # Names of the labels in the order of the head's outputs. Rows give a label by its name or its index. For regression
    # these are the names of the numbers, and null means that there is one number.
    labels: list[str] | None = None
    # Weights of the labels in the loss, in the same order. Where a row may have several labels, they weigh the positive
    # ones. `balanced` weighs each label inversely to how often it occurs. null weighs all alike.
    class_weights: Any = None

    @property
    def is_causal(self) -> bool:
        """Whether the model writes text: its head gives the next token."""
        return self.name in (TaskName.causal_lm, TaskName.preference)

    @property
    def compares_answers(self) -> bool:
        """Whether a row of the data has answers to the same prompt, or an answer with a label."""
        return self.name in (TaskName.preference, TaskName.reward)

    @property
    def has_labels(self) -> bool:
        """Whether a new head is trained on labels of rows or words."""
        return self.name in (TaskName.sequence_classification, TaskName.token_classification)


@dataclass
class PreferenceConfig:
    # The loss of task=preference. dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), hinge (SLiC, arXiv:2305.10425),
    # robust (arXiv:2403.00409) and kto (arXiv:2402.01306) compare the model with the base without the adapter, or with
    # the adapter of lora.start. simpo (arXiv:2405.14734), cpo (arXiv:2401.08417) and orpo (arXiv:2403.07691) need no
    # such reference.
    loss: PreferenceLoss = PreferenceLoss.dpo
    # How strongly the loss reacts to differences of log-probabilities: beta of the papers, but IPO's tau and ORPO's
    # lambda. null: 2 for simpo, 0.1 for the others.
    beta: float | None = field(default=None, metadata=bounds(above=0))
    # Part of the pairs whose answers are taken to be swapped: of dpo (conservative DPO), robust, cpo and simpo.
    label_smoothing: float = field(default=0.0, metadata=bounds(at_least=0, below=0.5))
    # SimPO's gamma: how much larger, times beta, a chosen answer's mean log-probability is to be.
    simpo_gamma: float = field(default=1.0, metadata=bounds(at_least=0))
    # This many times the negative log-likelihood of the chosen answer, a mean over its tokens, is added to a pair's
    # loss. With dpo this is RPO (arXiv:2404.19733). null: 1 for cpo and orpo, 0 for the others.
    sft_weight: float | None = field(default=None, metadata=bounds(at_least=0))
    # Of kto: the weight of answers whose label is true.
    desirable_weight: float = field(default=1.0, metadata=bounds(above=0))
    # Of kto: the weight of answers whose label is false.
    undesirable_weight: float = field(default=1.0, metadata=bounds(above=0))
    # Compute the reference's log-probabilities once, before training, and keep them beside the tokenized data. false
    # computes them in each step, in a pass without gradient. Both are the same numbers.
    precompute: bool = True

    @property
    def used_beta(self) -> float:
        """`beta`, or what it is for the loss if it is null."""
        return self.beta if self.beta is not None else 2.0 if self.loss is PreferenceLoss.simpo else 0.1

    @property
    def used_sft_weight(self) -> float:
        """`sft_weight`, or what it is for the loss if it is null."""
        if self.sft_weight is not None:
            return self.sft_weight
        return 1.0 if self.loss in (PreferenceLoss.cpo, PreferenceLoss.orpo) else 0.0


@dataclass
class ModelConfig:
    # Short name of the model, for messages.
    name: str = "custom"
    # A folder with config.json and safetensors files, or a hub name such as meta-llama/Meta-Llama-3-8B.
    path: str | None = None
    # Branch, tag or commit of a hub model.
    revision: str | None = None
    # Where the tokenizer is, if it is not beside the model. `bytes` is a built-in tokenizer whose tokens are bytes.
    tokenizer_path: str | None = None
    # `random` initialises the weights randomly, from the model's config alone. This is for dry runs at real size, and
    # needs no download.
    weights: Weights = Weights.checkpoint
    # Attention kernel. `auto` is flash_attention_4 where it is installed, on a Hopper or Blackwell GPU; else varlen,
    # where torch and the GPU have it; else sdpa, or eager for models that transformers has no sdpa for.
    attn_implementation: AttnImplementation = AttnImplementation.auto
    # Keep the quantized weights in files, in bitsandbytes' format. Later runs and the other jobs of a sweep then load
    # these: they are a quarter of the bytes, and quantized already. The first run that needs them writes them.
    cache_quantized: bool = False
    # Folder of these files. With several nodes, a disk of each node is best. null: ~/.cache/qlora_fsdp/quantized
    cache_folder: str | None = None
    # Run model code that comes with the model's files. Set it only for models that you trust. It counts where you set
    # it yourself, and never in the settings that come with an adapter.
    trust_remote_code: bool = False
    # The transformers config of the model (model_type, hidden_size, ...). A preset states it, so that preflight and
    # `model.weights=random` need no download. If model.path is set to something else than the preset's, the config.json
    # there counts, and must be of the same model. With model=custom it is for `model.weights=random`: used alone if it
    # has a model_type and model.path is no local folder, else over the config.json in model.path.
    config: dict[str, Any] = field(default_factory=dict)
    # Scaled rotary embeddings, for rows longer than the model was made for (docs/long-rows.md). As transformers'
    # rope_scaling: {rope_type: yarn, factor: 4.0}, with rope_type yarn, linear or llama3, and what else the type takes.
    # Empty: what the model has.
    rope_scaling: dict[str, Any] = field(default_factory=dict)


@dataclass
class TokenizerConfig:
    # New tokens, which the tokenizer then never splits. Only their rows of the embeddings and of the head are trained
    # (PEFT's trainable_token_indices), unless lora.modules_to_save names the embeddings or the head. A new row starts
    # at the mean of the old ones. A token that the tokenizer already has is trained from the row that it has.
    add_tokens: list[str] = field(default_factory=list)
    # The same, as special tokens: they are left out when text is decoded with skip_special_tokens.
    add_special_tokens: list[str] = field(default_factory=list)


@dataclass
class QuantConfig:
    # Quantize linear layers to 4 bits (QLoRA, arXiv:2305.14314).
    load_in_4bit: bool = True
    # Quantize linear layers to 8 bits: int8 codes with one fp32 scale per row (the weights of LLM.int8,
    # arXiv:2208.07339).
    load_in_8bit: bool = False
    # Code book of the 4-bit codes.
    bnb_4bit_quant_type: QuantType4bit = QuantType4bit.nf4
    # Quantize the scales too, which saves 0.37 bits per weight.
    bnb_4bit_use_double_quant: bool = True
    # dtype in which codes are stored and gathered. `auto` is bfloat16. uint8 needs torch >= 2.13. float16 is refused.
    bnb_4bit_quant_storage: QuantStorage = QuantStorage.auto
    # dtype of the matrix products. `auto` follows training.precision. If training.precision is auto, another value here
    # sets both. float16 is refused.
    bnb_4bit_compute_dtype: Dtype = Dtype.auto
    # How frozen input embeddings and a frozen output head are stored. `none`: in training.precision. `int8`: as codes
    # with one fp32 scale per row, in half the memory.
    embeddings: EmbeddingStorage = EmbeddingStorage.none
    # Linear layers to leave unquantized, by their names or by the ends of these. null leaves out the output head, as
    # transformers does.
    llm_int8_skip_modules: list[str] | None = None


@dataclass
class LoraConfig:
    # Train on from a saved adapter: the folder of a LoRA adapter, of this project's or PEFT's. Its weights are where
    # this run's adapter starts, and all other settings of this section but lora_dropout are its own: what is written
    # may not contradict them. Without a model named, its base is the model. null: a new adapter.
    start: str | None = None
    # Rank of the adapters.
    r: int = field(default=16, metadata=bounds(at_least=1))
    # The adapters' output is scaled by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora.
    lora_alpha: float = field(default=32, metadata=bounds(above=0))
    # Dropout on the adapters' input.
    lora_dropout: float = field(default=0.0, metadata=bounds(at_least=0, below=1))
    # The linear layers to adapt: a list of names or of ends of names; a regular expression; or `all-linear`, which is
    # all that a gradient reaches and that PEFT adapts.
    target_modules: Any = "all-linear"
    # Whether target_modules mean the experts of a mixture of experts too, each of which then gets its own adapter.
    experts: bool = True
    # Names, or ends of names, of layers that target_modules should not match.
    exclude_modules: list[str] | None = None
    # Modules that are trained in full and saved with the adapter, e.g. a classification head.
    modules_to_save: list[str] | None = None
    # true (Kaiming A, zero B), gaussian, or orthogonal. Other initialisations of PEFT start from the full-precision
    # weights, and are refused by name.
    init_lora_weights: Any = True
    # Rank-stabilized scaling (arXiv:2312.03732).
    use_rslora: bool = False
    # Weight-decomposed LoRA (arXiv:2402.09353).
    use_dora: bool = False
    # Ranks that differ from r: {name or regular expression: rank}.
    rank_pattern: dict[str, int] = field(default_factory=dict)
    # Alphas that differ from lora_alpha: {name or regular expression: alpha}.
    alpha_pattern: dict[str, float] = field(default_factory=dict)


@dataclass
class FsdpConfig:
    # auto: NO_SHARD where the memory plan has room to spare for whole copies and they are no slower, else FULL_SHARD.
    # FULL_SHARD: every rank holds a part of each layer. SHARD_GRAD_OP: the same, but layers stay gathered between
    # forward and backward. HYBRID_SHARD: parameters are sharded within groups of hybrid_shard_size ranks and replicated
    # between the groups. NO_SHARD: every rank holds all parameters.
    sharding_strategy: ShardingStrategy = ShardingStrategy.auto
    # Free a layer after its forward, and gather it again for backward. null frees layers unless the memory plan has
    # room to keep all of them gathered.
    reshard_after_forward: bool | None = None
    # Ranks per shard group under HYBRID_SHARD. null: the ranks of one node.
    hybrid_shard_size: int | None = field(default=None, metadata=bounds(at_least=1))
    # Keep shards and optimizer state in host memory. Layers come to the GPU only to be used.
    cpu_offload: bool = False
    # Layers that are gathered ahead of the running one in forward. With cpu_offload it is at least 1.
    forward_prefetch: int = field(default=1, metadata=bounds(at_least=0))
    # The same in backward, where FSDP2 always gathers one layer ahead.
    backward_prefetch: int = field(default=1, metadata=bounds(at_least=1))

    @property
    def reshards(self) -> bool:
        """Whether layers are freed after their forward, unless the memory plan has room to keep them gathered."""
        return self.reshard_after_forward is not False and self.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP

    @property
    def may_be_whole(self) -> bool:
        """Whether auto may give each rank the whole base: not if a setting says how its parts are to be handled."""
        is_open = self.sharding_strategy is ShardingStrategy.auto
        return is_open and not self.cpu_offload and self.reshard_after_forward is None

    def num_shards(self, num_ranks: int, local_num_ranks: int) -> int:
        """Ranks among which every parameter is split, given the ranks in all and those of one node.

        `auto` is split like FULL_SHARD, which it is where no plan has chosen: on CPUs, and in use.
        """
        match self.sharding_strategy:
            case ShardingStrategy.auto | ShardingStrategy.FULL_SHARD | ShardingStrategy.SHARD_GRAD_OP:
                return num_ranks
            case ShardingStrategy.HYBRID_SHARD:
                return self.hybrid_shard_size or local_num_ranks
            case ShardingStrategy.NO_SHARD:
                return 1
            case other:
                assert_never(other)

    def uses_fsdp(self, num_shards: int) -> bool:
        """Whether FSDP has anything to do: parameters are split, or they come from host memory."""
        return num_shards > 1 or self.cpu_offload


@dataclass
class MemoryConfig:
    # What happens to a layer's activations until backward needs them. none: all are kept. selective: all but the norms'
    # outputs, which cost little to compute again. full: only the layer's input is kept, and the rest is computed again.
    # every_k: full for every k-th layer. offload: full, with the layers' inputs in host memory. auto: for each layer
    # the fastest of these with which the run fits, by the memory plan.
    activations: Activations = Activations.auto
    # The k of every_k.
    every_k: int = 2
    # Tokens that gated MLPs, experts and norms compute at a time, so that what they need does not grow with the length
    # (docs/long-rows.md). The results are the same but for rounding. auto: all at once, or 8192 of long micro-batches
    # if the run fits or is faster so, by the memory plan. null: all at once.
    tile_tokens: Any = field(default="auto", metadata=bounds(at_least=64))
    # GiB of each GPU that the run may use in all. The limit is enforced, so that a large GPU can stand for a smaller
    # one. null: the free memory less 5 %, by which auto decides.
    target_gib: float | None = field(default=None, metadata=bounds(above=0))
    # When the GPU runs out of memory, write torch's record of allocations to the run folder, for
    # pytorch.org/memory_viz. This slows steps a little.
    snapshot: bool = False

    @property
    def num_tile_tokens(self) -> int | None:
        """Tokens of a tile; None for all at once, which also is what auto does where no plan has chosen."""
        return None if self.tile_tokens == "auto" else self.tile_tokens


@dataclass
class ComputeConfig:
    # Matrix products with the quantized base. dequantized: in training.precision. fp8: both factors in float8_e4m3fn
    # with one scale per row, in forward and for the gradient of the input; the products of adapters and of experts stay
    # in bfloat16. fp8 needs a 4-bit base and an Ada, Hopper or later GPU.
    matmul: MatmulKind = MatmulKind.dequantized
    # Record forward and backward of a micro-batch as a CUDA graph, so that a step does not wait for Python: true or
    # false. What can't be recorded is computed kernel by kernel, and the log says why.
    cuda_graph: bool = True


@dataclass
class KernelsConfig:
    # RMS norms. auto: Liger's fused kernels (arXiv:2410.10989) on a GPU, where they are installed and know the model;
    # else torch's own operations.
    rms_norm: Kernel = Kernel.auto
    # Rotary position embeddings.
    rotary: Kernel = Kernel.auto
    # The gated activation of the MLP (SwiGLU, GeGLU).
    glu: Kernel = Kernel.auto
    # The loss over a frozen output head. auto: a Triton kernel of this project on a GPU; liger: Liger's, which asks the
    # device, so that steps can't be captured (compute.cuda_graph).
    cross_entropy: Kernel = Kernel.auto
    # What dequantizes 4-bit weights on a GPU. bitsandbytes: its kernels, one for scales and one for codes. triton: a
    # kernel of this project that does both in one pass; the same weights, and steps of 8B are 0.7 % faster. Parts of a
    # weight (slices of experts) and fp8 take it in any case, because bitsandbytes' kernels write whole weights alone.
    dequantize: Dequantizer = Dequantizer.bitsandbytes
    # Compute q, k and v together, and gate, up and down, where all of them are quantized and adapted without dropout or
    # DoRA. On a GPU with rms_norm=auto, each norm of a Llama, Mistral, Qwen 2 or Qwen 3 layer is also computed together
    # with its residual. false computes each by itself.
    fuse_layers: bool = True


# What the QLoRA paper (arXiv:2305.14314) trained Guanaco on: conversations of OpenAssistant.
DEFAULT_DATA = "timdettmers/openassistant-guanaco"


@dataclass
class DataConfig:
    # A .jsonl, .json, .csv, .parquet or .arrow file; a folder of .txt or .md files or of any of these; a pattern such
    # as rows/*.jsonl; a URL such as s3://bucket/rows.jsonl; or a hub data set's name. Several files, folders, patterns
    # or URLs are a list, [a.jsonl,b.jsonl], whose rows follow one another. The default is what the QLoRA paper trained
    # on. It counts for training and preview, where neither a mix nor random tokens are asked for; other commands want
    # data named.
    path: Any = field(default=DEFAULT_DATA, metadata=TEXT_OR_LIST)
    # Several of these with their weights, in place of path: {chats.jsonl: 3, code.jsonl: 1} takes three of four rows
    # from chats. A data set may have settings of its own, {code.jsonl: {weight: 1, max_rows: 5000}}: weight, max_rows,
    # split, name, columns and system_prompt.
    mix: dict[str, Any] = field(default_factory=dict)
    # How long an epoch of a mix is. longest: until every row was seen, so that data sets which are small for their
    # weight are repeated. shortest: until the first data set is used up, so that no row is repeated and the others are
    # not seen whole.
    mix_until: MixUntil = MixUntil.longest
    # What the weights of a mix are shares of: its rows or its tokens.
    mix_by: MixBy = MixBy.rows
    # Subset of a hub data set.
    name: str | None = None
    # Split of a data set that has splits, with the rows of it to take: train, train[:5000], train[10%:]. Files without
    # splits are train.
    split: str = "train"
    # Held-out data of the same form. null: eval_fraction of the rows.
    eval_path: Any = field(default=None, metadata=TEXT_OR_LIST)
    # Split of eval_path, with the rows of it to take. null: the name of data.split, and all rows.
    eval_split: str | None = None
    # Part of the rows that is held out for evaluation when there is no eval_path. 0: no evaluation.
    eval_fraction: float = field(default=0.0, metadata=bounds(at_least=0, below=1))
    # Use at most this many rows, drawn by data.seed; the first ones are data.split=train[:5000]. For a mix this holds
    # for each of its data sets. null: all rows.
    max_rows: int | None = field(default=None, metadata=bounds(at_least=1))
    # Seed of the choice of rows: by max_rows, by eval_fraction, and by a mix. Set it to compare runs of different
    # training.seed on the same rows. null: training.seed.
    seed: int | None = field(default=None, metadata=bounds(at_least=0, below=2**31))
    # Form of the rows. `auto` looks at their keys. `random` makes random tokens, for dry runs.
    format: DataFormat = DataFormat.auto
    # The names that the data has for prompt, completion, messages, role, content, text, label and so on, where these
    # differ: {prompt: question, completion: answer}.
    columns: dict[str, str] = field(default_factory=dict)
    # A system message for conversations that have none.
    system_prompt: str | None = None
    # Whether to train on the completion, which is the assistant's turns, or on every token.
    loss_on: LossOn = LossOn.completion
    # A Jinja file, or the name of a template that ships here (chatml, llama3, alpaca). null: the tokenizer's own.
    chat_template: str | None = None
    # What to do with an unusable row. error: stop and list all of them. skip: leave it out. truncate: cut it if it is
    # longer than training.max_length, and leave it out if it is unusable for another reason.
    bad_rows: BadRows = BadRows.truncate
    # Times its size that a file of rows may unpack to (.gz, .bz2, .xz, .zst; Parquet and Arrow compress inside). A file
    # that unpacks to more was probably made to fill memory and disks. Up to 128 MiB any file may unpack to.
    max_unpack_ratio: int = field(default=200, metadata=bounds(at_least=1))
    # Leave out rows of the training data that have the same tokens, targets and label as an earlier one, also of
    # another data set of a mix. Evaluation data and streams stay as they are.
    deduplicate: bool = True
    # Leave out rows of the training data that are nearly the same as an earlier one: with at least this share of runs
    # of five tokens in common (Jaccard's index, estimated by MinHash; needs the package datasketch). 0.8 is usual.
    near_duplicates: float | None = field(default=None, metadata=bounds(above=0, below=1))
    # Leave out rows of the training data that are in the evaluation data too. Without it they are only counted.
    decontaminate: bool = False
    # Leave out rows of the training data with fewer tokens. With pairs the longer answer counts, with its prompt.
    min_tokens: int | None = field(default=None, metadata=bounds(at_least=1))
    # Leave out rows of the training data with more tokens, at most training.max_length. Rows that are longer than that
    # are cut first (data.bad_rows).
    max_tokens: int | None = field(default=None, metadata=bounds(at_least=1))
    # Read the rows while training, in the order of the files. This is for data that is larger than the disk. It needs
    # training.max_steps to know the end, and data.eval_path to evaluate. Each rank reads and tokenizes its part.
    streaming: bool = False
    # With streaming: the rows that are tokenized, packed and shuffled together, ahead of the training. From 2,000 rows
    # on, processes of each rank tokenize: data.num_proc, or its share of the host's cores but one, at most 8.
    buffer_rows: int = field(default=10000, metadata=bounds(at_least=1))
    # Processes that tokenize. null: one for each CPU core that this rank may use.
    num_proc: int | None = field(default=None, metadata=bounds(at_least=1))
    # Where tokenized data is kept, also what a run that was broken off has done. null: ~/.cache/qlora_fsdp/data
    cache_folder: str | None = None

    @property
    def is_default(self) -> bool:
        """Whether a run takes the data of those who name none."""
        return bool(self.path == DEFAULT_DATA)


@dataclass
class OptimConfig:
    # adamw: torch's fused AdamW. adamw_8bit: bitsandbytes' AdamW with block-wise 8-bit state (arXiv:2110.02861).
    name: Optimizer = Optimizer.adamw
    # Decoupled weight decay (arXiv:1711.05101).
    weight_decay: float = field(default=0.0, metadata=bounds(at_least=0))
    # Decay of the running means of the gradient and of its square.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    # Added to the denominator.
    eps: float = field(default=1e-8, metadata=bounds(above=0))
    # Clip the gradient's global norm to this. 0 does not clip.
    max_grad_norm: float = field(default=1.0, metadata=bounds(at_least=0))
    # Shape of the learning rate after warmup.
    lr_scheduler_type: LrScheduler = LrScheduler.cosine
    # Part of the steps during which the learning rate rises from 0.
    warmup_ratio: float = field(default=0.03, metadata=bounds(at_least=0, below=1))
    # Number of warmup steps. It wins over warmup_ratio.
    warmup_steps: int | None = field(default=None, metadata=bounds(at_least=0))


DEFAULT_GLOBAL_BATCH = 16


@dataclass
class TrainingConfig:
    # Most tokens per sequence. With task=preference it is most tokens of a prompt with one answer, and a sequence has
    # room for two of these.
    max_length: int = field(default=2048, metadata=bounds(at_least=2))
    # Optimizer steps. It wins over num_epochs: the data is repeated as often as needed. null: num_epochs over the data.
    max_steps: int | None = field(default=None, metadata=bounds(at_least=1))
    # Passes over the data.
    num_epochs: float = field(default=1.0, metadata=bounds(above=0))
    # Sequences per GPU and forward pass. `auto`: the smallest power of two that divides a rank's part of the global
    # batch and has the best predicted speed, but for 1 %; on a CPU about 2,048 tokens. The losses do not depend on it.
    micro_batch_size: Any = field(default="auto", metadata=bounds(at_least=1))
    # Sequences per optimizer step, over all ranks. The default is the QLoRA paper's; where it is no multiple of
    # micro_batch_size x ranks, the nearest one is taken. null: micro_batch_size x ranks.
    global_batch_size: int | None = field(default=DEFAULT_GLOBAL_BATCH, metadata=bounds(at_least=1))
    # Peak learning rate.
    learning_rate: float = field(default=2e-4, metadata=bounds(above=0))
    # Seed of the initialisation, of the data's order and of dropout.
    seed: int = field(default=0, metadata=bounds(at_least=0, below=2**31))
    # Let a run repeat to the bit on the same GPUs. Kernels that add in any order are replaced by slower ones or refused
    # by name, and every micro-batch sums its gradients over the ranks. On CPUs runs repeat without it.
    deterministic: bool = False
    # Put several rows into one sequence of max_length tokens, without letting them see one another. `auto`: where a
    # small model of the same kind shows that they do not; otherwise each row is a sequence, and the log says why. true:
    # the same, but a run whose rows would see one another ends with an error.
    packing: Any = "auto"
    # dtype of activations and matrix products. `auto`: bfloat16 on GPUs that have it, else float32. float16 is refused,
    # because it needs loss scaling, which is not here.
    precision: Dtype = Dtype.auto
    # Evaluate each time this many steps are done, and at the end. null: only before and after training.
    eval_every_steps: int | None = field(default=None, metadata=bounds(at_least=1))
    # Of a mixture of experts: what its load-balancing loss (arXiv:2101.03961) is multiplied by before it is added. 0
    # adds none, whatever the model's config says.
    router_aux_loss_coef: float = field(default=0.0, metadata=bounds(at_least=0))
    # What to do when a step's loss or gradient is NaN or infinite. Its rows are written to run.folder/bad_steps. stop:
    # save and end. skip: continue with the next batch. rollback: the same, from the weights of the newest checkpoint.
    on_bad_step: OnBadStep = OnBadStep.stop
    # A step is also bad when its gradient norm is more than this many times the median of the last 100 steps. null:
    # never.
    grad_norm_spike: float | None = field(default=None, metadata=bounds(above=1))


@dataclass
class CheckpointConfig:
    # Write a checkpoint, which includes the adapter, each time this many steps are done. null: not by steps. SIGTERM,
    # SIGUSR1 and the first Ctrl-C write one in any case, and end the run.
    every_steps: int | None = field(default=None, metadata=bounds(at_least=1))
    # Write a checkpoint when this many minutes have passed since the last one.
    every_minutes: float | None = field(default=None, metadata=bounds(above=0))
    # Number of checkpoints to keep. An older one is removed once a newer one is complete.
    keep_last: int = field(default=2, metadata=bounds(at_least=1))
    # Besides these, keep this many of those with the lowest evaluation loss.
    keep_best: int = field(default=0, metadata=bounds(at_least=0))
    # auto: resume from the newest checkpoint in run.folder, if there is one. none: start anew, which removes the
    # checkpoints. Or the folder of a checkpoint, of this run or of another.
    resume: str = "auto"
    # Settings that may differ from the checkpoint's although this makes it another run, e.g. [training.learning_rate].
    allow_changes: list[str] = field(default_factory=list)


@dataclass
class TrackingConfig:
    # W&B. auto: online if a key is configured, else disabled, with a note that says so.
    wandb: WandbMode = WandbMode.disabled
    # Project in W&B and trackio, experiment in MLflow.
    project: str = "qlora-fsdp"
    # W&B user or team. null: the key's own.
    entity: str | None = None
    # Upload the adapter to W&B and MLflow as an artifact when the run has finished.
    log_adapter: bool = False
    # Write TensorBoard's event files to run.folder/tensorboard.
    tensorboard: bool = False
    # Trackers that get every figure: wandb, tensorboard, mlflow, trackio. wandb and tensorboard above do the same.
    report_to: list[str] = field(default_factory=list)
    # At every evaluation, let the model complete the beginnings of this many held-out rows. The texts go to
    # generations.jsonl, report.html and the trackers. 0: none.
    num_generations: int = field(default=0, metadata=bounds(at_least=0))
    # Most tokens per completion. Every token is a pass through the whole model.
    generation_tokens: int = field(default=64, metadata=bounds(at_least=1))


@dataclass
class HubConfig:
    # Upload the adapter to the Hugging Face hub when the run has finished (transformers' push_to_hub). Whether that is
    # allowed is found out before training. A failed upload does not fail the run.
    push: bool = False
    # The repository, ORG/NAME, or NAME for one of your own (transformers' hub_model_id). It is made if it is not there.
    repo: str | None = None
    # Whether a new repository is private (transformers' hub_private_repo). One that is there stays as it is.
    private: bool = True


@dataclass
class DistributedConfig:
    # A collective that takes longer than this means that a rank is gone or stuck, and ends all ranks.
    timeout_seconds: int = field(default=600, metadata=bounds(at_least=1))
    # Ranks that share each sequence: every one computes a slice of it, so that rows can be as many times as long. It
    # divides the ranks and the model's attention heads. The losses do not depend on it (docs/long-rows.md).
    context_parallel: int = field(default=1, metadata=bounds(at_least=1))

    def num_groups(self, num_ranks: int) -> int:
        """Groups of ranks that have sequences of their own, which a step's are divided among."""
        return max(1, num_ranks // max(1, self.context_parallel))


@dataclass
class LaunchConfig:
    # For what `qlora-fsdp`, `-m` or `hydra/launcher=...` starts: processes per job, one per GPU; on SLURM, per node.
    # null: all GPUs, of which jobs that run at the same time get equal shares.
    num_processes: int | None = field(default=None, metadata=bounds(at_least=1))
    # An accelerate config. null: accelerate_configs/one_node.yaml, or multi_node.yaml where slurm.nodes is above 1.
    config_file: str | None = None
    # GPUs of this host to use, by index. null: all that are visible.
    devices: list[int] | None = None
    # Jobs of a sweep that run at the same time, on disjoint GPUs.
    parallel: int = field(default=1, metadata=bounds(at_least=1))
    # Print the commands or the job script, and start nothing.
    dry_run: bool = False


@dataclass
class SlurmConfig:
    # Partition (queue). null: the cluster's default, as for all settings below.
    partition: str | None = None
    # Account to charge.
    account: str | None = None
    # Time limit of a job, e.g. 24:00:00 or 2-00:00:00 (in YAML with quotes). A run that needs longer is queued again.
    time: str | None = None
    # Nodes per job. Each starts launch.num_processes processes.
    nodes: int = field(default=1, metadata=bounds(at_least=1))
    # GPUs per node. It is also the number of processes where launch.num_processes is null.
    gpus_per_node: int | None = field(default=None, metadata=bounds(at_least=1))
    # CPU cores per node. null: the cluster's default for one task, which may be 1.
    cpus_per_task: int | None = field(default=None, metadata=bounds(at_least=1))
    # Further options of sbatch, one per entry: ["--qos=long","--mem=0"].
    options: list[str] = field(default_factory=list)
    # Environment modules to load, e.g. [cuda/12.8].
    modules: list[str] = field(default_factory=list)
    # Shell commands to run first in the job script, e.g. ["source venv/bin/activate"].
    setup: list[str] = field(default_factory=list)
    # Container image, through srun --container-image (Pyxis). Its `python` is used.
    container: str | None = None
    # Seconds before the time limit at which a run is told to save. The job is then queued again.
    signal_seconds: int = field(default=120, metadata=bounds(at_least=1, below=65536))


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def __post_init__(self) -> None:
        """What was written for settings, by key, where it has a `${...}`; `written.py` says what that is for."""
        self.written: dict[str, Any] = {}

    @property
    def has_pairs(self) -> bool:
        """Whether a row of the data is a prompt with two answers, which stay together in a sequence."""
        is_paired = self.task.name is TaskName.reward or self.preference.loss.is_paired
        return self.task.compares_answers and is_paired

    @property
    def row_seed(self) -> int:
        """The seed by which rows are chosen from data sets."""
        return self.training.seed if self.data.seed is None else self.data.seed

    @property
    def sequence_length(self) -> int:
        """Most tokens of a packed sequence: there is room for a whole pair."""
        return self.training.max_length * (2 if self.has_pairs else 1)

    @property
    def slice_length(self) -> int:
        """Most tokens of a sequence that one rank computes."""
        return -(self.sequence_length // -self.distributed.context_parallel)

    @property
    def num_extra_forwards(self) -> int:
        """Forward passes of a micro-batch without a gradient, besides the one that is trained on.

        The reference's, unless it is precomputed; and KTO's of mismatched answers, by the model and by the reference.
        """
        if self.task.name is not TaskName.preference:
            return 0
        in_step = int(self.computes_reference)
        return in_step if self.has_pairs else 1 + 2 * in_step

    @property
    def computes_reference(self) -> bool:
        """Whether each step computes the reference's log-probabilities of its answers."""
        settings = self.preference
        return self.task.name is TaskName.preference and settings.loss.needs_reference and not settings.precompute
