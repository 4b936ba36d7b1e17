"""Fine-tune large language models with QLoRA on FSDP2: from one command, or from Python (docs/python.md).

from qlora_fsdp import load, train

run = train({"model": "qwen2.5-0.5b-instruct", "data": "chats.jsonl"})
print(load(run.adapter).complete(["What does textwrap.dedent do?"]))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qlora_fsdp.common.errors import ConfigError, UserError
    from qlora_fsdp.launch.from_python import RunFailed
    from qlora_fsdp.launch.from_python import train_from_python as train
    from qlora_fsdp.python.load_model import LoadedModel, load
    from qlora_fsdp.records.run_state import RunState, read_run

__version__ = "0.1.0"
__all__ = ["ConfigError", "LoadedModel", "RunFailed", "RunState", "UserError", "load", "read_run", "train"]

# Where each is. Only what is asked for is imported: commands have to answer within a second. `train` is a module too,
# that of the command, which can be called (train.py).
_PLACES = {
    "ConfigError": "qlora_fsdp.common.errors",
    "LoadedModel": "qlora_fsdp.python.load_model",
    "RunFailed": "qlora_fsdp.launch.from_python",
    "RunState": "qlora_fsdp.records.run_state",
    "UserError": "qlora_fsdp.common.errors",
    "load": "qlora_fsdp.python.load_model",
    "read_run": "qlora_fsdp.records.run_state",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("qlora_fsdp.train")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
