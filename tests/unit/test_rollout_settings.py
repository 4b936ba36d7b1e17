"""task=grpo: each mistake in its settings and rows gets one message."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.checkpoints import VOCAB
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process
from tests.helpers.quick_config import load_config

from qlora_fsdp.common.errors import ConfigError, DataError
from qlora_fsdp.config.checks import check_rollouts
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.questions import Questions, prepare_questions, question_of
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.training.answers.rollouts import describe_shares

BASE = ["task=grpo", "model.path=org/name", "data.path=org/name", "reward.functions=[exact_match]"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no function": (["reward.functions=[]"], "reward.functions=[] names no function"),
    "unknown": (["reward.functions=[nothing]"], "has nothing, which is neither FILE.py:NAME nor built in"),
    "no file": (["reward.functions=[no.py:one]"], "has no.py:one, and the file no.py"),
    "twice": (["reward.functions=[exact_match,exact_match]"], "names a function twice"),
    "weights": (["reward.weights=[1,2]"], "has 2 numbers, and reward.functions 1"),
    "no reward model": (["reward.models=[nowhere/judge]"], "reward.models=nowhere/judge holds no adapter"),
    "no tries": (["rollout.dynamic_sampling=-1"], "must be finite and at least 0"),
    "no answer to held-out prompts": (["rollout.num_generations_eval=0"], "must be finite and at least 1"),
    "a threshold that all pass": (["reward.pass_threshold=0"], "must be finite and greater than 0"),
    "a group of one": (["rollout.num_generations=1"], "must be at least 2: the answers to a prompt are compared"),
    "no room": (["rollout.max_completion_length=2048"], "leaves no room for a prompt"),
    "no probability": (["rollout.top_p=1.5"], "is a probability"),
    "delta": (["grpo.delta=1.1"], "is to be above 1 + epsilon_high, 1.2"),
    "delta of cispo": (["grpo.loss_type=cispo", "grpo.delta=2"], "has no effect with grpo.loss_type=cispo"),
    "checkpoints": (["grpo.num_iterations=4", "checkpoint.every_steps=6"], "falls between steps on the same answers"),
    "trained beside": (["grpo.beta=0.1", "lora.modules_to_save=[lm_head]"], "the reference would have it"),
    "host memory": (["fsdp.cpu_offload=true"], "has the weights where no text can be written"),
    "Liger": (["kernels.cross_entropy=liger"], "sums over all tokens"),
    "stream": (["data.streaming=true", "training.max_steps=9"], "can't be used with task.name=grpo"),
    "slices": (["distributed.context_parallel=2"], "can't be used with task.name=grpo"),
    "columns": (["data.columns={completion: answer}"], "renames completion, and task.name=grpo reads prompts"),
    "generations": (["tracking.num_generations=2", "data.eval_fraction=0.1"], "what is written in each step"),
    "other task": (["task=causal_lm", "rollout.num_generations=4"], "Set task=grpo or task=distill too"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_one_problem(mistake: str) -> None:
    more, told = MISTAKES[mistake]
    base = [text for text in BASE if mistake != "other task" or not text.startswith("reward")]
    problems = check_settings(load_config([*base, *more]))
    assert len(problems) == 1, problems
    assert told in str(problems[0])


DISTILL = ["task=distill", "model.path=org/name", "data.path=org/name"]
HINTED = "distill.teacher_prompt=hinted"
DISTILL_MISTAKES: dict[str, tuple[list[str], str]] = {
    "no teacher": ([], "distill.teacher_adapter=null is the base with the model's own prompts"),
    "no adapter": (["distill.teacher_adapter=nowhere"], "distill.teacher_adapter=nowhere holds no adapter"),
    "no model": (["distill.teacher_model=./nowhere"], "distill.teacher_model=./nowhere does not exist"),
    "no config": (["distill.teacher_model=tests"], "distill.teacher_model=tests has no config.json"),
    "the model itself": (["distill.teacher_model=org/name"], "is the model that is trained, which would be twice"),
    "an address": (["distill.teacher_model=https://huggingface.co/org/big"], "is an address"),
    "unknown tokens": (["distill.teacher_model=org/big", "tokenizer.add_tokens=[<new>]"], "the teacher does not know"),
    "no scores": (
        ["distill.teacher_scores=nowhere", "distill.lmbda=0"],
        "distill.teacher_scores=nowhere has no scores",
    ),
    "beta": ([HINTED, "distill.beta=2"], "distill.beta=2.0 is a part"),
    "lmbda": ([HINTED, "distill.lmbda=1.5"], "distill.lmbda=1.5 is a part"),
    "below": ([HINTED, "distill.lmbda=-1"], "must be finite and at least 0"),
    "trained beside": ([HINTED, "tokenizer.add_tokens=[<new>]"], "the teacher would compute with it"),
    "other task": ([HINTED, "task=causal_lm"], "Set task=distill too"),
    "drawn anew": ([HINTED, "rollout.dynamic_sampling=2"], "Set task=grpo too"),
    "Liger": ([HINTED, "kernels.cross_entropy=liger"], "sums over all tokens"),
    "pieces": ([HINTED, "memory.head_in_pieces=true"], "is not there for task=distill"),
}


@pytest.mark.parametrize("mistake", DISTILL_MISTAKES)
def test_each_mistake_of_a_teacher_is_one_problem(mistake: str) -> None:
    more, told = DISTILL_MISTAKES[mistake]
    problems = check_settings(load_config([*DISTILL, *more]))
    assert len(problems) == 1, problems
    assert told in str(problems[0])


def test_an_adapter_that_teaches_computes_with_nothing_that_is_trained() -> None:
    problems = check_settings(load_config([*DISTILL, "distill.teacher_adapter=nowhere", "lora.use_dora=true"]))
    assert any("lora.use_dora=true can't be switched off" in str(problem) for problem in problems), problems


def test_scores_are_of_the_answers_in_the_data_alone(tmp_path: Path) -> None:
    (tmp_path / "scores.json").touch()
    scores = f"distill.teacher_scores={tmp_path}"
    refused = {
        "and distill.lmbda=0.5 asks for others. Set distill.lmbda=0": [scores, "distill.lmbda=0.5"],
        "distill.teacher_model=org/big can't be used with distill.teacher_scores=": [
            scores,
            "distill.lmbda=0",
            "distill.teacher_model=org/big",
        ],
    }
    for told, more in refused.items():
        (problem,) = check_settings(load_config([*DISTILL, *more]))
        assert told in str(problem)
    assert check_settings(load_config([*DISTILL, scores, "distill.lmbda=0"])) == []


def test_a_teacher_that_differs_from_the_model_has_no_problem() -> None:
    big = "distill.teacher_model=org/big"
    for more in ([HINTED], ["distill.teacher_system_prompt=Think."], [big], [big, "lora.use_dora=true"]):
        assert check_settings(load_config([*DISTILL, *more])) == []


@pytest.mark.parametrize("setting", ["lora.use_dora=true", "lora.modules_to_save=[embed_tokens]"])
def test_a_reward_model_computes_with_nothing_that_is_trained(setting: str) -> None:
    """Its matrices take the places of the adapter's; what else is trained would stay, and move its scores."""
    problems = check_settings(load_config([*BASE, "reward.models=[nowhere/judge]", setting]))
    assert any("reward.models would compute with it" in str(problem) for problem in problems), problems


