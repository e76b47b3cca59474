"""Where a command runs: the device, the engine and the ranks of a process, which joins
a launch (`accelerate launch`, torchrun) or runs alone; how its ranks evaluate one model
together: each takes a share of the batches, and all of them get all answers; how they
begin and finish a stage; and how weights in shards stay gathered while a model is scored
(`gathered_once`).

    launch = join_launch()                               # all ranks of the launch; one process: that one
    with prepare_evaluation(tokenizer, suite, config, ranks=launch.ranks) as evaluate:
        result, samples = evaluate(model, "model")

All ranks make these calls, with the same arguments, and get the same results; only the
first one prints, writes and runs programs. This also works on a model in training,
under every engine (`fcsd.parallel.engine`):

copies      every rank has the whole model (of DDP the model inside). A rank asks its own share, at its own pace.
lockstep    the weights are sharded over the ranks (FSDP2, ZeRO-3, expert parallelism), so a forward pass needs all of
            them at the same time. Ranks that finish early run dummy forwards, and
            generation lasts as long as the longest of the ranks.

The batches are those that a single process would make, in the same order, dealt one by
one: the number of ranks changes neither the padding of a sequence nor the seed that it
is sampled with.

Where ranks have copies, an error of one rank in its share is raised on all of them. In
lockstep, and for everything that is not an `Exception`, the others wait in a
collective, and `fcsd.parallel.failure` ends them.

Not covered: starting processes, which is the launcher's work (see `configs/`); ranks
that must see the same batch (tensor parallelism, and expert
parallelism of the `all_reduce` kind).
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import get_int_from_env
from torch import nn

from fcsd.base.artifact import Stage, check_outputs, model_outputs
from fcsd.base.errors import UserError, one_line
from fcsd.base.memory import available_memory, free_memory
from fcsd.base.writing import hold_folder, release_folder
from fcsd.parallel.engine import Engine, Overlap, requested_engine
from fcsd.parallel.failure import watch_ranks

Item = TypeVar("Item")

Result = TypeVar("Result")


@dataclass
class Share:
    """The items that a rank is dealt, each with its number among all, and their
    results: of this rank within the block of `Ranks.sharing`, of all items, in order,
    after it.
    """

    items: list[tuple[int, Any]]
    results: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Ranks:
    """This rank's place. lockstep: a forward pass needs all ranks at the same time."""

    rank: int = 0
    size: int = 1
    lockstep: bool = False

    @cached_property
    def first(self) -> bool:
        """Whether this rank prints, writes and runs programs."""
        return self.rank == 0

    def deal(self, batches: Sequence[Item]) -> list[Item]:
        """Return this rank's share, in order."""
        return list(batches[self.rank :: self.size])

    def idle_passes(self, num_batches: int) -> int:
        """Return how many batches fewer than the first rank this one has; in lockstep
        it runs as many dummy forwards.
        """
        num_own = len(range(self.rank, num_batches, self.size))
        return math.ceil(num_batches / self.size) - num_own if self.lockstep else 0

    @contextlib.contextmanager
    def sharing(self, items: Sequence[Any], idle: Callable[[], Any]) -> Iterator[Share]:
        """Give the block the items that this rank is dealt; the block appends a result
        for each, and after it all ranks have the results of all items.

        idle: runs a dummy forward, on ranks in lockstep that have fewer items. Raises
        as `share`.
        """
        share, error = Share(self.deal(list(enumerate(items)))), None
        try:
            yield share
            # In lockstep, every rank makes as many passes as the busiest one.
            for _ in range(self.idle_passes(len(items))):
                idle()
        except Exception as own_error:
            if self.size == 1 or self.lockstep:
                raise
            error = own_error
        by_rank = self._from_all(share.results, error)
        # Items were dealt in turn, so item i is the (i // size)-th result of rank i %
        # size.
        share.results = [
            by_rank[number % self.size][number // self.size]
            for number in range(len(items))
        ]

    def share(self, call: Callable[[], Result]) -> list[Result]:
        """Return call() of every rank, by rank, on all ranks. Plain data only.

        Raises:
            The error of `call` on this rank; for that of another rank, a UserError or
            RuntimeError with the same text.
        """
        if self.size == 1:
            return [call()]
        own_result, error = _attempt(call)
        # The other ranks are in a forward pass, and would not join the collective.
        if error is not None and self.lockstep:
            raise error
        return self._from_all(own_result, error)

    def _from_all(self, own_result: Any, error: Exception | None) -> list[Any]:
        """Return the results of all ranks, by rank, or raise the first error of one."""
        if self.size == 1:
            return [own_result]
        # The error is also sent to the others, since they wait in the collective.
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (own_result, _for_others(error)))
        _raise_first(error, [of_rank for _, of_rank in outcomes])
        return [result for result, _ in outcomes]

    def from_first(self, call: Callable[[], Result]) -> Result:
        """Call on the first rank alone, and return its result, or raise its error, on
        all ranks. Plain data only.
        """
        if self.size == 1:
            return call()
        # An error is sent like a result, because the others wait for either.
        own_result, error = _attempt(call) if self.first else (None, None)
        outcome: list[Any] = [(own_result, _for_others(error))]
        dist.broadcast_object_list(outcome, src=0)
        result, of_first = outcome[0]
        _raise_first(error, [of_first])
        return result


