"""Count the examples that cannot be tokenized; end the run at the first one, or leave
them out up to a limit.
"""

from collections.abc import Sequence
from typing import Literal

from fcsd.base.errors import UserError

CAP = 0.01  # share of the examples read that may be left out
_ALWAYS_ALLOWED = 10
_LISTED = 10_000
_SHOWN = 10

Policy = Literal["error", "skip"]


class BadRows:
    """The record of bad examples, and the policy for them.

    policy: error: the first one ends the run; skip: they are left out, up to 1 % of the
    examples that were read, and ten in any case. setting: name of the setting that
    chooses the policy, for errors; None: there is none.
    """

    def __init__(
        self, policy: Policy = "error", setting: str | None = "data.on_bad_row"
    ):
        self.policy, self.setting = policy, setting
        self.num_examples = 0
        self.num_bad = 0
        self._listed: dict[str, str] = {}  # where -> the fault

    def __repr__(self) -> str:
        listed = [
            f"{where}: {reason}"
            for where, reason in list(self._listed.items())[:_SHOWN]
        ]
        lines = [f"{self.num_bad} of {self.num_examples} examples left out", *listed]
        if self.num_bad > len(listed):
            lines.append(f"and {self.num_bad - len(listed)} more")
        return "\n".join(lines)

    def add(self, examples: Sequence[tuple[str, str]], num_read: int = 0) -> None:
        """Record bad examples, as (location, reason), among `num_read` that were read;
        UserError if the policy does not allow them, or there are too many.
        """
        self.num_examples += num_read
        # A shard that is read again must not count its bad examples twice.
        for where, reason in examples:
            if where not in self._listed:
                self.num_bad += 1
                if len(self._listed) < _LISTED:
                    self._listed[where] = reason
        if examples:
            self._refuse(examples)

    def _refuse(self, examples: Sequence[tuple[str, str]]) -> None:
        where, reason = examples[0]
        if self.policy == "error":
            num_others = len(examples) - 1
            other_rows = ""
            if num_others:
                rows = "row" if num_others == 1 else "rows"
                other_rows = f" ({num_others} more {rows} cannot be tokenized either)"
            skip = ""
            if self.setting:
                skip = f", or set {self.setting}: skip to leave out such rows"
            raise UserError(f"{where}: {reason}{other_rows}; correct it{skip}")
        # A few bad rows pass in any case: 1 % of a small data set may be less than one.
        if self.num_bad > max(_ALWAYS_ALLOWED, CAP * self.num_examples):
            raise UserError(
                f"{self.num_bad} of {self.num_examples} examples cannot be tokenized,"
                f" and {self.setting}: skip leaves out at most {CAP:.0%}; one of them:"
                f" {where}: {reason}; correct the data, or `columns`"
            )

    def listed(self) -> list[dict[str, str]]:
        """List the bad examples, the first ten thousand of them."""
        return [
            {"where": where, "reason": reason} for where, reason in self._listed.items()
        ]

    def summary(self) -> dict[str, int]:
        """Sum up for a manifest: examples read, and left out."""
        return {"num_examples": self.num_examples, "num_left_out": self.num_bad}
