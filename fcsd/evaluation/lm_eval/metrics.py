"""lm-eval's metrics, by their keys `metric,filter`; and which of them stands for a task
with several.
"""

from collections.abc import Sequence

METRICS = ("acc_norm", "acc", "exact_match", "prompt_level_strict_acc")
FILTERS = ("flexible-extract", "none", "strict-match")
"""Those that are preferred, in this order, where nothing else chooses."""


def preferred(names: Sequence[str], order: Sequence[str]) -> str:
    """Return the first of `order` that is among the names, else the first name."""
    return next((name for name in order if name in names), names[0])


def preferred_key(keys: Sequence[str]) -> str:
    """Return the preferred of these keys, by its metric first, else the first key."""
    return preferred(keys, [f"{m},{f}" for m in METRICS for f in FILTERS])


def lm_eval_key(metric: str) -> tuple[str, str]:
    """Split metric and filter: ("acc", "none") of `acc,none`; code tasks have no
    filter.
    """
    name, _, rule = metric.partition(",")
    return name, rule or "none"
