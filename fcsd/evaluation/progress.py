"""Report the progress of an evaluation, or of a run of several stages, and the time
that remains: a line before each task.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from fcsd.base.text import duration


@dataclass(frozen=True)
class Work:
    """The work that one part asks of a model: an item of MMLU with five shots takes as
    long as ten of PIQA.

    unit: of `amount`, such as characters that the model reads, or tokens that it may
    write; each has its own pace.
    """

    items: int
    unit: str
    amount: float


class Progress:
    """Counts tasks, or stages; estimates the time left from the remaining work, at each
    kind's pace so far.

    tasks: name -> work of each remaining task, in order. kept: number of tasks that
    were finished before. label: (name, position, work) -> beginning of the line. ended:
    (name, duration) -> the line with a task's duration. noun: the word for a task.
    """

    def __init__(
        self,
        tasks: Mapping[str, Work],
        kept: int = 0,
        *,
        label: Callable[[str, str, Work], str] = "[{1}] {0}: {2.items} items".format,
        ended: Callable[[str, str], str] | None = None,
        noun: str = "task",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.tasks = dict(tasks)
        self.kept = kept
        self._stream = stream
        self._clock = clock
        self._label, self._ended, self._noun = label, ended, noun
        self._began = clock()
        # Unit -> seconds, and the amount of work that was done in them.
        self._spent: dict[str, tuple[float, float]] = {}
        self._current: tuple[str, float] | None = None

    def start(self, task: str) -> None:
        """Print that `task` begins and the previous task has ended."""
        self.end()
        self._current = task, self._clock()
        names = list(self.tasks)
        position = f"{self.kept + names.index(task) + 1}/{self.kept + len(names)}"
        line = self._label(task, position, self.tasks[task])
        if time_left := self.left():
            line += (
                f"; {duration(self._clock() - self._began)} so far, {time_left} left"
            )
        self._print(line)

    def end(self) -> None:
        """Count the time of the current task, which has ended, and say it where `ended`
        has words for it.
        """
        if self._current is not None and self._ended is not None:
            task, began = self._current
            self._print(self._ended(task, duration(self._clock() - began)))
        self._spent, self._current = self._with_current(1.0), None

    def _print(self, line: str) -> None:
        print(line, file=self._stream or sys.stderr, flush=True)

    def left(self, done: float = 0.0) -> str:
        """Estimate the time that remains once the share `done` of the current task is
        finished; "" while there is nothing to estimate from."""
        assert self._current is not None
        names, spent = list(self.tasks), self._with_current(done)
        # Each kind of work has its pace, in seconds per unit.
        pace = {
            unit: seconds / amount
            for unit, (seconds, amount) in spent.items()
            if amount
        }
        # The current task counts with the share that is still to do.
        coming = [self.tasks[name] for name in names[names.index(self._current[0]) :]]
        parts = [
            (work.unit, work.amount * (1 if index else 1 - done))
            for index, work in enumerate(coming)
        ]
        estimates = [pace[unit] * amount for unit, amount in parts if unit in pace]
        if sum(estimates) < 1:
            return ""
        # A kind of work that is still to come may have no pace yet. What is missing from
        # the sum is counted beside it: most of a run may lie there.
        missing = sum(unit not in pace and amount > 0 for unit, amount in parts)
        time_left = f"about {duration(sum(estimates))}"
        if not missing:
            return time_left
        return f"{time_left} + {missing} {self._noun}{'' if missing == 1 else 's'}"

    def _with_current(self, done: float) -> dict[str, tuple[float, float]]:
        """Return unit -> seconds and amount so far, with the share `done` of the
        current task.
        """
        if self._current is None or not done:
            return self._spent
        (task, began), spent = self._current, dict(self._spent)
        work = self.tasks[task]
        seconds, amount = spent.get(work.unit, (0.0, 0.0))
        return spent | {
            work.unit: (seconds + self._clock() - began, amount + done * work.amount)
        }