def test_what_is_right_has_no_problem() -> None:
    assert check_settings(load_config([*BASE, "grpo.loss_type=rloo", "grpo.beta=0.05"])) == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_rollouts, "find_spec", lambda name: None)
    (problem,) = check_settings(load_config([*BASE[:-1], "reward.functions=[math_equal]"]))
    assert 'pip install "math-verify[antlr4_13_2]"' in str(problem)


def test_functions_count_only_where_they_are_typed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("reward:\n  functions: [evil.py:run]\n")
    with pytest.raises(ConfigError, match=r"decides what is run here.*Remove it; if you want it, type"):
        load_config([*BASE[:-1], f"--config={file}"])


def spec_of(file: Path, *more: str) -> DataSpec:
    argv = ["task=grpo", "model.path=org/name", f"data.path={file}", "training.max_length=20"]
    return DataSpec.of(load_config([*argv, "rollout.max_completion_length=8", *more]))


def test_rows_are_prompts_with_columns(tmp_path: Path) -> None:
    rows = [
        {"question": "2 + 2", "answer": 4},
        {"question": "x" * 30},
        {"answer": 5},
        {"question": 7},
        {"question": ""},
    ]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    spec = spec_of(file, "data.columns={prompt: question}")
    prepared = prepare_questions(spec, byte_tokenizer(), one_process(), VOCAB)
    assert isinstance(prepared.train.rows, Questions)
    question = question_of(prepared.train, 0)
    assert len(prepared.train) == 1
    assert (question.prompt, question.columns, question.place) == ("2 + 2", {"answer": 4}, "rows.jsonl:1")
    told = str(prepared.report)
    for text in (
        "rows.jsonl:2 (31 tokens, and rollout.max_completion_length leaves 12 to prompts)",
        "rows.jsonl:3 (no question, which data.columns names for prompt; keys are answer)",
        "prompt is int, neither text nor a list of messages",
        "prompt is empty",
        "training: 1 prompt, 6 tokens",
    ):
        assert text in told


