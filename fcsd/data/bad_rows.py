"""Count the examples that cannot be tokenized: the run ends with the first one, or
leaves them out up to a cap.
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
    """The record of bad examples, and what becomes of a run that meets one.

    policy: error: the first one ends the run; skip: they are left out, up to 1 % of the
    examples that were read, and ten in any case. setting: what errors call the setting
    that chooses the policy; None: there is none.
    """

    def __init__(
        self, policy: Policy = "error", setting: str | None = "data.on_bad_row"
    ):
        self.policy, self.setting = policy, setting
        self.num_examples = 0
        self.num_bad = 0
        self._listed: dict[str, str] = {}  # where -> what is wrong

    def __repr__(self) -> str:
        listed = [
            f"{where}: {reason}"
            for where, reason in list(self._listed.items())[:_SHOWN]
        ]
        more = (
            [f"and {self.num_bad - len(listed)} more"]
            if self.num_bad > len(listed)
            else []
        )
        return "\n".join(
            [f"{self.num_bad} of {self.num_examples} examples left out", *listed, *more]
        )

    def add(self, examples: Sequence[tuple[str, str]], num_read: int = 0) -> None:
        """Record bad examples, where each is and what is wrong with it, among
        `num_read` more that were read; UserError where there is one that is not to be
        left out, or too many.
        """
        self.num_examples += num_read
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
            others = len(examples) - 1
            more = (
                f" ({others} more row{'' if others == 1 else 's'} cannot be tokenized"
                " either)"
                if others
                else ""
            )
            skip = (
                f", or set {self.setting}: skip to leave out such rows"
                if self.setting
                else ""
            )
            raise UserError(f"{where}: {reason}{more}; correct it{skip}")
        if self.num_bad > max(_ALWAYS_ALLOWED, CAP * self.num_examples):
            raise UserError(
                f"{self.num_bad} of {self.num_examples} examples cannot be tokenized,"
                f" and {self.setting}: skip leaves out {CAP:.0%} at most; one of them:"
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
