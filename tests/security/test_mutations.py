"""Files that were damaged at random end in success or in one error; `mutate.py` tries more of them by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.mutate import KINDS, run_mutations

COUNT = 8  # of each kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_ends_in_success_or_in_one_error(kind: str, tmp_path: Path) -> None:
    outcome = run_mutations(kind, tmp_path, COUNT, seed=1)
    assert not outcome.failures, "\n\n".join(outcome.failures)
    assert outcome.succeeded + outcome.refused == COUNT
