"""What other programs, and common speech, call a setting."""

from __future__ import annotations

# The names of settings in transformers, TRL, PEFT, Axolotl, LLaMA-Factory, torchtune and common speech, where these are
# too different to be guessed.
OTHER_NAMES = {
    "alpha": "lora.lora_alpha",
    "batch_size": "training.micro_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "gradient_checkpointing": "memory.activations",
    "lr": "training.learning_rate",
    "epochs": "training.num_epochs",
    "num_train_epochs": "training.num_epochs",
    "max_seq_length": "training.max_length",
    "eval_steps": "training.eval_every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "checkpoint.resume",
    "rank": "lora.r",
    "lora_r": "lora.r",
    "output_dir": "run.folder",
    "model_name_or_path": "model.path",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "base_model": "model.path",
    "datasets": "data.path",
    "val_set_size": "data.eval_fraction",
    "val_size": "data.eval_fraction",
    "train_on_inputs": "data.loss_on",
    "template": "data.chat_template",
    "sequence_len": "training.max_length",
    "cutoff_len": "training.max_length",
    "max_seq_len": "training.max_length",
    "sample_packing": "training.packing",
    "lora_target": "lora.target_modules",
    "lora_target_modules": "lora.target_modules",
    "flash_attention": "model.attn_implementation",
    "flash_attn": "model.attn_implementation",
}
