"""The scripts that compare constraints.txt with what is installed, and with what is newer."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.check_constraints import find_differences, read_constraints
from scripts.propose_versions import propose


def test_what_is_not_pinned_or_differs_is_named(tmp_path: Path):
    file = tmp_path / "constraints.txt"
    file.write_text('# one\nA_b==1.0\nc==2\nd==1; python_version >= "3.10"\nd==0; python_version < "3.10"\n')
    assert read_constraints(file) == {"a-b": "1.0", "c": "2", "d": "1"}
    installed = {"a-b": "1.0+cpu", "c": "3", "d": "1", "e": "5", "pip": "23", "triton": "3", "nvidia-nccl-cu13": "2"}
    assert list(find_differences(installed, read_constraints(file))) == [
        "c==3 is installed, and constraints.txt has 2.",
        "e==5 is installed and not in constraints.txt.",
    ]


def test_newer_versions_are_proposed_for_this_python(capsys: pytest.CaptureFixture[str]):
    text = '# a==1\nA_b==1.0\nc==2\nd==1; python_version >= "3.10"\nd==0; python_version < "3.10"\n'
    assert propose(text, {"a": "9", "a-b": "1.1", "d": "7"}) == (
        '# a==1\nA_b==1.1\nc==2\nd==7; python_version >= "3.10"\nd==0; python_version < "3.10"\n'
    )
