"""Trainer callbacks: the progress bar, and the stop when the score stalls."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import SaveStrategy

from fcsd.distill.early_stopping import EarlyStopper, Score

STOPPER_FILE = "early_stopping.json"  # in each checkpoint of a run with early stopping


_SHOWN = ("kl", "reverse_kl", "jsd", "ce", "l2", "router_kl", "top1_agreement")


class ScoreFailure(Exception):
    """A score could not be made, and all ranks know; the reason is the cause."""


class ProgressBar(TrainerCallback):
    """One line with step, time left, loss and tokens per second; nothing on ranks other than the first."""

    def __init__(self, description: str):
        self.description = description
        self.bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar at the step at which training begins."""
        if state.is_world_process_zero:
            from tqdm import tqdm

            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self.description, unit="step"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the newest figures."""
        if self.bar is not None and logs and "tokens_per_second" in logs:
            shown: dict[str, str] = {name: f"{logs[name]:.4f}" for name in _SHOWN if name in logs}
            self.bar.set_postfix({**shown, "tok/s": f"{logs['tokens_per_second']:.0f}"}, refresh=False)

    def close(self) -> None:
        """End the line, also after an error: what is printed next begins a new one."""
        if self.bar is not None:
            self.bar.close()


class StopWhenScoreStalls(TrainerCallback):
    """Scores the model every `every_steps` steps and ends training when the stopper says so.

    A step that is asked to be the last one (`ending`) is not scored any more, and one whose score failed ends the
    training: both leave a checkpoint, and the run that goes on from it begins with that score. `failure` is the error.

    Args:
        score: of the step's weights; on all ranks, which get the same score or error.
        keep_best: keeps the weights of that step beside those kept before.
        drop_others: may drop all others; called once a checkpoint that names `step` as the best one is on disk.
        say: prints a line, once for all ranks.
    """

    def __init__(
        self,
        stopper: EarlyStopper,
        score: Callable[[int], Score],
        *,
        keep_best: Callable[[int], None],
        drop_others: Callable[[int], None],
        say: Callable[[str], None],
        ending: Callable[[], bool],
    ):
        self.stopper, self.score = stopper, score
        self.keep_best, self.drop_others = keep_best, drop_others
        self.say, self.ending = say, ending
        self.failure: ScoreFailure | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Score the model before the first step: the curve's first point, and never the best one kept.

        Of a run that goes on, make the score that its last step is still to have.
        """
        self.stopper.time.start()
        if state.global_step == 0:
            self.stopper.first(self.score(0))
            self.say(self.stopper.line())
        elif self.stopper.is_due(state.global_step, state.max_steps):
            self._evaluate(state.global_step)
            control.should_training_stop = self.stopper.should_stop or state.global_step == state.max_steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Score, keep the best, stop."""
        step = state.global_step
        later = self.ending() and step < state.max_steps
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
        best = self.stopper.update(step, self.score(step))
        self.say(self.stopper.line())
        if (warning := self.stopper.noise()) is not None:
            self.say(warning)
        if best:
            self.keep_best(step)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Only the best weights are needed from now on."""
        if self.stopper.best_step is not None:
            self.drop_others(self.stopper.best_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the clock of the run."""
        self.stopper.time.stop()


def replace_output(trainer: Trainer, description: str) -> ProgressBar:
    """Put our progress bar in the place of the Trainer's own output."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    bar = ProgressBar(description)
    trainer.add_callback(bar)
    return bar
