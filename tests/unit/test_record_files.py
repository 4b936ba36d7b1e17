"""Records that grow while a run trains, where their folder goes away."""

from pathlib import Path

import pytest

from qlora_fsdp.records import record_files
from qlora_fsdp.records.record_files import RecordFiles


def test_a_folder_removed_between_the_check_and_the_writing_is_told_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    records = RecordFiles(folder)
    monkeypatch.setattr(record_files, "check_own", lambda folder: folder.rmdir())
    records.append("metrics.jsonl", "{}\n")
    assert records.reason == "the folder was removed"
