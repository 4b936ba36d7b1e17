"""Files that are made to hang a command, to fill memory, or to end it in a traceback: each has a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp import preview, status
from qlora_fsdp.common.errors import CheckpointError, DataError
from qlora_fsdp.config.schema import DataConfig, LossOn, ModelConfig
from qlora_fsdp.data.chats import template as chat_template
from qlora_fsdp.data.chats.conversation import format_messages
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.streams.windows import Place, find_place
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from qlora_fsdp.generate import GenerateSettings, _read_rows
from qlora_fsdp.inference.prompts import chat_tokens
from qlora_fsdp.records.run_state import read_jobs, read_json, read_metrics, read_run
from qlora_fsdp.report import __main__ as report
from tests.helpers.lines import write_lines

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='0123456789') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
DEEP = "[" * 100_000


def render(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    format_messages(CHAT, None, LossOn.completion, tokenizer)


def ask(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    chat_tokens(tokenizer, CHAT[:1], None, "prompt")


@pytest.mark.parametrize("use", [render, ask])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (SLOW, "takes more than 1 s for one conversation"),
        ("{{ 'a' * 50000000000 }}", "takes more than 1 GiB for one conversation"),  # computed while it is compiled
        ("{{ messages[0].content * 5000000000 }}", "takes more than 1 GiB"),
        ("{{ '%5000000000d' % messages|length }}", "takes more than 1 GiB"),
        ("{{ messages[0].content.ljust(5000000000) }}", "takes more than 1 GiB"),
        (DOUBLING, "takes more than 1 GiB"),
        ("{{ 'a' * 200000 }}", r"makes a text of 200,000 characters"),
    ],
)
def test_a_chat_template(
    use: Callable[[str], None], template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 1.0 if template == SLOW else 30.0  # a busy host takes more than one to fill a GiB
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", seconds)
    monkeypatch.setattr(chat_template, "RENDER_BYTES", 2**30)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 100_000)
    with pytest.raises(DataError, match=rf"^The chat template {message}.* Set data\.chat_template to another\.$"):
        use(template)


def test_memory_is_as_before_once_a_limit_is_over(tmp_path: Path) -> None:
    """In a process of its own: where earlier tests have left a large hole in the heap, that takes the first object."""
    program = tmp_path / "program.py"
    program.write_text(
        "from qlora_fsdp.common.limits import limited_memory\n"
        "try:\n"
        "    with limited_memory(2**26):\n"
        "        bytearray(2**28)\n"
        "except MemoryError:\n"
        "    print('refused,', len(bytearray(2**28)) == 2**28)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert done.stdout == "refused, True\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "../x", "template": "{{ messages }}"}], "names a chat template ../x, which can't be the name of"),
        ([{"name": "/x", "template": "{{ messages }}"}], "names a chat template /x"),
        ([{"name": ".", "template": "{{ messages }}"}], "names a chat template ."),
        ([{"name": "a\x1b", "template": "{{ messages }}"}], "names a chat template a?,"),
        (5, "has a chat template that is no text"),
        ({"a": 3}, "has a chat template that is no text"),
        ("x" * 2**21, "has chat templates of more than 1,048,576 characters"),
    ],
)
def test_a_template_that_could_not_be_saved_is_refused_at_the_start(tmp_path: Path, template: Any, message: str):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)), DataConfig())
    assert message in str(caught.value)


def test_templates_with_names_that_honest_people_give(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag-2.1": "{{ documents }}"}
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(path=str(tmp_path)), DataConfig()).chat_template == tokenizer.chat_template


def make_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    (folder / "environment.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "slurm_queue", dict)


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "slurm.json", "sweep.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a link"])
def test_status_waits_for_no_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "secret").write_text('{"status": "secret", "step": 1, "loss": 9.9, "job_id": "secret"}\n')
    if kind == "a pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero" if kind == "a device" else tmp_path / "secret")
    assert "secret" not in shown(tmp_path, capsys) and list(read_metrics(run)) == [] and read_json(run / name) == {}


ODD: list[Any] = [None, True, "x", "\x1b]0;owned\x07", [1], {"a": 1}, 10**400, 10**30, -1, float("nan"), float("inf")]


@pytest.mark.parametrize("value", ODD)
def test_status_of_a_run_with_odd_records(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any) -> None:
    run, keys = make_run(tmp_path / "run"), ("step", "num_steps", "loss", "seconds", "tokens_per_second_per_gpu")
    (run / "metrics.jsonl").write_text(json.dumps(dict.fromkeys((*keys, "gpu_peak_gib", "eval_loss"), value)) + "\n")
    assert "setting up" in (text := shown(tmp_path, capsys)) or "running" in text
    (run / "sweep.json").write_text(json.dumps({"jobs": [value, {"folder": value, "overrides": value}]}))
    summary = ("status", "steps", "final_loss", "eval_loss", "tokens_per_second_per_gpu", "step_gpu_peak_gib", "error")
    (run / "summary.json").write_text(json.dumps(dict.fromkeys(summary, value)))
    assert "\x1b" not in shown(tmp_path, capsys)


@pytest.mark.parametrize("value", [*ODD, 1e308, -1e308, 1e-320])
def test_report_of_a_run_with_odd_records(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any) -> None:
    run, lines = make_run(tmp_path / "run"), list[str]()
    for step in (1, 2, value):
        keys = ("num_steps", "loss", "seconds", "tokens_per_second_per_gpu", "gpu_peak_gib", "eval_loss", "lr")
        lines.append(json.dumps({"step": step} | dict.fromkeys(keys, value)) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    summary = ("status", "steps", "final_loss", "eval_loss", "seconds", "setup_seconds", "resume_seconds")
    (run / "summary.json").write_text(json.dumps(dict.fromkeys((*summary, "load_seconds", "error"), value)))
    assert report.main([str(run)]) == 0
    assert "Traceback" not in capsys.readouterr().err and "</html>" in (run / "report.html").read_text()


def test_a_report_turns_no_text_around(tmp_path: Path) -> None:
    """U+202E lets the reader see what follows from right to left; the report says where one stands."""
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text(json.dumps({"run": {"name": "a\u202eb"}, "data": {"path": "\u2066c"}}))
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": "d\u202dgpj"}))
    assert report.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert not set(page) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert "d\\u202dgpj" in page


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"jobs": 3}',
        '{"jobs": {"a": 1}}',
        '{"jobs": [{}]}',
        json.dumps({"jobs": [{"folder": "a" * 10_000, "overrides": {}}]}),
        json.dumps({"jobs": [{"folder": "\ud800", "overrides": {}}]}),
        "{",
        DEEP,
        '{"a": ' + DEEP,
    ],
)
def test_a_damaged_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    run = make_run(tmp_path / "run")
    for name in ("sweep.json", "summary.json", "slurm.json", "metrics.jsonl"):
        (run / name).write_text(text)
    assert "run" in shown(tmp_path, capsys)
    assert read_jobs(run / "sweep.json") == [] and read_run(run).loss is None


@pytest.mark.parametrize(
    "line",
    [
        *("[]", "3", "{}", DEEP, '{"key": "k"}', '{"key": "k", "window": 0, "sequence": "0", "num_drawn": 1}'),
        '{"key": "k", "window": 0, "sequence": 5, "num_drawn": ["x"], "positions": [{}]}',
        '{"key": "k", "window": 0, "sequence": 5, "num_drawn": [1], "positions": [{"file": -1}]}',
        '{"key": "k", "window": 0, "sequence": 5, "num_drawn": [1], "positions": [{"start": 0.5}]}',
        '{"key": "k", "window": 0, "sequence": 5, "num_drawn": [1], "positions": [{"hub": [1]}]}',
        '{"key": "k", "window": 0, "sequence": 5, "num_drawn": [1], "positions": [{"other": 1}]}',
        '{"key": "k", "window": 0, "sequence": 5, "num_drawn": [1], "num_read": [1]}',
    ],
)
def test_a_list_of_windows_that_holds_anything(tmp_path: Path, line: str) -> None:
    """A run that streams its data resumes where the list of another's run says, if it is one."""
    file = tmp_path / "stream.jsonl"
    file.write_text(
        line + '\n{"key": "k", "window": 1, "sequence": 4, "num_drawn": [7], "positions": [{"start": 2}]}\n'
    )
    assert find_place([file], "k", 9) == Place(1, 4, [7], [Position(start=2)])
    file.unlink()
    os.mkfifo(file)
    assert find_place([file], "k", 9) is None


def test_prompts_that_are_nested_deeply(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(DEEP)
    with pytest.raises(DataError, match="line 1 is not JSON: maximum recursion depth exceeded"):
        _read_rows(GenerateSettings(prompts=str(tmp_path / "prompts.jsonl")))


def test_a_preview_shows_what_a_terminal_would_obey(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows\x1b.jsonl"
    rows = [{"prompt": "a\x1b]0;owned\x07\tb", "completion": "c\n\x9b2J"}, {"\x1bkey": 1}]
    write_lines(file, rows)
    argv = ["model=tiny", "model.tokenizer_path=bytes", f"data.path={file}", f"data.cache_folder={tmp_path}"]
    assert preview.main([*argv, "color=never"]) == 0
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(out)
    assert r"a\x1b]0;owned\x07" in out and "\tb" in out


def test_many_small_objects_end_at_the_limit() -> None:
    """In a process of its own: memory that this one has freed and kept would be used before the limit is."""
    script = """
from qlora_fsdp.common.limits import limited_memory
lists = []
try:
    with limited_memory(2**26):
        while True:
            lists.append([])
except MemoryError:
    print(f"ended with {len(lists) * 64 // 2**20} MiB")
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith("ended with "), done.stdout
