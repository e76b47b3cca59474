"""Begin and finish a stage on all ranks of a launch; the first one alone reads and
writes its folder.
"""

import sys
from pathlib import Path
from typing import Any

from fcsd.base.artifact import Stage, check_outputs, model_outputs
from fcsd.base.writing import hold_folder, release_folder
from fcsd.parallel.launch import Launch


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
