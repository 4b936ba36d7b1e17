"""A multimodal checkpoint: its text decoder is trained, and the adapter loads where transformers loads the model."""

from __future__ import annotations

from pathlib import Path

import peft
import torch
from tests.helpers.checkpoints import SHAPE
from tests.helpers.quick_config import load_config
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from qlora_fsdp.config.world import World
from qlora_fsdp.training.run import run

VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_the_text_decoder_of_gemma3_is_trained(tmp_path: Path):
    torch.manual_seed(0)
    config = Gemma3Config(text_config={**SHAPE, "head_dim": 16}, vision_config=VISION)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    settings = ["model.tokenizer_path=bytes", "data=random", "training.max_steps=3", "training.max_length=64"]
    run(load_config([f"model.path={tmp_path / 'model'}", f"run.folder={tmp_path / 'run'}", *settings]), World())

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    input_ids = torch.arange(1, 17).view(1, 16)
    with torch.no_grad():
        before = base(input_ids=input_ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
        after = adapted(input_ids=input_ids).logits
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(names) == 2 * 7 * SHAPE["num_hidden_layers"] and all("language_model" in name for name in names)
    assert (after - before).abs().max() > 1e-3
