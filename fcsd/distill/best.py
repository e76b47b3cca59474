"""Keep the weights with the best early-stopping score beside the checkpoints, and drop the others."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

from fcsd.distill.arguments import Scorer, TrainingRun
from fcsd.distill.callbacks import STOPPER_FILE, ScoreFailure
from fcsd.distill.checkpoints import checkpoints
from fcsd.distill.early_stopping import EarlyStopper, Score
from fcsd.distill.trainer import DistillTrainer
from fcsd.distributed.ranks import known_to_all
from fcsd.distributed.state import check_state, write_state
from fcsd.errors import UserError
from fcsd.files import read_json, replace_folder, writing


def best_folder(run: TrainingRun, step: int) -> Path:
    """Return the folder of the best weights of `step`."""
    # One folder a step: a checkpoint that names an older best one must find it, should the run be cut off here.
    return run.folder / "best" / f"step-{step}"


def keep_best(trainer: DistillTrainer, run: TrainingRun, step: int) -> None:
    """All ranks write their parts of the weights beside, then the first renames the folder."""
    best = best_folder(run, step)
    beside = best.with_name(f".{best.name}.tmp")
    first = trainer.is_world_process_zero()
    if first:
        shutil.rmtree(beside, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    with writing(best), trainer.scored_weights():
        write_state(beside, trainer.plain_model, trainer.optimizer, trainer.launch.ranks, weights_only=True)
    trainer.accelerator.wait_for_everyone()
    if first:
        check_state(beside)
        replace_folder(beside, best)
    trainer.accelerator.wait_for_everyone()


def drop_others(trainer: DistillTrainer, run: TrainingRun, step: int) -> None:
    """Keep the best weights of this step, and those that a checkpoint names: the run may go back to it."""
    if trainer.is_world_process_zero():
        kept = checkpoints(run.folder / "checkpoints")
        named = {read_json(checkpoint / STOPPER_FILE)["best_step"] for checkpoint in kept}
        wanted = {best_folder(run, best) for best in {step, *named} if best is not None}
        for folder in set((run.folder / "best").iterdir()) - wanted:
            shutil.rmtree(folder)


def scored(stopper: EarlyStopper, score: Scorer, trainer: DistillTrainer) -> Callable[[int], Score]:
    """Scores the weights of a step with all ranks; they learn the same score, or the same failure.

    Raises:
        ScoreFailure: no score, and all ranks know. What one rank alone knows, while the others wait for its part of a
            pass, is raised as it is.
    """

    def score_step(step: int) -> Score:
        try:
            with stopper.time.scoring(), trainer.scored_weights():
                own = score(trainer.plain_model)
            if not math.isfinite(own.value):
                raise UserError(f"the score is {own.value}: the model gives figures that are not finite")
        except Exception as error:
            if trainer.launch.engine.shards and not known_to_all(error):
                raise
            raise ScoreFailure(str(error)) from error
        found: Score = trainer.launch.ranks.from_first(lambda: own)
        trainer.listen()
        due = trainer.control.should_log  # logging clears it, and this step's loss is yet to be logged
        name = stopper.name
        errors = {f"{name}_stderr": found.stderr} if found.stderr is not None else {}
        trainer.log({name: found.value, **errors, "scoring_share": round(stopper.time.share, 6)})
        trainer.control.should_log = due
        return found

    return score_step
