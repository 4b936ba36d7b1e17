"""Run EleutherAI's lm-eval on the quantized base with its adapter, whole or sharded.

lm-eval's own class for transformers models does the work: tokens, windows, stop sequences. This module gives it a model
that runs under FSDP, and lets each process answer its share of the requests. Likelihoods are computed in a few large
calls, and texts are generated in slots (decoding/); ranks that share the model answer the same requests together.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM, eval_logger
from lm_eval.tasks import TaskManager
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm
from typing_extensions import assert_never

from qlora_fsdp.common.errors import ConfigError, DataError, Problem
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.chats.stops import end_texts_of
from qlora_fsdp.data.template_arguments import template_arguments
from qlora_fsdp.data.tokenizer import ContainedTokenizer, try_texts
from qlora_fsdp.decoding.completer import Completer, Request, default_slots
from qlora_fsdp.decoding.likelihoods import Scorer, Text
from qlora_fsdp.decoding.sampling import Sampling, why_not_sampled
from qlora_fsdp.decoding.stop_strings import StopStrings, stop_strings
from qlora_fsdp.decoding.trial import why_not_in_slots
from qlora_fsdp.inference.completions import blaming_file, generation_config, make_completer, stock_batch_size
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import log
from qlora_fsdp.sharding.by_rows import ByRows, texts_of_rank, why_not_by_rows
from qlora_fsdp.sharding.shard import bypassing_root

BOOTSTRAP_ITERS = 1000  # for standard errors that have no formula, such as perplexity's
# A rank's share of the requests, and its answers to these: log-probabilities, with or without whether they are the
# likeliest, or texts.
Answers = tuple[tuple[int, int], list[tuple[float, bool] | float | str]]


class Work(IntEnum):
    """The work that the ranks of a sharded model do together."""

    none = 0
    forward = 1
    generate = 2


class ModelInStep:
    """The model that lm-eval calls in place of transformers'.

    Computing with a sharded model is collective, and ranks have different numbers of requests. Before each computation
    the ranks agree on what comes next, and those without a request compute on a dummy input.
    """

    def __init__(self, trained: AssembledModel, processes: Processes) -> None:
        self.trained, self.processes = trained, processes
        self.device, self.config = processes.device, trained.meta.config
        self.base: Any = trained.model.base
        self.is_sharded = isinstance(trained.model, FSDPModule)

    def __call__(self, input_ids: Tensor) -> Any:
        """The model's output for int64 [B, L], with logits [B, L, vocabulary]."""
        return self._run(Work.forward, lambda: self.base(input_ids=input_ids, use_cache=False))

    def generate(self, **options: Any) -> Tensor:
        """Transformers' `generate`."""
        return self._run(Work.generate, lambda: self._generate(**options))  # type: ignore[no-any-return]

    def keep_step(self) -> None:
        """Once this rank has no requests left, compute with the others until none has any."""
        if not self.is_sharded:
            return
        ones = torch.ones((1, 1), dtype=torch.int64, device=self.device)
        while True:
            work = self._agree(Work.none)
            match work:
                case Work.none:
                    return
                case Work.forward:
                    self._compute(lambda: self.base(input_ids=ones, use_cache=False))
                case Work.generate:
                    self._compute(lambda: self._generate(input_ids=ones, attention_mask=ones, max_new_tokens=1))
                case _:
                    assert_never(work)

    def _run(self, work: Work, compute: Callable[[], Any]) -> Any:
        if self.is_sharded:
            self._agree(work)
        return self._compute(compute)

    def _generate(self, **options: Any) -> Any:
        config = generation_config(self.trained)
        with blaming_file(self.trained, config):
            return self.base.generate(
                generation_config=config,
                synced_gpus=self.is_sharded,
                tokenizer=self.trained.tokenizer,  # of the stop strings
                **options,
            )

    def _agree(self, work: Work) -> Work:
        """Agree on what the ranks compute next: the highest of what they ask for.

        Ranks that have written their texts may wait for long: those that share another copy of the model write theirs.
        """
        return Work(int(self.processes.max([work], patiently=True)[0]))

    def _compute(self, compute: Callable[[], Any]) -> Any:
        with bypassing_root(self.trained.model):
            return compute()