def test_messages_are_written_by_the_template(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "2 + 2"}], "answer": 4}]
    spec = spec_of(write_lines(tmp_path / "rows.jsonl", rows), "training.max_length=200", "data.chat_template=chatml")
    prepared = prepare_questions(spec, byte_tokenizer(), one_process(), VOCAB)
    question = question_of(prepared.train, 0)
    assert question.is_chat
    text = byte_tokenizer().decode(question.tokens)
    assert text.endswith("<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n")


def test_teachers_get_prompts_of_their_own_and_rows_have_answers(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 2"}]
    rows = [
        {"prompt": chat, "completion": "4", "hinted": [{"role": "user", "content": "2 + 2, which is 4"}]},
        {"prompt": chat, "completion": [{"role": "assistant", "content": "4"}], "hinted": chat},
        {"prompt": chat, "completion": "4"},
        {"prompt": chat, "hinted": chat},
        {"prompt": chat, "completion": "4" * 40, "hinted": chat},
        {"prompt": "2 + 2", "completion": "4", "hinted": "2 + 2"},
    ]
    more = ["task=distill", HINTED, "distill.lmbda=0.5", "training.max_length=200", "data.chat_template=chatml"]
    more += ["distill.teacher_system_prompt=Think.", "rollout.max_completion_length=30"]
    spec = spec_of(write_lines(tmp_path / "rows.jsonl", rows), *more)
    prepared = prepare_questions(spec, byte_tokenizer(), one_process(), VOCAB)
    tokenizer = byte_tokenizer()
    first, second = question_of(prepared.train, 0), question_of(prepared.train, 1)
    assert len(prepared.train) == 2
    assert "system" not in tokenizer.decode(first.tokens)
    system = "<bos><|im_start|>system\nThink.<|im_end|>\n"
    system = "<bos><|im_start|>system\nThink.<|im_end|>\n"
    asked = f"{system}<|im_start|>user\n2 + 2, which is 4<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(first.teacher_tokens) == asked
    assert first.given == second.given
    assert first.given is not None and tokenizer.decode(first.given).startswith("4<|im_end|>")
    for text in (
        "no hinted, which distill.teacher_prompt names",
        "no completion, which distill.lmbda=0.5 asks for",
        "and rollout.max_completion_length is 30",
        "the prompt is text, which distill.teacher_system_prompt can't stand before",
    ):
        assert text in str(prepared.report)


def test_columns_with_names_of_their_own_have_answers_too(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"question": "2 + 2", "hinted": "2 + 2 is 4", "answer": "4"}])
    more = ["task=distill", HINTED, "distill.lmbda=0.5", "data.columns={prompt: question, completion: answer}"]
    tokenizer = byte_tokenizer()
    question = question_of(prepare_questions(spec_of(rows, *more), tokenizer, one_process(), VOCAB).train, 0)
    assert question.given is not None and tokenizer.decode(question.given).startswith("4")


