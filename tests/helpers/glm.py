"""A small GLM: its markers are tokens, and the ids at which generation stops are the markers of the next role."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from qlora_fsdp.data.tokenizer import byte_tokenizer

TEMPLATE = Path(__file__).parent / "templates" / "glm.jinja"
MARKERS = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
STOPS = ["<eos>", "<|user|>", "<|observation|>"]


def write_glm_files(folder: Path) -> Path:
    """Writes a tokenizer of bytes with GLM's markers and template, and the generation_config.json that names stops."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(STOPS)
    GenerationConfig(eos_token_id=ids, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return folder
