"""Join a launch (`accelerate launch`, torchrun), or run as a single process.

Not covered: starting processes, which is the launcher's work (see `configs/`).
"""

import os
import warnings
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import get_int_from_env

from fcsd.base.errors import UserError, one_line
from fcsd.parallel.engine import Overlap, requested_engine
from fcsd.parallel.failure import watch_ranks
from fcsd.parallel.launch import Launch
from fcsd.parallel.ranks import ALONE, Ranks

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
