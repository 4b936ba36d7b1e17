"""The plan's bytes of what a rank holds, and of embeddings and heads that are trained, against the tensors of a model.

Two ranks on a CPU take a step; what is alive is counted by its storages.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from qlora_fsdp.config.schema import Config, TaskName
from qlora_fsdp.config.specs import ShardSpec, TaskSpec
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.tokenizer import byte_tokenizer, extend_tokenizer
from qlora_fsdp.layers import head_loss
from qlora_fsdp.layers.rewire import use_head_pieces
from qlora_fsdp.memory import model_bytes
from qlora_fsdp.memory.plan import WORKSPACE, MemoryPlan, make_plan
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import Workload
from qlora_fsdp.model.activations import set_activation_policy
from qlora_fsdp.model.assemble import adapt_model
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import ModelFiles, make_config
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime import rows as sharded_rows
from qlora_fsdp.runtime.processes import start_processes
from qlora_fsdp.runtime.rows import local_tensor
from qlora_fsdp.sharding.prove import prove_shards
from qlora_fsdp.sharding.shard import place_model, shard_model
from qlora_fsdp.tracing.model_tracer import Computing, ModelTracer
from qlora_fsdp.training.optim import make_optimizer
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import Meeting, once, run_ranks

pytestmark = pytest.mark.distributed

NUM_RANKS = 2
TOKENS = "tokenizer.add_tokens=[call,tool,end]"
TIED = "model.config.tie_word_embeddings=true"
LABELS = "task.labels=[a,b,c]"
# As in Gemma 4 E2B: a table with something of each token for every layer, and keys and values that layers share.
PER_LAYER = "model.config={model_type: gemma4_text, tie_word_embeddings: true, head_dim: 32, global_head_dim: 64, "
PER_LAYER += "hidden_size_per_layer_input: 64, num_kv_shared_layers: 2, sliding_window: 64, "
PER_LAYER += "layer_types: [sliding_attention, full_attention, sliding_attention, full_attention]}"
CASES: dict[str, list[str]] = {
    "default": [],
    "int8, large rank, rank-stabilized": ["quant=int8", "lora.r=128", "lora.use_rslora=true"],
    "int4": ["quant=int4"],
    "mxfp4": ["quant=mxfp4"],
    "nvfp4": ["quant=nvfp4"],
    "fp8": ["quant=fp8"],
    "unquantized, some layers": ["quant=none", "lora.target_modules=[q_proj,down_proj]"],
    "dora": ["lora.use_dora=true", "quant.bnb_4bit_use_double_quant=false"],
    "ends in int8": ["quant.embeddings=int8"],
    "8-bit AdamW": ["optim=adamw_8bit", "lora.r=64"],
    "8-bit Lion": ["optim=lion_8bit", "lora.r=64"],
    "Lion": ["optim=lion_32bit"],
    "Adafactor": ["optim=adafactor", "lora.use_dora=true"],
    "tied": [TIED],
    "ends trained": ["lora.modules_to_save=[embed_tokens,lm_head]"],
    "head trained": ["lora.modules_to_save=[lm_head]"],
    "norms trained": ["lora.modules_to_save=[norm]"],
    "layers trained": ["lora.modules_to_save=[down_proj,v_proj]", "lora.target_modules=[q_proj,v_proj]"],
    "MLPs trained, no skips": ["lora.modules_to_save=[mlp,lm_head]", "quant.llm_int8_skip_modules=[]"],
    "some layers unquantized": ["quant.llm_int8_skip_modules=[model.layers.0,'.*v_proj',lm_head]"],
    "embeddings trained, tied": [TIED, "lora.modules_to_save=[embed_tokens]"],
    "new tokens": [TOKENS],
    "new tokens, tied": [TIED, TOKENS],
    "new tokens, head whole": [TOKENS, "lora.modules_to_save=[lm_head]"],
    "classes of rows": ["task=sequence_classification", LABELS],
    "classes of words": ["task=token_classification", LABELS],
    "a table for all layers": [PER_LAYER, "model.config.vocab_size_per_layer_input=259"],
    "such a table in int8": [PER_LAYER, "model.config.vocab_size_per_layer_input=259", "quant.embeddings=int8"],
}


# Where embeddings, head and logits are nearly all there is, or what DoRA keeps.
WIDE = ["model.config.vocab_size=20000", "training.max_length=256", "training.precision=float32", "memory=recompute"]
WIDE += ["training.global_batch_size=null"]  # a step of one micro-batch, which keeps no gradients of others
LARGE_TABLE = [PER_LAYER, "model.config.vocab_size_per_layer_input=20000", "model.config.vocab_size=300"]
PEAKS = {
    "head": ["lora.modules_to_save=[lm_head]"],
    "adapted head": ["lora.target_modules=[q_proj,down_proj,lm_head]"],
    "both": ["lora.modules_to_save=[embed_tokens,lm_head]"],
    "classifier": ["task=sequence_classification", LABELS],
    "dora": ["lora.use_dora=true", "memory=keep", "training.max_length=1000", "model.config.vocab_size=300"],
    "a table for all layers": LARGE_TABLE,
    "such a table in int8": [*LARGE_TABLE, "quant.embeddings=int8"],
}


def read(arguments: Sequence[str]) -> Config:
    # 259 rows are the byte tokenizer's own: new tokens come behind the table, as with most models.
    kernels = "compute.cuda_graph=false"  # a graph's gradients stay; on a CPU there is none
    return load_config(["model=tiny", "model.config.vocab_size=259", kernels, *arguments])


def build(config: Config, dtype: torch.dtype) -> TaskModel:
    """The adapted model on meta."""
    values = dict(config.model.config)
    files = ModelFiles(None, AutoConfig.for_model(values.pop("model_type"), **values))
    keep, pad = list(config.lora.modules_to_save or []), byte_tokenizer().pad_token_id
    built = build_model(files, BuildSettings(config.quant, dtype, "sdpa", config.task, keep=keep, pad_token_id=pad))
    task = TaskSpec(config.task, config.preference)
    return adapt_model(built, config.lora, task, extend_tokenizer(byte_tokenizer(), config.tokenizer))


def place(model: TaskModel) -> None:
    """On the CPU, with zeros."""
    place_model(model, torch.device("cpu"), torch.device("cpu"))
    for param in model.parameters():
        local_tensor(param).view(torch.uint8).zero_()


def held_bytes(cases: Mapping[str, Sequence[str]]) -> dict[str, dict[str, int]]:
    """Bytes of this rank's tensors after a step, by part of the plan."""
    Meeting.new_port()
    processes, found = start_processes(60), {}
    for case, arguments in cases.items():
        config = read(arguments)
        model = build(config, torch.bfloat16)
        shard_model(model, ShardSpec.of(config.fsdp, processes.num_ranks, processes.local_num_ranks), processes)
        place(model)
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(params, config.optim, 0.0)
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        inner: Any = getattr(optimizer, "inner", optimizer)
        sizes = {"optimizer": sum(_state_bytes(state) for state in inner.state.values())}
        for name, param in model.named_parameters():
            part = "adapters" if param.requires_grad else _part(name)
            sizes[part] = sizes.get(part, 0) + local_tensor(param).untyped_storage().nbytes()
        found[case] = sizes
    return found


