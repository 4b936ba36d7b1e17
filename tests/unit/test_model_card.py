"""The model card of an adapter: what it tells, and that nothing in it can become more than text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from qlora_fsdp.common.hub import hub_name
from qlora_fsdp.common.text import printable
from qlora_fsdp.inference.merged_card import make_merged_card
from qlora_fsdp.model.adapters.model_card import CardData, CardFacts, code, fence, make_card, read_license

FACTS = CardFacts(
    base="org/base-1b",
    license="apache-2.0",
    data=(CardData("org/chats", True, 1234), CardData("my chats.jsonl", False, 20)),
    settings=(("lora.r", "24"),),
    num_steps=300,
    eval_losses=((0, 2.5), (150, 2.0), (300, 1.75)),
    train_losses=(2.6, 1.5),
    rank=24,
    prompt="Prompts are given as they are.",
    example=("What is dedent?", "It removes spaces."),
)


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_card_tells_what_a_user_of_the_adapter_asks():
    card = make_card(FACTS, "code()")
    assert front_matter(card) == {
        "base_model": "org/base-1b",
        "license": "apache-2.0",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "datasets": ["org/chats"],
        "tags": ["lora", "qlora", "qlora-fsdp"],
    }
    for part in (
        "| [org/chats](https://huggingface.co/datasets/org/chats) | 1,234 |\n| `my chats.jsonl` | 20 |",
        "| held-out rows | 2.5000 before training | 1.7500 after 300 steps |",
        "| training rows | 2.6000 in the first 10 steps | 1.5000 in the last 10 steps |",
        "vllm serve org/base-1b --enable-lora --max-lora-rank 32",
        "sglang.launch_server --model-path org/base-1b --enable-lora \\\n  --lora-paths adapter=path/to/this/folder\n",
        " out=merged gguf=q8_0 llama_cpp=llama.cpp\nllama-server --model merged/model-Q8_0.gguf\n",
        "What the model wrote:\n\n```\nIt removes spaces.\n```",
        "trained with qlora-fsdp",
        ": 300 steps.",
    ):
        assert part in card, part


def test_a_card_is_honest_about_what_is_not_known():
    facts = CardFacts(None, num_steps=9, is_final=False, train_losses=(2.5, 1.5), num_averaged=4)
    facts = replace(facts, needs_merge="it is a DoRA adapter", doubt="It rose.")
    card = make_card(facts, "code()")
    assert "base_model" not in front_matter(card) and "a checkpoint of a run of 9 steps" in card
    assert "No held-out rows were evaluated. **It rose.**" in card
    assert "| training rows | 2.5000 in the first 4 steps | 1.5000 in the last 4 steps |" in card
    assert "because it is a DoRA adapter" in card and "--enable-lora" not in card and "Random tokens" in card
    assert "vllm" not in make_card(facts, "code()", is_classifier=True)


def test_a_card_has_an_adapter_of_rslora_written_anew_for_sglang():
    plain, scaled = (make_card(replace(FACTS, use_rslora=value), "code()") for value in (False, True))
    assert "write=adapter" not in plain and "--lora-modules adapter=path/to/this/folder" in scaled
    assert "out=for-servers write=adapter\npython -m sglang.launch_server" in scaled
    assert "--lora-paths adapter=for-servers" in scaled


@pytest.mark.parametrize(("is_coded", "option"), [(False, ""), (True, " --load-format bitsandbytes")])
def test_the_card_of_a_merged_model_says_how_servers_take_it(is_coded: bool, option: str):
    card = make_merged_card("org/base-1b", "in nf4", "it", "AutoModel", "report=false.", is_coded, ["model-Q4_0.gguf"])
    folder = "path/to/this/folder"
    assert f"vllm serve {folder}\npython -m sglang.launch_server --model-path {folder}{option}\n" in card
    assert f"llama-server --model {folder}/model-Q4_0.gguf\ncd {folder} && ollama create NAME" in card


@pytest.mark.parametrize(
    "name", ["a\n---\nlicense: mit", "a: [b", "]}\nbase_model: evil/model", "| x | ` <script>", "\x1b]0;title\x07"]
)
def test_names_of_others_add_nothing_to_a_card(name: str):
    facts = CardFacts(name, name, name, (CardData(name, True, 1), CardData(name, False, 1)))
    found = front_matter(make_card(facts, "code()"))
    assert set(found) == {"base_model", "license", "library_name", "pipeline_tag", "datasets", "tags"}
    assert (found["base_model"], found["datasets"]) == (printable(name), [printable(name)])
    local = CardFacts(None, name, data=(CardData(name, False, 1),), example=("```\n# A heading", f"{name}\n~~~"))
    card = make_card(local, "code()")
    assert "\x1b" not in card and "`````" not in card and "````\n```\n# A heading\n````" in card
    assert set(front_matter(card)) == {"library_name", "pipeline_tag", "tags"}


def test_code_and_fences_hold_any_text():
    assert code("a|b`c\nd") == "`a\\|b'c?d`"
    assert fence("```` four") == "`````\n```` four\n`````"


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert hub_name("org/model-1.5") == "org/model-1.5"
    assert hub_name("/cache/models--org--model/snapshots/0123abc") == "org/model"
    for local in (
        None,
        "org/here",
        "/models/llama",
        "llama",
        "../a/b",
        "~/models",
        "a/b/c",
        "../b",
        "org/a b",
        "org/a\n",
    ):
        assert hub_name(local) is None, local


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# A", "apache-2.0"),
        ("---\ntags:\n- a\nlicense: mit\n---\n", "mit"),
        ("---\nlicense: 'x: y'\n---\n", None),
        ("# A\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_the_license_of_a_base(tmp_path: Path, text: str, found: str | None):
    assert read_license(tmp_path) is read_license(None) is None
    (tmp_path / "README.md").write_text(text)
    assert read_license(tmp_path) == found
