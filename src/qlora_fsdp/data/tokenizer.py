"""The tokenizer: the model's own, or a built-in one whose tokens are bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import tokenizers
import transformers
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.hub import cached_file

from qlora_fsdp import __version__
from qlora_fsdp.common.contained import LimitError, TryError, call, may_be_killed
from qlora_fsdp.common.errors import CheckpointError, ConfigError, DataError
from qlora_fsdp.common.files import digest_files, write_atomically
from qlora_fsdp.common.foreign_files import find_cache, find_outside, open_cache
from qlora_fsdp.common.hub import fetch_small_files, find_unreachable
from qlora_fsdp.common.model_figures import LARGEST
from qlora_fsdp.common.text import name_error, shorten
from qlora_fsdp.config.schema import CHAT_TEMPLATES, DataConfig, DataFormat, ModelConfig, TokenizerConfig
from qlora_fsdp.data.stop_tokens import BYTES, remember_stop_tokens
from qlora_fsdp.data.template_arguments import remember_template_arguments

MAX_TEMPLATE = 2**20  # characters of a tokenizer's chat templates
MOST_TOKENS = 64  # of a character; and characters that a decoder makes of one
# What a tokenizer is tried with: letters of many kinds, and runs of them, which regular expressions may not get over.
PROBE = (
    f"{string.printable} {'a' * 64}{'ab ' * 32}{' ' * 64}"
    "\u00c4\u00df\u00e9\u0131\ufb01\u00bd\u2122 \u2014\u2026\u201c\u2019 \u20ac\u00d7 \u03b1\u0414 \u05d0 "
    "\u0639\u0631\u0628 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e44\u0e17\u0e22 \u6c49\u5b57\u304b\u30ab\ud55c "
    "\U0001f600\U0001f44d\U0001f3fd \u200b\u0301\xa0\u2028"
)
TRIED_TOGETHER = 2**18  # characters of texts that are tried in one call
DECODING = ("decode", "batch_decode")
TRIED_FOLDER = "~/.cache/qlora_fsdp/tried"
WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx"}  # which no tokenizer reads
OWN_CODE = "transformers_modules"  # where transformers keeps what comes with models
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

# transformers passes every value of these files to the tokenizer's class, which opens some of them as paths.
ARGUMENT_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# These are replaced by the folder's own files. Old tokenizers still have the paths of those who saved them.
UNUSED_PATHS = ("tokenizer_file", "special_tokens_map_file")


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

    `data.chat_template`, if set, replaces its chat template, so that the template is saved with the adapter, and it
    remembers `data.template_arguments`. The tokens at which generation stops are those of the model's files
    (`stop_tokens`). If the tokenizer has no pad token, its end token becomes the pad token: padding never has a target,
    and the embeddings keep their size.

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
    remember_template_arguments(tokenizer, data.template_arguments)
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
    """The ids of a text's own tokens: none are added at its beginning or end.

    In the process for foreign files, unless this one may be killed as well.

    Raises:
        DataError: the tokenizer does not get over the text.
    """
    if not may_be_killed():
        return ContainedTokenizer(tokenizer).encode(text)
    with blaming_tokenizer():
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def try_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
    """Has texts tokenized in the process for foreign files, before this process does it in a way of its own.

    A process that may be killed as well does it at once. Short texts go there together.

    Raises:
        DataError: the tokenizer does not get over one of them.
    """
    if may_be_killed():
        return
    contained = ContainedTokenizer(tokenizer)
    together: list[str] = []
    length = 0
    for text in texts:
        if together and length + len(text) > TRIED_TOGETHER:
            contained.encode_all(together)
            together = []
            length = 0
        together.append(text)
        length += len(text)
    if together:
        contained.encode_all(together)


@contextmanager
def blaming_tokenizer() -> Iterator[None]:
    """Around a call of a tokenizer, whose regular expressions may be beyond what their engine does for a text.

    Raises:
        DataError: they are. `tokenizers` raises an Exception then, of no other class, or ends in a panic. Or it took
            too long or too much memory in the process for foreign files.
    """
    try:
        yield
    except LimitError as error:
        raise DataError(f"The tokenizer {error} for one text. Set model.tokenizer_path to another.") from None
    except BaseException as error:
        is_of_library = type(error) is Exception or type(error).__name__ == "PanicException"
        if not is_of_library and not isinstance(error, TryError):
            raise
        reason = shorten(" ".join(str(error).split()).rstrip("."))
        raise DataError(
            f"The tokenizer can't tokenize a text: {reason}. Set model.tokenizer_path to another, or leave the text "
            "out."
        ) from error


class ContainedTokenizer:
    """A tokenizer in the process for foreign files: no text and no tokens make it hang this process, or fill memory.

    The process gets the tokenizer with the first call, and keeps the last one. That takes a second where a vocabulary
    is large, so decoders that can't take long decode here, as nearly all do. A tokenizer with code of its own stays
    here, as that code may do anything anyway.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._key = _keys.setdefault(tokenizer, secrets.token_hex(8))

    def encode(self, text: str) -> list[int]:
        """As the function `encode` has it."""
        ids: list[int] = self._call("__call__", text, add_special_tokens=False, verbose=False)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one call.

        Raises:
            DataError: the tokenizer does not get over one of them.
        """
        ids: list[list[int]] = self._call("__call__", list(texts), add_special_tokens=False, verbose=False)
        return ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """As the tokenizer's own `decode`.

        Raises:
            DataError: the tokenizer does not get over the tokens.
        """
        ids = [int(token) for token in tokens]
        text: str = self._call("decode", ids, skip_special_tokens=skip_special_tokens, **options)
        return text

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of each row, with special tokens, in one call.

        Raises:
            DataError: the tokenizer does not get over the tokens.
        """
        texts: list[str] = self._call("batch_decode", [[int(token) for token in tokens] for tokens in rows])
        return texts

    def write_chat(self, messages: Any, **options: Any) -> str:
        """`apply_chat_template` of the tokenizer, as text.

        Raises:
            DataError: the chat template refuses the messages, or does not get over them.
        """
        try:
            text: str = self._ask("apply_chat_template", messages, tokenize=False, **options)
        except LimitError as error:
            raise DataError(
                f"The chat template {error} for one conversation. Set data.chat_template to another."
            ) from None
        except Exception as error:  # a template is a program, and its sandbox lets any error through
            reason = shorten(str(error)).rstrip(".")
            raise DataError(
                f"The chat template can't be applied: {reason}. Correct it, or set data.chat_template to another."
            ) from error
        return text

    def _call(self, name: str, value: Any, **options: Any) -> Any:
        with blaming_tokenizer():
            return self._ask(name, value, **options)

    def _ask(self, name: str, value: Any, **options: Any) -> Any:
        stays = type(self.tokenizer).__module__.startswith(OWN_CODE)
        stays = stays or (name in DECODING and _decodes_plainly(self.tokenizer))
        if stays:
            return _use(self.tokenizer, name, value, options)
        key = f"{self._key} with {len(self.tokenizer)} tokens"
        answer = call(_use_kept, key, None, name, value, options)
        if answer is None:
            answer = call(_use_kept, key, self.tokenizer, name, value, options)
        return answer[0]


