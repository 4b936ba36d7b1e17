"""Fine-tune large language models with QLoRA on FSDP2, from one command."""

__version__ = "0.1.0"
