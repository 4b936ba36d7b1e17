"""TRL's files: what `trl sft --config` and `trl dpo --config` read, and those of the alignment handbook."""

from __future__ import annotations

from typing import Any

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.convert.common_settings import (
    BY_ITSELF,
    MADE_HERE,
    OF_TRAINER,
    TheirSettings,
    convert_adapter,
    convert_arguments,
    convert_names,
    convert_quantization,
    convert_targets,
    finish,
    is_folder_or_file,
    put_sets,
)

OF_ANSWERS = ("reward_funcs", "num_generations", "rloo_k", "use_vllm", "vllm_mode")  # of GRPO's and RLOO's files alone
LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust"}
# Trainer: learning rate, epochs and longest row that its config has where a file names none (TRL 1.x).
DEFAULTS = {
    "sft": (2e-5, 3.0, 1024),
    "dpo": (1e-6, 3.0, 1024),
    "kto": (1e-6, 3.0, 1024),
    "reward": (1e-4, 1.0, 1024),
}
REASONS = {
    **OF_TRAINER,
    "torch_dtype": "bfloat16 where the GPU has it (training.precision)",
    "dtype": "bfloat16 where the GPU has it (training.precision)",
    "attn_implementation": BY_ITSELF,
    "use_liger": BY_ITSELF,
    "padding_free": "packed rows need no padding",
    "packing_strategy": "rows are packed whole, by best-fit decreasing",
    "eval_packing": "held-out rows are packed as training's",
    "pad_to_multiple_of": "the end of a sequence is filled up as CUDA graphs need it",
    "pad_token": "no padding token is needed",
    "eos_token": "answers end as the chat template ends them, which a trial finds out",
    "dataset_num_proc": MADE_HERE,
    "preprocessing_num_workers": MADE_HERE,
    "dataset_kwargs": MADE_HERE,
    "dataset_batch_size": MADE_HERE,
    "model_init_kwargs": "quant.* and model.* say it",
    "bnb_4bit_quant_storage": "storage is bfloat16, of which no number depends",
    "max_prompt_length": "a row is cut as a whole (data.bad_rows, training.max_length)",
    "max_completion_length": "a row is cut as a whole (data.bad_rows, training.max_length)",
    "truncation_mode": "a row is cut at its end (data.bad_rows)",
    "generate_during_eval": "set tracking.num_generations",
    "gradient_checkpointing_use_reentrant": "the memory plan chooses (memory.activations)",
    "disable_dropout": "set lora.lora_dropout=0",
    "reference_free": "not here",
    "f_divergence_type": "the reverse KL divergence is the only one here",
    "sync_ref_model": "not here",
    "loss_weights": "one loss is trained",
    "label_pad_token_id": "nothing to set",
    "lora_task_type": "task.name says it",
    "log_completions": "set tracking.num_generations",
    "hub_private_repo": "a new repository is private unless hub.private=false",
    "auto_insert_empty_system_msg": "set data.system_prompt",
    "model_adapter_name": "nothing to set",
    "ref_adapter_name": "nothing to set",
    "use_logits_to_keep": "the loss is computed where there are targets",
    "ignore_bias_buffers": "nothing to set",
    "average_tokens_across_devices": "a step's loss is the mean over all its targets, on any number of GPUs",
}


def convert_trl(theirs: TheirSettings, trainer: str) -> None:
    """Converts TRL's settings. What they leave open has the defaults of TRL's config of this trainer.

    Args:
        theirs: the settings.
        trainer: `sft`, `dpo`, `kto` or `reward`: which of TRL's commands the file was for.
    """
    rate, epochs, longest = DEFAULTS[trainer]
    convert_names(theirs, {"tokenizer_name_or_path": "model.tokenizer_path"})
    theirs.put("training.max_length", theirs.take("max_length", theirs.take("max_seq_length", longest)))
    theirs.put("training.learning_rate", float(theirs.take("learning_rate", rate)))
    _convert_task(theirs, trainer)
    _convert_adapter(theirs)
    _convert_data(theirs)
    convert_arguments(theirs, epochs, optimizer="adamw_torch_fused")
    packs = trainer != "sft" or bool(theirs.take("packing", False))
    finish(theirs, packs, REASONS)


def find_trainer(values: dict[str, Any]) -> str:
    """Which of TRL's trainers a file is for, by the settings that only one has.

    Raises:
        ConfigError: it is for GRPO or RLOO.
    """
    if found := [name for name in OF_ANSWERS if name in values]:
        fix = "Type task=grpo with its settings, which have TRL's names (docs/grpo.md)."
        raise ConfigError([Problem(found[0], "is of GRPO or RLOO, whose files are not converted.", fix)])
    if "desirable_weight" in values or "undesirable_weight" in values:
        return "kto"
    if "center_rewards_coefficient" in values:
        return "reward"
    of_pairs = ("beta", "precompute_ref_log_probs", "rpo_alpha", "label_smoothing", "max_prompt_length")
    return "dpo" if any(name in values for name in of_pairs) else "sft"


