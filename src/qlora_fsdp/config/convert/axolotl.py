"""axolotl's files (docs.axolotl.ai, `axolotl.utils.schemas.config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_fsdp.config.convert.common_settings import (
    BY_ITSELF,
    BY_THE_PLAN,
    MADE_HERE,
    OF_TRAINER,
    SHARDED_HERE,
    TheirSettings,
    convert_adapter,
    convert_batch,
    convert_fsdp,
    convert_held_out,
    convert_length,
    convert_optimizer,
    convert_place,
    convert_quantization,
    convert_saves,
    convert_schedule,
    convert_targets,
    convert_texts,
    is_folder_or_file,
    put_sets,
)
from qlora_fsdp.config.schema import CHAT_TEMPLATES

TEMPLATES = {"llama3": "llama3", "chatml": "chatml", "alpaca": "alpaca"}
OF_TOKENIZER = ("tokenizer_default", "tokenizer_default_fallback_chatml")
LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo")
# Columns by the names of axolotl's settings for them.
COLUMNS = {
    "field_messages": "messages",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_prompt": "prompt",
    "field_completion": "completion",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_label": "label",
    "field_tools": "tools",
}
# Types of pairs, each with the columns that its data sets have.
PAIRS = {
    "intel": {"system": "system", "prompt": "question"},
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"},
}
NOT_OF_A_ROW = {
    "ds_type": "found out by the file's name",
    "shards": "data.split takes a part of the rows: train[:10%]",
    "shards_idx": "data.split takes a part of the rows: train[:10%]",
    "preprocess_shards": MADE_HERE,
    "train_on_eos": "the end of an answer is trained on",
    "train_on_eot": "the end of an answer is trained on",
    "conversation": "data.chat_template says it",
    "roles": "roles of common names are known; data.columns renames fields",
    "message_field_training": "every answer of the assistant is trained on, or by data.loss_on=last the last one",
    "trust_remote_code": "data sets that run code of their own are not loaded",
    "split_thinking": "thoughts are trained on as data.thoughts says",
}
REASONS = {
    **OF_TRAINER,
    "model_type": "the class follows from the model's config.json",
    "tokenizer_type": "the class follows from the tokenizer's files",
    "is_llama_derived_model": "the class follows from the model's config.json",
    "is_mistral_derived_model": "the class follows from the model's config.json",
    "is_falcon_derived_model": "the class follows from the model's config.json",
    "num_labels": "a reward model has one output; task.labels names a classifier's",
    "strict": "unknown settings are always refused",
    "eval_sample_packing": "held-out rows are packed as training's",
    "pad_to_sequence_len": "the end of a sequence is filled up as CUDA graphs need it",
    "dataset_prepared_path": MADE_HERE,
    "dataset_processes": MADE_HERE,
    "dataset_num_proc": MADE_HERE,
    "dataset_keep_in_memory": MADE_HERE,
    "shuffle_merged_datasets": "rows are always shuffled, by training.seed",
    "skip_prepare_dataset": MADE_HERE,
    "special_tokens": "the tokenizer's own count; no padding token is needed",
    "eot_tokens": "answers end as the chat template ends them, which a trial finds out",
    "flash_attention": BY_ITSELF,
    "flash_attn_cross_entropy": BY_ITSELF,
    "flash_attn_rms_norm": BY_ITSELF,
    "flash_attn_fuse_mlp": BY_ITSELF,
    "flex_attention": BY_ITSELF,
    "sdp_attention": BY_ITSELF,
    "xformers_attention": BY_ITSELF,
    "attn_implementation": BY_ITSELF,
    "lora_qkv_kernel": BY_ITSELF,
    "lora_o_kernel": BY_ITSELF,
    "lora_mlp_kernel": BY_ITSELF,
    "plugins": BY_ITSELF,
    "liger_rope": BY_ITSELF,
    "liger_rms_norm": BY_ITSELF,
    "liger_glu_activation": BY_ITSELF,
    "liger_layer_norm": BY_ITSELF,
    "liger_cross_entropy": BY_ITSELF,
    "liger_fused_linear_cross_entropy": BY_ITSELF,
    "cut_cross_entropy": BY_ITSELF,
    "low_cpu_mem_usage": "each rank reads and quantizes its own rows of the files",
    "qlora_sharded_model_loading": "each rank reads and quantizes its own rows of the files",
    "activation_checkpointing": BY_THE_PLAN,
    "lora_on_cpu": SHARDED_HERE,
    "fsdp_version": SHARDED_HERE,
    "fsdp_final_state_dict_type": SHARDED_HERE,
    "ddp": SHARDED_HERE,
    "dp_shard_size": SHARDED_HERE,
    "local_rank": "the launcher says it",
    "early_stopping_patience": "set training.early_stopping_patience, which counts evaluations",
    "debug": "`qlora-fsdp preview` shows rows as the model sees them",
    "wandb_watch": "not here",
    "wandb_log_model": "set tracking.log_adapter=true",
    "wandb_run_id": "a resumed run knows its own",
    "use_wandb": "tracking.report_to says it",
    "unfrozen_parameters": "adapters are trained, and what lora.modules_to_save names",
    "relora": "not here",
    "relora_steps": "not here",
    "output_dir_overwrite": "type run.overwrite=true",
    "sample_packing_bin_size": "rows are packed by best-fit decreasing",
    "sample_packing_group_size": "rows are packed by best-fit decreasing",
    "multipack_real_batches": "packed sequences are separate rows of a micro-batch",
    "val_set_size_seed": "data.seed",
    "peft_use_loftq": "set lora.init_lora_weights=loftq, which is LoftQ's first iteration",
    "loftq_config": "lora.init_lora_weights=loftq is LoftQ's first iteration",
    "embeddings_skip_upcast": "nothing is cast up here",
    "gpu_memory_limit": "set memory.target_gib",
    "eval_table_size": "tracking.num_generations writes completions at evaluations",
    "eval_max_new_tokens": "tracking.generation_tokens",
}


def convert_axolotl(theirs: TheirSettings) -> None:
    """Converts axolotl's settings. What they leave open has axolotl's defaults."""
    theirs.rename(
        {
            "base_model": "model.path",
            "revision_of_model": "model.revision",
            "tokenizer_config": "model.tokenizer_path",
            "sequence_len": "training.max_length",
            "seed": "training.seed",
            "learning_rate": "training.learning_rate",
            "tokens": "tokenizer.add_tokens",
            "lora_model_dir": "lora.start",
            "hub_model_id": "hub.repo",
            "resume_from_checkpoint": "checkpoint.resume",
            "peft_use_dora": "lora.use_dora",
            "peft_use_rslora": "lora.use_rslora",
            "lora_rank_pattern": "lora.rank_pattern",
            "lora_alpha_pattern": "lora.alpha_pattern",
            "default_system_message": "data.system_prompt",
        }
    )
    theirs.take("base_model_config")  # the same place, in older files
    theirs.take("auto_resume_from_checkpoints")  # what always is done here
    if "hub.repo" in theirs.settings:
        theirs.put("hub.push", True)
    rate = theirs.settings.get("training.learning_rate")
    if rate is not None:
        theirs.put("training.learning_rate", float(rate))  # `2e-4`, which YAML reads as text
    if theirs.settings.get("model.tokenizer_path") == theirs.settings.get("model.path"):
        theirs.settings.pop("model.tokenizer_path", None)
    _convert_adapter(theirs)
    _convert_task(theirs)
    _convert_data(theirs)
    convert_batch(theirs, theirs.take("micro_batch_size", 1), theirs.take("gradient_accumulation_steps", 1))
    convert_length(theirs, theirs.take("num_epochs", 1.0), theirs.take("max_steps"))
    convert_optimizer(theirs, "optimizer", str(theirs.take("optimizer", "adamw_torch_fused")))
    _convert_schedule(theirs)
    for name in ("evals_per_epoch", "saves_per_epoch"):
        if value := theirs.take(name):
            key = "training.eval_every_steps" if name.startswith("evals") else "checkpoint.every_steps"
            theirs.leave_out(name, value, f"set {key} to a number of steps")
    convert_saves(theirs, theirs.take("eval_steps"), theirs.take("save_steps"))
    if theirs.take("sample_packing", False) is not True:
        theirs.put("training.packing", False, "sample_packing is off there; auto packs rows, and is faster")
    _convert_trackers(theirs)
    _convert_fsdp(theirs)
    if theirs.take("fp16") or theirs.take("float16"):
        theirs.leave_out("fp16", True, "float16 needs loss scaling; bfloat16 is taken where the GPU has it")
    theirs.take("float32")
    theirs.take("bfloat16")
    convert_texts(theirs)
    theirs.drop(REASONS)
    theirs.finish()


def _convert_adapter(theirs: TheirSettings) -> None:
    adapter = theirs.take("adapter", "")
    convert_quantization(
        theirs, bool(theirs.take("load_in_4bit", adapter == "qlora")), bool(theirs.take("load_in_8bit", False))
    )
    if not adapter:
        theirs.leave_out("adapter", None, "the whole model was trained there; here an adapter with the defaults is")
        return
    if adapter not in ("lora", "qlora"):
        theirs.leave_out("adapter", adapter, "LoRA is the only kind here")
    convert_adapter(theirs, rank=8, alpha=16, dropout=0.0)
    targets = theirs.take("lora_target_modules")
    if theirs.take("lora_target_linear", False):
        targets = "all-linear"
    convert_targets(theirs, targets)
    if parameters := theirs.take("lora_target_parameters"):
        theirs.put("lora.experts", True)
        theirs.leave_out("lora_target_parameters", parameters, "lora.experts=true adapts each expert")
    theirs.take("lora_fan_in_fan_out")
    init = theirs.take("peft_init_lora_weights")
    if init is not None:
        theirs.put("lora.init_lora_weights", init)


def _convert_task(theirs: TheirSettings) -> None:
    loss = theirs.take("rl")
    if loss is not None and loss not in LOSSES:
        reason = "not trained here" if loss != "grpo" else "not converted: docs/grpo.md has the settings of task=grpo"
        theirs.leave_out("rl", loss, f"{reason}; supervised training is set")
    elif loss is not None:
        theirs.put("task.name", "preference")
        theirs.put("preference.loss", loss)
    if theirs.take("reward_model", False):
        theirs.put("task.name", "reward")
    theirs.rename(
        {
            "rl_beta": "preference.beta",
            "dpo_label_smoothing": "preference.label_smoothing",
            "simpo_gamma": "preference.simpo_gamma",
            "cpo_alpha": "preference.sft_weight",
            "rpo_alpha": "preference.sft_weight",
            "orpo_alpha": "preference.beta",
            "kto_desirable_weight": "preference.desirable_weight",
            "kto_undesirable_weight": "preference.undesirable_weight",
            "precompute_ref_log_probs": "preference.precompute",
        }
    )
    theirs.drop({"dpo_use_weighting": "not here", "dpo_padding_free": "answers are packed here", "trl": "not here"})


def _convert_data(theirs: TheirSettings) -> None:
    chat_template = theirs.take("chat_template")
    inline = theirs.take("chat_template_jinja")
    if inline:
        theirs.leave_out("chat_template_jinja", inline, "write it to a file, and set data.chat_template to that")
    if kwargs := theirs.take("chat_template_kwargs"):
        theirs.put("data.template_arguments", dict(kwargs))
    sets = theirs.take("datasets", [])
    converted = [_convert_set(theirs, dict(each), chat_template) for each in sets]
    pretraining = theirs.take("pretraining_dataset")
    if pretraining:
        listed = pretraining if isinstance(pretraining, list) else [pretraining]
        named = [each if isinstance(each, Mapping) else {"path": each} for each in listed]
        converted += [_convert_set(theirs, {"type": "completion", **each}, None) for each in named]
        theirs.put("data.streaming", True)
    put_sets(theirs, converted)
    held_out = [dict(each) for each in theirs.take("test_datasets", [])]
    if held_out:
        first = _convert_set(theirs, held_out[0], chat_template)
        theirs.put("data.eval_path", first["path"])
        if first.get("split", "train") != "train":
            theirs.put("data.eval_split", first["split"])
        if len(held_out) > 1:
            others = [each.get("path") for each in held_out[1:]]
            theirs.leave_out("test_datasets", others, "data.eval_path takes several files, or one data set of the hub")
    convert_held_out(theirs, "val_set_size")
    if theirs.take("train_on_inputs", False):
        theirs.put("data.loss_on", "all")
    theirs.rename({"dataset_exact_deduplication": "data.deduplicate"})
    if strategy := theirs.take("excess_length_strategy"):
        words = {"drop": "skip", "raise": "error", "truncate": "truncate"}
        theirs.put("data.bad_rows", words.get(str(strategy), "truncate"))


def _convert_set(theirs: TheirSettings, values: dict[str, Any], chat_template: Any) -> dict[str, Any]:
    """A data set in the words of our data.mix, and its path."""
    own = TheirSettings(values)
    path = str(own.take("path", ""))
    files = own.take("data_files")
    if files:
        listed = [files] if isinstance(files, str) else list(files)
        path = ",".join(listed) if is_folder_or_file(listed[0]) else f"{path}/{listed[0]}"
    kind = own.take("type", "alpaca")
    found: dict[str, Any] = {"path": path, "name": own.take("name"), "split": own.take("split", "train")}
    columns: dict[str, str] = {}
    if isinstance(kind, Mapping):
        own.values |= kind
        if "field_input" not in kind and str(kind.get("format", "")).strip() == "{instruction}":
            columns |= {"prompt": own.take("field_instruction", "instruction")}
            columns |= {"completion": own.take("field_output", "output")}
            own.take("format")
        reason = "Alpaca's words stand around instructions; write the words of a format into the rows' prompts"
        own.drop({"format": reason, "no_input_format": ""})
        own.drop({"field_system": "set data.columns={system: NAME}", "system_prompt": "set data.system_prompt"})
    else:
        words = str(kind).split(".")
        last = words[-1]
        columns |= PAIRS.get(last, {})
        template = own.take("chat_template", chat_template)
        if words[0] in TEMPLATES and (len(words) > 1 or words[0] != "alpaca"):
            template = words[0]
        found["chat_template"] = _template(theirs, template)
        if words[0] == "completion":
            found["format"] = "text"
            columns |= {"text": own.take("field", "text")}
        elif words[0] in ("chat_template", "sharegpt"):
            columns |= _names_of_messages(own)
        elif words[0] == "input_output":
            theirs.leave_out("datasets.type", kind, "segments with labels of their own: make them messages")
    for name, column in COLUMNS.items():
        if value := own.take(name):
            columns[column] = value
    roles = own.take("roles_to_train")
    if roles is not None and list(roles) not in ([], ["assistant"], ["gpt"], ["assistant", "gpt"]):
        theirs.leave_out(
            "datasets.roles_to_train", roles, "the assistant's turns are trained on, or by data.loss_on all"
        )
    found["columns"] = {ours: column for ours, column in columns.items() if ours != column}
    own.drop(NOT_OF_A_ROW)
    own.finish()
    theirs.left_out += [(f"datasets.{name}", value, reason) for name, value, reason in own.left_out if reason]
    return {name: value for name, value in found.items() if value}


def _names_of_messages(own: TheirSettings) -> dict[str, str]:
    """The columns of conversations: `conversations` in older files, and `from` and `value`, are known by themselves."""
    mapping = dict(own.take("message_property_mappings", {}))
    role = own.take("message_field_role") or mapping.get("role")
    content = own.take("message_field_content") or mapping.get("content")
    names = {"role": role, "content": content}
    found = {ours: name for ours, name in names.items() if name}
    field = own.take("field_messages")
    if field:
        found["messages"] = field
    if found == {"role": "from", "content": "value", "messages": "conversations"}:
        return {}  # ShareGPT's, which are known
    return found


def _template(theirs: TheirSettings, name: Any) -> str | None:
    """The name of a template that ships here; None for the tokenizer's own."""
    if name is None or name in OF_TOKENIZER:
        return None
    if TEMPLATES.get(str(name)) in CHAT_TEMPLATES:
        return TEMPLATES[str(name)]
    told = ("chat_template", name, "the tokenizer's own is taken; data.chat_template takes a Jinja file")
    if told not in theirs.left_out:
        theirs.left_out.append(told)
    return None


