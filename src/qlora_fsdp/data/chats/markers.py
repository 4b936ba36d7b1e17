"""Check whether what ends and divides rows is there: a chat template's markers as tokens, and an end token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.data_sets import settings_for
from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.tokenizer import encode, read_template

# What templates have for tokens. Others, such as [INST] or <tools>, are plain text to many models that know them.
_MARKER = re.compile(r"<\|[^<>|\s'\"]+\|>|<\uff5c[^<>\uff5c\s]+\uff5c>|<(?:start|end)_of_turn>")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_NO_CHATS = (DataFormat.text, DataFormat.prompt_completion, DataFormat.instruction, DataFormat.random)
PLAIN_TEMPLATE = "alpaca"  # the template that ships here without markers

# The names of base models, and what their instruct models are called.
_INSTRUCT_NAMES = (
    (r"((?:Meta-)?Llama-3(?:\.\d)?-\d+B)", r"\1-Instruct"),
    (r"(Qwen2(?:\.5)?(?:-Coder|-Math)?-[\d.]+B)", r"\1-Instruct"),
    (r"((?:Qwen3|SmolLM3)-[\w.-]+)-Base", r"\1"),
    (r"(SmolLM2?-[\d.]+[MB])", r"\1-Instruct"),
    (r"(gemma-[\w-]+)-pt", r"\1-it"),
    (r"(gemma-(?:2-)?\d+b)", r"\1-it"),
    (r"Mistral-7B-(v0\.\d)", r"Mistral-7B-Instruct-\1"),
    (r"(Mistral-[\w-]+)-Base-(\d+)", r"\1-Instruct-\2"),
)


def _find_markers(template: str) -> list[str]:
    """The markers that a template writes, each once."""
    return list(dict.fromkeys(_MARKER.findall(_COMMENT.sub("", template))))


def chosen_markers(spec: DataSpec) -> list[str]:
    """The markers of the templates that the settings name; none where no chats are trained on."""
    if not spec.task.is_causal:
        return []
    return [marker for template in _chosen_templates(spec) for marker in _find_markers(read_template(template))]


def _chosen_templates(spec: DataSpec) -> list[str]:
    """The templates that data.chat_template and the data sets of a mix name, each once."""
    sets = [settings_for(path, spec.settings) for path in spec.settings.mix] or [spec.settings]
    names = [data.chat_template for data in sets if data.chat_template is not None and data.format not in _NO_CHATS]
    return list(dict.fromkeys(names))


def check_markers(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> list[str]:
    """Checks that the markers of data.chat_template are tokens.

    Returns:
        A note for those that are several tokens each; none if all are tokens, or the template is the tokenizer's own.

    Raises:
        DataError: the tokenizer can't write a marker at all.
    """
    known = tokenizer.added_tokens_encoder
    pieces = {
        marker: [known[marker]] if marker in known else encode(tokenizer, marker) for marker in chosen_markers(spec)
    }
    lost = [marker for marker, ids in pieces.items() if not ids or tokenizer.unk_token_id in ids]
    split = [marker for marker, ids in pieces.items() if len(ids) > 1]
    what = f"data.chat_template={','.join(_chosen_templates(spec))}"
    if lost:
        raise DataError(
            f"{what} has markers that this tokenizer can't write: {', '.join(lost)}. Set {add_tokens(lost)}, or"
            f" data.chat_template={PLAIN_TEMPLATE}, which has none."
        )
    if not split:
        return []
    shown = ", ".join(f"{marker} ({len(pieces[marker])} tokens)" for marker in split)
    return [
        f"{what} has markers that are no tokens of this tokenizer, so that the model has to learn them from pieces:"
        f" {shown}. Set {add_tokens(split)}, which makes tokens of them and trains these;"
        f" {_instruct(spec.model_path)}; or set data.chat_template={PLAIN_TEMPLATE}, which has none."
    ]


def check_end_token(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> list[str]:
    """Returns a note if rows that no template writes get no end token: the model then learns to go on for ever."""
    if tokenizer.eos_token_id is not None or spec.task.has_labels:
        return []
    if spec.settings.format in (DataFormat.messages, DataFormat.sharegpt, DataFormat.random):
        return []
    return [
        "the tokenizer has no end token, so rows that are no chats end without one, and the model does not learn where"
        " to stop. Set model.tokenizer_path to a copy whose tokenizer_config.json names it as eos_token."
    ]


def explain_untrained(markers: list[str], spec: DataSpec) -> str:
    """The note for markers that are tokens whose embeddings were never trained."""
    return (
        f"data.chat_template={','.join(_chosen_templates(spec))} has markers that the model has never learned, as"
        f" their rows of the embeddings are zeros or all alike: {', '.join(markers)}. Set {add_tokens(markers)}, which"
        f" trains these rows; or {_instruct(spec.model_path)}."
    )


def explain_no_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The message for conversations where the tokenizer has no chat template, and none is set."""
    name = tokenizer.name_or_path
    vocabulary = tokenizer.get_vocab()
    templates = {template: _find_markers(read_template(template)) for template in ("llama3", "chatml")}
    known = [template for template, markers in templates.items() if all(marker in vocabulary for marker in markers)]
    template = known[0] if known else "chatml"
    return (
        f"The rows are conversations, and the tokenizer{f' of {name}' if name else ''} has no chat template: it is that"
        f" of a base model. To train on them, {_instruct(name)}; or set data.chat_template={template}"
        f" {add_tokens(templates[template])}, whose rows are then trained; or set data.chat_template={PLAIN_TEMPLATE},"
        " which is plain text. data.chat_template may also be a Jinja file."
    )


def instruct_name(path: str) -> str | None:
    """The name of a base model's instruct model, with the folder or user before it; None: the name does not tell."""
    folder, slash, name = path.rstrip("/").rpartition("/")
    for pattern, instruct in _INSTRUCT_NAMES:
        if re.fullmatch(pattern, name):
            return folder + slash + re.sub(pattern, instruct, name)
    return None


def add_tokens(markers: Iterable[str]) -> str:
    """The setting that makes trained tokens of markers, as it is typed in a shell."""
    return f"'tokenizer.add_special_tokens={json.dumps(list(markers), separators=(',', ':'), ensure_ascii=False)}'"


def _instruct(path: str | None) -> str:
    name = instruct_name(path) if path else None
    where = f" (model.path={name})" if name else ""
    return f"take the model's instruct version{where}, which has a template of its own"