def _convert_task(theirs: TheirSettings, trainer: str) -> None:
    kind = theirs.take("loss_type", "nll" if trainer == "sft" else "sigmoid")
    losses = [kind] if isinstance(kind, str) else list(kind)
    if trainer == "sft":
        if losses == ["dft"]:
            theirs.put("task.loss_type", "dft")
        elif losses != ["nll"]:
            theirs.leave_out("loss_type", kind, "the loss of every target counts alike here")
        return
    if trainer == "reward":
        theirs.put("task.name", "reward")
        theirs.drop({"center_rewards_coefficient": "not here"})
        return
    theirs.put("task.name", "preference")
    if trainer == "kto":
        theirs.put("preference.loss", "kto")
    else:
        theirs.put("preference.loss", LOSSES.get(losses[0], "dpo"))
        others = [loss for loss in losses if loss not in LOSSES]
        if others:
            theirs.leave_out("loss_type", others, f"not here: {LOSSES.get(losses[0], 'dpo')} is taken")
    theirs.put("preference.beta", theirs.take("beta", 0.1))
    theirs.rename(
        {
            "label_smoothing": "preference.label_smoothing",
            "rpo_alpha": "preference.sft_weight",
            "precompute_ref_log_probs": "preference.precompute",
            "desirable_weight": "preference.desirable_weight",
            "undesirable_weight": "preference.undesirable_weight",
        }
    )


def _convert_adapter(theirs: TheirSettings) -> None:
    if not theirs.take("use_peft", False):
        theirs.leave_out("use_peft", False, "the whole model was trained there; here an adapter is")
    convert_adapter(theirs, rank=16, alpha=32, dropout=0.05)
    convert_targets(theirs, theirs.take("lora_target_modules"))
    if parameters := theirs.take("lora_target_parameters"):
        theirs.leave_out("lora_target_parameters", parameters, "lora.experts=true adapts each expert")
    convert_quantization(theirs, bool(theirs.take("load_in_4bit", False)), bool(theirs.take("load_in_8bit", False)))
    if theirs.settings["quant.load_in_4bit"]:
        theirs.put("quant.bnb_4bit_quant_type", theirs.take("bnb_4bit_quant_type", "nf4"))
        theirs.put("quant.bnb_4bit_use_double_quant", bool(theirs.take("use_bnb_nested_quant", False)))


def _convert_data(theirs: TheirSettings) -> None:
    mixer = theirs.take("dataset_mixer")
    splits = theirs.take("dataset_splits", [])
    sets = [_describe(theirs, dict(each)) for each in theirs.take("datasets", [])]
    name = theirs.take("dataset_name")
    mixed = theirs.take("dataset_mixture", {})
    sets += [_describe(theirs, dict(each)) for each in dict(mixed).get("datasets", [])]
    if dict(mixed).get("test_split_size"):
        theirs.put("data.eval_fraction", float(mixed["test_split_size"]))
    if name:
        found = {
            "path": str(name),
            "name": theirs.take("dataset_config"),
            "split": theirs.take("dataset_train_split", "train"),
        }
        sets.append({key: value for key, value in found.items() if value})
    if mixer:
        train = next((split for split in splits if "train" in str(split)), "train")
        theirs.put("data.mix", {path: {"weight": float(part), "split": train} for path, part in dict(mixer).items()})
        theirs.remarks["data.mix"] = "weights are shares of the rows; there each was a part of its data set"
        name = next(iter(mixer)) if len(mixer) == 1 else None
    else:
        put_sets(theirs, sets)
    test = theirs.take("dataset_test_split")
    evaluates = theirs.values.get("eval_strategy", theirs.values.get("evaluation_strategy", "no")) != "no"
    if name and evaluates and is_folder_or_file(str(name)):
        reason = "a file has no second split: set data.eval_path, or data.eval_fraction to hold rows out of it"
        theirs.leave_out("dataset_test_split", test or "test", reason)
    elif name and evaluates:
        theirs.put("data.eval_path", str(name))
        theirs.put("data.eval_split", test or next((split for split in splits if "test" in str(split)), "test"))
    columns = {"text": theirs.take("dataset_text_field", "text")}
    if columns["text"] != "text":
        theirs.put("data.columns", columns)
    if theirs.take("dataset_streaming", False):
        theirs.put("data.streaming", True)
    if theirs.take("completion_only_loss") is False:
        theirs.put("data.loss_on", "all")
    if theirs.take("assistant_only_loss") is False:
        theirs.put("data.loss_on", "all")
    template = theirs.take("chat_template") or theirs.take("chat_template_path")
    if template:
        theirs.leave_out(
            "chat_template", template, "the tokenizer's own is taken; data.chat_template takes a Jinja file"
        )


def _describe(theirs: TheirSettings, values: dict[str, Any]) -> dict[str, Any]:
    """A data set in the words of our data.mix, and its path."""
    own = TheirSettings(values)
    found: dict[str, Any] = {
        "path": str(own.take("path", own.take("id", ""))),
        "name": own.take("name", own.take("config")),
        "split": own.take("split", "train"),
    }
    files = own.take("data_files")
    if files:
        found["path"] = files if isinstance(files, str) else next(iter(files))
    own.drop({"columns": "every row has only the columns that its form needs", "weight": "set it in data.mix"})
    own.drop({"data_dir": "set data.path to the folder"})
    own.finish()
    theirs.left_out += [(f"datasets.{name}", value, reason) for name, value, reason in own.left_out]
    return {key: value for key, value in found.items() if value}
