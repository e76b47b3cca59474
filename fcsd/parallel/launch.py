"""Where a command runs: the device, the engine and the rank of a process, which joins a
launch (`accelerate launch`, torchrun) or runs alone; and the begin and the end of a
stage on all its ranks.

launch = join_launch()        # once, in the command, which passes it on
launch.device, launch.engine, launch.ranks

Not covered: starting processes, which is the launcher's work (see `configs/`).
"""

import contextlib
import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import get_int_from_env

from fcsd.base.artifact import Stage, check_outputs, model_outputs
from fcsd.base.errors import UserError, one_line
from fcsd.base.writing import hold_folder, release_folder
from fcsd.parallel.engine import Engine, Overlap, requested_engine
from fcsd.parallel.failure import watch_ranks
from fcsd.parallel.ranks import ALONE, Ranks


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

    def for_evaluation(self) -> "Launch":
        """Return this launch with FSDP2 in place of ZeRO-3: the scores are the same,
        and generation works.
        """
        fsdp2 = replace(self.engine, name="fsdp2", reshard=True)
        return self._with_engine(fsdp2) if self.engine.uses_deepspeed else self

    def with_copies(self) -> "Launch":
        """Return this launch with a whole model on every rank in place of expert
        parallelism.
        """
        copies = Engine("ddp" if self.ranks.size > 1 else "one")
        return self._with_engine(copies) if self.engine.spreads_experts else self

    def _with_engine(self, engine: Engine) -> "Launch":
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