def _convert_schedule(theirs: TheirSettings) -> None:
    ratio = theirs.take("cosine_min_lr_ratio")
    if ratio:
        theirs.put("optim.lr_scheduler_kwargs", {"min_lr_rate": float(ratio)})
        theirs.take("lr_scheduler")
        theirs.values["lr_scheduler"] = "cosine_with_min_lr"
    convert_schedule(theirs, "lr_scheduler", "cosine")
    theirs.drop({"cosine_constant_lr_ratio": "set optim.lr_scheduler_type=warmup_stable_decay"})


def _convert_trackers(theirs: TheirSettings) -> None:
    trackers = [name for name in ("wandb", "mlflow", "trackio") if theirs.values.get(f"{name}_project")]
    if theirs.values.get("mlflow_experiment_name"):
        trackers.append("mlflow")
    if theirs.take("use_tensorboard", False):
        trackers.append("tensorboard")
    if trackers:
        theirs.put("tracking.report_to", trackers)
    for name in ("mlflow_experiment_name", "trackio_project", "wandb_project"):
        theirs.rename({name: "tracking.project"})
    mode = theirs.take("wandb_mode")
    if mode in ("offline", "disabled"):
        theirs.put("tracking.wandb_mode", mode)
    theirs.drop({"mlflow_tracking_uri": "export MLFLOW_TRACKING_URI", "wandb_entity": "export WANDB_ENTITY"})
    theirs.drop({"comet_project_name": "not here"})
    convert_place(theirs, theirs.take("output_dir"), theirs.take("wandb_name") or theirs.take("wandb_run_name"))


def _convert_fsdp(theirs: TheirSettings) -> None:
    if "offload" in theirs.take("fsdp", []):
        theirs.put("fsdp.cpu_offload", True)
    rest = convert_fsdp(theirs)
    if rest:
        theirs.leave_out("fsdp_config", rest, SHARDED_HERE)
    degree = theirs.take("sequence_parallel_degree") or theirs.take("context_parallel_size")
    if degree and degree > 1:
        theirs.put("distributed.context_parallel", int(degree))
    theirs.drop({"ring_attn_func": "sequences are shared by all-to-all (docs/long-rows.md)", "heads_k_stride": ""})
