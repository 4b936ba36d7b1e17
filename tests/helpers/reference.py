"""The independent reference: stock transformers, bitsandbytes and PEFT in one process, a row at a time.

No padding, no packing. It takes the same settings as our runs, so that a test says what is compared once.

What is quantized and adapted in a mixture of experts is found here by the names that transformers gives its modules,
and not by the code that is tested.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import numpy as np
import peft
import torch
from peft.optimizers import create_loraplus_optimizer
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    Adafactor,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    get_scheduler,
)
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.trainer_pt_utils import LabelSmoother, get_length_grouped_indices

from qlora_fsdp.config.schema import (
    CompressedFormat,
    Config,
    EmbeddingStorage,
    LossType,
    LrScheduler,
    OptimConfig,
    Optimizer,
    QuantConfig,
    TaskConfig,
)
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.run_data import prepare_data
from qlora_fsdp.data.sequences import epoch_order
from qlora_fsdp.data.tokenizer import byte_tokenizer, extend_tokenizer
from tests.helpers.checkpoints import VOCAB
from tests.helpers.compressed import through_package
from tests.helpers.one_process import one_process
from tests.helpers.quick_config import load_config

Row = tuple[list[int], list[bool]]  # tokens, and which of them are targets
MULTIMODAL = ("gemma3", "mistral3")  # these have a text decoder, `language_model`, beside towers for images
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
OWN_LINEARS = ("FalconLinear",)  # classes of linear layers that stock transformers leaves as they are
ROUTERS = ("gate", "router", "classifier", "wg")
FORMER_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # PEFT takes layers of these names for experts


def stock_losses(argv: Sequence[str], device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[float]:
    """Losses of the same run with stock libraries."""
    config = load_config(argv)
    model = load_stock(Path(config.model.path), config.quant, device, dtype)
    model = add_lora(model, config, token_rows=grow(model, config))
    if config.task.neftune_noise_alpha is not None:
        embeddings = model.get_base_model().get_input_embeddings()
        embeddings.neftune_noise_alpha = config.task.neftune_noise_alpha
        embeddings.register_forward_hook(neftune_post_forward_hook)
    return train_stock(model, global_batches(config), config)


def stock_loss(model: nn.Module, rows: Path, max_length: int = 64) -> tuple[float, int]:
    """Mean loss of the completions of a file's rows, byte tokens cut to `max_length`, and the number of targets."""
    loss_sum, num_targets = 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        prompt, text = (256, *row["prompt"].encode()), (256, *(row["prompt"] + row["completion"]).encode(), 257)
        ids = torch.tensor([text[:max_length]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        targets = ids[0, len(prompt) :]
        loss_sum += F.cross_entropy(logits[:, :VOCAB], targets, reduction="sum").item()
        num_targets += len(targets)
    return loss_sum / num_targets, num_targets


def load_stock(folder: Path, quant: QuantConfig, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """`from_pretrained` with a BitsAndBytesConfig, as PEFT's documentation does it; a quantized checkpoint as it is.

    transformers leaves fused experts as they are, and quantizes routers that are linear layers: here the experts are
    quantized, and no router is, and so are linear layers of a model's own class. Stock int8 also quantizes
    activations, which we do not: for int8 the layers hold the dequantized weights, and so do experts in any format.
    """
    config = AutoConfig.from_pretrained(folder)
    auto_class = AutoModelForImageTextToText if _is_multimodal(config) else AutoModelForCausalLM
    as_asked = deepcopy(config)  # transformers asks what to leave out before it ties weights
    as_asked.get_text_config().tie_word_embeddings = as_asked.tie_word_embeddings = False
    with torch.device("meta"):
        on_meta = auto_class.from_config(as_asked)
    routers, left_out = find_routers(on_meta), get_keys_to_not_convert(on_meta)
    skip = quant.llm_int8_skip_modules
    if routers:
        skip = [*(left_out if skip is None else skip), *routers]
    options = {}  # quantization_config=None would make transformers take stored codes for weights
    if quant.load_in_4bit and not _is_quantized(folder):
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant.bnb_4bit_quant_type.value,
            bnb_4bit_use_double_quant=quant.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=skip,
        )
    model = auto_class.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", device_map={"": device}, **options
    )
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    in_int8 = _stored_in_int8(model, ends) if quant.embeddings is EmbeddingStorage.int8 else []
    if quant.load_in_8bit and not _is_quantized(folder):
        kept = [*(left_out if skip is None else skip), *routers]
        linears = [(name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear]
        in_int8 += [layer for name, layer in linears if layer not in ends and should_convert_module(name, kept)]
    if quant.compressed_tensors is not CompressedFormat.none:
        kept = [*(left_out if skip is None else skip), *routers]
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer not in ends and should_convert_module(name, kept):
                layer.weight.data = through_package(layer.weight.data, quant)
    for layer in in_int8:
        layer.weight.data = _through_int8(layer.weight.data)
    for name, layer in model.named_modules():
        if type(layer).__name__ in OWN_LINEARS and should_convert_module(name, skip or left_out):
            if quant.load_in_8bit:
                layer.weight.data = _through_int8(layer.weight.data)
            elif quant.load_in_4bit:
                layer.weight.data = _through_4bit(layer.weight.data, quant)
    for name, key in find_experts(model):
        weight = getattr(model.get_submodule(name), key)
        if not should_convert_module(name, quant.llm_int8_skip_modules or []):
            continue
        if quant.compressed_tensors is CompressedFormat.mxfp4 and model.get_submodule(name).is_transposed:
            weight.data = through_package(weight.data.mT, quant).mT.contiguous()
        elif quant.compressed_tensors is not CompressedFormat.none:
            weight.data = through_package(weight.data, quant)
        elif quant.load_in_8bit:
            weight.data = _through_int8(weight.data)
        elif quant.load_in_4bit:
            weight.data = _through_4bit(weight.data, quant)
    return model


def _stored_in_int8(model: nn.Module, ends: list[nn.Module]) -> list[nn.Module]:
    """The tables in int8: embeddings and head if they are not one weight, and Gemma's with something for all layers."""
    per_layer = [module for name, module in model.named_modules() if name.endswith("embed_tokens_per_layer")]
    is_tied = ends[0].weight is ends[1].weight
    return per_layer if is_tied else [*ends, *per_layer]


def _is_multimodal(config: PretrainedConfig) -> bool:
    """Whether the model has a text decoder beside towers, and transformers' class for images and text is used."""
    return config.model_type in MULTIMODAL or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def find_experts(model: nn.Module) -> list[tuple[str, str]]:
    """Module and name of each weight of fused experts: where transformers lets others compute them, and Llama 4's."""
    modules = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "has_gate") or type(module).__name__ == "Llama4TextExperts"
    ]
    return [
        (name, key)
        for name, module in modules
        for key, weight in module.named_parameters(recurse=False)
        if key in EXPERT_WEIGHTS and weight.ndim == 3
    ]


