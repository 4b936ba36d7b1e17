"""Foreign files that take the host from inside of libraries' C and Rust code: each ends in one message.

What such a file makes a library do can't be interrupted, by a timer of Python or by Ctrl-C. It runs in a process that
is killed (common/contained.py), or, of sizes in config.json, on the meta device before it is made.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from qlora_fsdp.common import contained, module_names
from qlora_fsdp.common.errors import AdapterError, CheckpointError, DataError
from qlora_fsdp.config.schema import DataConfig, LossOn, ModelConfig, QuantConfig, Weights
from qlora_fsdp.data import tokenizer as tokenizer_module
from qlora_fsdp.data.chats import template as chat_template
from qlora_fsdp.data.chats.conversation import format_messages
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from qlora_fsdp.decoding.completer import Completer, Request, _Launched
from qlora_fsdp.decoding.sampling import Sampling
from qlora_fsdp.decoding.stop_strings import StopsOfGenerate, StopStrings
from qlora_fsdp.inference.prompts import prompt_tokens
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import find_model
from tests.helpers.ranks import start_process

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
NESTED = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
NESTED += "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
POWER = "{{ 7 ** 9999999 ** 2 }}"  # computed while it is compiled


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A home of its own, where nothing was tried before, and a process that knows this test's limits."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 1.0)
    monkeypatch.setattr(module_names, "MATCHING_SECONDS", 1.0)
    yield
    contained.close()


def render(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    format_messages(CHAT, None, LossOn.completion, tokenizer)


@pytest.mark.parametrize("template", [NESTED + "{{ ns.x == ns.y }}", POWER], ids=["compared", "powers"])
def test_a_template_that_stays_inside_c_code(template: str) -> None:
    with pytest.raises(DataError, match=r"^The chat template takes more than 1 s for one conversation\."):
        render(template)


def render_in_worker() -> None:
    """As a process that tokenizes does, which the system ends."""
    chat_template.RENDER_SECONDS = 1.0
    contained.contain_itself()
    render(NESTED + "{{ ns.x == ns.y }}")


def test_a_process_that_tokenizes_is_ended_by_the_system() -> None:
    process = start_process(render_in_worker)
    process.join(60)
    assert process.exitcode == -contained.TOO_LONG


def wait_for_long() -> None:
    """Asks for what never ends."""
    contained.call(spin, seconds=600.0)


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_parent(number: signal.Signals) -> None:
    process = start_process(wait_for_long)
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(children := parent.children(recursive=True)) < 2 or children[-1].cpu_times().user < 0.05:
        assert time.monotonic() < deadline
    os.kill(parent.pid, number)
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert gone and not alive
    process.join(60)
    assert process.exitcode != 0


def stored_tokenizer(folder: Path, change: Callable[[dict[str, Any]], Any]) -> ModelConfig:
    byte_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    return ModelConfig(path=str(folder))


def growing(factor: int, times: int) -> Callable[[dict[str, Any]], Any]:
    """A tokenizer.json that makes `factor` letters of one, again and again."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * factor}
    return lambda values: values.update(normalizer={"type": "Sequence", "normalizers": [step] * times})


def growing_texts(values: dict[str, Any]) -> None:
    """A tokenizer.json that makes gigabytes of one word's tokens."""
    step = {"type": "Replace", "pattern": {"String": "magic"}, "content": "magic" * 30}
    values.update(decoder={"type": "Sequence", "decoders": [values["decoder"], {"type": "Fuse"}, *[step] * 6]})


