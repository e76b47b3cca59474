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
        self._current: tuple[Work, float] | None = None

    def start(self, task: str) -> None:
        """Say that `task` begins; the one before has ended."""
        now = self._clock()
        if self._current is not None:
            before, began = self._current
            seconds, done = self._spent.get(before.unit, (0.0, 0.0))
            self._spent[before.unit] = seconds + now - began, done + before.amount
        self._current = self.tasks[task], now
        names = list(self.tasks)
        place = self.kept + names.index(task) + 1
        line = f"[{place}/{self.kept + len(names)}] {task}: {self.tasks[task].items} items"
        if pace := {unit: seconds / done for unit, (seconds, done) in self._spent.items() if done}:
            coming = [self.tasks[name] for name in names[names.index(task) :]]
            left = sum(pace[work.unit] * work.amount for work in coming if work.unit in pace)
            # A kind of work that is still to come may have no pace yet.
            word = "about" if all(work.unit in pace for work in coming) else "at least"
            line += f"; {duration(now - self._began)} so far, {word} {duration(left)} left"
        print(line, file=self._stream or sys.stderr, flush=True)
