"""The processes of a launch (`accelerate launch`, torchrun, or just this one), and how a stage begins and ends in all.

Not covered: starting them; that is the launcher's work, see `configs/`.
"""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import get_int_from_env

from fcsd.artifact import Stage, weights_fingerprint
from fcsd.errors import UserError
from fcsd.rank_failure import watch_ranks

# While the first rank generates text for a score, or tokenizes, the others wait in a collective.
_PATIENCE = timedelta(hours=12)
_SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]


def processes() -> PartialState:
    """Accelerate's state of this process; the first call joins the group, with gloo where there is no accelerator.

    Raises:
        UserError: accelerate was asked for several processes and started one.
    """
    import torch

    if not PartialState._shared_state:
        # What `accelerate launch --num_processes 2` does on a machine without GPUs (accelerate 1.15).
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
        if launched and get_int_from_env(_SIZES, 0) == 0:
            raise UserError(
                "accelerate was asked for several processes but started one, as it does on a machine without GPUs;"
                " add --multi_gpu (it starts CPU processes there), or --config_file configs/cpu_2.yaml"
            )
        if torch.accelerator.is_available():
            started, devices = get_int_from_env(["LOCAL_WORLD_SIZE"], 1), torch.accelerator.device_count()
            if started > devices:
                raise UserError(
                    f"{started} processes were started on this machine, which has {devices} devices; set num_processes"
                    f" of accelerate's configuration to at most {devices} a machine"
                )
    if not torch.accelerator.is_available():
        # DeepSpeed, which transformers imports where it is installed, would tell stdout that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Left to itself, accelerate forms a group of CPU processes only under ACCELERATE_USE_CPU.
    with warnings.catch_warnings():
        # Where the launcher left it unset (mpirun), accelerate shares a machine's cores out among its processes, as it
        # should, and warns of that in each of them.
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
        state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_PATIENCE)
    if state.num_processes > 1:
        watch_ranks()
    return state


def begin(stage: Stage) -> str:
    """Note the start of a stage on the first rank; tells on every rank whether it is finished already."""
    state = stage.state()
    processes().wait_for_everyone()  # nobody may see what the first rank writes below
    if processes().is_main_process:
        if state == "finished":
            print(f"{stage.name}: finished before, in {stage.folder}", file=sys.stderr)
        else:
            stage.start()
    processes().wait_for_everyone()
    return state


def finish(stage: Stage, results: dict[str, Any], model: Path | None = None) -> None:
    """Write the manifest on the first rank, with the fingerprint of the `model` that the stage leaves."""
    if processes().is_main_process:
        stage.finish(results, {"model": weights_fingerprint(model)} if model is not None else None)
    processes().wait_for_everyone()