ALONE = Ranks()


def _attempt(call: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _for_others(error: Exception | None) -> Exception | None:
    """Return an error in the form for other ranks, which have no traceback of it."""
    # A user's mistake needs no traceback; that of a bug would otherwise be lost here.
    if error is None or isinstance(error, UserError):
        return error and UserError(str(error))
    return RuntimeError("".join(traceback.format_exception(error)))


def _raise_first(
    own_error: Exception | None, errors: Sequence[Exception | None]
) -> None:
    if first := next(filter(None, errors), None):
        # A rank raises its own error if it has one, since that has the real traceback.
        error = own_error or first
        error.of_all_ranks = True  # type: ignore[attr-defined]
        raise error


def known_to_all(error: BaseException) -> bool:
    """Return whether all ranks have raised this error, or one with the same text, and
    can continue together.
    """
    return getattr(error, "of_all_ranks", False)


def is_sharded(model: nn.Module) -> bool:
    """Return whether this rank holds a shard of the weights: FSDP2 and expert
    parallelism have DTensors, ZeRO-3 ids.
    """
    return any(
        hasattr(weight, "device_mesh") or hasattr(weight, "ds_id")
        for weight in model.parameters()
    )


def input_device(model: Any) -> torch.device:
    """Return the device for token ids; it is not that of the embedding's weights, if
    these are moved to another one for a pass.
    """
    # The embedding is the first module, and the only one that gets token ids.
    embedding = model.get_input_embeddings()
    if is_sharded(embedding):
        return PartialState().device  # offloaded weights are in main memory
    # accelerate's hook moves offloaded weights to this device for the pass.
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    return next(embedding.parameters()).device


@dataclass(frozen=True)
class Launch:
    """The processes that run a command, as one of them sees it.

    device: of this rank. engine: shards the weights, if they are sharded. ranks: this
    rank among all, in lockstep where the engine shards.
    """

    device: torch.device
    engine: Engine
    ranks: Ranks = ALONE

    @cached_property
    def first(self) -> bool:
        """Whether this rank prints, writes and runs programs."""
        return self.ranks.first

    @property
    def loads_weights(self) -> bool:
        """Whether this rank reads weights; with FSDP2 and ZeRO-3 only the first one
        does, and sends the others their shards.
        """
        return not self.engine.shards_when_placed or self.first

    def hardware(self) -> dict[str, Any]:
        """Describe what computes: the `device` of a rank by its name, and the number of
        `processes`; of a CPU also its `threads`.
        """
        facts = {"processes": self.ranks.size}
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            return {"device": str(module.get_device_name(self.device))} | facts
        name = platform.processor() or platform.machine()
        with contextlib.suppress(OSError):  # only Linux has it
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE):
                name = found[1]
        threads = min(torch.get_num_threads(), os.cpu_count() or 1)
        return {"device": f"CPU {name}".strip()} | facts | {"threads": threads}

    def wait(self) -> None:
        """Wait until all ranks have made this call."""
        if self.ranks.size > 1:
            PartialState().wait_for_everyone()

    def for_evaluation(self) -> Launch:
        """Return this launch with FSDP2 in place of ZeRO-3: the scores are the same,
        and generation works.
        """
        fsdp2 = replace(self.engine, name="fsdp2", reshard=True)
        return self._with_engine(fsdp2) if self.engine.uses_deepspeed else self

    def with_copies(self) -> Launch:
        """Return this launch with a whole model on every rank in place of expert
        parallelism.
        """
        copies = Engine("ddp" if self.ranks.size > 1 else "one")
        return self._with_engine(copies) if self.engine.spreads_experts else self

    def _with_engine(self, engine: Engine) -> Launch:
        return replace(
            self, engine=engine, ranks=replace(self.ranks, lockstep=engine.shards)
        )


# While the first rank generates text for a score, or tokenizes, the others wait in a
# collective.
_PATIENCE = timedelta(hours=12)

_SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]


def join_launch(*, expert_parallel: int = 1, overlap: Overlap | None = None) -> Launch:
    """Join the other processes of the launch, with gloo if there is no accelerator.

    expert_parallel: number of ranks that share the experts of an MoE layer; 1: every
    rank holds all. overlap: how much of their communication runs beside computation;
    None: all, where the model can.

    Raises:
        UserError: accelerate was asked for several processes and started one; there are
            more processes than devices; a configuration is not supported, or would
            shard nothing.
    """
    state = _process_state()
    engine = requested_engine(
        state.num_processes, state.device, expert_parallel, overlap
    )
    # A launcher may start a single process, which needs no group.
    ranks = ALONE
    if state.num_processes > 1:
        ranks = Ranks(state.process_index, state.num_processes, lockstep=engine.shards)
    return Launch(state.device, engine, ranks)


