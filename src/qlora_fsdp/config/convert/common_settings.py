"""What the projects have in common, because all are built on transformers, PEFT and bitsandbytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qlora_fsdp.config.schema import LrScheduler, Optimizer

TEXTS = ("name", "path", "dir", "model", "revision", "dataset", "template", "project", "prompt", "field")  # in names
NOT_KNOWN = "not known here, and left out"


@dataclass
class TheirSettings:
    """The settings of a file, of which each is taken once.

    Attributes:
        values: the file's, of which those that were not taken yet are left.
        gpus: GPUs that the run had there: batch sizes are of each.
        settings: what comes of them, by our keys.
        remarks: beside these, by our keys: what a reader has to know of the value.
        left_out: what has no counterpart: name, value and reason.
    """

    values: dict[str, Any]
    gpus: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = {name: _read_quoted(name, value) for name, value in self.values.items()}

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a setting of theirs, which counts as dealt with; `default` where it is missing or null."""
        value = self.values.pop(name, None)
        return default if value is None else value

    def put(self, key: str, value: Any, remark: str = "") -> None:
        """Sets one of ours."""
        self.settings[key] = value
        if remark:
            self.remarks[key] = remark

    def leave_out(self, name: str, value: Any, reason: str) -> None:
        """Says why a setting of theirs is none here."""
        self.left_out.append((name, value, reason))

    def rename(self, names: Mapping[str, str]) -> None:
        """Takes settings that only have another name here."""
        for name, key in names.items():
            value = self.take(name)
            if value is not None:
                self.put(key, value)

    def drop(self, reasons: Mapping[str, str]) -> None:
        """Leaves out settings that have no counterpart. One that is off or empty asks for nothing, and is not told."""
        for name, reason in reasons.items():
            value = self.take(name)
            if value not in (None, False, "", "no", [], {}):
                self.leave_out(name, value, reason)

    def finish(self) -> None:
        """Names what nobody has taken."""
        self.drop(dict.fromkeys(list(self.values), NOT_KNOWN))


def _read_quoted(name: str, value: Any) -> Any:
    """A number or a truth value that stands in quotes, which those projects read as what it is; other values as is.

    Names stay text: a run may be called 1.10.
    """
    if not isinstance(value, str) or any(word in name for word in TEXTS):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        return float(value)
    return value


BY_THE_PLAN = "the memory plan chooses (memory.activations)"
BY_ITSELF = "chosen by itself; kernels.* and model.attn_implementation say otherwise"
SHARDED_HERE = "FSDP2 shards the run here, by fsdp.*"
MADE_HERE = "nothing to set: data is tokenized in parallel and cached"
LOGGED_HERE = "every step is in metrics.jsonl"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")  # by accelerate's numbers, from 1 on
OTHER_NAMES = {  # of optimizers that have another name here
    "adamw_torch": Optimizer.adamw,
    "adamw_torch_fused": Optimizer.adamw,
    "adamw_hf": Optimizer.adamw,
    "adamw_anyprecision": Optimizer.adamw,
    "adamw_bnb_8bit": Optimizer.adamw_8bit,
    "paged_adamw": Optimizer.paged_adamw_32bit,
    "lion": Optimizer.lion_32bit,
    "lion_pytorch": Optimizer.lion_32bit,
}
# Of supervised training, and of no other task here.
OF_TEXTS = {
    "neftune_noise_alpha": "task.neftune_noise_alpha",
    "label_smoothing_factor": "task.label_smoothing_factor",
}
# Of transformers' TrainingArguments, on which all three are built.
OF_TRAINER = {
    "logging_steps": LOGGED_HERE,
    "logging_first_step": LOGGED_HERE,
    "logging_strategy": LOGGED_HERE,
    "logging_dir": LOGGED_HERE,
    "log_level": LOGGED_HERE,
    "include_tokens_per_second": LOGGED_HERE,
    "include_num_input_tokens_seen": LOGGED_HERE,
    "save_strategy": "checkpoints come by checkpoint.every_steps or checkpoint.every_minutes, and at the end",
    "save_only_model": "a checkpoint has all that resuming needs, and the adapter for use",
    "save_safetensors": "the only format here",
    "eval_strategy": "the evaluations are those of training.eval_every_steps, one before and one after training",
    "evaluation_strategy": "the evaluations are those of training.eval_every_steps, one before and one after training",
    "do_eval": "held-out rows are evaluated where there are some",
    "per_device_eval_batch_size": "evaluations have the micro-batch of training",
    "eval_accumulation_steps": "evaluations have the micro-batch of training",
    "load_best_model_at_end": "set checkpoint.best_at_end, with checkpoint.keep_best=1",
    "metric_for_best_model": "set training.metric_for_best_model, by a name of a figure of the evaluations here",
    "greater_is_better": "set training.greater_is_better, with training.metric_for_best_model",
    "gradient_checkpointing": BY_THE_PLAN,
    "gradient_checkpointing_kwargs": BY_THE_PLAN,
    "activation_offloading": BY_THE_PLAN,
    "bf16": "bfloat16 where the GPU has it (training.precision)",
    "bf16_full_eval": "bfloat16 where the GPU has it (training.precision)",
    "tf32": "float32 products are few here: adapters' optimizer steps",
    "torch_compile": "steps are CUDA graphs (compute.cuda_graph)",
    "torch_compile_backend": "steps are CUDA graphs (compute.cuda_graph)",
    "use_liger_kernel": BY_ITSELF,
    "remove_unused_columns": "unused columns are ignored, and a note names them",
    "dataloader_num_workers": MADE_HERE,
    "dataloader_pin_memory": MADE_HERE,
    "dataloader_prefetch_factor": MADE_HERE,
    "dataloader_drop_last": "the last step of an epoch has the rows that are left",
    "ddp_timeout": "distributed.timeout_seconds is for ranks that do not answer, and downloads may take hours",
    "ddp_find_unused_parameters": SHARDED_HERE,
    "deepspeed": SHARDED_HERE,
    "fsdp": SHARDED_HERE,
    "fsdp_config": SHARDED_HERE,
    "push_to_hub_token": "log in by `hf auth login`",
    "hub_strategy": "the adapter is uploaded at the end",
    "overwrite_output_dir": "type run.overwrite=true to begin anew in a folder that has a run",
    "auto_find_batch_size": "the plan chooses a micro-batch that fits",
    "trust_remote_code": "type model.trust_remote_code=true if you trust the code that comes with the model",
    "do_train": "`qlora-fsdp train` does that",
}


