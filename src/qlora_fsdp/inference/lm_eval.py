"""EleutherAI's lm-eval on the quantized base with its adapter, whole or in shards.

lm-eval's own class for transformers models does the work: tokens, windows, stop sequences, likelihoods. Here it gets a
model that runs under FSDP, and each process answers its share of the requests.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM, eval_logger
from lm_eval.tasks import TaskManager
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from qlora_fsdp.common.errors import ConfigError, DataError, Problem
from qlora_fsdp.config.settings import show
from qlora_fsdp.inference.trained import generation_config
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.shard import computing_inside
from qlora_fsdp.runtime.processes import Processes

BOOTSTRAP_ITERS = 1000  # for standard errors that have no formula, such as perplexity's
IDLE, FORWARD, GENERATE = range(3)


class ModelInStep:
    """What lm-eval calls in place of a transformers model: in shards, every rank computes whenever one does.

    Args:
        trained: of `load_trained`, built to generate.
        processes: all ranks have the model, and a share of the requests.
    """

    def __init__(self, trained: AssembledModel, processes: Processes) -> None:
        self.trained, self.processes = trained, processes
        self.device, self.config = processes.device, trained.meta.config
        self.base: Any = trained.model.base
        self.is_sharded = isinstance(trained.model, FSDPModule)

    def __call__(self, input_ids: Tensor) -> Any:
        """The model's output for int64 [B, L], with logits [B, L, vocabulary]."""
        return self._run(FORWARD, lambda: self.base(input_ids=input_ids, use_cache=False))

    def generate(self, **options: Any) -> Tensor:
        """Transformers' `generate`."""
        return self._run(GENERATE, lambda: self._generate(**options))  # type: ignore[no-any-return]

    def keep_step(self) -> None:
        """With nothing left to do: compute along until no rank has."""
        if not self.is_sharded:
            return
        ones = torch.ones((1, 1), dtype=torch.int64, device=self.device)
        while kind := self._agree(IDLE):
            if kind == FORWARD:
                self._compute(lambda: self.base(input_ids=ones, use_cache=False))
            else:
                self._compute(lambda: self._generate(input_ids=ones, attention_mask=ones, max_new_tokens=1))

    def _run(self, kind: int, compute: Callable[[], Any]) -> Any:
        if self.is_sharded:
            self._agree(kind)
        return self._compute(compute)

    def _generate(self, **options: Any) -> Any:
        config = generation_config(self.trained)
        return self.base.generate(generation_config=config, synced_gpus=self.is_sharded, **options)

    def _agree(self, kind: int) -> int:
        """What the ranks compute next; IDLE once none has anything left."""
        return int(self.processes.max([kind])[0])

    def _compute(self, compute: Callable[[], Any]) -> Any:
        with computing_inside(self.trained.model):
            return compute()


class SharedLM(HFLM):  # type: ignore[misc]
    """lm-eval's model. Each rank is given all requests, answers every n-th, and returns what all have answered.

    Args:
        model: what computes.
        batch_size: requests a rank at a time.
        max_length: tokens of a request at most, from its end; None: as many as the model knows positions.
    """

    def __init__(self, model: ModelInStep, batch_size: int, max_length: int | None) -> None:
        eval_logger.disabled = True  # it warns of models given as objects, and of accelerate
        super().__init__(
            model,
            backend="causal",
            tokenizer=model.trained.tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            softmax_dtype="float32",
        )
        eval_logger.disabled = False
        self.processes = model.processes

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._share(super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._share(super().loglikelihood_rolling, requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._share(super().generate_until, requests)

    def get_model_info(self) -> dict[str, Any]:
        return {}  # lm-eval would ask the hub

    def _share(self, answer: Callable[..., list[Any]], requests: list[Any]) -> list[Any]:
        mine = requests[self.processes.rank :: self.processes.num_ranks]
        answers = answer(mine, disable_tqdm=not self.processes.is_main) if mine else []
        self._model.keep_step()
        answered: list[Any] = [None] * len(requests)
        for rank, part in enumerate(self.processes.gather(answers, patiently=True)):
            answered[rank :: self.processes.num_ranks] = part
        return answered


def find_tasks(names: Sequence[str]) -> TaskManager:
    """Load lm-eval's tasks by name, or from YAML files of yours, data and all, before any model is loaded.

    Raises:
        ConfigError: a name is no task.
        DataError: a task's data can't be loaded.
    """
    manager = TaskManager()
    unknown = [name for name in names if not manager.match_tasks([name]) and not Path(name).is_file()]
    if unknown:
        fix = "Set tasks to what `lm-eval ls tasks` lists, or to a YAML file."
        raise ConfigError([Problem(show("tasks", name), "is no task of lm-eval's.", fix) for name in unknown])
    try:
        manager.load(list(names))
    except Exception as error:  # a task is YAML and code of its own, and its data a download
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"tasks={','.join(names)} can't be loaded: {reason} Without a network, tasks need data in the cache of "
            "`datasets`, or a YAML file that names local files."
        ) from error
    return manager


def evaluate_tasks(
    lm: SharedLM,
    manager: TaskManager,
    names: Sequence[str],
    *,
    num_fewshot: int | None,
    limit: int | None,
    apply_chat_template: bool,
) -> dict[str, dict[str, Any]]:
    """Each task's and group's metrics as lm-eval names them, such as `acc,none`; empty on all ranks but the first.

    Args:
        lm: the model; every rank takes part, and answers its share of the requests.
        manager: the tasks that `find_tasks` has loaded.
        names: tasks, groups or tags, or YAML files.
        num_fewshot: examples before each question; None: the task's own number.
        limit: rows of each task; None: all.
        apply_chat_template: ask in turns of a conversation.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval would fork this process, GPU and all, to draw samples
    with contextlib.redirect_stdout(sys.stderr):
        results = simple_evaluate(
            lm,
            tasks=list(names),
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            log_samples=False,
            bootstrap_iters=BOOTSTRAP_ITERS if lm.processes.is_main else 0,
        )
    found: dict[str, dict[str, Any]] = results["results"] if lm.processes.is_main else {}
    return found