def splitting(expression: str) -> Callable[[dict[str, Any]], Any]:
    how = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return lambda values: values.update(pre_tokenizer=how)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (growing(1000, 4), r"its loading (takes more than \d GiB|ends the process that tries it)"),
        (growing(3, 17), r"its loading takes more than 2 s"),
        (growing(1000, 1), r"it makes [\d,]+ tokens of \d+ characters"),
        (splitting("(a|aa)+$"), "retry-limit-in-match"),
        (growing_texts, r"its decoder may make 729,000,000 characters of one"),
    ],
    ids=["gigabytes", "minutes", "growth", "regex", "decoder"],
)
def test_a_tokenizer(
    change: Callable[[dict[str, Any]], Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    real = contained.call
    monkeypatch.setattr(tokenizer_module, "call", lambda *args: real(*args, seconds=2.0, num_bytes=2**30))
    model = stored_tokenizer(tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=rf"^No tokenizer could be loaded from .*: {reason}"):
        load_tokenizer(model, DataConfig())
    assert "panicked" not in capfd.readouterr().err


def test_what_was_tried_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = contained.call
    monkeypatch.setattr(tokenizer_module, "call", lambda *args: calls.append(args) or real(*args))
    model = stored_tokenizer(tmp_path / "model", lambda values: None)
    for _ in range(2):
        load_tokenizer(model, DataConfig())
    assert len(calls) == 1
    stored_tokenizer(tmp_path / "model", growing(2, 1))
    load_tokenizer(model, DataConfig())
    assert len(calls) == 2


def test_a_text_that_a_regular_expression_does_not_get_over(tmp_path: Path) -> None:
    """The tokenizer was tried with texts that have no such run of letters."""
    tokenizer = load_tokenizer(stored_tokenizer(tmp_path / "model", splitting("(z|zz)+$")), DataConfig())
    with pytest.raises(DataError, match=r"^The tokenizer can't tokenize a text: .*retry-limit-in-match"):
        tokenizer_module.encode(tokenizer, "z" * 200 + "!")


SIZES: dict[str, dict[str, Any]] = {
    "a mask of positions": {"model_type": "gpt_neo", "max_position_embeddings": 95_000},
    "places of patches": {"model_type": "gemma3", "vision_config": {"image_size": 34_000, "patch_size": 1}},
    "many masks": {"model_type": "gpt_neo", "max_position_embeddings": 11_000},
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_of_a_config_that_are_multiplied(case: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"its config can't be used: it asks for"):
        files = find_model(ModelConfig(weights=Weights.random, config=SIZES[case]), True, lambda error: error)
        build_model(files, BuildSettings(QuantConfig(load_in_4bit=False), torch.bfloat16, "eager"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**21  # KiB


def test_masks_that_models_have_are_made() -> None:
    config = {"model_type": "gpt_neo", "max_position_embeddings": 2048, "hidden_size": 64, "num_layers": 24}
    files = find_model(ModelConfig(weights=Weights.random, config=config), True, lambda error: error)
    built = build_model(files, BuildSettings(QuantConfig(load_in_4bit=False), torch.bfloat16, "eager"))
    masks = [buffer for name, buffer in built.model.named_buffers() if name.endswith("attention.bias")]
    assert len(masks) == 24 and not masks[0].is_meta


def test_a_vision_tower_of_a_pretrained_backbone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    tower = {"model_type": "detr", "backbone": "microsoft/resnet-50", "use_timm_backbone": False}
    config = {"model_type": "mistral3", "vision_config": tower | {"use_pretrained_backbone": True}}
    with pytest.raises(CheckpointError, match="it names another model, which would be looked for on the hub"):
        find_model(ModelConfig(weights=Weights.random, config=config), True, lambda error: error)


@pytest.mark.parametrize("expression", ["(.+)+#", "(.|..)*#", "(a*)*b"])
def test_a_pattern_of_ranks_that_does_not_end(expression: str) -> None:
    names = ["model.layers.0." + "a" * 64]
    with pytest.raises(AdapterError, match=r"^lora\.rank_pattern: a regular expression takes too long\."):
        module_names.try_matching("lora.rank_pattern", module_names.match_all, names, [expression])


def growing_words(values: dict[str, Any]) -> None:
    """A tokenizer.json that makes gigabytes of one word, which no trial has."""
    step = {"type": "Replace", "pattern": {"String": "magic"}, "content": "magic" * 30}
    values.update(normalizer={"type": "Sequence", "normalizers": [step] * 5})


@pytest.mark.parametrize("change", [growing_words, growing_texts])
def test_a_prompt_and_an_answer_with_which_nobody_has_tried_it(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As generate and chat have them: neither memory nor Ctrl-C is lost to a word that the file waits for."""
    monkeypatch.setattr(tokenizer_module, "_try_loading", lambda *args: None)
    tokenizer = load_tokenizer(stored_tokenizer(tmp_path / "model", change), DataConfig())
    real = contained.call
    monkeypatch.setattr(tokenizer_module, "call", lambda *args: real(*args, seconds=2.0, num_bytes=2**30))
    assert prompt_tokens(tokenizer, "hello") == [256, *b"hello"]
    foreign = tokenizer_module.ContainedTokenizer(tokenizer)
    assert foreign.decode(list(b"hello")) == "hello"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"^The tokenizer (takes more than \d (s|GiB)|ends the process that tries it)"):
        prompt_tokens(tokenizer, "magic" * 40)
        foreign.decode(list(b"magic" * 40))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def slow_decoder(values: dict[str, Any]) -> None:
    """A tokenizer.json whose decoder has a regular expression that takes seconds at each letter of a long run."""
    step = {"type": "Replace", "pattern": {"Regex": "(z|zz){20}#"}, "content": ""}
    values.update(decoder={"type": "Sequence", "decoders": [values["decoder"], {"type": "Fuse"}, step]})


SLOW = [*b"z" * 600, *b"!"]  # what a model may say


def say(place: str, tokenizer: Any) -> None:
    """Turn these tokens into text, where this package does."""
    match place:
        case "stops":
            StopStrings(tokenizer, ["x" * 1000])(SLOW)
        case "stops of generate":
            StopsOfGenerate(StopStrings(tokenizer, ["x" * 1000]), 0)(torch.tensor([SLOW]), torch.zeros(1))
        case "slots":
            request = Request([0], len(SLOW) + 1)
            request.completion = SLOW[:-1]
            completer = Completer(nn.Identity(), torch.device("cpu"), Sampling(), [], 0)
            completer.stops = StopStrings(tokenizer, ["x" * 1000])
            completer._look(_Launched(torch.tensor(SLOW[-1:]), None, None, [request]), [request], None)
        case unknown:
            raise AssertionError(unknown)


@pytest.mark.parametrize("place", ["stops", "stops of generate", "slots"])
def test_what_a_model_says_is_looked_through_for_its_end_in_bounded_time(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer was tried with texts that have no such run of letters."""
    tokenizer = load_tokenizer(stored_tokenizer(tmp_path / "model", slow_decoder), DataConfig())
    real = contained.call
    monkeypatch.setattr(tokenizer_module, "call", lambda *args: real(*args, seconds=1.0))
    before = time.process_time()
    with pytest.raises(DataError, match=r"^The tokenizer takes more than 1 s for one text"):
        say(place, tokenizer)
    assert time.process_time() - before < 1.0, "this process waits, and hears Ctrl-C"


def quick_regex(values: dict[str, Any]) -> None:
    """A tokenizer.json with a regular expression in its decoder, which is quick."""
    step = {"type": "Replace", "pattern": {"Regex": "[q]"}, "content": "q"}
    values.update(decoder={"type": "Sequence", "decoders": [values["decoder"], step]})


@pytest.mark.parametrize("change", [lambda values: None, quick_regex], ids=["plain", "regex"])
def test_a_contained_tokenizer_is_the_tokenizer(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    """Also once it has more tokens, and once the process was ended."""
    tokenizer = load_tokenizer(stored_tokenizer(tmp_path / "model", change), DataConfig())
    foreign = tokenizer_module.ContainedTokenizer(tokenizer)
    for text in ("", "a <eos> \u00e9\U0001f600", "new one"):
        ids = tokenizer_module.encode(tokenizer, text)
        assert foreign.encode(text) == ids
        for skips in (True, False):
            assert foreign.decode(ids, skip_special_tokens=skips) == tokenizer.decode(ids, skip_special_tokens=skips)
    tokenizer.add_tokens(["new one"])
    assert foreign.encode("new one") == [259]
    contained.close()
    assert foreign.decode([259]) == "new one"


def test_a_conversation_of_a_task_is_written_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `evaluate tasks=...` has lm-eval write its questions."""
    real = contained.call
    monkeypatch.setattr(tokenizer_module, "call", lambda *args: real(*args, seconds=1.0))
    tokenizer = byte_tokenizer()
    expected = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    written = tokenizer_module.ContainedTokenizer(tokenizer).write_chat(CHAT[:1], add_generation_prompt=True)
    assert written == expected
    for template, message in (
        (NESTED + "{{ ns.x == ns.y }}", r"^The chat template takes more than 1 s for one conversation\."),
        ("{{ raise_exception('No system role.') }}", r"^The chat template can't be applied: No system role\. Correct"),
    ):
        foreign = byte_tokenizer()
        foreign.chat_template = template
        with pytest.raises(DataError, match=message):
            tokenizer_module.ContainedTokenizer(foreign).write_chat(CHAT)


def test_texts_are_tried_together_up_to_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []
    monkeypatch.setattr(tokenizer_module, "TRIED_TOGETHER", 6)
    monkeypatch.setattr(
        tokenizer_module, "call", lambda function, key, sent, name, value, options: tried.append(value) or [[]]
    )
    tokenizer_module.try_texts(byte_tokenizer(), ["abc", "def", "g", "a long one", "", "hi"])
    assert tried == [["abc", "def"], ["g"], ["a long one"], ["", "hi"]]


def test_a_plain_decoder_waits_for_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nearly all are, among them those that put spaces in place of other signs."""
    space = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}

    def change(values: dict[str, Any]) -> None:
        values.update(decoder={"type": "Sequence", "decoders": [values["decoder"], {"type": "Fuse"}, space]})

    tokenizer = load_tokenizer(stored_tokenizer(tmp_path / "model", change), DataConfig())
    monkeypatch.setattr(tokenizer_module, "call", None)
    assert StopStrings(tokenizer, ["a b"])(list(b"a_b"))


def test_a_slow_download_is_no_part_of_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tokenizer of the hub all files are fetched before the process that tries them is asked."""
    done: list[str] = []
    monkeypatch.setattr(tokenizer_module, "find_unreachable", lambda *args: None)
    monkeypatch.setattr(tokenizer_module, "_check_arguments", lambda *args: None)
    monkeypatch.setattr(tokenizer_module, "fetch_small_files", lambda *args: done.append("fetched"))
    monkeypatch.setattr(tokenizer_module, "_try_loading", lambda *args: done.append("tried"))
    monkeypatch.setattr(tokenizer_module, "_load", lambda *args: byte_tokenizer())
    load_tokenizer(ModelConfig(path="some/model"), DataConfig())
    assert done == ["fetched", "tried"]


def tell_processes() -> list[int]:
    """This process, the one that has forked it, and how many threads each had when it was born."""
    return [os.getpid(), os.getppid()]


def has_imported(name: str) -> bool:
    return name in sys.modules


def start_early_and_call_late(results: Any) -> None:
    """As a command does: later there are threads, and what is tried ends the process or is too long or too large."""
    gc.disable()  # as while a command imports
    contained.start(makes_configs=True)
    forker = contained._forker.pid if contained._forker is not None else 0
    stopped = threading.Event()
    for _ in range(4):
        threading.Thread(target=stopped.wait, daemon=True).start()
    told = [contained.call(tell_processes)]
    for function, *args in ((os._exit, 3), (spin,), (bytes, 2**40)):
        with suppress(contained.LimitError):
            contained.call(function, *args, seconds=1.0)
        told.append(contained.call(tell_processes))
    processes, parents = zip(*told, strict=True)
    threads = [len(psutil.Process(pid).threads()) for pid in (forker, processes[-1])]
    is_ready = contained.call(has_imported, "transformers.activations")
    results.put((set(parents) == {forker}, len(set(processes)), threads, contained.call(gc.isenabled), is_ready))


def test_it_is_forked_off_a_process_without_threads() -> None:
    results = multiprocessing.get_context("forkserver").SimpleQueue()
    process = start_process(start_early_and_call_late, results)
    found = results.get()
    process.join(60)
    assert found == (True, 4, [1, 1], True, True)


def test_what_starts_cuda_is_imported_after_it() -> None:
    """PEFT and bitsandbytes start CUDA while they are imported."""
    program = "import sys; from qlora_fsdp.common import contained; contained.start(makes_configs=True); "
    program += "print({'bitsandbytes', 'peft', 'accelerate'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "set()\n"
