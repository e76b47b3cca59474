"""Text, suites, results, and the KL to an original."""

from fcsd.data.batches import NO_LOSS, Collator, in_batches, real_tokens
from fcsd.data.dataset import heldout_fingerprint, heldout_rows
from fcsd.data.local import data_fingerprint
from fcsd.evaluation.backend import Batches
from fcsd.evaluation.config import SuiteConfig, load_suite, named_tasks
from fcsd.evaluation.items import suite_prompts
from fcsd.evaluation.results import read_result
from fcsd.evaluation.store import TaskStore, configuration_fingerprint
from fcsd.evaluation.suites import test_set_fingerprints
from fcsd.pipeline.reference import Reference, heldout_of
from fcsd.training.losses.kl import Original, mean_kl, read_original

__all__ = [
    "NO_LOSS",
    "Batches",
    "Collator",
    "Original",
    "Reference",
    "SuiteConfig",
    "TaskStore",
    "configuration_fingerprint",
    "data_fingerprint",
    "heldout_fingerprint",
    "heldout_of",
    "heldout_rows",
    "in_batches",
    "load_suite",
    "mean_kl",
    "named_tasks",
    "read_original",
    "read_result",
    "real_tokens",
    "suite_prompts",
    "test_set_fingerprints",
]
