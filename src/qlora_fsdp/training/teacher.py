"""Teachers that are not the base which is trained: a model of its own, or what one has made of the data, in files.

A model of its own is quantized and sharded beside the one that it teaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import CheckpointError, DataError
from qlora_fsdp.common.text import plural, show_bytes
from qlora_fsdp.config.schema import Config, DataConfig, ModelConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import ShardSpec, TaskSpec
from qlora_fsdp.data.questions import question_of
from qlora_fsdp.data.run_data import PreparedData
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.teacher_scores import TeacherScores
from qlora_fsdp.data.together import failing_together
from qlora_fsdp.data.tokenizer import VOCABULARY_FILES, load_tokenizer
from qlora_fsdp.model.adapters.initialize import initialize_adapters
from qlora_fsdp.model.adapters.read_adapter import NO_ADAPTER
from qlora_fsdp.model.assemble import AssembledModel, assemble, describe_base
from qlora_fsdp.model.find import HOW_TO_TRUST
from qlora_fsdp.model.positions import num_learned_positions
from qlora_fsdp.model.settle import settle_model
from qlora_fsdp.model.tasks.distill_lm import DistillLM, OtherModel
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.materialize import materialize
from qlora_fsdp.weights.quantized_cache import use_cache

SETTING = "distill.teacher_model"


def assemble_teacher(config: Config, student: AssembledModel, processes: Processes) -> AssembledModel | None:
    """The teacher on meta, without adapters; None where it shares the base of the model. Collective.

    Args:
        config: the settings of the run, or those of an adapter with what was typed. How the teacher is quantized and
            computed is what they say of the model.
        student: the model that learns.
        processes: all ranks take part.

    Raises:
        CheckpointError: there is no such model, or its files can't be used.
        ConfigError: its tokenizer is another one than the model's, or its rows can't be packed as the model's are.
    """
    path = config.distill.teacher_model
    if path is None:
        return None
    own = config.with_values(
        {
            "model.name": path,
            "model.path": path,
            "model.revision": None,
            "model.trust_remote_code": False,  # it is for the model that is trained, and a passed-on file may name this
            "model.config": {},
            "model.rope_scaling": {},
            "model.tokenizer_path": config.model.tokenizer_path or config.model.path,
            "training.packing": student.spec.packs_rows,
        }
    )
    with _named():
        spec = settle_model(own, NO_ADAPTER, processes, trains=False)
        teacher = assemble(spec, processes.device)
    error = None
    if processes.is_main:
        asked = show(SETTING, own.distill.teacher_model)
        error = _why_another_tokenizer(own.model, own.data, asked, teacher, student.tokenizer)
    error = processes.first_error(error)
    if error is not None:
        raise CheckpointError(error)
    if config.model.cache_quantized:
        meta = teacher.meta
        base = describe_base(meta.assignments, processes)
        meta.assignments = use_cache(meta.assignments, base, config.model.cache_folder, teacher.dtype, processes)
    return teacher


def check_teacher_positions(teacher: AssembledModel, max_length: int) -> None:
    """Refuse rows with more positions than the teacher was made for.

    Args:
        teacher: on meta, or loaded.
        max_length: most tokens of a prompt with its answer.

    Raises:
        DataError: it knows fewer.
    """
    config = teacher.meta.config.get_text_config()
    table = num_learned_positions(teacher.meta.model)
    known = getattr(config, "max_position_embeddings", None) if table is None else table
    if known is not None and max_length > known:
        raise DataError(
            f"A prompt with its answer may have training.max_length={max_length:,} tokens, and the teacher was made "
            f"for {known:,} positions. Set training.max_length={known}, or {SETTING} to another model."
        )


def load_teacher(teacher: AssembledModel, shards: ShardSpec, seed: int, processes: Processes) -> OtherModel:
    """Give the teacher its weights, split over the ranks as the model's are. Collective.

    Args:
        teacher: on meta.
        shards: of the model. The teacher's layers are gathered for each pass anew.
        seed: of random weights.
        processes: all ranks take part.
    """
    own = replace(shards, reshard_after_forward=True)
    loaded = materialize(
        teacher, own, seed, processes, lambda model: initialize_adapters(model, True, seed, teacher.tokens)
    )
    model = teacher.model
    assert isinstance(model, DistillLM)
    model.eval().requires_grad_(False)
    meta = teacher.meta
    log.info(
        f"Teacher: {meta.model.name_or_path}, {meta.kind}; loaded {show_bytes(loaded.num_bytes_read)} a rank in "
        f"{loaded.load_seconds:.1f} s"
    )
    return OtherModel(model)


@contextmanager
def _named() -> Iterator[None]:
    """A context in which what is wrong with a model's files is told of the teacher's setting."""
    try:
        yield
    except CheckpointError as error:
        told = str(error).replace(HOW_TO_TRUST, "Code of a teacher's own is never run: set it to a model without.")
        raise CheckpointError(told.replace("model.path", SETTING)) from error


def _why_another_tokenizer(
    model: ModelConfig, data: DataConfig, asked: str, teacher: AssembledModel, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Why the probabilities of teacher and model can't be compared; None where their tokens are the same.

    A folder of a teacher that has no tokenizer of its own is taken to be of the model's.

    Args:
        model: says how the teacher's files are read.
        data: says which chat template counts.
        asked: the setting that names the teacher, for messages.
        teacher: its model.
        tokenizer: the student's.
    """
    folder = teacher.files.folder
    if len(tokenizer) > teacher.model.vocab_size:
        return (
            f"{asked} knows {teacher.model.vocab_size:,} tokens, and the model's tokenizer has {len(tokenizer):,}. Set "
            "it to a model with the same tokenizer."
        )
    if folder is None or not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return None
    try:
        theirs = load_tokenizer(replace(model, path=str(folder), tokenizer_path=None), data)
    except CheckpointError as error:
        return str(error).replace("model.path", SETTING)
    first, second = tokenizer.get_vocab(), theirs.get_vocab()
    if first == second:
        return None
    differing = sorted(first.items() ^ second.items(), key=lambda item: (item[1], item[0]))
    token, number = differing[0]
    return (
        f"{asked} has another tokenizer than the model: {plural(len(differing), 'token')} in one of them alone or with "
        f"another number, the first {token!r} ({number}). Their probabilities can't be compared. Set it to a model "
        "with the same tokenizer."
    )


def open_scores(task: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> TeacherScores | None:
    """What a teacher that takes no part makes of the answers in the data; None where a teacher takes part.

    Raises:
        ConfigError: it is of other tokens, or of another temperature.
        DataError: the folder can't be read.
    """
    folder = task.distill.teacher_scores
    if folder is None:
        return None
    return TeacherScores(Path(folder).expanduser(), tokenizer, task.rollout.temperature)


def check_scores(
    task: TaskSpec, tokenizer: PreTrainedTokenizerBase, data: PreparedData[Sequences], processes: Processes
) -> TeacherScores | None:
    """As `open_scores`, and every row must have its own. Collective.

    Raises:
        ConfigError: they are of other tokens, or of another temperature.
        DataError: the folder can't be read, or lacks rows.
    """
    with failing_together(processes):
        scores = open_scores(task, tokenizer)
        if scores is not None:
            parts = [part for part in (data.train, data.eval) if part is not None]
            scores.check([question_of(part, index) for part in parts for index in range(len(part))])
    return scores
