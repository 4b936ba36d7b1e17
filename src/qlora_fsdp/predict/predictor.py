"""What a trained head says of rows: classes with probabilities, numbers, labels of words, or rewards of answers.

Rows are tokenized as in training, and computed in batches that are padded on the right, as training has them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_never

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.sizes import round_length
from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn, ProblemType, TaskConfig, TaskName
from qlora_fsdp.data.batch import lay_out
from qlora_fsdp.data.columns import rename
from qlora_fsdp.data.format import format_row
from qlora_fsdp.data.labels import LabelledRowTokenizer, label_columns, label_first_tokens, read_pair, read_text
from qlora_fsdp.data.read_answers import PAIR_KEYS, RESPONSES, Answer, read_answers
from qlora_fsdp.data.read_row import read_row
from qlora_fsdp.data.row import EMPTY, NO_TARGET, WRONG_KEYS, WRONG_TYPES, BadRow
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.inference.trained import num_positions
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.shard import bypassing_root

BATCH_SIZE = 8  # texts that a process computes at a time, where nobody says another number
THRESHOLD = 0.5  # from which probability on one of several labels is predicted


@dataclass(frozen=True)
class EncodedRow:
    """A row as the model gets it.

    Attributes:
        texts: token ids of its text, or of each of its answers.
        firsts: for token classification, for each word its first token; None of a word that has none, because the row
            was cut before it.
        is_pair: the answers are a chosen and a rejected one.
        is_list: the answers stand in a list.
        is_cut: something was longer than the model or `training.max_length` allows.
    """

    texts: list[list[int]]
    firsts: tuple[int | None, ...] = ()
    is_pair: bool = False
    is_list: bool = False
    is_cut: bool = False


class Predictor:
    """A trained classifier, regression or reward model, and how rows get into it and predictions out.

    Args:
        trained: what `load_trained` returned.
        task: what was learned.
        columns: data.columns.
        max_length: tokens of the longest row; a longer one is cut.
    """

    def __init__(self, trained: AssembledModel, task: TaskConfig, columns: Mapping[str, str], max_length: int) -> None:
        self.trained = trained
        self.task = task
        self.columns = columns
        limits = (max_length, num_positions(trained), trained.tokenizer.model_max_length)
        self.max_length = min(int(limit) for limit in limits if limit is not None)

    def encode(self, row: dict[str, Any], place: str) -> EncodedRow:
        """A row's tokens.

        Args:
            row: as it stands in the file, with or without labels.
            place: where it stands, for messages.

        Raises:
            DataError: it lacks what the task needs.
        """
        try:
            match self.task.name:
                case TaskName.sequence_classification:
                    named = self._renamed(row)
                    return self._encode_text(read_text(named), read_pair(named))
                case TaskName.token_classification:
                    return self._encode_words(self._renamed(row))
                case TaskName.reward:
                    return self._encode_answers(row)
                case TaskName.causal_lm | TaskName.preference | TaskName.grpo | TaskName.distill:
                    raise AssertionError("a model that writes text has no head for predictions")
                case _:
                    assert_never(self.task.name)
        except BadRow as bad:
            raise DataError(f"{place}: {bad.kind}: {bad.detail}. Correct it, or leave it out.") from bad

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        return rename(row, label_columns(self.columns, self.task))

    def _encode_text(self, text: str, pair: str | None) -> EncodedRow:
        problem, tokens, _ = self._tokenize(text, pair)
        return EncodedRow([tokens], is_cut=bool(problem[0]))

    def _encode_words(self, row: dict[str, Any]) -> EncodedRow:
        words = words_of(row)
        problem, tokens, offsets = self._tokenize(" ".join(words))
        # A word's number takes the place of its label, so that it is known which words have a token.
        is_first, numbers = label_first_tokens(words, list(range(len(words))), offsets)
        places = dict(zip(map(int, numbers), np.flatnonzero(is_first).tolist(), strict=True))
        return EncodedRow([tokens], tuple(places.get(n) for n in range(len(words))), is_cut=bool(problem[0]))

    def _tokenize(self, text: str, pair: str | None = None) -> tuple[tuple[str, str], list[int], list[tuple[int, int]]]:
        tokenize = LabelledRowTokenizer(
            self.trained.tokenizer, self.task, self.max_length, BadRows.truncate, self.columns
        ).tokenize
        return tokenize(text, pair)

    def _encode_answers(self, row: dict[str, Any]) -> EncodedRow:
        tokenizer = self.trained.tokenizer
        named = rename(row, self.columns)
        is_pair = all(key in named for key in PAIR_KEYS)
        is_list = not is_pair and isinstance(named.get(RESPONSES), list)
        if is_pair:
            answers = read_answers(row, True, self.columns)
        elif is_list:
            answers = [answer for text in named[RESPONSES] for answer in self._one_answer(named, text)]
        elif "completion" in named:
            answers = self._one_answer(named, named["completion"])
        else:
            answers = [Answer(*read_row(row, DataFormat.auto, self.columns))]
        if not answers:
            raise BadRow(EMPTY, f"{RESPONSES} is empty")
        inner = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, self.max_length, BadRows.truncate)
        formatted = [
            made for answer in answers for made in format_row(answer.form, answer.fields, LossOn.completion, tokenizer)
        ]
        texts = [tokens.tolist() for (tokens, _), _ in inner.encode(formatted)]
        if not all(texts):
            raise BadRow(NO_TARGET, "it has no tokens")
        is_cut = any(len(tokens) > self.max_length for tokens in texts)
        texts = [tokens[: self.max_length] for tokens in texts]
        return EncodedRow(texts, is_pair=is_pair, is_list=is_list, is_cut=is_cut)

    def _one_answer(self, named: dict[str, Any], answer: Any) -> list[Answer]:
        """A prompt with an answer. The label is what rows of answers have besides; no reward depends on it."""
        row = {key: value for key, value in named.items() if key != RESPONSES}
        columns = {key: value for key, value in self.columns.items() if key not in ("prompt", "completion", "label")}
        return read_answers(row | {"completion": answer, "label": True}, False, columns)

    def predict(self, rows: Sequence[EncodedRow], batch_size: int, processes: Processes) -> list[dict[str, Any]]:
        """The predictions of this rank's rows. Collective.

        Ranks that share the model compute as many batches each, so some compute one of a single token and drop it.

        Args:
            rows: of this rank, perhaps none.
            batch_size: texts, or answers, at a time.
            processes: all ranks take part.

        Returns:
            What is said of each row: `prediction`, and where there are labels `probabilities`.
        """
        texts = [tokens for row in rows for tokens in row.texts]
        logits: list[Tensor] = []
        (num_batches,) = processes.max([-(-len(texts) // batch_size)], patiently=True)
        for number in range(int(num_batches)):
            begin = number * batch_size
            logits += self._logits(texts[begin : begin + batch_size], processes.device)
        found = []
        first = 0
        for row in rows:
            found.append(self._read(row, logits[first : first + len(row.texts)]))
            first += len(row.texts)
        return found

    def _logits(self, texts: Sequence[list[int]], device: torch.device) -> list[Tensor]:
        """float32 [K] of each text, or [L, K] where words have labels, on the CPU."""
        pad_token_id = self.trained.tokenizer.pad_token_id
        assert isinstance(pad_token_id, int)
        laid = list(texts) or [[pad_token_id]]
        longest = max(map(len, laid))
        sequences = [[(np.array(tokens, np.int32), np.zeros(len(tokens), np.bool_))] for tokens in laid]
        batch = lay_out(sequences, round_length(longest, self.max_length), pad_token_id).to(device)
        model = self.trained.model
        with bypassing_root(model):
            output = model.base(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        return list(output.logits.float().cpu())[: len(texts)]

    def _read(self, row: EncodedRow, logits: list[Tensor]) -> dict[str, Any]:
        names = self.task.labels or []
        if self.task.name is TaskName.reward:
            rewards = [float(each[0]) for each in logits]
            if row.is_pair:
                return {"prediction": dict(zip(PAIR_KEYS, rewards, strict=True))}
            return {"prediction": rewards if row.is_list else rewards[0]}
        (logits_K,) = logits
        if self.task.name is TaskName.token_classification:
            best = [None if first is None else logits_K[first].softmax(0).max(0) for first in row.firsts]
            return {
                "prediction": [None if one is None else names[int(one.indices)] for one in best],
                "probabilities": [None if one is None else float(one.values) for one in best],
            }
        match self.task.problem_type:
            case ProblemType.single_label_classification:
                chances = logits_K.softmax(0).tolist()
                return {
                    "prediction": names[int(logits_K.argmax())],
                    "probabilities": dict(zip(names, chances, strict=True)),
                }
            case ProblemType.multi_label_classification:
                chances = logits_K.sigmoid().tolist()
                chosen = [name for name, chance in zip(names, chances, strict=True) if chance >= THRESHOLD]
                return {"prediction": chosen, "probabilities": dict(zip(names, chances, strict=True))}
            case ProblemType.regression:
                numbers = logits_K.tolist()
                if names:
                    return {"prediction": dict(zip(names, numbers, strict=True))}
                return {"prediction": numbers[0] if len(numbers) == 1 else numbers}
            case _:
                assert_never(self.task.problem_type)


def words_of(row: dict[str, Any]) -> list[str]:
    """The words of a row: its `tokens`, or its `text` divided at white space.

    Raises:
        BadRow: it has neither, or no word.
    """
    words = row.get("tokens")
    if words is None and isinstance(row.get("text"), str):
        words = row["text"].split()
    if words is None:
        raise BadRow(WRONG_KEYS, "it has neither tokens nor text")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BadRow(WRONG_TYPES, "tokens is not a list of words")
    if not any(word.strip() for word in words):
        raise BadRow(EMPTY, "it has no words")
    return words
