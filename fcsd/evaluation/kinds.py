"""The kinds of tasks, and what holds of every task of a kind, also in the results of
another machine. `fcsd.evaluation.steps` has what an evaluation does with them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Group = Literal["likelihood", "generation"]
GROUPS: dict[Group, str] = {
    "likelihood": "by likelihood of given answers",
    "generation": "by what it writes",
}
"""What scores have seen: a verdict has a line, and a comparison a mean, for each."""


@dataclass(frozen=True)
class Kind:
    """What holds of every task of a kind.

    scored_by: what its score has seen, in words. by_lm_eval: lm-eval loads and grades
    it, so that it may be a group with members. distance: its figure is a divergence
    from the original, in nats: less is better, it has no floor and no place in a mean
    of scores, and the original must be named.
    """

    group: Group
    scored_by: str
    by_lm_eval: bool = False
    distance: bool = False

    @cached_property
    def writes(self) -> bool:
        """Whether the model writes; otherwise it is asked for likelihoods alone."""
        return self.group == "generation"


KINDS = {
    "likelihood": Kind("likelihood", "likelihood of given answers", by_lm_eval=True),
    "generation": Kind("generation", "the answer that it writes", by_lm_eval=True),
    "code": Kind("generation", "the program that it writes"),
    "own_text": Kind("generation", "its own text", distance=True),
}
