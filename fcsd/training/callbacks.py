"""What is told of a training's progress: the bar in the place of the Trainer's own output, and where steps begin."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from fcsd.base.text import nats, progress_bar
from fcsd.parallel.failure import in_step
from fcsd.training.losses.objectives import MEASURES

_SHOWN = (*MEASURES, "l2", "router_kl", "top1_agreement")


class ProgressBar(TrainerCallback):
    """One line with step, time left, loss and tokens per second; nothing on ranks other than the first.

    left: as in `TrainingRun`.
    """

    def __init__(self, description: str, left: Callable[[float], str] | None = None):
        self.description, self.left = description, left
        self.bar: Any = None
        self._first_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Open the bar at the step at which training begins."""
        if state.is_world_process_zero:
            self._first_step = state.global_step
            self.bar = progress_bar(
                total=state.max_steps, initial=state.global_step, desc=self.description, unit="step"
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Show the newest figures."""
        if self.bar is not None and "tokens_per_second" in logs:
            shown = {name: nats(logs[name]) for name in _SHOWN if name in logs}
            shown["tok/s"] = f"{logs['tokens_per_second']:.0f}"
            done = (state.global_step - self._first_step) / max(1, state.max_steps - self._first_step)
            if self.left is not None and (left := self.left(done)):
                shown["all stages"] = f"{left} left"
            self.bar.set_postfix(shown, refresh=False)

    def close(self) -> None:
        """End the line, also after an error: what is printed next begins a new one."""
        if self.bar is not None:
            self.bar.close()


class InStep(TrainerCallback):
    """Tells when this rank is in a step, so that one that hangs is found. Comes before callbacks that take hours."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Note that the first micro-batch begins."""
        in_step()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Note that the next one begins."""
        in_step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Note that weights are updated."""
        in_step(False)


class NoCheckpointAtTheEnd(TrainerCallback):
    """Leave the checkpoint of the last step out, where nothing but the loss curve is wanted of a training."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Take back what `Trainer` asks for."""
        if state.global_step >= state.max_steps:
            control.should_save = False


def replace_output(trainer: Trainer, bar: ProgressBar) -> None:
    """Put our progress bar in the place of the Trainer's own output."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(bar)