def find_routers(model: nn.Module) -> list[str]:
    """The linear layers that choose among the experts beside them."""
    names = [name for name, _ in model.named_modules()]
    blocks = tuple(name.removesuffix("experts") for name in names if name.endswith(".experts"))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linears if name.startswith(blocks) and name.rpartition(".")[2] in ROUTERS]


def _through_4bit(weight: torch.Tensor, quant: QuantConfig) -> torch.Tensor:
    """What `bitsandbytes.nn.parametrize.replace_parameter_4bit` would compute with: quantized, and dequantized."""
    kind = quant.bnb_4bit_quant_type.value
    codes, state = bnb.functional.quantize_4bit(
        weight, compress_statistics=quant.bnb_4bit_use_double_quant, quant_type=kind
    )
    return bnb.functional.dequantize_4bit(codes, state)


def _through_int8(weight: torch.Tensor) -> torch.Tensor:
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.flatten(0, -2).half())
    return dequantize_int8(codes, scales, weight.dtype).view(weight.shape)


def dequantize_int8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that int8 codes [out, in] with row maxima [out] stand for."""
    return (codes.double() * scales.double()[:, None] / 127).to(dtype)


@torch.no_grad()
def grow(model: nn.Module, config: Config) -> dict[str, list[int]] | None:
    """Resize a model for the new tokens of the settings, each at the mean; PEFT's trainable_token_indices."""
    tokenizer, wanted = byte_tokenizer(), [*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens]
    if not wanted:
        return None
    first = len(tokenizer)
    tokenizer.add_tokens(wanted)
    tables = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    means = {name: table.weight.double().mean(0) for name, table in tables.items()}
    model.resize_token_embeddings(max(VOCAB, len(tokenizer)), mean_resizing=False)
    tables = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    for name, table in tables.items():
        table.weight[first : len(tokenizer)] = means[name].to(table.weight.dtype)
    whole, ids = config.lora.modules_to_save or [], list(range(first, len(tokenizer)))
    is_tied = tables["embed_tokens"].weight is tables["lm_head"].weight
    names = ["embed_tokens"] if is_tied and not whole else tables
    return {name: ids for name in names if name not in whole} or None