def convert_names(theirs: TheirSettings, more: Mapping[str, str]) -> None:
    """Settings that have another name in transformers and PEFT, and `more`, that have one in the project alone."""
    names = {
        "model_name_or_path": "model.path",
        "model_revision": "model.revision",
        "use_rslora": "lora.use_rslora",
        "use_dora": "lora.use_dora",
        "seed": "training.seed",
        "resume_from_checkpoint": "checkpoint.resume",
        "hub_model_id": "hub.repo",
    }
    theirs.rename({**names, **more})
    if theirs.take("push_to_hub", False):
        theirs.put("hub.push", True)


def convert_arguments(theirs: TheirSettings, num_epochs: float, optimizer: str) -> None:
    """Transformers' TrainingArguments. The data is known by now.

    Args:
        theirs: the settings.
        num_epochs: the project's default.
        optimizer: the project's default, by its name in transformers.
    """
    batch = theirs.take("per_device_train_batch_size", 8)
    convert_batch(theirs, batch, theirs.take("gradient_accumulation_steps", 1))
    convert_length(theirs, theirs.take("num_train_epochs", num_epochs), theirs.take("max_steps"))
    convert_optimizer(theirs, "optim", str(theirs.take("optim", optimizer)))
    convert_schedule(theirs, "lr_scheduler_type", "linear")
    convert_saves(theirs, theirs.take("eval_steps"), theirs.take("save_steps"))
    convert_trackers(theirs, theirs.take("report_to"))
    convert_place(theirs, theirs.take("output_dir"), theirs.take("run_name"))


def finish(theirs: TheirSettings, packs: bool, reasons: Mapping[str, str]) -> None:
    """What comes last in the files of TRL and LLaMA-Factory.

    Args:
        theirs: the settings. The task is known by now.
        packs: whether rows are packed there, or the task leaves it open.
        reasons: why settings have no counterpart.
    """
    if not packs:
        theirs.put("training.packing", False, "packing is off there; auto packs rows, and is faster")
    if theirs.take("fp16", False):
        theirs.leave_out("fp16", True, "float16 needs loss scaling; bfloat16 is taken where the GPU has it")
    convert_texts(theirs)
    theirs.drop(reasons)
    theirs.finish()


def convert_held_out(theirs: TheirSettings, name: str) -> None:
    """The part of the training data that is held out; a number of rows has no counterpart."""
    size = theirs.take(name, 0)
    if 0 < size < 1:
        theirs.put("data.eval_fraction", float(size))
    elif size:
        theirs.leave_out(name, size, "a number of rows: set data.eval_fraction to their part of the data")