def _process_state() -> PartialState:
    if not PartialState._shared_state:
        # `accelerate launch --num_processes 2` leaves these variables on a machine
        # without GPUs (accelerate 1.15).
        launched = (
            "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
        )
        if launched and get_int_from_env(_SIZES, 0) == 0:
            raise UserError(
                "accelerate was asked for several processes but started one, as it does"
                " on a machine without GPUs; add --multi_gpu (it starts CPU processes"
                " there), or --config_file configs/cpu_2.yaml"
            )
        if torch.accelerator.is_available():
            started = get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
            devices = torch.accelerator.device_count()
            if started > devices:
                raise UserError(
                    f"{started} processes were started on this machine, which has"
                    f" {devices} devices; set num_processes of accelerate's"
                    f" configuration to at most {devices} per machine"
                )
    if not torch.accelerator.is_available():
        # transformers imports DeepSpeed where it is installed, which would print to
        # stdout that it found no accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # By default, accelerate forms a group of CPU processes only under
    # ACCELERATE_USE_CPU.
    with warnings.catch_warnings():
        # Where the launcher leaves the variable unset (mpirun), accelerate rightly
        # divides a machine's cores among its processes, but warns of that in each of
        # them.
        warnings.filterwarnings(
            "ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset"
        )
        # accelerate sets more of these variables before it fails.
        names = (*_SIZES, "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        variables = [
            f"{name}={os.environ[name]}" for name in names if name in os.environ
        ]
        try:
            state = PartialState(
                cpu=not torch.accelerator.is_available(), timeout=_PATIENCE
            )
        except ValueError as error:
            PartialState._reset_state()
            raise UserError(
                f"the environment names a launch ({', '.join(variables)}) that cannot be"
                f" joined: {one_line(error)}; start with `accelerate launch` or"
                " torchrun, or unset these variables"
            ) from None
    if state.num_processes > 1:
        watch_ranks()
    return state


def begin_stage(stage: Stage, launch: Launch) -> str:
    """Record the start of a stage on the first rank; return its state, which may be
    "finished" already, on every rank.

    Raises:
        UserError: as `Stage.state` and, of a finished stage, `check_outputs`.
    """

    def begin() -> str:
        state = stage.state()
        # Only the first rank reads files; the others get the state from it.
        if state == "finished":
            check_outputs(stage.folder)
            print(f"{stage.name}: finished before, in {stage.folder}", file=sys.stderr)
            return state
        stage.folder.mkdir(parents=True, exist_ok=True)
        hold_folder(stage.folder)
        stage.start()
        return state

    return launch.ranks.from_first(begin)


def finish_stage(
    stage: Stage,
    launch: Launch,
    results: dict[str, Any],
    model: Path | None = None,
    outputs: dict[str, Any] | None = None,
) -> None:
    """Write the manifest on the first rank, with the identity of the `model` that the
    stage leaves.

    outputs: that identity, where the caller has it.
    """
    if launch.first:
        if model is not None:
            outputs = model_outputs(model)
        stage.finish(results, outputs)
        release_folder(stage.folder)
    launch.wait()


# ---- weights that FSDP2 gathers, while a model is scored


@dataclass(frozen=True)
class Shards:
    """The weights that FSDP2 gathers on a rank: its units, each with whether a forward
    pass frees it, and the bytes of all of them.
    """

    units: list[tuple[Any, bool]]
    num_bytes: int
    device: torch.device


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered (generation leaves the head whole)."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_WHOLE_AND_REST = 1.1
"""Free memory, as a multiple of all gathered weights, from which on they stay gathered:
a tenth is for caches and activations.
"""


def fits_whole(num_bytes: int, free_bytes: int) -> bool:
    """Tell whether weights of this many bytes stay whole while a model is scored."""
    return _WHOLE_AND_REST * num_bytes <= free_bytes


@contextlib.contextmanager
def gathered_once(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Keep the weights that FSDP2 gathers in the block's first forward pass until the
    block ends, if all ranks have room for them.

    Generation makes a pass for every token, and each would gather all weights. All
    ranks enter the block, and change no weights in it. Expert parallelism gathers as it
    does outside.
    """
    # Only models under FSDP2 have such a record.
    shards: list[Shards] = [
        shard_set.__dict__["_shards"]
        for shard_set in model.modules()
        if "_shards" in shard_set.__dict__
    ]
    num_bytes = sum(shard_set.num_bytes for shard_set in shards)
    units: list[tuple[Any, bool]] = []
    # All ranks must decide alike, or their gathers would not match.
    if shards and all(
        ranks.share(lambda: fits_whole(num_bytes, _free_bytes(shards[0].device)))
    ):
        units = [unit for shard_set in shards for unit in shard_set.units]
    for unit, _ in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit, frees in units:
            unit.set_reshard_after_forward(frees, recurse=False)
        if units:
            reshard(model)


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that this rank may take of its device's memory."""
    if device.type == "cpu":
        return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Unused blocks of the caching allocator are returned to the device first.
    free_memory()
    return int(torch.cuda.mem_get_info(device)[0])
