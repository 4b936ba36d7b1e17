"""The tokenizer: the model's own, or a built-in one whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qlora_fsdp.common.errors import CheckpointError, DataError
from qlora_fsdp.config.schema import CHAT_TEMPLATES, DataConfig, DataFormat, ModelConfig, TokenizerConfig
from qlora_fsdp.data.stop_tokens import BYTES, remember_stop_tokens
from qlora_fsdp.data.tokenizer_files import load_from_files


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that `tokenizer.add_tokens` and `tokenizer.add_special_tokens` name, whose rows are trained.

    Attributes:
        ids: the ids of all of them.
        fresh: the ids of those that the tokenizer did not have.
        vocab_size: the tokenizer's largest id + 1.
        with_head: whether the head has rows for them too, or the embeddings alone.
        whole: the rows of tables that a saved adapter has as a whole, by their names. They may be more or fewer than
            the base's.
    """

    ids: frozenset[int] = frozenset()
    fresh: frozenset[int] = frozenset()
    vocab_size: int = 0
    with_head: bool = True
    whole: Mapping[str, int] = field(default_factory=dict)


NO_TOKENS = AddedTokens()


def find_tokenizer(
    model: ModelConfig, data: DataConfig, model_folder: Path | None, tokenizer_folder: Path | None, trains: bool
) -> PreTrainedTokenizerBase:
    """The saved adapter's tokenizer if it has one, else the model's.

    Args:
        model: says which tokenizer is the model's.
        data: its chat template replaces the tokenizer's own.
        model_folder: the folder of the model's files; None where they are not here.
        tokenizer_folder: the folder of the adapter; None without one, or where its tokenizer is not wanted.
        trains: whether the tokenizer is for training.

    Training on random tokens needs no tokenizer, so it gets the built-in one and no file is read.
    `model.trust_remote_code` is meant for the base model: a tokenizer that an adapter brings or names runs no code.
    """
    if trains and data.format is DataFormat.random:
        return byte_tokenizer()
    if model_folder is not None:
        model = replace(model, path=str(model_folder))
    if tokenizer_folder is not None and (tokenizer_folder / "tokenizer_config.json").is_file():
        model = replace(model, tokenizer_path=str(tokenizer_folder))
    if tokenizer_folder is None or model.tokenizer_path is None:
        return load_tokenizer(model, data)
    try:
        return load_tokenizer(replace(model, trust_remote_code=False), data)
    except CheckpointError as error:
        if not model.trust_remote_code:
            raise
        raise CheckpointError(
            f"{error} model.trust_remote_code=true is for the base model alone: a tokenizer that an adapter brings or "
            "names may not come with code of its own. Remove it from the adapter, and the base's tokenizer is used."
        ) from error


def load_tokenizer(model: ModelConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `model.tokenizer_path`, or of `model.path` if that is not set.

    `data.chat_template`, if set, replaces its chat template, so that the template is saved with the adapter. The tokens
    at which generation stops are those of the model's files (`stop_tokens`). If the tokenizer has no pad token, its end
    token becomes the pad token: padding never has a target, and the embeddings keep their size.

    Raises:
        CheckpointError: there is no tokenizer, or it has no fast (Rust) version.
        DataError: `data.chat_template` is neither a file nor the name of a template that ships here.
    """
    if model.tokenizer_path == BYTES:
        tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    else:
        tokenizer = load_from_files(model)
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"The tokenizer of {model.tokenizer_path or model.path} has no fast (tokenizers) version, which is needed"
            " to tell the tokens of a completion. Set model.tokenizer_path to a folder with a tokenizer.json."
        )
    if data.chat_template is not None:
        tokenizer.chat_template = read_template(data.chat_template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    remember_stop_tokens(tokenizer, model)
    return tokenizer


def with_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that counts for one data set of a mix, if that is another."""
    template = tokenizer.chat_template if data.chat_template is None else read_template(data.chat_template)
    if template == tokenizer.chat_template:
        return tokenizer
    own = copy(tokenizer)
    own.chat_template = template
    return own


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Names the chat template: one that ships here, the tokenizer's own, or none."""
    if tokenizer.chat_template is None:
        return "none"
    return next(
        (name for name in CHAT_TEMPLATES if tokenizer.chat_template == read_template(name)), "the tokenizer's own"
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text's own tokens: none are added at its beginning or end."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a text by itself: the begin token, as a rule, or none."""
    whole, own = tokenizer("a", verbose=False)["input_ids"], encode(tokenizer, "a")
    starts = (n for n in range(len(whole)) if whole[n : n + len(own)] == own)
    return list(whole[: next(starts, 0)])


def add_tokens(tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig) -> AddedTokens:
    """Adds the tokens of the settings to the tokenizer, in place. Their ids follow the tokenizer's last one."""
    wanted = [*config.add_tokens, *config.add_special_tokens]
    if not wanted:
        return NO_TOKENS
    known = set(tokenizer.get_vocab())
    tokenizer.add_tokens(list(config.add_tokens))
    tokenizer.add_tokens(list(config.add_special_tokens), special_tokens=True)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return AddedTokens(
        ids=frozenset(vocabulary[token] for token in wanted),
        fresh=frozenset(vocabulary[token] for token in wanted if token not in known),
        vocab_size=max(vocabulary.values()) + 1,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer of 259 tokens: byte b is token b, then <bos> 256, <eos> 257, <pad> 258. Chats are ChatML."""
    alphabet = bytes_to_unicode()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    special_tokens = {"<bos>": 256, "<eos>": 257, "<pad>": 258}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **special_tokens}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=read_template("chatml"),
        clean_up_tokenization_spaces=False,
    )


def read_template(name: str) -> str:
    """The source of the template that data.chat_template names.

    Raises:
        DataError: it is neither a file nor the name of a template that ships here.
    """
    if name in CHAT_TEMPLATES:
        return (files("qlora_fsdp.data") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"data.chat_template={name} is neither a file nor a template that ships here."
            f" Set data.chat_template to a Jinja file or one of {', '.join(CHAT_TEMPLATES)}."
        )
    return path.read_text(encoding="utf-8")