def convert_adapter(theirs: TheirSettings, rank: int, alpha: int, dropout: float) -> None:
    """LoRA's settings where they have PEFT's names with `lora_` before them; the arguments are their defaults."""
    theirs.put("lora.r", theirs.take("lora_r", rank))
    theirs.put("lora.lora_alpha", theirs.take("lora_alpha", alpha))
    theirs.put("lora.lora_dropout", theirs.take("lora_dropout", dropout))
    theirs.rename({"lora_modules_to_save": "lora.modules_to_save"})


def convert_targets(theirs: TheirSettings, value: Any) -> None:
    """Target modules: a list, words between commas, or one word for all."""
    if value is None:
        return
    if isinstance(value, str) and value in ("all", "all-linear"):
        theirs.put("lora.target_modules", "all-linear")
    elif isinstance(value, str):
        theirs.put("lora.target_modules", [name.strip() for name in value.split(",")])
    else:
        theirs.put("lora.target_modules", list(value))


def convert_quantization(theirs: TheirSettings, in_4bit: bool, in_8bit: bool) -> None:
    """How the base is stored."""
    theirs.put("quant.load_in_4bit", in_4bit)
    if in_8bit:
        theirs.put("quant.load_in_8bit", True)


def convert_fsdp(theirs: TheirSettings) -> dict[str, Any]:
    """FSDP's settings, whose names begin with `fsdp_` or not. Returns those that are not converted."""
    values = dict(theirs.take("fsdp_config", {}))
    named = {str(name).removeprefix("fsdp_"): value for name, value in values.items()}
    strategy = str(named.pop("sharding_strategy", "FULL_SHARD")).upper()
    if strategy.isdecimal() and int(strategy) <= len(STRATEGIES):
        strategy = ("", *STRATEGIES)[int(strategy)]
    if strategy in STRATEGIES[1:]:
        theirs.put("fsdp.sharding_strategy", strategy)
    if named.pop("offload_params", False):
        theirs.put("fsdp.cpu_offload", True)
    if named.pop("reshard_after_forward", True) is False:
        theirs.put("fsdp.reshard_after_forward", False)
    return named


def convert_batch(theirs: TheirSettings, micro_batch: int, accumulation: int) -> None:
    """The product of their three numbers is the batch of a step, and the micro-batch is the plan's."""
    product = int(micro_batch) * int(accumulation) * theirs.gpus
    remark = f"{micro_batch} a GPU x {accumulation} accumulated x {theirs.gpus} GPU" + "s" * (theirs.gpus > 1)
    remark += " (gpus=N); the micro-batch is chosen by the plan"
    theirs.put("training.global_batch_size", product, remark)


def convert_length(theirs: TheirSettings, num_epochs: float, max_steps: Any) -> None:
    """How long a run is; a number of steps wins, and -1 is none."""
    if isinstance(max_steps, int) and max_steps > 0:
        theirs.put("training.max_steps", max_steps)
    else:
        theirs.put("training.num_epochs", num_epochs)


def convert_optimizer(theirs: TheirSettings, name: Any, value: str) -> None:
    """The optimizer by its name in transformers, and its numbers."""
    known = OTHER_NAMES | {optimizer.value: optimizer for optimizer in Optimizer}
    if value not in known:
        theirs.leave_out(name, value, "not here: adamw is taken, whose learning rate may have to be another")
    elif known[value] is not Optimizer.adamw:
        theirs.put("optim.name", known[value].value)
    beta1 = theirs.take("adam_beta1", 0.9)
    beta2 = theirs.take("adam_beta2", 0.999)
    if (beta1, beta2) != (0.9, 0.999):
        theirs.put("optim.betas", [float(beta1), float(beta2)])
    theirs.rename({"adam_epsilon": "optim.eps", "weight_decay": "optim.weight_decay"})
    theirs.rename({"max_grad_norm": "optim.max_grad_norm", "loraplus_lr_ratio": "optim.loraplus_lr_ratio"})
    theirs.rename({"embedding_lr": "optim.embedding_learning_rate"})
    theirs.rename({"loraplus_lr_embedding": "optim.embedding_learning_rate"})


def convert_texts(theirs: TheirSettings) -> None:
    """What is of supervised training alone, and of padded rows alone. The task and the packing are known by now."""
    if "task.name" in theirs.settings:
        theirs.drop(dict.fromkeys(OF_TEXTS, "of supervised training alone here"))
    else:
        theirs.rename(OF_TEXTS)
    if theirs.settings.get("training.packing", True) is False:
        theirs.rename({"group_by_length": "training.group_by_length"})
    else:
        theirs.drop({"group_by_length": "packed sequences have one length"})


