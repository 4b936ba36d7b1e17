"""preview prints rows as the model sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.lines import broken_pipe, write_lines
from tests.helpers.model_templates import model_template
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from qlora_fsdp import preview
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import Config, DataConfig, DataFormat, TaskConfig, TaskName
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.chats.markers import check_end_token, check_markers, instruct_name
from qlora_fsdp.data.notes import check_date, check_prompt, check_system_prompt, check_turns_as_text
from qlora_fsdp.data.tokenizer import byte_tokenizer

ROWS = [
    {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello!"}]},
    {"prompt": "2+2=", "completion": "4"},
    {"nothing": "here"},
    {"text": "plain text"},
]


def show(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    file = folder / "rows.jsonl"
    write_lines(file, ROWS)
    base = ["model=tiny", "model.tokenizer_path=bytes", f"data.path={file}", f"data.cache_folder={folder}"]
    code = preview.main([*base, *more])
    return code, *capsys.readouterr()


def test_rows_what_is_trained_on_and_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = show(tmp_path, capsys, "rows=2", "training.max_length=100")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("--- used row 1: ") and lines[0].endswith(" trained on")
    assert "<|im_start|>assistant\n[[Hello!<|im_end|>" in out and "user\nHi?<|im_end|>" in out
    assert "--- used row 2: 7 tokens, 2 trained on\n<bos>2+2=[[4<eos>]]\n" in out
    assert "plain text" not in out
    assert "4 rows read, 3 used" in out and "1 row left out (wrong keys): rows.jsonl:3" in out
    assert "tokens a row: 7 to " in out and "% full" in out
    assert sum(line.count("#") > 0 for line in lines) >= 2


def test_colours_and_later_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = show(tmp_path, capsys, "rows=5", "first=2", "color=always", "training.max_length=100")
    assert code == 0 and "Hello!" not in out
    assert "\033[2m<bos>2+2=\033[0m\033[32m4<eos>\033[0m" in out
    assert "\033[32mplain text<eos>\033[0m" in out


def test_nobody_reads_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    stdout = broken_pipe()
    stdout.reconfigure(line_buffering=True)
    monkeypatch.setattr("sys.stdout", stdout)
    assert show(tmp_path, capsys, "rows=3", "training.max_length=100")[0] == 0


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, _, error = show(tmp_path, capsys, "color=green", "first=0")
    assert code == 2 and "color=green is none of" in error and "first=0 must be at least 1." in error


def test_a_mix_shows_rows_and_shares_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "another"}\n')
    mix = f"data.mix={{{tmp_path / 'rows.jsonl'}:1,{other}:1}}"
    code, out, _ = show(tmp_path, capsys, "rows=1", "data.path=null", mix, "training.max_length=100")
    assert code == 0
    assert f"--- {tmp_path / 'rows.jsonl'}, used row 1: " in out and f"--- {other}, used row 1: 9 tokens" in out
    assert f"mix: {other}: 1 row 3 times, 50.0% of the rows" in out


def test_of_a_stream_the_first_rows_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = show(tmp_path, capsys, "data.streaming=true", "data.buffer_rows=2", "training.max_length=100")
    assert code == 0
    assert "--- row 2: 7 tokens" in out and "--- row 3" not in out and "streaming, 2 rows at a time" in out


def test_beside_a_stream_held_out_data_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "held_out.xlsx").touch()
    (tmp_path / "held_out.jsonl").touch()
    for name, reason in (("held_out.xlsx", "is of no known kind"), ("held_out.jsonl", "has no rows")):
        code, _, error = show(tmp_path, capsys, "data.streaming=true", f"data.eval_path={tmp_path / name}")
        assert code == 2 and reason in error and "data.eval_path" in error and "data.path" not in error


def test_a_tokenizer_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"text": "plain text"}\n')
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    data = [f"data.path={tmp_path / 'rows.jsonl'}", f"data.cache_folder={tmp_path}"]
    assert preview.main([f"model.tokenizer_path={tmp_path / 'tokenizer'}", *data]) == 0
    assert "[[plain text<eos>]]" in capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(f"model.tokenizer_path: {tmp_path / 'tokenizer'}\n")
    assert preview.main(["--config", str(tmp_path / "mine.yaml"), *data]) == 0
    assert "[[plain text<eos>]]" in capsys.readouterr().out
    assert preview.main(data) == 2
    error = capsys.readouterr().err
    assert "model.path=null names no model. Set model to a preset" in error and "adapter" not in error


def chat(folder: Path, **more: str) -> Path:
    """A folder with a tokenizer of bytes, conversations, and embeddings as long as the tokenizer with `more` tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_tokens(list(more), special_tokens=True)
    tokenizer.save_pretrained(folder)
    rows = torch.randn(len(tokenizer), 8)
    rows[259:] = torch.tensor([float(value) for value in more.values()])[:, None]
    save_file({"model.embed_tokens.weight": rows}, folder / "model.safetensors")
    (folder / "chats.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    return folder


def test_chats_for_a_model_that_can_not_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def show(folder: Path, *more: str) -> str:
        code = preview.main(
            [f"model.path={folder}", f"data.path={folder}/chats.jsonl", f"data.cache_folder={tmp_path}", *more]
        )
        out = capsys.readouterr()
        return out.err if code else " ".join(out.out.split())

    template, added = "data.chat_template=chatml", 'tokenizer.add_special_tokens=["<|im_start|>","<|im_end|>"]'
    base = chat(tmp_path / "Qwen2.5-7B")
    error = show(base)
    assert "has no chat template" in error and f"(model.path={base}-Instruct)" in error
    assert f"set {template} '{added}', whose rows are then trained" in error.splitlines()[-1]
    split = show(base, template)
    assert "<|im_start|> (12 tokens), <|im_end|> (10 tokens)" in split and f"Set '{added}', which makes tokens" in split
    assert "warning" not in show(base, template, added) + show(base, "data.chat_template=alpaca")
    assert "<|im_start|> (12 tokens)" in show(base, template, "data.streaming=true", "training.max_steps=1")

    untrained = show(chat(tmp_path / "zeros", **{"<|im_start|>": "0", "<|im_end|>": "0"}), template)
    assert "never learned" in untrained and f"<|im_start|>, <|im_end|>. Set '{added}', which trains" in untrained
    assert "never learned" in show(chat(tmp_path / "alike", **{"<|im_start|>": "1", "<|im_end|>": "1"}), template)
    trained = chat(tmp_path / "trained", **{"<|im_start|>": "1", "<|im_end|>": "2"})
    assert "warning" not in show(trained, template)
    llama = chat(tmp_path / "l", **dict.fromkeys(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "0"))
    assert 'set data.chat_template=llama3 \'tokenizer.add_special_tokens=["<|start_header_id|>",' in show(llama)


@pytest.mark.parametrize(
    ("base", "instruct"),
    [
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("meta-llama/Llama-3.1-70B/", "meta-llama/Llama-3.1-70B-Instruct"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B"),
        ("google/gemma-3-4b-pt", "google/gemma-3-4b-it"),
        ("google/gemma-2-9b", "google/gemma-2-9b-it"),
        ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistralai/Mistral-Nemo-Instruct-2407"),
        ("SmolLM2-135M", "SmolLM2-135M-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct", None),
        ("my/model", None),
    ],
)
def test_the_instruct_model_of_a_base_model(base: str, instruct: str | None):
    assert instruct_name(base) == instruct


def test_a_tokenizer_that_can_not_write_a_marker(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hi": 1}, unk_token="<unk>"))
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    config = Config(data=DataConfig(chat_template="chatml"))
    with pytest.raises(DataError, match=r"markers that this tokenizer can't write: <\|im_start\|>, <\|im_end\|>"):
        check_markers(words, DataSpec.of(config))
    texts = Config(data=DataConfig(chat_template="chatml", format=DataFormat.text))
    assert not check_markers(words, DataSpec.of(texts))


@pytest.mark.parametrize("name", ["table.jsonl", "table.parquet"])
@pytest.mark.parametrize("streaming", ["true", "false"])
def test_columns_that_are_not_used_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, streaming: str
):
    row, file = {"text": "a", "id": 1}, tmp_path / name
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row))
    _, out, _ = show(tmp_path, capsys, f"data.path={file}", f"data.streaming={streaming}", "training.max_steps=1")
    assert "columns that are not used: id" in out


