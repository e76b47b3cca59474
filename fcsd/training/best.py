"""Score the weights during training: stop when the score stalls, and keep the best
weights in a folder beside the checkpoints.
"""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from fcsd.base.errors import UserError
from fcsd.base.writing import replace_folder, writing
from fcsd.parallel.launch import Launch, Ranks, known_to_all
from fcsd.parallel.state import check_state, write_weights
from fcsd.training.arguments import Job, ScoreFailure
from fcsd.training.checkpoints import (
    best_step_of,
    checkpoints,
    damage,
    note_files,
    set_aside,
)
from fcsd.training.early_stopping import Score

if TYPE_CHECKING:
    from fcsd.training.ready_trainer import ReadyTrainer

# folders in `best/` that a training has made: complete, damaged or half-written weights
_OURS = re.compile(r"(\.|damaged-)*step-\d+.*")


def best_folder(job: Job, step: int) -> Path:
    # One folder per step: a run that is killed now continues from a checkpoint that may
    # name older best weights, and has to find them.
    return job.folder / "best" / f"step-{step}"


def _owner(job: Job, step: int) -> Any:
    """Return the owner of best weights: those of another step are not taken for them."""
    return [job.owner, step]


def keep_best(
    job: Job, launch: Launch, step: int, model: nn.Module, optimizer: Any
) -> None:
    """Write the weights as the best so far: all ranks write their shards to a temporary
    folder, which the first rank renames.
    """
    best = best_folder(job, step)
    temporary_folder = best.with_name(f".{best.name}.tmp")
    if launch.first:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    launch.wait()
    with writing(best):
        write_weights(temporary_folder, model, optimizer, launch.ranks)
    # All shards are written: check them, hash them, and only then give the name.
    launch.wait()
    if launch.first:
        check_state(temporary_folder)
    with writing(best):
        note_files(temporary_folder, launch.ranks, owner=_owner(job, step))
    if launch.first:
        replace_folder(temporary_folder, best)
    launch.wait()


def settle_best(
    job: Job,
    ranks: Ranks,
    say: Callable[[str], None],
    *,
    last_step: int | None = None,
) -> None:
    """Make the stopper choose other weights where the best ones are damaged. All ranks
    call this.

    The damaged ones are set aside as `damaged-step-N`. last_step: the step of the
    weights in the model, which are a candidate, too.
    """
    stopper = job.stopper
    if stopper is None or stopper.best_step is None or not job.keeps_best:
        return
    damaged_folder = best_folder(job, stopper.best_step)
    reason = damage(damaged_folder, ranks, _owner(job, stopper.best_step))
    if reason is None:
        return
    # The stopper has scored many steps, but only some of their weights are still there.
    saved_steps = ranks.from_first(
        lambda: [
            point["step"]
            for point in stopper.points
            if best_folder(job, point["step"]).is_dir()
        ]
    )
    whole_steps = [
        step
        for step in saved_steps
        if damage(best_folder(job, step), ranks, _owner(job, step)) is None
    ]
    stopper.lose_all_but([*whole_steps, *([] if last_step is None else [last_step])])
    if stopper.best_step is None:
        replacement = "all other scored weights are damaged, too"
    else:
        replacement = (
            f"taking those of step {stopper.best_step}, {stopper.name}"
            f" {stopper.best_score:.4g}"
        )
    say(f"{damaged_folder}: the best weights are damaged ({reason}); {replacement}")
    ranks.from_first(
        lambda: set_aside(damaged_folder) if damaged_folder.is_dir() else None
    )


def drop_others(job: Job, steps: list[int], say: Callable[[str], None]) -> None:
    """Remove all weights except those of these steps and those that a checkpoint names,
    since the run may go back to it; the first rank alone calls this.
    """
    if not (job.folder / "best").is_dir():
        return
    needed_folders = {best_folder(job, step) for step in steps}
    for checkpoint in checkpoints(job.folder / "checkpoints"):
        try:
            step = best_step_of(checkpoint, job.owner)
        except UserError as error:
            # A run goes back to intact checkpoints only, so the weights that a damaged
            # one names are not needed.
            say(
                f"{checkpoint}: is damaged ({error}); fcsd sets it aside and continues"
                " the training"
            )
            set_aside(checkpoint)
            continue
        # A run that goes back to this checkpoint looks for these weights.
        if step is not None:
            needed_folders.add(best_folder(job, step))
    for folder in set((job.folder / "best").iterdir()) - needed_folders:
        if _OURS.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