def add_lora(
    model: nn.Module,
    config: Config,
    task_type: str = "CAUSAL_LM",
    token_rows: dict[str, list[int]] | None = None,
) -> peft.PeftModel:
    """PEFT on the stock model, A drawn as PEFT does but from the seed that we use.

    `lora.Linear` goes over bitsandbytes' layer too, as PEFT's `Linear4bit` rounds in another order.
    """
    wanted = config.lora
    target_modules, target_parameters = find_targets(model, config)
    excluded = wanted.exclude_modules
    if wanted.target_modules == "all-linear" and (refused := _refused_by_peft(model)):
        excluded = [*(excluded or []), *refused]
    settings = peft.LoraConfig(
        task_type=task_type,
        r=wanted.r,
        lora_alpha=wanted.lora_alpha,
        lora_dropout=wanted.lora_dropout,
        use_rslora=wanted.use_rslora,
        use_dora=wanted.use_dora,
        target_modules=target_modules,
        target_parameters=target_parameters,
        exclude_modules=excluded,
        modules_to_save=wanted.modules_to_save,
        rank_pattern=wanted.rank_pattern,
        alpha_pattern=wanted.alpha_pattern,
        trainable_token_indices=token_rows,
    )
    settings._register_custom_module({bnb.nn.Linear4bit: lora.Linear, bnb.nn.Linear8bitLt: lora.Linear})
    model.requires_grad_(False)
    wrapped = peft.get_peft_model(model, settings)
    for name, module in wrapped.named_modules():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{config.training.seed}/{name}".encode()))
        if isinstance(module, lora.Embedding):  # A is zero
            table = module.lora_embedding_B["default"]
            table.data.copy_(torch.empty(table.shape).normal_(generator=generator))
        elif isinstance(module, lora.LoraLayer):
            weight = module.lora_A["default"].weight
            bound = math.sqrt(1 / weight.shape[1])
            weight.data.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
    return wrapped


def _refused_by_peft(model: nn.Module) -> list[str]:
    """Ends of names of linear layers that stock PEFT does not adapt, found by asking for each in a copy on meta."""
    refused = []
    for end in {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}:
        with torch.device("meta"):
            on_meta = type(model)(model.config)
        try:
            peft.get_peft_model(on_meta, peft.LoraConfig(target_modules=[end]))
        except ValueError as error:
            if "incompatible" in str(error):
                refused.append(end)
    return refused