def test_a_tokenizer_without_an_end_token_is_told() -> None:
    tokenizer = byte_tokenizer()
    assert check_end_token(tokenizer, DataSpec.of(Config())) == []
    tokenizer.eos_token = None
    [note] = check_end_token(tokenizer, DataSpec.of(Config()))
    assert "has no end token" in note and "eos_token" in note
    assert check_end_token(tokenizer, DataSpec.of(Config(data=DataConfig(format=DataFormat.messages)))) == []
    assert check_end_token(tokenizer, DataSpec.of(Config(task=TaskConfig(TaskName.sequence_classification)))) == []


@pytest.mark.parametrize(
    ("template", "answer", "told"),
    [
        ("deepseek_r1_distill", "Hello!", 'writes the first answer of the data as "<\uff5cAssistant\uff5c>Hello!'),
        ("deepseek_r1_distill", "<think>\nhm\n</think>\n\nHello!", "without its thoughts"),
        ("deepseek_r1_distill_training", "<think>\nhm\n</think>\n\nHello!", None),
        ("qwen3", "Hello!", None),
    ],
)
def test_answers_that_do_not_begin_as_the_prompt_for_them_are_told(
    tmp_path: Path, template: str, answer: str, told: str | None
):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = model_template(template)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [ROWS[0]["messages"][0], {"role": "assistant", "content": answer}]}))
    notes = check_prompt(tokenizer, DataSpec.of(Config(data=DataConfig(path=str(file)))))
    assert len(notes) == (told is not None)
    assert told is None or (told in notes[0] and '"<\uff5cAssistant\uff5c><think>\\n"' in notes[0])
    file.write_text(json.dumps(ROWS[1]))
    assert check_prompt(tokenizer, DataSpec.of(Config(data=DataConfig(path=str(file))))) == []


