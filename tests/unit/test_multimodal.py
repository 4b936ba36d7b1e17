"""A multimodal checkpoint: its text decoder is trained, and the adapter loads where transformers loads the model."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from tests.helpers.checkpoints import SHAPE
from tests.helpers.quick_config import load_config
from transformers import AutoModelForImageTextToText, Gemma3Config, Mistral3Config, Qwen3VLConfig

from qlora_fsdp.config.world import World
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.training.run import run

VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


TEXT = {**SHAPE, "head_dim": 16}
CONFIGS = {
    "gemma3": Gemma3Config(text_config=TEXT, vision_config=VISION),
    "mistral3": Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "model_type": "pixtral"},
        tie_word_embeddings=False,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        vision_config={
            **{"hidden_size": 64, "intermediate_size": 64, "depth": 1, "num_heads": 2},
            **{"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        },
        tie_word_embeddings=False,
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_text_decoder_is_trained(family: str, tmp_path: Path):
    """The first loss is that of the whole model, and the adapter loads where transformers loads it."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(CONFIGS[family]).save_pretrained(tmp_path / "model")
    if not CONFIGS[family].tie_word_embeddings:  # as on the hub, where only the files show it
        file = tmp_path / "model" / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in config.items() if key != "tie_word_embeddings"}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "The quick brown fox jumps over the lazy dog."}))
    settings = ["model.tokenizer_path=bytes", "quant=none", "training.max_steps=2", "training.max_length=64"]
    settings += [f"data.path={tmp_path / 'rows.jsonl'}", f"data.cache_folder={tmp_path / 'cache'}"]
    run(load_config([f"model.path={tmp_path / 'model'}", f"run.folder={tmp_path / 'run'}", *settings]), World())

    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = byte_tokenizer()
    text = "The quick brown fox jumps over the lazy dog."
    input_ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        before = base(input_ids=input_ids, labels=input_ids)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
        after = adapted(input_ids=input_ids)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(before.loss.item(), abs=1e-4)
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(names) == 2 * 7 * SHAPE["num_hidden_layers"] and all("language_model" in name for name in names)
    assert (after.logits - before.logits).abs().max() > 1e-3
