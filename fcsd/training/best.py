"""Score the weights while they are trained: stop when the score stalls, keep the best
beside the checkpoints.
"""

import math
import re
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from fcsd.base.errors import UserError
from fcsd.base.files import writing
from fcsd.base.temporary import replace_folder
from fcsd.parallel.ranks import known_to_all
from fcsd.parallel.state import check_state, write_weights
from fcsd.training.arguments import Scorer, TrainingRun
from fcsd.training.checkpoints import (
    best_step_of,
    checkpoints,
    damage,
    note_files,
    set_aside,
)
from fcsd.training.early_stopping import EarlyStopper, Score
from fcsd.training.fcsd_trainer import FCSDTrainer

# in `best/`: weights, whole, damaged or half-written
_OURS = re.compile(r"(\.|damaged-)*step-\d+.*")


class ScoreFailure(Exception):
    """A score could not be made, and all ranks know; the reason is the cause."""


def best_folder(run: TrainingRun, step: int) -> Path:
    # One folder a step: a checkpoint that names an older best one must find it, should
    # the run be cut off here.
    return run.folder / "best" / f"step-{step}"


def keep_best(trainer: FCSDTrainer, run: TrainingRun, step: int) -> None:
    """Write the parts of the weights beside, on all ranks; then the first renames the
    folder.

    A checkpoint that is still being written is waited for, and what no checkpoint names
    goes before: the run can go back to no other.
    """
    trainer.checkpoint_writer.close()
    _keep_only(trainer, run, [])
    best = best_folder(run, step)
    beside = best.with_name(f".{best.name}.tmp")
    first = trainer.is_world_process_zero()
    if first:
        shutil.rmtree(beside, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    with writing(best), trainer.scored_weights():
        write_weights(
            beside, trainer.plain_model, trainer.optimizer, trainer.launch.ranks
        )
    trainer.accelerator.wait_for_everyone()
    if first:
        check_state(beside)
    with writing(best):
        note_files(beside, trainer.launch.ranks)
    if first:
        replace_folder(beside, best)
    trainer.accelerator.wait_for_everyone()


def settle_best(
    trainer: FCSDTrainer, run: TrainingRun, *, last_step: int | None = None
) -> None:
    """Have the stopper name best weights that are whole, where those that it names are
    damaged. All ranks call this.

    What is damaged is set aside as `damaged-step-N`. last_step: of the weights in the
    model, which can be saved too.
    """
    stopper, ranks = run.stopper, run.launch.ranks
    if stopper is None or stopper.best_step is None:
        return
    lost = best_folder(run, stopper.best_step)
    reason = damage(lost, ranks)
    if reason is None:
        return
    kept = ranks.from_first(
        lambda: [
            point["step"]
            for point in stopper.points
            if best_folder(run, point["step"]).is_dir()
        ]
    )
    whole = [step for step in kept if damage(best_folder(run, step), ranks) is None]
    stopper.lose_all_but([*whole, *([] if last_step is None else [last_step])])
    if stopper.best_step is None:
        instead = "no other weights that were scored are whole"
    else:
        instead = (
            f"taking those of step {stopper.best_step}, {stopper.name}"
            f" {stopper.best_score:.4g}"
        )
    trainer.guarded.say(f"{lost}: the best weights are damaged ({reason}); {instead}")
    ranks.from_first(lambda: set_aside(lost) if lost.is_dir() else None)


def drop_others(trainer: FCSDTrainer, run: TrainingRun, step: int) -> None:
    """Keep the best weights of this step, and those that a checkpoint names: the run
    may go back to it.
    """
    _keep_only(trainer, run, [step])


def _keep_only(trainer: FCSDTrainer, run: TrainingRun, steps: list[int]) -> None:
    if not trainer.is_world_process_zero() or not (run.folder / "best").is_dir():
        return
    wanted = {best_folder(run, step) for step in steps}
    for checkpoint in checkpoints(run.folder / "checkpoints"):
        try:
            step = best_step_of(checkpoint)
        except (
            UserError
            # the run goes back to whole ones only, so what this one names is not needed
        ) as error:
            trainer.guarded.say(
                f"{checkpoint}: is damaged ({error}); it is set aside, and the training"
                " goes on"
            )
            set_aside(checkpoint)
            continue
        if step is not None:
            wanted.add(best_folder(run, step))
    for folder in set((run.folder / "best").iterdir()) - wanted:
        if _OURS.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


class StopWhenScoreStalls(TrainerCallback):
    """Scores the model every `every_steps` steps with all ranks, and ends training when
    the stopper says so.

    A step that is asked to be the last one (`guarded.ending`) is not scored any more,
    and one whose score failed ends the training: both leave a checkpoint, and the run
    that goes on from it begins with that score. `failure` is the error.
    """

    def __init__(
        self,
        trainer: FCSDTrainer,
        run: TrainingRun,
        stopper: EarlyStopper,
        score: Scorer,
    ):
        self.trainer, self.run, self.stopper, self.score = trainer, run, stopper, score
        self.failure: ScoreFailure | None = None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Score the model before the first step: it is the first checkpoint to beat.

        Of a run that goes on, make the score that its last step is still to have.
        """
        self.stopper.time.start()
        if state.global_step == 0:
            self._evaluate(0)
        else:
            settle_best(self.trainer, self.run)
        if state.global_step and self.stopper.is_due(
            state.global_step, state.max_steps
        ):
            self._evaluate(state.global_step)
            control.should_training_stop = (
                self.stopper.should_stop or state.global_step == state.max_steps
            )

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        step = state.global_step
        later = self.trainer.guarded.ending and step < state.max_steps
        if self.stopper.is_due(step, state.max_steps) and not later:
            try:
                self._evaluate(step)
            except ScoreFailure as error:
                self.failure = error
                control.should_training_stop = True
                control.should_save = args.save_strategy != SaveStrategy.NO
        if self.stopper.should_stop:
            control.should_training_stop = True
            control.should_save = True

    def _evaluate(self, step: int) -> None:
        best = self.stopper.update(step, self._score())
        self.trainer.guarded.say(self.stopper.line())
        if (warning := self.stopper.noise()) is not None:
            self.trainer.guarded.say(warning)
        if best:
            keep_best(self.trainer, self.run, step)

    def _score(self) -> Score:
        """Score the weights as they are; all ranks learn the same score, or the same
        failure (`ScoreFailure`).

        What one rank alone knows, while the others wait for its part of a pass, is
        raised as it is.
        """
        trainer, stopper = self.trainer, self.stopper
        try:
            with stopper.time.scoring(), trainer.scored_weights():
                own = self.score(trainer.plain_model)
            if not math.isfinite(own.value):
                raise UserError(
                    f"the score is {own.value}: the model gives figures that are not"
                    " finite"
                )
        except Exception as error:
            if trainer.launch.engine.shards and not known_to_all(error):
                raise
            raise ScoreFailure(str(error)) from error
        score: Score = trainer.launch.ranks.from_first(lambda: own)
        trainer.guarded.listen()
        # logging clears it, and this step's loss is yet to be logged
        due = trainer.control.should_log
        name = stopper.name
        errors = {f"{name}_stderr": score.stderr} if score.stderr is not None else {}
        trainer.log(
            {name: score.value, **errors, "scoring_share": round(stopper.time.share, 6)}
        )
        trainer.control.should_log = due
        return score

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Drop all other weights: a checkpoint that names the best ones is on disk."""
        if self.stopper.best_step is not None:
            drop_others(self.trainer, self.run, self.stopper.best_step)

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        self.stopper.time.stop()