_keys: WeakKeyDictionary[PreTrainedTokenizerBase, str] = WeakKeyDictionary()


_kept: dict[str, PreTrainedTokenizerBase] = {}  # in the process for foreign files, by its key: the last one


def _use_kept(
    key: str, tokenizer: PreTrainedTokenizerBase | None, name: str, value: Any, options: dict[str, Any]
) -> list[Any] | None:
    """Calls a tokenizer that this process has been sent, now or before; None: it has not."""
    if tokenizer is not None:
        _kept.clear()
        _kept[key] = tokenizer
    return [_use(_kept[key], name, value, options)] if key in _kept else None


def _use(tokenizer: PreTrainedTokenizerBase, name: str, value: Any, options: dict[str, Any]) -> Any:
    result = getattr(tokenizer, name)(value, **options)
    return result["input_ids"] if name == "__call__" else result


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a text by itself: the begin token, as a rule, or none."""
    whole, own = tokenizer("a", verbose=False)["input_ids"], encode(tokenizer, "a")
    starts = (n for n in range(len(whole)) if whole[n : n + len(own)] == own)
    return list(whole[: next(starts, 0)])


def extend_tokenizer(tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig) -> AddedTokens:
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


def load_from_files(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `model.tokenizer_path`, or of `model.path` if that is not set, as it stands there.

    Raises:
        CheckpointError: there is none, or its files can't be used or would read others.
    """
    path = model.tokenizer_path or model.path
    fix = "Set model.tokenizer_path to a folder that has one, or to `bytes` for the built-in byte tokenizer."
    if path is None:
        raise CheckpointError(f"There is no tokenizer: neither model.tokenizer_path nor model.path is set. {fix}")
    # transformers would look for a mistyped folder on the hub, and fail with a message about the network.
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise CheckpointError(f"There is no tokenizer: {path} is not a folder. {fix}")
    place = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    revision = model.revision if path == model.path else None
    unreachable = None if Path(place).is_dir() else find_unreachable(place, revision)
    is_offline = unreachable is not None
    try:
        _check_arguments(place, revision, is_offline)
        told = (place, revision, model.trust_remote_code, is_offline)
        if not model.trust_remote_code:  # code of the model's may do anything anyway
            if not is_offline and not Path(place).is_dir():
                fetch_small_files(place, revision)  # or a slow download would count as the trial's time
            _try_loading(*told)
        tokenizer = _load(*told)
    except LimitError as error:
        raise CheckpointError(f"No tokenizer could be loaded from {path}: its loading {error}. {fix}") from None
    except BaseException as error:  # from_pretrained raises a dozen types for files that are missing or broken
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of `tokenizers`, in Rust
            raise
        if unreachable is not None:
            if path == model.path:
                fix = (
                    "Set model.path to a folder that has the model, such as `hf download --local-dir FOLDER "
                    f"{path}` makes on a host that reaches the hub. For the tokenizer alone s{fix[1:]}"
                )
            raise CheckpointError(
                f"No tokenizer could be loaded from {path}: it is no folder here, the hub can't be reached "
                f"({name_error(unreachable)}), and its cache has none. {fix}"
            ) from error
        raise CheckpointError(
            f"No tokenizer could be loaded from {path}: {_explain(Path(place), error)}. {fix}"
        ) from error
    # A folder with config.json alone gives a tokenizer that knows its special tokens and no others.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise CheckpointError(f"{path} has no tokenizer files. {fix}")
    problem = _vocabulary_problem(tokenizer) or _template_problem(tokenizer.chat_template)
    if problem is not None:
        raise CheckpointError(f"The tokenizer of {path} {problem} Repair it, or {fix[:1].lower()}{fix[1:]}")
    return tokenizer


