"""The form of a run's rows, which is saved with the adapter, so that later prompts are written alike."""

from __future__ import annotations

from itertools import islice
from typing import Any

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.data_sets import settings_for
from qlora_fsdp.config.schema import DataFormat, TaskName
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.read import find_source, iterate_rows, training_paths
from qlora_fsdp.data.read_answers import read_answers
from qlora_fsdp.data.read_row import read_row
from qlora_fsdp.data.row import BadRow, parse_row

ROWS_LOOKED_AT = 100  # the first of them may be bad


def find_form(spec: DataSpec) -> DataFormat | None:
    """The form of the first usable training row, never `auto` or `sharegpt`; None as `find_first`."""
    found = find_first(spec)
    return None if found is None else found[0]


def find_first(spec: DataSpec) -> tuple[DataFormat, dict[str, Any]] | None:
    """The first usable training row, with its form; of a preference, with the first of its answers.

    None for random tokens, for a classifier's rows, and where no row can be read.
    """
    paths = training_paths(spec.settings)
    if not paths or spec.settings.format is DataFormat.random or not spec.task.is_causal:
        return None
    data = settings_for(paths[0], spec.settings)
    try:
        for _, raw in islice(iterate_rows(find_source(paths[0], data)), ROWS_LOOKED_AT):
            try:
                if spec.task.name is TaskName.preference:
                    answer = read_answers(parse_row(raw), spec.task.has_pairs, data.columns)[0]
                    return answer.form, answer.fields
                return read_row(parse_row(raw), data.format, data.columns)
            except BadRow:
                continue
    except DataError:  # the rows were tokenized before, and are not there any more
        pass
    return None
