"""Texts in slots against transformers' own `generate`, logits and warpers, in float32 on the CPU."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from itertools import pairwise
from string import ascii_letters
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    GenerationConfig,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.decoding.completer import Completer, Request
from qlora_fsdp.decoding.sampling import Draws, Sampling, why_not_sampled
from qlora_fsdp.decoding.slot_cache import SlotCache
from qlora_fsdp.decoding.steps import Prompts, Steps
from qlora_fsdp.decoding.stop_strings import StopStrings
from qlora_fsdp.decoding.trial import why_not_in_slots

CPU = torch.device("cpu")
VOCAB, ENDS = 100, [5, 6, 7, 8, 9]
LENGTHS = (1, 5, 13, 2, 20, 9, 7)  # tokens of the prompts
NUM_NEW = (12, 7, 20, 3, 9, 14, 30)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "norms of heads": Qwen3Config(**SIZES),
    "windows": MistralConfig(**SIZES, sliding_window=6),
    "windows and caps": Gemma2Config(**SIZES, sliding_window=6, tie_word_embeddings=False),
    "windows, sinks and experts": GptOssConfig(**SIZES, sliding_window=6, num_local_experts=4),
    "keys wider than values": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
        n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
    ),
    "delta rules": Qwen3_5TextConfig(
        **SIZES, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "short convolutions": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
    "states beside attention in one layer": FalconH1Config(
        **SIZES, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=16, mamba_n_groups=1,
    ),
}  # fmt: skip


@cache
def build(family: str) -> PreTrainedModel:
    """Weights so large that the likeliest token is clear."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        FAMILIES[family], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(10, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def stock(model: PreTrainedModel, prompt: list[int], num_new: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, eos_token_id=ENDS,
        pad_token_id=0, **options,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_slots", [1, 3, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_are_those_of_transformers(family: str, num_slots: int):
    """Prompts of many lengths; some end at a token, some at their number; fewer slots than prompts, and more."""
    model = build(family)
    expected = [stock(model, prompt, number) for prompt, number in zip(prompts(), NUM_NEW, strict=True)]
    found = [Request(prompt, number) for prompt, number in zip(prompts(), NUM_NEW, strict=True)]
    completer = Completer(model, CPU, Sampling(), ENDS, 0, num_slots)
    completer.complete(found)
    assert [request.completion for request in found] == expected
    assert {len(text) == number for text, number in zip(expected, NUM_NEW, strict=True)} == {True, False}
    assert model.config._attn_implementation == "eager"
    longer = Request(prompts()[4] * 6, 40)  # than the slots that there are
    completer.complete([longer])
    assert longer.completion == stock(model, longer.prompt, 40)


def test_a_penalty_for_repetition_is_that_of_transformers():
    model = build("llama")
    found = [Request(prompt, number) for prompt, number in zip(prompts(), NUM_NEW, strict=True)]
    Completer(model, CPU, Sampling(repetition_penalty=1.5), ENDS, 0, 3).complete(found)
    expected = [stock(model, request.prompt, request.max_new_tokens, repetition_penalty=1.5) for request in found]
    assert [request.completion for request in found] == expected
    plain = [stock(model, request.prompt, request.max_new_tokens) for request in found]
    assert plain != expected


def test_slots_are_given_back_at_once():
    """Not only when the garbage collector comes by: nothing may refer to them in a circle."""
    completer = Completer(build("llama"), CPU, Sampling(), ENDS, 0)
    completer.complete([Request([10, 11, 12], 3)])
    assert completer.steps is not None
    keys = weakref.ref(completer.steps.cache.slot_layers[0].keys)
    gc.disable()
    completer.release()
    gc.enable()
    assert keys() is None


def test_prompts_are_padded_alike_where_no_graph_can_be_recorded(monkeypatch: pytest.MonkeyPatch):
    """The other ranks of a sharded model may have recorded theirs: results of one shape travel."""
    monkeypatch.setattr("qlora_fsdp.decoding.steps.record", lambda *args: None)
    shapes: list[tuple[int, ...]] = []
    reader = Prompts(lambda tokens, positions: shapes.append(tuple(tokens.shape)), 256, CPU, pool=object())
    for _ in range(3):
        reader.read([0, 1, 2], [[10] * 5, [11] * 7, [12] * 9], 0)
    assert shapes == [(4, 64)] * 3