def _load(place: str, revision: str | None, trust_remote_code: bool, is_offline: bool) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        place, revision=revision, trust_remote_code=trust_remote_code, local_files_only=is_offline
    )
    tokenizer("a", verbose=False)  # some settings are looked at only here
    return tokenizer


def _try_loading(place: str, revision: str | None, trust_remote_code: bool, is_offline: bool) -> None:
    """Loads a tokenizer in the process for foreign files, and has it write and read a text, unless it was tried before.

    A tokenizer.json is a program: its normalizers may make gigabytes of a letter, its regular expressions may never
    end, and `tokenizers` then ends the process, or can't be stopped. What has been tried is remembered by the checksum
    of all that it may have read, so that large vocabularies are loaded twice once only.

    Raises:
        LimitError: it takes too long or too much memory.
        TryError: it can't be loaded.
    """
    mark = _mark_of_trial(place, revision)
    if mark is not None and mark.is_file() and mark.stat().st_uid in (os.geteuid(), 0):
        return
    call(_use_once, place, revision, trust_remote_code, is_offline)
    mark = _mark_of_trial(place, revision)  # anew: loading may have fetched the files of which only names were known
    if mark is not None:
        with suppress(OSError):
            open_cache(None, TRIED_FOLDER)
            write_atomically(mark, "")


def _use_once(place: str, revision: str | None, trust_remote_code: bool, is_offline: bool) -> None:
    tokenizer = _load(place, revision, trust_remote_code, is_offline)
    ids = tokenizer(PROBE, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) > MOST_TOKENS * len(PROBE):
        raise ValueError(f"it makes {len(ids):,} tokens of {len(PROBE)} characters")
    text = tokenizer.decode(ids)
    if len(text) > MOST_TOKENS * len(PROBE):
        raise ValueError(f"it makes {len(text):,} characters of {len(ids):,} tokens")
    decoder: Any = getattr(tokenizer, "backend_tokenizer", None) and tokenizer.backend_tokenizer.decoder
    growth = 1.0 if decoder is None else _growth(json.loads(decoder.__getstate__()))
    if growth > MOST_TOKENS:
        raise ValueError(f"its decoder may make {growth:,.0f} characters of one")