def _state_bytes(state: Mapping[str, Any]) -> int:
    """But for the number of steps, and the table of 8-bit values that all share."""
    tensors = [v for k, v in state.items() if isinstance(v, Tensor) and k != "step" and not k.startswith("qmap")]
    return sum(local_tensor(tensor).untyped_storage().nbytes() for tensor in tensors)


def _part(name: str) -> str:
    if "embed_tokens" in name or "lm_head" in name:
        return "embeddings"
    parts = {"codes": "codes", "scales": "scales", "nested_scales": "scales", "global_scales": "scales"}
    return parts.get(name.rpartition(".")[2], "full_precision")


class LiveBytes(TorchDispatchMode):
    """Follows the storages of all tensors that operations see, also those that FSDP empties.

    Attributes:
        peak: most bytes that were there after an operation.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._at_most = 0  # bytes, some of which may be gone: all are looked at only where this may be a new peak
        self._follow(tensors)
        self.peak = self._now()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._follow([leaf for leaf in tree_leaves((out, args, kwargs)) if isinstance(leaf, Tensor)])
        if self._at_most > self.peak:
            self.peak = max(self.peak, self._now())
        return out

    def follow_those_of(self, other: LiveBytes) -> None:
        self.storages |= other.storages
        self._now()

    def _follow(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            storage = local_tensor(tensor).untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            self.storages[key] = weakref.ref(storage)
            self._at_most += size - self._sizes.get(key, 0)
            self._sizes[key] = size

    def _now(self) -> int:
        alive = {key: storage for key, ref in self.storages.items() if (storage := ref()) is not None}
        self.storages = {key: self.storages[key] for key in alive}
        self._sizes = {key: storage.nbytes() for key, storage in alive.items()}
        self._at_most = sum(self._sizes.values())
        return self._at_most


PIECES = (head_loss, model_bytes, sharded_rows)  # which read PIECE_BYTES


def peak_bytes_in_pieces(arguments: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The same of one run, with pieces of 1 MiB in place of 32, of which a small model's tables have many."""
    for module in PIECES:
        module.PIECE_BYTES = 2**20
    return peak_bytes({"run": arguments})


