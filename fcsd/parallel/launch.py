"""Join a launch (`accelerate launch`, torchrun), or run as a single process.

    launch = join_launch()                   # once, in the command, which passes it on
    launch.device, launch.engine, launch.ranks

Not covered: starting processes, which is the launcher's work (see `configs/`).
"""

import os
import sys
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import get_int_from_env

from fcsd.base.artifact import Stage, check_outputs, model_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import hold_folder, release_folder
from fcsd.parallel.engine import Engine, Overlap, requested_engine
from fcsd.parallel.failure import watch_ranks
from fcsd.parallel.ranks import ALONE, Ranks

# While the first rank generates text for a score, or tokenizes, the others wait in a
# collective.
_PATIENCE = timedelta(hours=12)
_SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]


@dataclass(frozen=True)
class Launch:
    """The processes that run a command, as one of them sees it.

    device: of this rank. engine: shards the weights, if they are sharded. ranks: this
    rank among all, in lockstep where the engine shards.
    """

    device: torch.device
    engine: Engine
    ranks: Ranks = ALONE

    @property
    def first(self) -> bool:
        """Whether this rank prints, writes and runs programs."""
        return self.ranks.first

    @property
    def loads_weights(self) -> bool:
        """Whether this rank reads weights; with FSDP2 and ZeRO-3 only the first one
        does, and sends the others their shards.
        """
        return not self.engine.shards_when_placed or self.first

    def wait(self) -> None:
        """Wait until all ranks have made this call."""
        if self.ranks.size > 1:
            PartialState().wait_for_everyone()

    def for_evaluation(self) -> "Launch":
        """Return this launch with FSDP2 in place of ZeRO-3: the scores are the same,
        and generation works.
        """
        fsdp2 = replace(self.engine, name="fsdp2", reshard=True)
        return self._with(fsdp2) if self.engine.uses_deepspeed else self

    def with_copies(self) -> "Launch":
        """Return this launch with a whole model on every rank in place of expert
        parallelism.
        """
        copies = Engine("ddp" if self.ranks.size > 1 else "one")
        return self._with(copies) if self.engine.spreads_experts else self

    def _with(self, engine: Engine) -> "Launch":
        return replace(
            self, engine=engine, ranks=replace(self.ranks, lockstep=engine.shards)
        )

    def begin(self, stage: Stage) -> str:
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
                print(
                    f"{stage.name}: finished before, in {stage.folder}", file=sys.stderr
                )
                return state
            stage.folder.mkdir(parents=True, exist_ok=True)
            hold_folder(stage.folder)
            stage.start()
            return state

        return self.ranks.from_first(begin)

    def finish(
        self,
        stage: Stage,
        results: dict[str, Any],
        model: Path | None = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Write the manifest on the first rank, with the identity of the `model` that
        the stage leaves.

        outputs: that identity, where the caller has it.
        """
        if self.first:
            if model is not None:
                outputs = model_outputs(model)
            stage.finish(results, outputs)
            release_folder(stage.folder)
        self.wait()


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
                    f" configuration to at most {devices} a machine"
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
        state = PartialState(
            cpu=not torch.accelerator.is_available(), timeout=_PATIENCE
        )
    if state.num_processes > 1:
        watch_ranks()
    return state