@pytest.mark.parametrize("own", [{}, {"system": "Be brief."}])
@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be nice."}]])
def test_the_teachers_system_prompt_takes_the_place_of_the_rows(
    tmp_path: Path, own: dict[str, str], before: list[dict[str, str]]
) -> None:
    rows = [{"prompt": [*before, {"role": "user", "content": "2 + 2"}], **own}]
    more = ["task=distill", "distill.teacher_system_prompt=Think.", "training.max_length=200"]
    more += ["data.chat_template=chatml", "data.system_prompt=Be quick."]
    spec = spec_of(write_lines(tmp_path / "rows.jsonl", rows), *more)
    tokenizer = byte_tokenizer()
    question = question_of(prepare_questions(spec, tokenizer, one_process(), VOCAB).train, 0)
    rest = "<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(question.teacher_tokens) == f"<bos><|im_start|>system\nThink.{rest}"
    assert "Think." not in tokenizer.decode(question.tokens)


def test_a_teachers_prompt_is_text_or_messages_as_the_prompt_is(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 2"}]
    rows = [{"prompt": chat, "hinted": "4"}, {"prompt": "2 + 2", "hinted": chat}, {"prompt": chat, "hinted": chat}]
    more = ["task=distill", HINTED, "training.max_length=200", "data.chat_template=chatml"]
    spec = spec_of(write_lines(tmp_path / "rows.jsonl", rows), *more)
    prepared = prepare_questions(spec, byte_tokenizer(), one_process(), VOCAB)
    assert len(prepared.train) == 1
    assert "hinted is text, and the prompt is a list of messages; write both as messages" in str(prepared.report)
    assert "hinted is a list of messages, and the prompt is text; write both as messages" in str(prepared.report)


@pytest.mark.parametrize("column", ["prompt", "hinted", "completion"])
@pytest.mark.parametrize("setting", ["data.path", "data.eval_path"])
def test_tokens_that_the_model_has_not_are_refused_wherever_they_are(tmp_path: Path, column: str, setting: str) -> None:
    row = {"prompt": "a", "hinted": "b", "completion": "c"}
    right = write_lines(tmp_path / "rows.jsonl", [row])
    wrong = write_lines(tmp_path / "wrong.jsonl", [{**row, column: "<new>"}])
    more = ["task=distill", HINTED, "distill.lmbda=0.5", f"{setting}={wrong}"]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    largest = tokenizer.convert_tokens_to_ids("<new>")
    with pytest.raises(DataError, match=f"wrong.jsonl has token {largest}, but the model has only {largest}"):
        prepare_questions(spec_of(right, *more), tokenizer, one_process(), vocab_size=largest)


@pytest.mark.parametrize(
    ("rows", "more", "told"),
    [
        ([{"prompt": "x" * 40}], [], "There is no usable prompt"),
        ([{"question": "a"}], [], r"set data.columns=\{prompt: question\}"),
        ([{"prompt": "a"}, {"prompt": 3}], ["data.bad_rows=error"], "data.bad_rows=error, and"),
        ([{"prompt": "a"}], ["data.eval_fraction=0.5"], "leaves none to train on"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, rows: list[object], more: list[str], told: str) -> None:
    spec = spec_of(write_lines(tmp_path / "rows.jsonl", rows), *more)
    with pytest.raises(DataError, match=told):
        prepare_questions(spec, byte_tokenizer(), one_process(), VOCAB)


def test_shares_that_are_not_even_are_told() -> None:
    rollout = load_config([*BASE, "rollout.num_generations=6"]).rollout
    assert describe_shares(30, 1, rollout) == "30 answers a step (rollout.num_generations=6)"
    assert describe_shares(30, 3, rollout).endswith("of which each of 3 writes 10")
    assert describe_shares(30, 4, rollout).endswith("of which each of 4 writes 7 or 8")
