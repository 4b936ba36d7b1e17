"""What the ranks of tests have imported when they start: the server that they are forked from imports this.

Besides a run, what test modules import: a rank imports the one that its function is from.
"""

import gc
from pathlib import Path

from qlora_fsdp.common.startup import quick_imports

with quick_imports():
    import datasets  # noqa: F401
    import peft.tuners.lora.bnb  # noqa: F401
    import pytest  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import qlora_fsdp.training.run  # noqa: F401
    import tests.helpers.classification  # noqa: F401
    from qlora_fsdp.config.reading.compose import load_config
    from tests.helpers.runs import settings

# What these make at their first use; Hydra too, for the choices of files that tests/helpers/quick_config.py finds new
load_config(settings(Path("model"), Path("rows.jsonl"), "model.tokenizer_path=bytes"))
get_checkpoint_conversion_mapping("llama")
gc.freeze()  # the ranks' garbage collector need not look through any of this
