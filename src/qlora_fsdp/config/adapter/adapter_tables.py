"""Whole tables of embeddings and head in an adapter's file: what PEFT saves of a base that was resized for new tokens.

Beside the adapter it saves both tables, trained or not, because the base's files have other numbers of rows. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from qlora_fsdp.common.module_names import is_target

TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # how the names of rows end that are trained alone
TABLE_OF_ROWS = "token_adapter.base_layer.weight"  # and the name of their table, where it is saved
PREFIX, WEIGHT = "base_model.model.", ".weight"  # how keys begin in PEFT's files, and names of weights end
_COPIES = re.compile(r"\.(original_module|modules_to_save)\.")  # of what PEFT also saves under the module's own name
_PARTS = ("lora_", ".base_layer.", ".token_adapter.", ".original_module.", ".modules_to_save.")
Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in an adapter's file, by their keys


def as_used(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """An adapter's tensors by the names of what they are in use: each table once, under its own name.

    Args:
        shapes: of the tensors in its file, by their keys there.
    """
    found = {}
    for key, shape in shapes.items():
        table = _table(key)
        if table is not None and f"{table}.{TABLE_OF_ROWS}" in shapes:
            found[table + WEIGHT] = shapes[f"{table}.{TABLE_OF_ROWS}"]
        elif _COPIES.sub(".", key) == key or _COPIES.sub(".", key) not in shapes:
            found[key] = shape
    return found


def _table(key: str) -> str | None:
    """The table that trained rows, or the whole below them, belong to."""
    return next((key.removesuffix(f".{end}") for end in (TOKEN_ROWS, TABLE_OF_ROWS) if key.endswith(f".{end}")), None)


def whole_keys(stored: Collection[str], key: str) -> dict[str, str]:
    """Where an adapter's file has a parameter as a whole: the key of the `whole`, and of `rows` that go into it."""
    table = key.removesuffix(WEIGHT)
    base = f"{table}.{TABLE_OF_ROWS}"
    return {"whole": base, "rows": f"{table}.{TOKEN_ROWS}"} if base in stored else {"whole": key}


def whole_weights(shapes: Shapes) -> dict[str, int]:
    """The rows of every module whose weight an adapter has as a whole, by the module's name."""
    return {
        key.removeprefix(PREFIX).removesuffix(WEIGHT): shape[0]
        for key, shape in as_used(shapes).items()
        if key.endswith(WEIGHT) and shape and not any(part in key for part in _PARTS)
    }


def untrained_tables(shapes: Shapes, trained: Collection[str]) -> list[str]:
    """Names of the modules whose weights an adapter has as a whole, although it did not train them as a whole.

    Args:
        shapes: of the tensors in its file, by their keys there.
        trained: names of the modules that it trained, or ends of these names.
    """
    return [name for name in whole_weights(shapes) if not any(is_target(outer, trained) for outer in _with_outer(name))]


def _with_outer(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
