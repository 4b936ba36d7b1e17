"""LLaMA-Factory's files (`llamafactory.hparams`), with the data sets that its dataset_info.json names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.config.convert.common_settings import (
    BY_ITSELF,
    BY_THE_PLAN,
    MADE_HERE,
    OF_TRAINER,
    TheirSettings,
    convert_arguments,
    convert_held_out,
    convert_names,
    convert_quantization,
    convert_targets,
    finish,
    put_sets,
)

INFO_FILE = "dataset_info.json"
MAX_INFO_BYTES = 2**24
LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto_pair": "kto"}
STAGES = {"sft": "causal_lm", "pt": "causal_lm", "rm": "reward", "dpo": "preference", "kto": "preference"}
# Columns of dataset_info.json by ours.
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "messages",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
REASONS = {
    **OF_TRAINER,
    "flash_attn": BY_ITSELF,
    "enable_liger_kernel": BY_ITSELF,
    "use_unsloth": BY_ITSELF,
    "use_unsloth_gc": BY_THE_PLAN,
    "disable_gradient_checkpointing": BY_THE_PLAN,
    "upcast_layernorm": "adapters and optimizer state are float32",
    "upcast_lmhead_output": "the loss is computed in float32",
    "pure_bf16": "adapters and optimizer state stay float32",
    "overwrite_cache": MADE_HERE,
    "preprocessing_num_workers": MADE_HERE,
    "preprocessing_batch_size": MADE_HERE,
    "tokenized_path": MADE_HERE,
    "data_shared_file_system": MADE_HERE,
    "plot_loss": "report.html has the curves",
    "predict_with_generate": "`qlora-fsdp generate` and `predict` write answers to a file of rows",
    "do_predict": "`qlora-fsdp predict` does that",
    "create_new_adapter": "lora.start trains an adapter on",
    "ref_model": "the reference is the base, or the adapter of lora.start",
    "ref_model_quantization_bit": "the reference is the base, or the adapter of lora.start",
    "reward_model": "PPO is not here",
    "pissa_init": "it would start from the full-precision weights",
    "pissa_iter": "it would start from the full-precision weights",
    "pissa_convert": "it would start from the full-precision weights",
    "quantization_method": "formats here are nf4, fp4 and int8, quantized while the files are read",
    "quantization_device_map": "formats here are nf4, fp4 and int8, quantized while the files are read",
    "use_galore": "not here",
    "use_apollo": "not here",
    "use_badam": "not here",
    "use_muon": "not here",
    "use_llama_pro": "not here",
    "shift_attn": "not here",
    "mixture_of_depths": "not here",
    "freeze_vision_tower": "the text part is trained",
    "freeze_multi_modal_projector": "the text part is trained",
    "freeze_language_model": "the text part is trained",
    "image_max_pixels": "the text part is trained",
    "video_max_pixels": "the text part is trained",
    "use_fast_tokenizer": "always",
    "resize_vocab": "tokenizer.add_tokens trains the rows of new tokens",
    "new_special_tokens_config": "tokenizer.add_special_tokens has their names",
    "low_cpu_mem_usage": "each rank reads and quantizes its own rows of the files",
    "export_dir": "`qlora-fsdp merge` makes one model of base and adapter",
    "export_size": "`qlora-fsdp merge` makes one model of base and adapter",
    "export_device": "`qlora-fsdp merge` makes one model of base and adapter",
    "ray_run_name": "not here",
    "ray_storage_path": "not here",
    "ray_num_workers": "not here",
    "placement_strategy": "not here",
    "resources_per_worker": "not here",
    "use_swanlab": "trackers here are wandb, tensorboard, mlflow and trackio",
    "swanlab_project": "trackers here are wandb, tensorboard, mlflow and trackio",
    "swanlab_run_name": "trackers here are wandb, tensorboard, mlflow and trackio",
    "infer_backend": "for use, not for training",
    "eval_on_each_dataset": "held-out rows are evaluated together",
    "eval_num_beams": "for use, not for training",
    "compute_accuracy": "not here",
    "moe_aux_loss_coef": "set training.router_aux_loss_coef",
    "hf_hub_token": "log in by `hf auth login`",
    "default_system": "set data.system_prompt",
}


def convert_llama_factory(theirs: TheirSettings, folder: Path) -> None:
    """Converts LLaMA-Factory's settings. What they leave open has its defaults, which are mostly transformers'.

    Args:
        theirs: the settings.
        folder: of the file, from which dataset_info.json is looked for, and from the current folder.
    """
    own_names = {
        "adapter_name_or_path": "lora.start",
        "max_samples": "data.max_rows",
        "buffer_size": "data.buffer_rows",
        "add_tokens": "tokenizer.add_tokens",
        "add_special_tokens": "tokenizer.add_special_tokens",
    }
    convert_names(theirs, own_names)
    theirs.put("training.max_length", theirs.take("cutoff_len", 2048))
    theirs.put("training.learning_rate", float(theirs.take("learning_rate", 5e-5)))
    is_text = theirs.values.get("stage") == "pt"
    _convert_stage(theirs)
    _convert_adapter(theirs)
    _convert_rope(theirs)
    _convert_data(theirs, folder, is_text)
    convert_arguments(theirs, num_epochs=3.0, optimizer="adamw_torch")
    packs = bool(theirs.take("packing", False)) or bool(theirs.take("neat_packing", False))
    finish(theirs, packs, REASONS)


def _convert_stage(theirs: TheirSettings) -> None:
    stage = str(theirs.take("stage", "sft"))
    if stage not in STAGES:
        theirs.leave_out("stage", stage, "not trained here: supervised training is set")
    task = STAGES.get(stage, "causal_lm")
    if task != "causal_lm":
        theirs.put("task.name", task)
    elif theirs.take("use_dft_loss", False):
        theirs.put("task.loss_type", "dft")
    loss = theirs.take("pref_loss", "sigmoid")
    if stage == "dpo":
        theirs.put("preference.loss", LOSSES.get(loss, "dpo"))
        if loss not in LOSSES:
            theirs.leave_out("pref_loss", loss, "not here: dpo is taken")
    elif stage == "kto":
        theirs.put("preference.loss", "kto")
    if task == "preference":
        theirs.put("preference.beta", theirs.take("pref_beta", 0.1))
    theirs.rename(
        {
            "pref_ftx": "preference.sft_weight",
            "dpo_label_smoothing": "preference.label_smoothing",
            "simpo_gamma": "preference.simpo_gamma",
            "kto_chosen_weight": "preference.desirable_weight",
            "kto_rejected_weight": "preference.undesirable_weight",
        }
    )


def _convert_adapter(theirs: TheirSettings) -> None:
    kind = theirs.take("finetuning_type", "lora")
    if kind != "lora":
        theirs.leave_out("finetuning_type", kind, "LoRA is the only kind here")
    rank = int(theirs.take("lora_rank", 8))
    theirs.put("lora.r", rank)
    theirs.put("lora.lora_alpha", int(theirs.take("lora_alpha", 2 * rank)))
    theirs.put("lora.lora_dropout", float(theirs.take("lora_dropout", 0.0)))
    convert_targets(theirs, theirs.take("lora_target", "all"))
    more = theirs.take("additional_target")
    if more:
        names = more.split(",") if isinstance(more, str) else list(more)
        theirs.put("lora.modules_to_save", [name.strip() for name in names])
    bits = theirs.take("quantization_bit")
    convert_quantization(theirs, bits == 4, bits == 8)
    if bits not in (None, 4, 8):
        theirs.leave_out("quantization_bit", bits, "formats here have 4 or 8 bits: none is set")
    theirs.rename(
        {"quantization_type": "quant.bnb_4bit_quant_type", "double_quantization": "quant.bnb_4bit_use_double_quant"}
    )


def _convert_rope(theirs: TheirSettings) -> None:
    kind = theirs.take("rope_scaling")
    if kind:
        reason = "set model.rope_scaling with its factor, such as {rope_type: yarn, factor: 4.0}"
        theirs.leave_out("rope_scaling", kind, reason)


def _convert_data(theirs: TheirSettings, folder: Path, is_text: bool) -> None:
    place = str(theirs.take("dataset_dir", "data"))
    info = _read_info(place, folder)
    names = _names(theirs.take("dataset"))
    sets = [_describe(theirs, name, place, info) for name in names]
    if theirs.values.get("template") in ("default", "empty"):
        for each in sets:
            each.pop("format", None)
    if is_text:
        for each in sets:  # what a column is called for instructions is the text
            column = each.pop("columns", {}).get("instruction", "text")
            each["format"] = "text"
            if column != "text":
                each["columns"] = {"text": column}
    strategy = str(theirs.take("mix_strategy", "concat"))
    weights = theirs.take("interleave_probs")
    if weights and len(sets) > 1:
        parts = [float(part) for part in weights.split(",")] if isinstance(weights, str) else list(weights)
        mix = {}
        for each, weight in zip(sets, parts, strict=False):
            mix[each["path"]] = {"weight": weight, **{key: value for key, value in each.items() if key != "path"}}
        theirs.put("data.mix", mix)
        if strategy == "interleave_under":
            theirs.put("data.mix_until", "shortest")
    else:
        put_sets(theirs, sets)
    held_out = [_describe(theirs, name, place, info) for name in _names(theirs.take("eval_dataset"))]
    if held_out:
        paths = [each["path"] for each in held_out]
        theirs.put("data.eval_path", paths[0] if len(paths) == 1 else paths)
    convert_held_out(theirs, "val_size")
    if theirs.take("train_on_prompt", False):
        theirs.put("data.loss_on", "all")
    elif theirs.take("mask_history", False):
        theirs.put("data.loss_on", "last")
    if theirs.take("streaming", False):
        theirs.put("data.streaming", True)
    template = theirs.take("template")
    if template not in (None, "default", "empty"):
        reason = "the tokenizer's own chat template is taken; data.chat_template takes a Jinja file"
        theirs.leave_out("template", template, reason)
    thinks = theirs.values.pop("enable_thinking", None)
    if thinks is not None:
        theirs.put("data.template_arguments", {"enable_thinking": bool(thinks)})


def _names(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else list(value or [])
    return [str(part).strip() for part in parts]


def _read_info(place: str, folder: Path) -> Mapping[str, Any] | None:
    """What dataset_info.json says; None where it is not here. It is looked for beside the file and here."""
    for start in (Path(), folder, *folder.resolve().parents):
        file = start / place / INFO_FILE
        if file.is_file():
            return read_json_object(file, MAX_INFO_BYTES)
    return None


def _describe(theirs: TheirSettings, name: str, place: str, info: Mapping[str, Any] | None) -> dict[str, Any]:
    """A data set in the words of our data.mix, and its path."""
    known = None if info is None else info.get(name)
    if not isinstance(known, Mapping):
        where = f"{place}/{INFO_FILE} is not here" if info is None else f"{place}/{INFO_FILE} does not name it"
        theirs.leave_out("dataset", name, f"{where}: set data.path to its file or its name on the hub")
        return {"path": f"{place}/{name}.json"}
    found: dict[str, Any] = {"path": f"{place}/{known['file_name']}"} if "file_name" in known else {}
    if "hf_hub_url" in known:
        found = {"path": str(known["hf_hub_url"])}
    if not found:
        found = {"path": f"{place}/{name}.json"}
        theirs.leave_out("dataset", name, f"{place}/{INFO_FILE} has neither file_name nor hf_hub_url of it")
    is_sharegpt = known.get("formatting") == "sharegpt"
    columns = dict(known.get("columns", {}))
    default = {"messages": "conversations"} if is_sharegpt else {"prompt": "instruction", "response": "output"}
    renamed = {}
    for key, column in {**default, **columns}.items():
        ours = COLUMNS.get(key)
        if ours is None:
            theirs.leave_out(f"dataset_info.{name}.columns", {key: column}, "no column here")
        elif ours != column and column != "conversations":
            renamed[ours] = column
    tags = dict(known.get("tags", {}))
    if (role := tags.get("role_tag", "from" if is_sharegpt else None)) not in (None, "from", "role"):
        renamed["role"] = role
    if (content := tags.get("content_tag", "value" if is_sharegpt else None)) not in (None, "value", "content"):
        renamed["content"] = content
    found |= {"name": known.get("subset"), "split": known.get("split"), "max_rows": known.get("num_samples")}
    found["columns"] = renamed
    if not is_sharegpt and not known.get("ranking") and "kto_tag" not in columns:
        found["format"] = "messages"  # an instruction and its output are two turns of the chat template there
    return {key: value for key, value in found.items() if value}
