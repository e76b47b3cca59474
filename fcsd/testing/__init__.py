"""Help for tests, also for those of code that builds on fcsd: tiny models, references, forked ranks.

Not covered: data, GPUs, anything slow.
"""

from fcsd.testing.ranks import run_ranks
from fcsd.testing.reference import reference_forward
from fcsd.testing.tiny import TINY, randomise, tiny_config, tiny_model, tiny_tokenizer

__all__ = [
    "TINY",
    "randomise",
    "reference_forward",
    "run_ranks",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
]