def test_the_date_of_tokenizing_is_told_where_the_template_writes_it(tmp_path: Path):
    """It stays in the tokenized rows, which later runs take from the cache."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = model_template("mistral_v7_tekken")
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}]
    data = DataConfig(path=str(write_lines(tmp_path / "rows.jsonl", [{"messages": said}])))
    (note,) = check_date(tokenizer, DataSpec.of(Config(data=data)))
    assert f'the day\'s date into conversations, "{datetime.now():%Y-%m-%d}" today' in note
    assert check_date(tokenizer, DataSpec.of(Config(data=replace(data, system_prompt="Be brief.")))) == []
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    assert check_date(tokenizer, DataSpec.of(Config(data=data))) == []


def test_messages_that_are_text_are_told(tmp_path: Path):
    turns = json.dumps([{"role": "user", "content": "Hi?"}])
    cases: list[tuple[dict[str, object], TaskName, str]] = [
        ({"prompt": "Make up a chat", "completion": turns}, TaskName.causal_lm, "completion of"),
        ({"text": turns}, TaskName.causal_lm, "text of"),
        ({"messages": [{"role": "user", "content": turns}]}, TaskName.causal_lm, "message 1"),
        ({"prompt": turns, "completion": "Hello!"}, TaskName.causal_lm, ""),  # the row is left out
        ({"prompt": turns, "chosen": "Hello!", "rejected": "No."}, TaskName.preference, ""),
        ({"prompt": '[{"name": "add"}]', "completion": "[1]"}, TaskName.causal_lm, ""),
        ({"messages": [{"role": "user", "content": "[Hi?]"}]}, TaskName.causal_lm, ""),
    ]
    path = tmp_path / "rows.jsonl"
    for row, task, said in cases:
        write_lines(path, [row])
        notes = check_turns_as_text(DataSpec.of(Config(data=DataConfig(path=str(path)), task=TaskConfig(name=task))))
        assert len(notes) == bool(said) and said in "".join(notes)


def test_a_system_prompt_that_is_written_nowhere_is_told(tmp_path: Path):
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}]
    texts, chats = ({"prompt": "hi", "completion": "Hello!"}, {"messages": said})
    for number, row in enumerate((texts, chats)):
        path = write_lines(tmp_path / f"{number}.jsonl", [row])
        config = Config(data=DataConfig(path=str(path), system_prompt="Be brief."))
        notes = check_system_prompt(DataSpec.of(config))
        assert len(notes) == (row is texts)
        assert not notes or f"the first row of {path} is none: its form is prompt_completion" in notes[0]
        assert check_system_prompt(DataSpec.of(replace(config, data=replace(config.data, system_prompt=None)))) == []


def test_what_a_teacher_gets_and_answers_in_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_lines(tmp_path / "questions.jsonl", [{"prompt": "2 + 2 = ", "hinted": "4 = ", "completion": "4"}])
    base = ["task=distill", "model=tiny", "model.tokenizer_path=bytes", f"data.path={file}"]
    assert preview.main([*base, "distill.teacher_prompt=hinted", "distill.lmbda=0.5"]) == 0
    out = capsys.readouterr().out
    assert "--- questions.jsonl:1: a prompt of 9 tokens\n<bos>2 + 2 = \n" in out
    assert (
        "--- the teacher's prompt of 5 tokens\n<bos>4 = \n--- the answer in the data, of 2 tokens\n[[4<eos>]]\n" in out
    )
    assert "No rewards are shown" not in out


def test_prompts_with_their_columns_and_rewards_of_reference_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [
        {"prompt": "2 + 2 = ", "answer": "4"},
        {"prompt": [{"role": "user", "content": "3 + 4?"}], "solution": "7", "answer": "seven"},
        {"prompt": "9 + 1 = "},
    ]
    file = write_lines(tmp_path / "questions.jsonl", rows)
    base = ["task=grpo", "model=tiny", "model.tokenizer_path=bytes", f"data.path={file}", "data.chat_template=chatml"]
    rewarded = [*base, "reward.functions=[exact_match,soft_overlong]"]
    assert preview.main(rewarded) == 0
    out = capsys.readouterr().out
    assert "--- questions.jsonl:1: a prompt of 9 tokens\n<bos>2 + 2 = \nanswer: 4\n" in out
    assert "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n\nsolution: 7\nanswer: seven\n" in out
    assert "questions.jsonl:1, answer: exact_match 1, soft_overlong 0\n" in out
    assert "questions.jsonl:2, solution: exact_match 0, soft_overlong 0\n" in out
    assert "training: 3 prompts" in out and "qlora-fsdp train task=grpo" in out
    assert preview.main([*rewarded, "reference=answer", "first=2", "rows=1"]) == 0
    assert "questions.jsonl:2, answer: exact_match 1, soft_overlong 0\n" in capsys.readouterr().out
    for more, told in (([], "reward.functions names no function"), (rewarded[5:], "no row has a column other")):
        assert preview.main([*base, "reference=other", *more]) == 0
        assert f"--- No rewards are shown: {told}" in capsys.readouterr().out
    assert preview.main([*base[1:], "reference=other"]) == 2
    assert "reference=other has no effect" in capsys.readouterr().err
