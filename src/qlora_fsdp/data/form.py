"""The form of a run's rows. It is saved with the adapter, so that later prompts are written in the same form."""

from __future__ import annotations

from itertools import islice

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.data_sets import settings_for
from qlora_fsdp.config.schema import Config, DataFormat, TaskName
from qlora_fsdp.data.parse import parse_row
from qlora_fsdp.data.preferences import read_answers
from qlora_fsdp.data.read import find_source, iterate_rows, training_paths
from qlora_fsdp.data.row import BadRow, check_row

ROWS_LOOKED_AT = 100  # the first of them may be bad


def find_form(config: Config) -> DataFormat | None:
    """The form of the first usable training row, never `auto` or `sharegpt`.

    None for random tokens, for a classifier's rows, and where no row can be read.
    """
    paths = training_paths(config.data)
    if not paths or config.data.format is DataFormat.random or not config.task.is_causal:
        return None
    data = settings_for(paths[0], config.data)
    try:
        for _, raw in islice(iterate_rows(find_source(paths[0], data)), ROWS_LOOKED_AT):
            try:
                if config.task.name is TaskName.preference:
                    return read_answers(raw, config.has_pairs, data.columns)[0].form
                return check_row(parse_row(raw), data.format, data.columns)[0]
            except BadRow:
                continue
    except DataError:  # the rows were tokenized before, and are not there any more
        pass
    return None