class SharedLM(HFLM):  # type: ignore[misc]
    """lm-eval's model. Each of n ranks is given all requests, answers every n-th, and returns the answers of all.

    Args:
        model: what computes.
        batch_size: requests that a rank answers at a time; None for as many as are fast.
        max_length: most tokens of a request, counted from its end; None for as many as the model knows positions.
    """

    def __init__(self, model: ModelInStep, batch_size: int | None, max_length: int | None) -> None:
        eval_logger.disabled = True  # it warns of models given as objects, and of accelerate
        trained = cast(CausalLM, model.trained.model)
        trusted = model.trained.spec.trust_remote_code
        reason = why_not_by_rows(trained, model.device)
        reason = reason or why_not_in_slots(model.base.config, trusted, with_several_ends=True)
        size = batch_size or default_slots(model.device)
        if reason is not None:
            size = stock_batch_size(model.config, trusted, batch_size)
            log.info(f"Tasks: by transformers, {plural(size, 'request')} at a time ({reason})")
        super().__init__(
            model,
            backend="causal",
            tokenizer=model.trained.tokenizer,
            batch_size=size,
            max_length=max_length,
            softmax_dtype="float32",
        )
        eval_logger.disabled = False
        self.processes = model.processes
        self.contained = ContainedTokenizer(model.trained.tokenizer)
        self.leaves_system_out = False  # of conversations, which the template refuses with it
        self.scorer: Scorer | None = None
        self.completer: Completer | None = None
        self.share = (self.processes.rank, self.processes.num_ranks)
        if reason is None:
            by_rows = ByRows(trained) if model.is_sharded else None
            self.scorer = Scorer(trained, model.device, batch_size, by_rows)
            self.share = texts_of_rank(trained, self.processes)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, by the template and its arguments, in the process for foreign files.

        Raises:
            DataError: the template refuses the conversation, without its system message too, or does not get over it.
        """
        try:
            return self._write_chat(chat_history, add_generation_prompt)
        except DataError as error:
            without_system = [message for message in chat_history if message["role"] != "system"]
            if len(without_system) == len(chat_history):
                raise
            if not self.leaves_system_out:
                log.warning(f"Conversations are written without their system message, as lm-eval does it: {error}")
            self.leaves_system_out = True
            return self._write_chat(without_system, add_generation_prompt)

    def _write_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return self.contained.write_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **template_arguments(self.tokenizer),
        )

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        """The text of a token or of several, in the process for foreign files."""
        ids = [tokens] if isinstance(tokens, int) else list(tokens)
        return self.contained.decode(ids, skip_special_tokens)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._share(super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._share(super().loglikelihood_rolling, requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        markers = end_texts_of(self.tokenizer)
        if markers:  # at which lm-eval cuts the texts, too
            requests = [_with_stops(request, markers) for request in requests]
        try:
            return self._share(super().generate_until, requests)
        finally:
            self._release()

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Each continuation's log-probability after its context, and whether greedy search would write it."""
        if self.scorer is None:
            theirs: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return theirs
        texts = []
        for _, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            texts.append(Text(tuple(tokens[:-1]), tuple(continuation)))
        with tqdm(total=len(texts), disable=disable_tqdm or override_bs is not None, desc="Likelihoods") as bar:
            answers = [(found.log_probability, found.is_greedy) for found in self.scorer.score(texts, bar.update)]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Prompts and completions, int64 [rows, length], padded between them and at the end."""
        options.setdefault("temperature", 0.0)
        samples = options.setdefault("do_sample", options["temperature"] > 0)
        generation = generation_config(self.model.trained)
        generation.update(**({} if samples else {"temperature": None, "top_p": None, "top_k": None}))
        mask = options.pop("attention_mask", torch.ones_like(context))
        unknown = generation.update(**{key: value for key, value in options.items() if samples or value})
        if self.scorer is None or unknown or why_not_sampled(generation) is not None:
            found: Tensor = super()._model_generate(context, max_length, stop, attention_mask=mask, **options)
            return found
        if self.completer is None or self.completer.sampling != Sampling.of(generation):
            self._release()
            self.completer = make_completer(self.model.trained, generation, self.processes, self.batch_size)
        assert self.completer is not None
        num_new = max_length - context.shape[1]
        self.completer.stops = StopStrings(self.tokenizer, [*stop, *stop_strings(generation)])
        prompts = [row[is_token.bool()].tolist() for row, is_token in zip(context.cpu(), mask.cpu(), strict=True)]
        requests = [Request(prompt, num_new) for prompt in prompts]
        self.completer.complete(requests)
        longest = max(len(request.completion) for request in requests)
        pad: int = self.tokenizer.pad_token_id
        new = [request.completion + [pad] * (longest - len(request.completion)) for request in requests]
        return torch.cat([context.cpu(), torch.tensor(new, dtype=torch.int64)], 1)

    def get_model_info(self) -> dict[str, Any]:
        return {}  # lm-eval would ask the hub

    def _release(self) -> None:
        """Give back the memory of slots, and graphs with NCCL's calls, with which a rank could not leave the others."""
        if self.completer is not None:
            self.completer.release()
        self.completer = None

    def _share(self, answer: Callable[..., list[Any]], requests: list[Any]) -> list[Any]:
        """The answers of all ranks. This one answers every n-th request from the i-th on, for a share (i, n)."""
        first, step = self.share
        mine = requests[first::step]
        texts = {text for request in mine for text in request.args if isinstance(text, str)}  # answers share a question
        try_texts(self.tokenizer, sorted(texts))
        answers = answer(mine, disable_tqdm=not self.processes.is_main) if mine else []
        self._model.keep_step()
        answered: list[Any] = [None] * len(requests)
        for (first, step), part in self.processes.gather((self.share, answers), Answers, patiently=True):
            answered[first::step] = part
        return answered


def _with_stops(request: Any, texts: Sequence[str]) -> Any:
    """A request for a text (`Instance`) that ends at these texts, too."""
    context, options = request.args
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    return replace(request, arguments=(context, {**options, "until": [*until, *texts]}))


def find_tasks(names: Sequence[str]) -> TaskManager:
    """Load lm-eval's tasks with their data, by name or from YAML files of the user's, before any model is loaded.

    Raises:
        ConfigError: a name is not a task.
        DataError: a task's data can't be loaded.
    """
    manager = TaskManager()
    unknown = [name for name in names if not manager.match_tasks([name]) and not Path(name).is_file()]
    if unknown:
        fix = "Set tasks to what `lm-eval ls tasks` lists, or to a YAML file."
        raise ConfigError([Problem(show("tasks", name), "is no task of lm-eval's.", fix) for name in unknown])
    try:
        manager.load(list(names))
    except Exception as error:  # a task is YAML with code of its own, and its data may be downloaded
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

    Without `num_fewshot` a task's own number of examples counts, without `limit` all of its rows.
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
