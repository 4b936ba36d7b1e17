"""Rows to tokens: what is trained on, token for token."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qlora_fsdp.common.errors import CheckpointError, DataError
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data import tokenize as tokenize_module
from qlora_fsdp.data.tokenize import RowTokenizer, find_target_tokens, first_text
from qlora_fsdp.data.tokenizer import load_tokenizer

BOS, EOS = 256, 257

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye."},
    {"role": "assistant", "content": "Ciao, é."},
]

PLAIN_TEMPLATE = (  # no generation marks
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING_TEMPLATE = (  # like Qwen3: an empty thought before the last answer only
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'].split('</think>')[-1] }}<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MISTRAL_TEMPLATE = (  # the system message stands in the last user turn, and there is no prompt for an answer
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% set last_user = (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{ bos_token }}{% for m in turns %}{% if m['role'] == 'user' %}"
    "[INST]{{ system + ' ' if system and m == last_user else '' }}{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig())
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tokenize(*rows: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any) -> list[tuple]:
    """(problem, tokens, is_target) of each row that comes out."""
    values = {"data_format": DataFormat.auto, "loss_on": LossOn.completion, "max_length": 1000}
    values |= {"bad_rows": BadRows.truncate, **settings}
    batch = {"place": [str(i) for i in range(len(rows))], "row": [json.dumps(row).encode() for row in rows]}
    out = RowTokenizer(tokenizer or make_tokenizer(), **values)(batch)
    columns = (out["problem"], out["tokens"], out["is_target"])
    return [(problem, tokens.tolist(), mask.tolist()) for problem, tokens, mask in zip(*columns, strict=True)]


def trained_text(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any) -> str:
    [(problem, tokens, mask)] = tokenize(row, tokenizer=tokenizer, **settings)
    assert problem == ""
    tokens = [token for token, is_target in zip(tokens, mask, strict=True) if is_target]
    return (tokenizer or make_tokenizer()).decode(tokens)


def test_prompt_completion_trains_on_completion_and_end_token():
    [(problem, tokens, mask)] = tokenize({"prompt": "ab", "completion": "cé"})
    assert problem == ""
    assert tokens == [BOS, 97, 98, 99, 0xC3, 0xA9, EOS]
    assert mask == [False, False, False, True, True, True, True]


def test_loss_on_all_trains_on_the_prompt_too():
    [(_, _, mask)] = tokenize({"prompt": "ab", "completion": "c"}, loss_on=LossOn.all)
    assert mask == [False, True, True, True, True]


def test_loss_on_last_trains_on_a_completion_as_ever():
    assert tokenize({"prompt": "ab", "completion": "c"}, loss_on=LossOn.last) == tokenize(
        {"prompt": "ab", "completion": "c"}
    )


def test_text_trains_on_all_but_the_first_token():
    assert tokenize({"text": "ab"}) == [("", [BOS, 97, 98, EOS], [False, True, True, True])]


def test_begin_and_end_tokens_written_in_the_text_are_not_doubled():
    [(_, tokens, _)] = tokenize({"text": "<bos>a<eos>"})
    assert tokens == [BOS, 97, EOS]


def test_instruction_uses_the_alpaca_prompt():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    [(_, tokens, _)] = tokenize(row)
    text = make_tokenizer().decode(tokens)
    assert text.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<eos>")
    assert trained_text(row) == "3<eos>"
    [(_, tokens, _)] = tokenize({"instruction": "Add {x}.", "input": None, "output": "3"})
    assert "### Input" not in make_tokenizer().decode(tokens)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("chatml", "Hello!<|im_end|><eos>Ciao, é.<|im_end|><eos>"),
        ("llama3", "Hello!<|eot_id|>Ciao, é.<|eot_id|>"),
        ("alpaca", "Hello!<eos>Ciao, é.<eos>"),
    ],
)
def test_shipped_templates(name: str, trained: str):
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template=name))
    row = {"messages": CHAT}
    assert trained_text(row, tokenizer) == trained
    [(_, tokens, mask)] = tokenize(row, tokenizer=tokenizer)
    reference = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens == reference["input_ids"]
    assert mask == [bool(is_target) for is_target in reference["assistant_masks"]]
    assert tokens.count(BOS) == 1
    # What the model is prompted with later is what it saw in training.
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokens[: len(prompt)] == prompt


def test_template_without_marks_is_compared_turn_by_turn():
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    [(_, tokens, mask)] = tokenize({"messages": CHAT[1:3]}, tokenizer=tokenizer)
    assert tokens == [BOS, *b"[user]Hi?<end>[assistant]Hello!<end>"]
    assert mask == [False] * (len(tokens) - len("Hello!<end>")) + [True] * len("Hello!<end>")
    assert trained_text({"messages": CHAT}, tokenizer) == "Hello!<end>Ciao, é.<end>"


def test_template_that_renders_the_last_turn_otherwise():
    tokenizer = make_tokenizer(THINKING_TEMPLATE)
    assert trained_text({"messages": CHAT}, tokenizer) == "Hello!<end><think></think>Ciao, é.<end>"
    chat = [dict(message) for message in CHAT]
    chat[2]["content"] = "<think>hm</think>Hello!"  # the template drops the thought
    chat[4]["content"] = "Hello!"
    assert trained_text({"messages": chat}, tokenizer) == "Hello!<end><think></think>Hello!<end>"


def test_template_that_moves_the_system_message():
    tokenizer = make_tokenizer(MISTRAL_TEMPLATE)
    assert trained_text({"messages": CHAT}, tokenizer) == "Hello!<eos>Ciao, é.<eos>"
    assert trained_text({"messages": CHAT[2:]}, tokenizer) == "Hello!<eos>Ciao, é.<eos>"  # nothing before the first


def test_template_that_ends_with_a_token_of_its_own():
    template = "{% for m in messages %}({{ m['role'] }}){{ m['content'] }}<bos>{% endfor %}"
    template += "{{ '(assistant)' if add_generation_prompt else eos_token }}"
    trained = trained_text({"messages": CHAT}, make_tokenizer(template))
    assert trained == "Hello!<bos>Ciao, é.<bos>"  # at which generation stops, as it ends earlier answers


def test_turns_that_cannot_be_told_apart_are_refused_not_trained_on():
    template = "{% for m in messages %}{{ m['content'] | upper if loop.last else m['role'] }}{% endfor %}"
    [(problem, tokens, _)] = tokenize({"messages": CHAT}, tokenizer=make_tokenizer(template))
    assert (problem, tokens) == ("no target token", [])


def test_chat_without_assistant_has_no_target():
    [(problem, tokens, _)] = tokenize({"messages": CHAT[:2]})
    assert (problem, tokens) == ("no target token", [])


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses_a_row_makes_it_a_bad_row(template: str):
    tokenizer = make_tokenizer(template)
    [(problem, _, _)] = tokenize({"messages": CHAT}, tokenizer=tokenizer)
    assert problem == "refused by the chat template"


@pytest.mark.parametrize("template", ["llama3", "chatml"])
@pytest.mark.parametrize("content", ["", "I'll look."])
def test_a_template_that_leaves_out_calls_of_tools_refuses_the_row(template: str, content: str):
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template=template))
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    row = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": calls}]
    }
    [(problem, tokens, _)] = tokenize(row, tokenizer=tokenizer)
    assert (problem, tokens) == ("refused by the chat template", [])


def test_null_fields_of_messages_are_as_if_missing():
    template = "{% for m in messages %}{{ m['content'] }}{% if m.name is defined %}!{% endif %}{% endfor %}"
    row = {"messages": [{**message, "name": None, "weight": None, "train": None} for message in CHAT]}
    [(_, tokens, _)] = tokenize(row, tokenizer=make_tokenizer(template), loss_on=LossOn.all)
    assert b"!" * 2 not in bytes(tokens)
    assert tokenize(row) == tokenize({"messages": CHAT})


def test_a_token_across_the_boundary_is_trained_on():
    vocab = {"a": 0, "b": 1, "c": 2, "d": 3, "bc": 4, "</s>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    [(_, tokens, mask)] = tokenize({"prompt": "a ab", "completion": "cd"}, tokenizer=tokenizer)
    assert tokens == [0, 0, 4, 3, 5]
    assert mask == [False, False, True, True, True]


def test_long_rows_under_each_policy():
    long = {"prompt": "ab", "completion": "cdef"}  # 8 tokens
    assert tokenize(long, max_length=5) == [
        ("longer than training.max_length", [BOS, 97, 98, 99, 100], [False, False, False, True, True])
    ]
    for policy in (BadRows.skip, BadRows.error):
        assert tokenize(long, max_length=5, bad_rows=policy) == [("longer than training.max_length", [], [])]
    assert tokenize(long, max_length=3) == [("no target token", [], [])]
    assert tokenize(long, max_length=8)[0][0] == ""


def test_long_text_is_split_and_counted_once():
    [first, second, third] = tokenize({"text": "abcdefgh"}, max_length=4)  # 10 tokens
    assert first == ("longer than training.max_length; all of it is used", [BOS, 97, 98, 99], [False, True, True, True])
    assert second == ("", [100, 101, 102, 103], [False, True, True, True])
    assert third == ("", [104, EOS], [False, True])


def train_bpe(splits_words: bool) -> PreTrainedTokenizerBase:
    """A BPE tokenizer with merges, of words or of whole texts."""
    backend = Tokenizer(models.BPE())
    if splits_words:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    text = ["the cat sat on the mat", "a banana and another banana", "aaaa abab baba"] * 3
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=120, special_tokens=["</s>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")


@pytest.mark.parametrize(
    "tokenizer", [make_tokenizer(), train_bpe(True), train_bpe(False)], ids=["bytes", "bpe", "one"]
)
def test_of_a_very_long_row_the_beginning_alone_is_tokenized(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    rng = random.Random(0)
    words = ["the ", "cat", "banana", "aa", "ab", "ba", " ", "another ", "\n", "</s>", "é"]
    for max_length in (1, 5, 16, 40):
        text = "".join(rng.choices(words, k=4000))
        rows = [{"prompt": text[:7], "completion": text[7:]}, {"prompt": "a", "completion": "b" * 3000 + "é"}]
        expected = tokenize(*rows, tokenizer=tokenizer, max_length=max_length)
        with monkeypatch.context() as patch:
            patch.setattr(tokenize_module, "LONG_TEXT", 64)
            assert len(first_text(tokenizer, text, max_length)) < len(text) / 2
            assert tokenize(*rows, tokenizer=tokenizer, max_length=max_length) == expected
            long = tokenize({"text": text}, tokenizer=tokenizer, max_length=max_length)
        assert long == tokenize({"text": text}, tokenizer=tokenizer, max_length=max_length)  # text is kept whole
    row = {"place": ["a:1"], "row": [json.dumps(rows[1]).encode()]}
    monkeypatch.setattr(tokenize_module, "LONG_TEXT", 64)
    out = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 5, BadRows.skip)(row)
    assert out["detail"] == ["3002 characters"] and len(out["tokens"][0]) == 0


def test_messages_without_any_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"data\.chat_template=chatml"):
        tokenize({"messages": CHAT}, tokenizer=tokenizer)


def test_byte_tokenizer_round_trip():
    tokenizer = make_tokenizer()
    text = "  tabs\t, é漢🙂\n\n"
    assert tokenizer(text)["input_ids"] == [BOS, *text.encode()]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert len(tokenizer) == 259


def test_tokenizer_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.tokenizer_path"):
        load_tokenizer(ModelConfig(), DataConfig())
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "missing")), DataConfig())
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    with pytest.raises(CheckpointError, match=r"model\.tokenizer_path"):
        load_tokenizer(ModelConfig(path=str(tmp_path)), DataConfig())
    with pytest.raises(DataError, match=r"data\.chat_template=chatlm .* chatml"):
        load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template="chatlm"))


def test_saved_tokenizer_keeps_its_template_and_gets_a_pad_token(tmp_path):
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template="llama3"))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(ModelConfig(path=str(tmp_path)), DataConfig())
    assert again.chat_template == tokenizer.chat_template
    assert again.pad_token_id == EOS
    assert again("a<eos>")["input_ids"] == [BOS, 97, EOS]


def test_what_a_tokenizer_puts_before_a_text_stands_there_once():
    tokenizer = make_tokenizer()
    added = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<pad>", "<bos>")]  # as GLM-4's two tokens
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<pad> <bos> $A", special_tokens=added)
    for prompt in ("ab", "<pad><bos>ab"):
        whole = tokenizer("ab", verbose=False)["input_ids"]
        [(_, tokens, mask)] = tokenize({"prompt": prompt, "completion": "c"}, tokenizer=tokenizer)
        assert tokens == [*whole, ord("c"), EOS]
        assert mask == [*[False] * len(whole), True, True]


def test_a_system_message_that_the_template_leaves_out_of_answered_conversations_is_told():
    """Mistral's templates write it into the last message, if that is the user's: before an answer, as in use."""
    template = (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}"
        "{% if m.role == 'user' %}[{{ system if loop.last }}{{ m.content }}]{% elif m.role == 'assistant' %}"
        "{{ m.content }}<end>{% endif %}{% endfor %}"
    )
    tokenizer, turns = make_tokenizer(template), CHAT[1:3]
    rendered = tokenizer.apply_chat_template([CHAT[0], *turns[:1]], tokenize=False)
    assert rendered == "[Be brief.Hi?]"
    for row, settings in (({"messages": turns}, {"system_prompt": "Be brief."}), ({"messages": CHAT[:3]}, {})):
        assert tokenize(row, tokenizer=tokenizer, **settings) == [("refused by the chat template", [], [])]
    assert "Be brief." in tokenizer.decode(tokenize({"messages": turns}, system_prompt="Be brief.")[0][1])


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_looks_for_words_in_another_field_is_told(role: str):
    """Jinja writes nothing for a field that is not there, and the end markers alone would be trained on."""
    words = f"m.text if m.role == '{role}' else m.content"
    template = f"{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ {words} }}}}<end>{{% endfor %}}"
    [(problem, tokens, _)] = tokenize({"messages": CHAT[:3]}, tokenizer=make_tokenizer(template))
    assert (problem, tokens) == ("refused by the chat template", [])
    escaped = template.replace(words, "m.content | tojson")
    assert "\\n" in trained_text({"messages": [CHAT[1], {**CHAT[2], "content": 'a\n"b"'}]}, make_tokenizer(escaped))


@pytest.mark.parametrize("text", ["def f():\n    return 1\n", "a  ", "\n\n", " b"])
def test_spaces_at_the_end_of_a_completion_are_trained_on_whatever_the_tokenizer_says_of_their_place(text: str):
    """GPT-NeoX's, OLMo's and StarCoder's tokenizers tell the places of tokens without the spaces in them."""
    tokenizer, found = make_tokenizer(), []
    for trims in (False, True):
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
        encoding = tokenizer.backend_tokenizer.encode(f"a \n{text}  b", add_special_tokens=False)
        found.append(find_target_tokens(encoding, [(3, 3 + len(text))]).tolist())
    assert found[1] == found[0]