def test_no_prompts_are_no_work():
    Completer(build("llama"), CPU, Sampling(), ENDS, 0).complete([])


def test_tokens_are_handed_out_and_a_stop_ends_all_texts():
    found, handed = [Request(prompt, 30) for prompt in prompts()], []
    completer = Completer(build("llama"), CPU, Sampling(), [], 0, 2)

    def hand_out(request: Request, token: int) -> None:
        handed.append((request, token))

    completer.complete(found, hand_out, lambda: len(handed) >= 9)
    for request in found:
        assert [token for owner, token in handed if owner is request] == request.completion
    assert sum(bool(request.completion) for request in found) == 2  # the others never began


@pytest.mark.parametrize("length", [2, 3, 5])
def test_several_tokens_end_a_text_as_stop_strings_do_in_transformers(length: int):
    """The text is in the middle of what the model writes, for one of the prompts at least; others may have it too."""
    model, tokenizer = build("llama"), letters()
    whole = stock(model, prompts()[5], 20)
    text = tokenizer.decode(whole[6 : 6 + length])
    found = [Request(prompt, number) for prompt, number in zip(prompts(), NUM_NEW, strict=True)]
    Completer(model, CPU, Sampling(), ENDS, 0, 3, stops=StopStrings(tokenizer, [text, "no such text"])).complete(found)
    options = {"stop_strings": [text, "no such text"], "tokenizer": tokenizer}
    expected = [stock(model, prompt, number, **options) for prompt, number in zip(prompts(), NUM_NEW, strict=True)]
    assert [request.completion for request in found] == expected
    assert len(expected[5]) <= 6 + length < NUM_NEW[5]


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are a letter, or two of which each is a token of its own too."""
    tokens = [*ascii_letters, *map("".join, pairwise(ascii_letters))][:VOCAB]
    own = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    own.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=own)


@pytest.mark.parametrize(
    ("text", "num_sure"), [("", 0), ("It is", 5), ("It is #", 6), ("It is ###E", 6), ("## It", 5), ("It ##", 3)]
)
def test_what_may_become_a_stop_is_not_shown_yet(text: str, num_sure: int):
    stops = StopStrings(byte_tokenizer(), ["###END"])
    assert stops.num_sure(text) == num_sure
    assert stops.cut(text) == text and stops.cut(f"{text}###END") == text


def test_prompts_are_read_in_calls_of_limited_size():
    model, sizes = build("llama"), []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].numel()))
    found = [Request(prompt, 5) for prompt in prompts()]
    Completer(model, CPU, Sampling(), ENDS, 0, prompt_tokens=30).complete(found)
    hook.remove()
    assert max(sizes) <= 30 < sum(LENGTHS)
    assert [request.completion for request in found] == [stock(model, prompt, 5) for prompt in prompts()]


def test_calls_that_do_not_fit_are_made_smaller(monkeypatch: pytest.MonkeyPatch):
    """As if a call of more than two prompts took more memory than there is, and four slots too."""
    admit, allocate, sizes = Steps.admit, SlotCache.allocate, []

    def admit_two(steps: Steps, slots: list[int], prompts: list[list[int]], *others: Any) -> None:
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError
        admit(steps, slots, prompts, *others)

    def allocate_three(cache: SlotCache, num_slots: int, *others: Any) -> None:
        if num_slots > 3:
            raise torch.OutOfMemoryError
        allocate(cache, num_slots, *others)

    model = build("llama")
    monkeypatch.setattr(Steps, "admit", admit_two)
    found = [Request(prompt, 5) for prompt in prompts()]
    Completer(model, CPU, Sampling(), ENDS, 0).complete(found)
    assert max(sizes) == 7 and min(sizes) == 1
    monkeypatch.setattr(SlotCache, "allocate", allocate_three)
    few = [Request(prompt, 5) for prompt in prompts()]
    completer = Completer(model, CPU, Sampling(), ENDS, 0)
    completer.complete(few)
    steps = completer.steps
    assert steps is not None and steps.num_slots == 2
    completer.complete([Request(prompt, 5) for prompt in prompts()])
    assert completer.steps is steps  # they are not made anew each time
    expected = [stock(model, prompt, 5) for prompt in prompts()]
    assert [request.completion for request in found] == [request.completion for request in few] == expected


def test_short_texts_get_more_slots_where_long_ones_take_the_memory(monkeypatch: pytest.MonkeyPatch):
    """As if there were memory for 600 tokens: one long text at a time, then four short ones beside one another."""
    model = build("llama")
    cache, _ = Completer(model, CPU, Sampling(), ENDS, 0)._probe()
    monkeypatch.setattr(Completer, "_free_bytes", lambda self: cache.slot_bytes(600))
    made: list[tuple[int, int]] = []
    allocate = SlotCache.allocate

    def note(cache: SlotCache, num_slots: int, length: int, device: torch.device) -> None:
        made.append((num_slots, length))
        allocate(cache, num_slots, length, device)

    monkeypatch.setattr(SlotCache, "allocate", note)
    short = [Request(prompt, 5) for prompt in prompts()]
    long = [Request(prompt * 8, 300 - 8 * len(prompt)) for prompt in prompts()[2:4]]
    completer = Completer(model, CPU, Sampling(), ENDS, 0)
    completer.complete([*short, *long])
    assert made == [(1, 384), (4, 128)]
    for request in (*short, *long):
        assert request.completion == stock(model, request.prompt, request.max_new_tokens)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(), "logits would differ"),
        (MambaConfig(), "logits would differ"),
        (Llama4TextConfig(), "logits would differ"),  # chunks of 8,192 tokens
        (JambaConfig(), None),
        (Gemma3Config(), None),
        (Gemma2Config(), None),
        (GptOssConfig(), None),
        (DeepseekV3Config(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_slots_are_not_enough_for_are_found_out(config: PretrainedConfig, reason: str | None):
    found = why_not_in_slots(config, trust_remote_code=False)
    assert found is None if reason is None else reason in (found or "")


def test_a_state_can_not_be_read_once_for_several_ends():
    assert why_not_in_slots(JambaConfig(), trust_remote_code=False, with_several_ends=True) is not None
    assert why_not_in_slots(LlamaConfig(), trust_remote_code=False, with_several_ends=True) is None


def test_a_shortage_of_memory_is_no_trait_of_the_model(monkeypatch: pytest.MonkeyPatch):
    """Texts would run in slots in the next start, and on other ranks of this one."""

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(SlotCache, "allocate", fail)
    with pytest.raises(MemoryError):
        why_not_in_slots(LlamaConfig(), trust_remote_code=False)


def logits(num_rows: int = 4) -> Tensor:
    return 2 * torch.randn(num_rows, 50, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("is_keyed", [False, True], ids=["torch's numbers", "numbers of keys"])
@pytest.mark.parametrize(
    "settings", [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 8}, {"min_p": 0.05}, {}], ids=str
)
def test_tokens_are_drawn_by_the_shares_that_transformers_gives_them(settings: dict[str, Any], is_keyed: bool):
    """20,000 draws of each row: shares differ by less than four standard deviations."""
    rows, shares = logits(), logits() / 1.3
    if "top_k" in settings:
        shares = TopKLogitsWarper(settings["top_k"])(None, shares)  # type: ignore[arg-type]
    if "top_p" in settings:
        shares = TopPLogitsWarper(settings["top_p"])(None, shares)  # type: ignore[arg-type]
    if "min_p" in settings:
        shares = MinPLogitsWarper(settings["min_p"])(None, shares)  # type: ignore[arg-type]
    torch.manual_seed(0)
    expected, number = shares.softmax(-1), 20_000
    for key, (row, share) in enumerate(zip(rows, expected, strict=True)):
        draws = Draws(torch.arange(number) // 200 + 1000 * key, torch.arange(number) % 200) if is_keyed else None
        drawn = Sampling(temperature=1.3, **settings).choose(row.expand(number, -1), None, draws)
        found = torch.bincount(drawn, minlength=50) / number
        assert (found[share == 0] == 0).all()
        assert ((found - share).abs() <= 4 * (share * (1 - share) / number).sqrt() + 1e-6).all()


@pytest.mark.parametrize("settings", [{}, {"top_k": 7}, {"top_k": 0}, {"top_p": 0.8}], ids=str)
def test_tokens_are_those_among_which_generate_draws(settings: dict[str, Any]):
    """What a generation config leaves out is what transformers takes then: 50 tokens, for example."""
    config, ids = GenerationConfig(do_sample=True, temperature=3.0, **settings), torch.tensor(prompts()[2:3])
    output = build("llama").generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, max_new_tokens=1, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    [kept], [raw] = output.scores, output.logits
    torch.manual_seed(0)
    drawn = Sampling.of(config).choose(raw.expand(20_000, -1), None)
    likely = kept[0].softmax(-1) > 1e-3
    assert torch.isfinite(kept[0])[drawn].all()
    assert set(likely.nonzero().flatten().tolist()) <= set(drawn.tolist())


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}, True),
        ({"do_sample": False, "min_p": 0.1}, True),
        ({"do_sample": True, "min_p": 0.1}, True),
        ({"do_sample": True, "typical_p": 0.5}, False),
        ({"num_beams": 4}, False),
        ({"no_repeat_ngram_size": 3}, False),
        ({"suppress_tokens": [3]}, False),
    ],
)
def test_settings_that_are_not_known_are_left_to_transformers(settings: dict[str, Any], is_known: bool):
    assert (why_not_sampled(GenerationConfig(**settings)) is None) is is_known


def test_numbers_of_keys_are_exponential_and_have_nothing_in_common():
    """A million numbers; and rows, neighbours and positions are uncorrelated within four standard deviations."""
    keys, positions = torch.arange(10).repeat(10), torch.arange(10).repeat_interleave(10)
    drawn = Draws(keys, positions).exponentials(10_000)
    assert drawn.min() > 0
    assert drawn.isfinite().all()
    ordered = drawn.flatten().sort().values
    wanted = -(1 - (torch.arange(len(ordered)) + 0.5) / len(ordered)).log()
    assert (ordered.neg().exp() - wanted.neg().exp()).abs().max() < 1.95 / len(ordered) ** 0.5  # Kolmogorov, 0.1 %
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 5 / 10_000**0.5
    assert torch.corrcoef(torch.stack([drawn[:, 1:].flatten(), drawn[:, :-1].flatten()]))[0, 1].abs() < 0.004


def test_no_number_of_a_key_is_zero() -> None:
    """The hash of this key and column has ones alone in its upper 24 bits, and 0 would draw what is left out."""
    drawn = Draws(torch.tensor([52]), torch.tensor([0])).exponentials(138_732)
    assert drawn[0, -1] == 2.0**-24


def drawn_texts(num_slots: int, chosen: list[int], **options: Any) -> list[Request]:
    """Four texts of each prompt, of which those that are chosen are completed, in that order."""
    of_prompts = prompts()
    found = [Request(of_prompts[n // 4], NUM_NEW[n // 4], key=n * 7919) for n in range(4 * len(of_prompts))]
    completer = Completer(build("llama"), CPU, Sampling(temperature=4.0), ENDS, 0, num_slots, is_keyed=True, **options)
    completer.complete([found[n] for n in chosen])
    return found


def test_drawn_texts_do_not_depend_on_slots_order_or_what_is_beside_them():
    everything = [*range(4 * len(LENGTHS))]
    expected = drawn_texts(32, everything)
    assert len({tuple(request.completion) for request in expected}) > 20
    for num_slots, chosen in ((1, everything), (3, everything[::-1]), (8, everything), (8, everything[::5])):
        found = drawn_texts(num_slots, chosen)
        assert [found[n].completion for n in chosen] == [expected[n].completion for n in chosen]
        for n in chosen:
            assert found[n].log_probs == pytest.approx(expected[n].log_probs, abs=1e-5)


def test_a_prompt_is_read_once_for_all_its_texts(monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    whole = Prompts.read

    def count(self: Prompts, slots: Any, prompts: Any, pad_token_id: int) -> None:
        read.append(len(prompts))
        whole(self, slots, prompts, pad_token_id)

    monkeypatch.setattr(Prompts, "read", count)
    found = drawn_texts(32, [*range(4 * len(LENGTHS))])
    assert sum(read) == len(LENGTHS)
    assert all(request.completion for request in found)


def test_log_probabilities_are_those_of_a_pass_over_the_text():
    """With a temperature and a part of the tokens left out, which does not change them."""
    model = build("llama")
    found = [Request(prompt, number, key=n) for n, (prompt, number) in enumerate(zip(prompts(), NUM_NEW, strict=True))]
    Completer(model, CPU, Sampling(temperature=1.5, top_k=30), ENDS, 0, 4, is_keyed=True).complete(found)
    for request in found:
        ids = torch.tensor([request.prompt + request.completion])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt) - 1 : -1] / 1.5
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(request.completion)[:, None])[:, 0]
        assert request.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