class StopWhenScoreStalls(TrainerCallback):
    """Score the model every `every_steps` steps on all ranks, and end the training when
    the stopper asks for it.

    The step that a signal has made the last one (`guarded.ending`) is not scored, and a
    failed score ends the training. Both leave a checkpoint, and the run that continues
    from it starts with that score. `failure` is the error.

    job: with its stopper and its score.
    """

    def __init__(self, job: Job, trainer: "ReadyTrainer"):
        self.job, self.trainer = job, trainer
        self.launch, self.guarded = trainer.launch, trainer.guarded
        self.stopper: Any = job.stopper
        self.score: Any = job.score
        self.failure: ScoreFailure | None = None

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Score the model before the first step, as the first one to beat.

        In a run that continues, make the score that its last step still lacks.
        """
        self.stopper.time.start()
        if state.global_step == 0:
            self._evaluate(0, control)
        else:
            settle_best(self.job, self.launch.ranks, self.guarded.say)
        if state.global_step and self.stopper.is_due(
            state.global_step, state.max_steps
        ):
            self._evaluate(state.global_step, control)
            # This score belongs to the last step of the earlier process, so that
            # `on_step_end` will not look at it.
            control.should_training_stop = (
                self.stopper.should_stop or state.global_step == state.max_steps
            )

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        # A signal leaves little time, and a score may take long: it is made when the
        # run continues. After the last step there is no such run.
        step = state.global_step
        is_postponed = self.guarded.ending and step < state.max_steps
        if self.stopper.is_due(step, state.max_steps) and not is_postponed:
            try:
                self._evaluate(step, control)
            except ScoreFailure as error:
                self.failure = error
                control.should_training_stop = True
                control.should_save = args.save_strategy != SaveStrategy.NO
        if self.stopper.should_stop:
            control.should_training_stop = True
            control.should_save = True

    def _evaluate(self, step: int, control: TrainerControl) -> None:
        trainer, score = self.trainer, self._score(control)
        is_best = self.stopper.update(step, score)
        self.guarded.say(self.stopper.line())
        if (warning := self.stopper.noise()) is not None:
            self.guarded.say(warning)
        if is_best and self.job.keeps_best:
            # The checkpoint that is still being written may name weights. Weights that
            # none names are removed, since the run cannot go back to them.
            trainer.checkpoint_writer.close()
            if self.launch.first:
                drop_others(self.job, [], self.guarded.say)
            with trainer.scored_weights():
                model = trainer.plain_model
                keep_best(self.job, self.launch, step, model, trainer.optimizer)

    def _score(self, control: TrainerControl) -> Score:
        """Score the present weights; all ranks get the same score, or the same failure
        (`ScoreFailure`).

        An error on one rank, while the others wait in a pass, is raised unchanged: it
        ends the launch.
        """
        stopper = self.stopper
        try:
            with stopper.time.scoring(), self.trainer.scored_weights():
                own_score = self.score(self.trainer.model)
            if not math.isfinite(own_score.value):
                raise UserError(
                    f"the score is {own_score.value}: the model's outputs are not"
                    " finite"
                )
        except Exception as error:
            if self.launch.engine.shards and not known_to_all(error):
                raise
            raise ScoreFailure(str(error)) from error
        score: Score = self.launch.ranks.from_first(lambda: own_score)
        self.guarded.listen()
        # `log` clears the flag, but the loss of this step still has to be logged.
        log_is_due = control.should_log
        name = stopper.name
        errors = {f"{name}_stderr": score.stderr} if score.stderr is not None else {}
        self.trainer.log(
            {name: score.value, **errors, "scoring_share": round(stopper.time.share, 6)}
        )
        control.should_log = log_is_due
        return score

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop all other weights, except those that a complete checkpoint names: the one
        that is saved now may still be in the making.
        """
        if self.stopper.best_step is not None and self.launch.first:
            drop_others(self.job, [self.stopper.best_step], self.guarded.say)

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stopper.time.stop()