@pytest.mark.parametrize("kind", ["bytes", "words", "metaspace", "unigram"])
def test_targets_are_the_tokens_that_overlap_a_span(kind: str):
    alphabet = "ab é漢👩\u0301\n  <"
    pieces = [(c, -1.0) for c in ["▁", "<unk>", *alphabet]] + [("ab", -1.5), ("▁a", -1.5)]
    vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
    if kind == "bytes":
        backend = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig()).backend_tokenizer
    elif kind == "words":
        backend = Tokenizer(models.WordPiece(vocab | {"##b": 90, "##a": 91}, unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    elif kind == "metaspace":
        backend = Tokenizer(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = normalizers.NFD(), pre_tokenizers.Metaspace()
    else:
        backend = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=False))
        backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    rng = random.Random(kind)
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 30)))
        spans = [tuple(sorted(rng.choices(range(len(text) + 1), k=2))) for _ in range(rng.randint(0, 4))]
        encoding = backend.encode(text, add_special_tokens=False)
        expected = [any(a < end and b > start for start, end in spans) for a, b in encoding.offsets]
        assert find_target_tokens(encoding, spans).tolist() == expected, (text, spans)


def test_columns_that_are_null_do_not_say_which_form_a_row_has():
    """As in a table that was joined of chats, completions and texts."""
    rows = [{"messages": CHAT}, {"prompt": "a ", "completion": "b"}, {"text": "abc"}]
    none = dict.fromkeys(("messages", "prompt", "completion", "text"))
    settings = {"tokenizer": make_tokenizer(PLAIN_TEMPLATE)}
    assert tokenize(*(none | row for row in rows), **settings) == tokenize(*rows, **settings)
    [(problem, tokens, _)] = tokenize(none | {"completion": "b"})
    assert problem == "wrong types" and not len(tokens)