def convert_schedule(theirs: TheirSettings, name: str, default: str) -> None:
    """The learning rate over the steps. A warm-up below 1 step is a ratio."""
    kind = str(theirs.take(name, default))
    given = theirs.take("lr_scheduler_kwargs", {})
    known = {scheduler.value: scheduler for scheduler in LrScheduler}
    if kind == "constant_with_warmup":
        kind = LrScheduler.constant.value
    if kind not in known:
        theirs.leave_out(name, kind, "not here: cosine is taken")
        kind = LrScheduler.cosine.value
    theirs.put("optim.lr_scheduler_type", kind)
    fitting = {key: value for key, value in dict(given).items() if key in known[kind].arguments}
    if fitting:
        theirs.put("optim.lr_scheduler_kwargs", fitting)
    others = {key: value for key, value in dict(given).items() if key not in fitting}
    if others:
        theirs.leave_out("lr_scheduler_kwargs", others, f"no arguments of {kind} here")
    steps = theirs.take("warmup_steps", 0)
    ratio = theirs.take("warmup_ratio", 0.0)
    if 0 < steps < 1:
        ratio = steps
        steps = 0
    if steps:
        theirs.put("optim.warmup_steps", int(steps))
    else:
        theirs.put("optim.warmup_ratio", ratio)


def convert_saves(theirs: TheirSettings, eval_steps: Any, save_steps: Any) -> None:
    """Evaluations and checkpoints by steps. A part of the run, which transformers takes too, is no number of steps."""
    for name, value, key in (
        ("eval_steps", eval_steps, "training.eval_every_steps"),
        ("save_steps", save_steps, "checkpoint.every_steps"),
    ):
        if isinstance(value, float) and 0 < value < 1:
            theirs.leave_out(name, value, f"a part of the run: set {key} to a number of steps")
        elif value:
            theirs.put(key, int(value))
    theirs.rename({"save_total_limit": "checkpoint.keep_last"})
    has_rows = {"data.eval_path", "data.eval_fraction"} & theirs.settings.keys()
    if not has_rows and "training.eval_every_steps" in theirs.settings:
        steps = theirs.settings.pop("training.eval_every_steps")
        theirs.leave_out("eval_steps", steps, "no held-out rows are named: set data.eval_path or data.eval_fraction")


def convert_trackers(theirs: TheirSettings, value: Any) -> None:
    """Trackers by their names; `none` and `all` are words of transformers'."""
    names = [value] if isinstance(value, str) else list(value or [])
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    if known:
        theirs.put("tracking.report_to", known)
    others = [name for name in names if name not in known and name != "none"]
    if others:
        theirs.leave_out("report_to", others, "trackers here are wandb, tensorboard, mlflow and trackio")


def convert_place(theirs: TheirSettings, folder: Any, name: Any = None) -> None:
    """The run's folder, and its name."""
    if folder:
        theirs.put("run.folder", str(folder))
        last = re.split(r"[/\\]", str(folder).rstrip("/\\"))[-1]
        theirs.put("run.name", str(name or last or "run"))
    elif name:
        theirs.put("run.name", str(name))


def is_folder_or_file(path: str) -> bool:
    """Whether a text names something on the disk and no data set of the hub."""
    endings = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
    return path.startswith(("/", "./", "../", "~")) or path.endswith(endings) or "://" in path


def put_sets(theirs: TheirSettings, sets: list[dict[str, Any]]) -> None:
    """Sets `data.*` for one data set, a list of files for several of the same form, and `data.mix` for others."""
    if not sets:
        return
    if len(sets) == 1:
        for name, value in sets[0].items():
            if (name, value) != ("split", "train"):
                theirs.put(f"data.{name}", value.split(",") if name == "path" and "," in value else value)
        return
    paths = [each["path"] for each in sets]
    rest = [{name: value for name, value in each.items() if name != "path"} for each in sets]
    if all(map(is_folder_or_file, paths)) and all(each == rest[0] for each in rest):
        theirs.put("data.path", paths)
        for name, value in rest[0].items():
            if (name, value) != ("split", "train"):
                theirs.put(f"data.{name}", value)
        return
    mix: dict[str, Any] = {}
    for path, own in zip(paths, rest, strict=True):
        shown = {name: value for name, value in own.items() if (name, value) != ("split", "train")}
        if path in mix:
            theirs.leave_out("datasets", path, "named twice: a data set is in a mix once, with one choice of rows")
            continue
        mix[path] = {"weight": 1.0, **shown} if shown else 1.0
    remark = "weights are shares of the rows: set each to the data set's number of rows, which followed one another"
    theirs.put("data.mix", mix, remark)