def find_targets(model: nn.Module, config: Config) -> tuple[list[str] | str | None, list[str] | None]:
    """PEFT's `target_modules` and `target_parameters`; of models without experts the former are those of the settings.

    PEFT adapts the parameter of a plain layer: those among the targets that are quantized become plain here.
    """
    wanted, experts, routers = config.lora, find_experts(model), find_routers(model)
    if not experts and not routers and not _is_multimodal(model.config):
        return wanted.target_modules, None
    decoder = ""
    if _is_multimodal(model.config):
        decoder = next(name for name, module in model.named_modules() if module is model.get_decoder()) + "."
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]

    def is_named(name: str) -> bool:
        ends = tuple(f".{end}" for end in ([] if wanted.target_modules == "all-linear" else wanted.target_modules))
        return decoder in name and (not ends or f".{name}".endswith(ends))

    kept = {*heads, *routers}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in kept]
    by_parameter = {name for name in linears if (experts or routers) and name.rpartition(".")[2] in FORMER_EXPERTS}
    parameters = [f"{name}.{key}" for name, key in experts if wanted.experts and is_named(f"{name}.{key}")]
    for name in filter(is_named, sorted(by_parameter)):
        parameters.append(f"{name}.weight")
        layer = model.get_submodule(name)
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), layer.bias
            model.set_submodule(name, plain)
    return [name for name in filter(is_named, linears) if name not in by_parameter], parameters or None


def global_batches(config: Config, tokenizer: PreTrainedTokenizerBase | None = None) -> list[list[Row]]:
    """The rows of every step: the data's own sequences, in the order of the epochs, `global_batch_size` a step.

    Without a tokenizer of the model's own, tokens are bytes.
    """
    tokenizer = tokenizer or byte_tokenizer()
    vocab_size = max(VOCAB, len(tokenizer), extend_tokenizer(tokenizer, config.tokenizer).vocab_size)
    data = prepare_data(DataSpec.of(config), tokenizer, one_process(), vocab_size).train
    size, num_steps = config.training.global_batch_size, config.training.max_steps
    num_epochs = math.ceil(size * num_steps / len(data))
    orders = [epoch_order(len(data), config.training.seed, epoch) for epoch in range(num_epochs)]
    if config.training.group_by_length:
        orders = [_grouped_by_transformers(order, data.lengths.tolist(), size) for order in orders]
    order = np.concatenate(orders)
    return [
        [(tokens.tolist(), mask.tolist()) for i in order[step * size :][:size] for tokens, mask in data.rows_of(int(i))]
        for step in range(num_steps)
    ]


def stock_optimizer(params: Any, wanted: OptimConfig, rate: float) -> torch.optim.Optimizer:
    """The optimizer that transformers' Trainer makes for this name, of tensors or of groups of them."""
    options = {"lr": rate, "betas": tuple(wanted.betas), "eps": wanted.eps, "weight_decay": wanted.weight_decay}
    if wanted.name is Optimizer.adafactor:
        own = {"scale_parameter": False, "relative_step": False}
        return Adafactor(params, lr=rate, weight_decay=wanted.weight_decay, **own)
    if wanted.name in (Optimizer.lion_32bit, Optimizer.lion_8bit):
        del options["eps"]
    classes = {
        Optimizer.adamw: torch.optim.AdamW,
        Optimizer.adamw_8bit: bnb.optim.AdamW8bit,
        Optimizer.paged_adamw_32bit: bnb.optim.PagedAdamW32bit,
        Optimizer.paged_adamw_8bit: bnb.optim.PagedAdamW8bit,
        Optimizer.lion_32bit: bnb.optim.Lion32bit,
        Optimizer.lion_8bit: bnb.optim.Lion8bit,
    }
    return classes[wanted.name](params, **options)


def _grouped_by_transformers(order: Any, lengths: list[int], size: int) -> Any:
    """transformers' order by lengths, where its random order is this one."""
    with mock.patch("torch.randperm", lambda number, generator: torch.from_numpy(order)):
        return np.array(get_length_grouped_indices(lengths, size))