def _growth(decoder: Mapping[str, Any]) -> float:
    """How many characters a decoder of tokenizer.json may make of one: the last tokens of a text are decoded anywhere.

    Of its steps only `Replace` makes a text longer.
    """
    steps = decoder.get("decoders", [])
    if decoder["type"] == "Replace":
        replaced = decoder["pattern"].get("String", " ")  # a regular expression may stand for a single character
        return max(1.0, len(decoder["content"]) / max(1, len(replaced)))
    return math.prod(_growth(step) for step in steps)


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decoding takes time and memory in proportion to the tokens: only `Replace` may take more."""
    if tokenizer not in _plain:
        decoder: Any = getattr(tokenizer, "backend_tokenizer", None) and tokenizer.backend_tokenizer.decoder
        _plain[tokenizer] = decoder is None or _is_plain(json.loads(decoder.__getstate__()))
    return _plain[tokenizer]


_plain: WeakKeyDictionary[PreTrainedTokenizerBase, bool] = WeakKeyDictionary()


def _is_plain(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] == "Replace":
        return "Regex" not in decoder["pattern"] and _growth(decoder) == 1
    return all(_is_plain(step) for step in decoder.get("decoders", []))


def _mark_of_trial(place: str, revision: str | None) -> Path | None:
    """The file that is there if a tokenizer has been tried; None: its files are not here, or there is no cache."""
    found = place if Path(place).is_dir() else try_to_load_from_cache(place, ARGUMENT_FILES[0], revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found) if Path(found).is_dir() else Path(found).parent
    names = sorted(file.name for file in folder.iterdir() if file.is_file() and file.suffix not in WEIGHTS)
    try:
        told = [__version__, tokenizers.__version__, transformers.__version__, PROBE, MOST_TOKENS]
        told.append(digest_files(folder, names))
        key = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        return find_cache(None, TRIED_FOLDER) / key
    except (OSError, ConfigError):
        return None


def _explain(folder: Path, error: BaseException) -> str:
    """Why no tokenizer could be loaded. Where files are missing, transformers names packages that would not help."""
    reason = " ".join(str(error).split()).rstrip(".")
    if not folder.is_dir() or not ("tiktoken" in reason or "sentencepiece" in reason):
        return reason
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return f"it has none of {', '.join(VOCABULARY_FILES)}"
    if (folder / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
        return "its tokenizer.model needs `pip install sentencepiece`, or tiktoken if it is one of tiktoken's"
    return reason


def _vocabulary_problem(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why a tokenizer could not be saved: `tokenizers` then makes a list of all ids up to the largest one."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= LARGEST["vocab_size"]:
        return f"has a token with the id {largest:,}, and no model knows more than {LARGEST['vocab_size']:,} tokens."
    return None


def _template_problem(template: Any) -> str | None:
    """Why a tokenizer's chat templates can't be used, or can't be saved with the adapter once it has been trained."""
    by_name = template if isinstance(template, dict) else {"default": template}
    for name in by_name:
        if not isinstance(name, str) or re.fullmatch(r"\w[\w.-]*", name) is None:
            return f"names a chat template {shorten(str(name))}, which can't be the name of a file."
    texts = [text for text in by_name.values() if text is not None]
    if not all(isinstance(text, str) for text in texts):
        return "has a chat template that is no text."
    if len("".join(texts)) > MAX_TEMPLATE:
        return f"has chat templates of more than {MAX_TEMPLATE:,} characters."
    return None


def _check_arguments(place: str, revision: str | None, is_offline: bool) -> None:
    """Checks that a tokenizer's files, which anybody may have written, name no files outside their folder.

    Such a file would become the vocabulary: its text could be read in what the model generates.

    Raises:
        ValueError: they do.
    """
    outside = find_outside(Path(place)) if Path(place).is_dir() else []
    if outside:
        raise ValueError(f"{outside[0].name} leads to a file outside the folder.")
    for name in ARGUMENT_FILES:
        file = cached_file(
            place,
            name,
            revision=revision,
            local_files_only=is_offline,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        arguments = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
        json.dumps(arguments, ensure_ascii=False).encode()  # as it will be saved; half a character can't be
        bad = [key for key, value in arguments.items() if _is_path(key, value)]
        if bad:
            raise ValueError(f"{bad[0]} in its {name} would open files that the tokenizer's folder does not hold.")


def _is_path(key: str, value: Any) -> bool:
    match key:
        case "vocab" | "merges":
            return isinstance(value, str)  # and not the vocabulary itself
        case "init_inputs" | "gguf_file":
            return bool(value)
        case "fast_tokenizer_files":
            return "/" in str(value)
        case _:
            is_used = key.endswith("_file") and key not in UNUSED_PATHS
            return is_used and value is not None and Path(str(value)).is_file()  # transformers asks the same