def peak_bytes(cases: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Most bytes of this rank's tensors in forward and in backward, of the second step."""
    Meeting.new_port()
    processes, found = start_processes(60), {}
    for case, arguments in cases.items():
        config = read(arguments)
        model = build(config, torch.float32)
        set_activation_policy(model.layers, [policy_of(config)] * len(model.layers))
        use_head_pieces(model.head, config.memory.head_in_pieces is True)
        shard_model(model, ShardSpec.of(config.fsdp, processes.num_ranks, processes.local_num_ranks), processes)
        place(model)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], config.optim, 0.0)
        length = config.training.max_length
        ids = torch.arange(length).unsqueeze(0) % 250
        half = length // 2  # two rows, which a mask keeps apart, as the plan assumes
        positions, starts = torch.arange(length).unsqueeze(0) % half, torch.tensor([0, half, length]).int()
        batch = Batch(ids, ids, positions, starts, half)
        if config.task.name is not TaskName.causal_lm:
            batch = replace(
                batch, labels=torch.zeros(1, 1), label_positions=torch.tensor([0]), num_tokens=torch.tensor([length])
            )
        for _ in range(2):
            held = [*model.parameters(), *model.buffers()]
            held += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
            with LiveBytes(held) as forward:
                loss = model(batch)
            with LiveBytes([loss]) as backward:
                backward.follow_those_of(forward)
                loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        found[case] = forward.peak, backward.peak
    return found


def proof_bytes(arguments: Sequence[str]) -> tuple[int, int]:
    """Most bytes of this rank's tensors while gathered weights are proven, in small pieces; and those it holds."""
    Meeting.new_port()
    sharded_rows.PIECE_BYTES = 2**20
    processes, config = start_processes(60), read(arguments)
    model = build(config, torch.float32)
    units = shard_model(model, ShardSpec.of(config.fsdp, processes.num_ranks, processes.local_num_ranks), processes)
    place(model)
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        held = live.peak
        prove_shards(model, units, processes, NUM_RANKS)
    return live.peak, held


def policy_of(config: Config) -> Policy:
    return Policy(config.memory.activations.value)


def plan_of(config: Config, policy: Policy, compute_bytes: int = 2) -> MemoryPlan:
    dtype = torch.bfloat16 if compute_bytes == 2 else torch.float32
    files = ModelFiles(None, make_config(config.model.config, "tiny"))
    tokens = extend_tokenizer(byte_tokenizer(), config.tokenizer)
    model = ModelTracer(files, Computing(dtype, "sdpa", (), "torch", is_cuda=False), tokens)
    work = Workload(model, config, NUM_RANKS, NUM_RANKS, 1)
    return make_plan(work, [policy] * work.num_layers)


@pytest.fixture(scope="module")
def held():
    return once(lambda num_ranks: run_ranks(num_ranks, held_bytes, CASES))


@pytest.mark.parametrize("case", CASES)
def test_plan_counts_what_a_rank_holds(held, case: str):
    """Rank 0's, who holds the largest shard; of the last shard, less than a row is padding."""
    planned = plan_of(read(CASES[case]), Policy.none).phases["step"]
    for part, size in held(NUM_RANKS)[0][case].items():
        assert planned[part] == size, part


@pytest.fixture(scope="module")
def peaks():
    cases = {case: [*WIDE, *arguments] for case, arguments in PEAKS.items()}
    return once(lambda num_ranks: run_ranks(num_ranks, peak_bytes, cases))


@pytest.mark.parametrize("case", PEAKS)
def test_plan_counts_what_a_step_takes(peaks, case: str):
    config = read([*WIDE, *PEAKS[case]])
    plan = plan_of(config, policy_of(config), compute_bytes=4)
    for phase, peak in zip(("forward", "backward"), peaks(NUM_RANKS)[0][case], strict=True):
        assert plan.tensor_bytes(phase) - WORKSPACE == pytest.approx(peak, rel=0.05, abs=3e6), phase


def test_proof_takes_no_more_than_a_step() -> None:
    """The largest tables, in int8: FSDP's two buffers of one, and pieces."""
    arguments = [*WIDE, "quant.embeddings=int8", "model.config.vocab_size=400000"]
    config = read(arguments)
    table = config.model.config["vocab_size"] * config.model.config["hidden_size"]
    peak, held = run_ranks(NUM_RANKS, proof_bytes, arguments)[0]
    assert 2 * table < peak - held < 2.2 * table
    assert peak < plan_of(config, Policy.full, compute_bytes=4).tensor_bytes("forward")


def test_plan_counts_a_head_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss of an int8 head is the peak of forward; as a whole it takes more than twice as much."""
    arguments = [*WIDE, "quant.embeddings=int8", "memory.head_in_pieces=true", "training.max_length=2048"]
    for module in PIECES:
        monkeypatch.setattr(module, "PIECE_BYTES", 2**20)
    config = read(arguments)
    plan = plan_of(config, Policy.full, compute_bytes=4)
    work = replace(plan.work, can_read_peers=False)  # as it is on a CPU
    plan = make_plan(work, plan.policies)
    peak, _ = run_ranks(NUM_RANKS, peak_bytes_in_pieces, arguments)[0]["run"]
    assert plan.phases["forward"]["loss"] > 0.8 * peak
    assert plan.tensor_bytes("forward") - WORKSPACE == pytest.approx(peak, rel=0.05)
    whole = make_plan(work.with_values({"memory.head_in_pieces": False}), plan.policies)
    assert whole.tensor_bytes("forward") > 2 * plan.tensor_bytes("forward")