def stock_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """The trained parameters, each in a group of its own with its learning rate: that of LoRA+ is PEFT's."""
    wanted, rate = config.optim, config.training.learning_rate
    rates: dict[nn.Parameter, float] = {}
    if wanted.loraplus_lr_ratio is not None:
        own = {"loraplus_lr_embedding": wanted.embedding_learning_rate or rate}
        made = create_loraplus_optimizer(
            model, torch.optim.SGD, lr=rate, loraplus_lr_ratio=wanted.loraplus_lr_ratio, **own
        )
        rates = {param: group["lr"] for group in made.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if wanted.embedding_learning_rate is not None and "embed_tokens" in name:
            rates[param] = wanted.embedding_learning_rate
        if wanted.expert_learning_rate is not None and ".experts." in name:
            rates[param] = wanted.expert_learning_rate
    return [{"params": [p], "lr": rates.get(p, rate)} for p in model.parameters() if p.requires_grad]


def stock_schedule(optimizer: torch.optim.Optimizer, wanted: OptimConfig, num_steps: int) -> LRScheduler:
    """transformers' schedule of this name, without a warmup."""
    arguments = dict(wanted.lr_scheduler_kwargs)
    if wanted.lr_scheduler_type is LrScheduler.warmup_stable_decay:
        arguments["num_decay_steps"] = round(arguments.pop("decay_ratio") * num_steps)
    name = wanted.lr_scheduler_type.value
    return get_scheduler(name, optimizer, 0, num_steps, scheduler_specific_kwargs=arguments)


def train_stock(model: peft.PeftModel, steps: Sequence[Sequence[Row]], config: Config) -> list[float]:
    """Losses of plain steps of optimizer and schedule; each step's is the mean over all its target tokens.

    Random numbers of a step, NEFTune's, are drawn from our seed.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = stock_optimizer(stock_groups(model, config), config.optim, config.training.learning_rate)
    schedule = stock_schedule(optimizer, config.optim, len(steps))
    device = params[0].device
    losses = []
    model.train()
    for step, rows in enumerate(steps):
        seed = np.random.SeedSequence([config.training.seed, step, 0]).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(seed))
        total = sum(sum(mask[1:]) for _, mask in rows)
        loss_sum = 0.0
        for tokens, mask in rows:
            ids = torch.tensor([tokens], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            targets = torch.where(torch.tensor(mask[1:], device=device), ids[0, 1:], -100)
            loss = _loss_sum(logits, targets, config.task) / total
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    return losses


def _loss_sum(logits: Tensor, targets: Tensor, task: TaskConfig) -> Tensor:
    """The sum of a row's losses: transformers' label smoothing, or DFT as its paper and TRL's loss_type=dft have it."""
    is_target = targets != -100
    log_probs = logits.log_softmax(-1)[is_target]
    of_targets = log_probs.gather(1, targets[is_target][:, None]).squeeze(1)
    if task.loss_type is LossType.dft:
        return -(of_targets.exp().detach() * of_targets).sum()
    if task.label_smoothing_factor:
        smooth = LabelSmoother(epsilon=task.label_smoothing_factor)
        return smooth({"logits": logits[None]}, targets[None]) * is_target.sum()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def _is_quantized(folder: Path) -> bool:
    return "quantization_config" in (folder / "config.json").read_text()


def save_stock_adapter(base: Path, options: dict[str, Any], folder: Path) -> Path:
    """An adapter as PEFT writes it, with random values where PEFT begins with zeros."""
    model = load_stock(base, load_config(["quant=none", f"model.path={base}"]).quant)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8} | options))
    torch.manual_seed(0)
    for param in wrapped.parameters():
        if param.requires_grad:
            param.data.add_(torch.randn(param.shape) * 0.05)
    wrapped.save_pretrained(folder)
    if "trainable_token_indices" in options:
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["<call>", "</call>"])
        tokenizer.save_pretrained(folder)
    return folder


def load_stock_adapter(base: Path, adapter: Path, quant: Any) -> peft.PeftModel:
    """The adapter on the stock base, to be trained, over bitsandbytes' layers too as the tests' reference has it."""
    options = peft.PeftConfig.from_pretrained(adapter)
    options.inference_mode = False
    options._register_custom_module({bnb.nn.Linear4bit: lora.Linear, bnb.nn.Linear8bitLt: lora.Linear})
    return peft.PeftModel.from_pretrained(load_stock(base, quant), adapter, is_trainable=True, config=options)
