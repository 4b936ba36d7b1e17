"""The order of labels that a table states. Its rows have indices, and task.labels may name them in another order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import TaskConfig, TaskName
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.files.row_file import RowFile
from qlora_fsdp.data.files.row_files import ARROW_FILE
from qlora_fsdp.data.labels import LABEL_KEYS, WORD_LABEL_KEYS, label_columns
from qlora_fsdp.data.read import Source


def check_label_order(source: Source, task: TaskConfig, columns: Mapping[str, str]) -> None:
    """Refuses task.labels in another order than the table's own names, as every row would get another row's label.

    `datasets` writes the names of a ClassLabel beside the indices. Other names than the table's are the user's to give.

    Raises:
        DataError: the order is another one.
    """
    ours = [label.casefold() for label in task.labels or []]
    keys = WORD_LABEL_KEYS if task.name is TaskName.token_classification else LABEL_KEYS
    names = label_columns(columns, task)
    features = _read_features(source)
    for column in (names.get(key, key) for key in keys):
        theirs = _find_names(features.get(column))
        folded = [name.casefold() for name in theirs]
        if folded != ours and sorted(folded) == sorted(ours):
            raise DataError(
                f"{show('task.labels', task.labels)} has the labels in another order than {source.path}, whose column "
                f"{column} has their indices. Set {show('task.labels', theirs)}."
            )


def _read_features(source: Source) -> dict[str, Any]:
    """The features of `datasets` by column; none if the source has none."""
    if source.hub is not None:
        schema = source.hub.features.arrow_schema if source.hub.features else pa.schema([])
    else:
        table = next((file for file in source.files if file.suffix in (".parquet", ".arrow")), None)
        schema = pa.schema([]) if table is None else _read_schema(table)
    try:
        features: dict[str, Any] = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return dict(features)
    except (KeyError, TypeError, ValueError):  # another program's table
        return {}


def _read_schema(file: RowFile) -> pa.Schema:
    with file.open() as stream:
        if file.suffix == ".parquet":
            return pq.ParquetFile(stream).schema_arrow
        is_indexed = stream.read(len(ARROW_FILE)) == ARROW_FILE
        stream.seek(0)
        return (pa.ipc.open_file if is_indexed else pa.ipc.open_stream)(stream).schema


def _find_names(feature: Any) -> list[str]:
    """The names of a ClassLabel, or of a list of them; none of another feature."""
    while isinstance(feature, dict) and "names" not in feature and "feature" in feature:
        feature = feature["feature"]
    names = feature.get("names") if isinstance(feature, dict) else None
    return list(map(str, names)) if isinstance(names, list) else []
