"""Tell how far an evaluation is, and what is left: a line before every task.

Not covered: the bars within a task, which are those of lm-eval and tqdm.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

from fcsd.text import duration


@dataclass(frozen=True)
class Work:
    """The work that one task asks of a model: an item of MMLU with five shots takes as long as ten of PIQA.

    Attributes:
        unit: of `amount`: characters that the model reads, or tokens that it may write; each has its own pace.
    """

    items: int
    unit: Literal["characters", "tokens"]
    amount: float


class Progress:
    """Counts tasks; the time left is that of the work still to come, at the pace of its kind so far.

    Args:
        tasks: task -> its work, of the tasks still to do, in order.
        kept: how many tasks of the suite were finished before.
    """

    def __init__(
        self,
        tasks: Mapping[str, Work],
        kept: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.tasks, self.kept, self._stream, self._clock = dict(tasks), kept, stream, clock
        self._began = clock()
        self._spent: dict[str, tuple[float, float]] = {}
        self._current: tuple[str, float] | None = None

    def start(self, task: str) -> None:
        """Say that `task` begins; the one before has ended."""
        self.end()
        self._current = (task, self._clock())
        names = list(self.tasks)
        place = self.kept + names.index(task) + 1
        line = f"[{place}/{self.kept + len(names)}] {task}: {self.tasks[task].items} items"
        left = self.seconds_left(names[names.index(task) :])
        if left is not None:
            line += f"; {duration(self._clock() - self._began)} so far, {left[0]}{duration(left[1])} left"
        print(line, file=self._stream or sys.stderr, flush=True)

    def end(self) -> None:
        """End the current task."""
        if self._current is not None:
            task, start = self._current
            work = self.tasks[task]
            seconds, done = self._spent.get(work.unit, (0.0, 0.0))
            self._spent[work.unit] = seconds + self._clock() - start, done + work.amount
            self._current = None

    def seconds_left(self, names: list[str]) -> tuple[str, float] | None:
        """Estimate ("about " or "at least ", seconds) for these tasks; None while nothing has been measured.

        "at least" where a kind of work is still to come for which there is no pace yet.
        """
        pace = {unit: seconds / done for unit, (seconds, done) in self._spent.items() if done}
        if not pace:
            return None
        known = [work for work in map(self.tasks.__getitem__, names) if work.unit in pace]
        word = "about " if len(known) == len(names) else "at least "
        return word, sum(pace[work.unit] * work.amount for work in known)
