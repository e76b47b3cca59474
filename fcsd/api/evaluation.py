"""Evaluate a model in memory on a suite, and compare two evaluations item by item.

Not covered: stages that continue after an interruption; `fcsd evaluate` and recipes
have them.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fcsd.base.errors import UserError, kind_of
from fcsd.base.strict import check_kind
from fcsd.evaluation.backend import Batches
from fcsd.evaluation.config import EvaluationConfig, SuiteConfig
from fcsd.evaluation.own_text.measure import Original
from fcsd.evaluation.results import Samples, TaskStore, read_result, save_result
from fcsd.evaluation.runner import (
    own_original,
    prepare_evaluation,
    refuse_converted,
)
from fcsd.evaluation.suites import chosen_suite, load_suite
from fcsd.model.load import refuse_not_finite, tokenizer_of
from fcsd.model.preserve import preserved
from fcsd.parallel.failure import stop_watching
from fcsd.parallel.launch import Launch, join_launch
from fcsd.report.comparison import compare_all, comparison_text, read_evaluated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Evaluation(dict[str, Any]):
    """The content of an evaluation's `results.json` (docs/results.md); `samples` has
    the answers to every item.
    """

    def __init__(self, result: Mapping[str, Any], samples: Samples):
        super().__init__(result)
        self.samples = samples

    def save(self, folder: str | Path) -> Path:
        """Write results.json and samples_<task>.jsonl to a folder, as `fcsd evaluate`
        does; `fcsd compare` reads them.
        """
        save_result(dict(self), self.samples, Path(folder))
        return Path(folder)


class Comparison(dict[str, Any]):
    """The paired comparison of two evaluations, as `fcsd compare --json` prints it;
    `str` gives the table.
    """

    def __init__(self, comparison: Mapping[str, Any], text: str):
        super().__init__(comparison)
        self.text = text

    def __str__(self) -> str:
        return self.text


def evaluate_model(
    model: Any,
    suite: str | Path | SuiteConfig = "tiny",
    *,
    tasks: list[str] | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    original: Any = None,
    data_root: str | Path | None = None,
    batch_size: int | Literal["auto"] = 16,
    limit: int | None = None,
    allow_weak_sandbox: bool = False,
    progress: bool = True,
    name: str = "model",
    launch: Launch | None = None,
    batches: Batches | None = None,
    store: TaskStore | None = None,
) -> Evaluation:
    """Evaluate a model on every task of a suite; all ranks of a launch call this and
    get the same result.

    Restores the model's training mode and settings, and the random generators.

    Args:
        model: a model in memory, or the path of a checkpoint, which is loaded with its
            tokenizer.
        suite: the name of a suite that ships with fcsd, the path of a suite file, or a
            `SuiteConfig`.
        tasks: only these: tasks of the suite, or any task, group or tag of lm-eval,
            with its own shots and metric.
        original: for tasks of kind own_text: the model that this one was converted
            from, in memory or as a path; None: this one, if it is not converted.
        data_root: folder that holds the data sets in hub layout; None: the Hub.
        batch_size: sequences in one forward pass, or "auto".
        limit: only the first items of every task, for a quick look.
        allow_weak_sandbox: run generated code even if the sandbox cannot block network
            access.
        batches: a hook before each batch, and the facts that the result records of it.
        store: keeps finished tasks, which are not run again; None: none are kept.

    Raises:
        UserError: a task, data set, metric or chat template does not exist; the sandbox
            is too weak; weights are NaN or infinite.
        ScorerError: the scorer of the code tasks failed, which never counts as a score
            of 0.
    """
    _check_kinds(suite, launch)
    suite = suite if isinstance(suite, SuiteConfig) else load_suite(suite)
    if tasks is not None:
        _check_tasks(tasks)
        suite = chosen_suite(tasks, suite)
    if isinstance(model, str | Path):
        from fcsd.api.models import load

        name = str(model) if name == "model" else name
        model, checkpoint_tokenizer = load(model)
        tokenizer = tokenizer or checkpoint_tokenizer
    check_kind(
        "model",
        model,
        nn.Module,
        "a model in memory (the first value that fcsd.load returns) or its path",
    )
    refuse_not_finite(model, type(model).__name__)
    if tokenizer is None:
        raise UserError(
            "tokenizer: is required for a model in memory; give the tokenizer that the"
            " model was trained with"
        )
    tokenizer = tokenizer_of(tokenizer, "tokenizer")
    if launch is None:
        launch = join_launch()
        stop_watching()  # a script may have more to do after the evaluation
    start = time.monotonic()
    config = EvaluationConfig.from_plain(
        {
            "data_root": None if data_root is None else str(data_root),
            "batch_size": batch_size,
            "limit": limit,
            "allow_weak_sandbox": allow_weak_sandbox,
        },
        "evaluate_model",
    )
    prepared = prepare_evaluation(
        tokenizer,
        suite,
        config,
        store=store,
        ranks=launch.ranks,
        progress=progress,
        original=_original(original, model, name, suite, launch),
    )
    with preserved(model, tokenizer), prepared as evaluate:
        evaluate.check_positions(model.config)
        result, samples = evaluate(model, name, batches)
    # All ranks report the clock of the first, so that their results are equal.
    result["wall_s"] = launch.ranks.from_first(lambda: time.monotonic() - start)
    return Evaluation(result, samples)


def _original(
    original: Any, model: Any, name: str, suite: SuiteConfig, launch: Launch
) -> Original | None:
    """Return the original of an evaluation: a model that is not converted is its own if
    none is given; None if there is none, or no task needs one.
    """
    if not suite.has_own_text:
        return None
    if original is None:
        if not launch.ranks.from_first(lambda: own_original(name, model.config)):
            return None
        original = model
    if isinstance(original, str | Path):
        from fcsd.api.models import load

        loaded = model if str(original) == name else load(original)[0]
    else:
        check_kind(
            "original",
            original,
            nn.Module,
            "a model in memory (the first value that fcsd.load returns) or its path",
        )
        loaded = original
    refuse_not_finite(loaded, "original")
    refuse_converted("original", loaded.config)
    return Original(lambda: contextlib.nullcontext(loaded), itself=loaded is model)


def _check_kinds(suite: Any, launch: Any) -> None:
    check_kind(
        "suite",
        suite,
        str | Path | SuiteConfig,
        "the name or path of a suite, or a SuiteConfig(…),",
    )
    check_kind(
        "launch", launch, Launch | None, "what fcsd.parallel.launch.join_launch gives"
    )


def compare(
    original: Evaluation | str | Path,
    converted: Evaluation | str | Path,
    *,
    tasks: list[str] | None = None,
) -> Comparison:
    """Compare two evaluations of the same items, paired, with intervals and tests, as
    `fcsd compare` does.

    Args:
        original: a result of `evaluate_model`, or a folder that `fcsd evaluate` wrote.
        converted: the same, for the model to compare with the original.
        tasks: compare only these tasks.

    Raises:
        UserError: the results are of different items or settings; a folder holds no
            result.
    """
    if tasks is not None:
        _check_tasks(tasks)
    # Folders also record the training, which the text of a comparison mentions; a
    # result in memory does not.
    if isinstance(original, str | Path) and isinstance(converted, str | Path):
        evaluated = read_evaluated(Path(original), [Path(converted)])
    else:
        evaluated = {
            "original": _evaluated(original),
            "converted": _evaluated(converted),
        }
    comparisons = compare_all(evaluated, tasks)
    (comparison,) = comparisons.values()
    return Comparison(comparison, comparison_text(comparisons, evaluated))


def _check_tasks(tasks: Any) -> None:
    wanted = 'a list of names, such as ["arc_easy"],'
    check_kind("tasks", tasks, list, wanted)
    if not tasks or not all(isinstance(task, str) for task in tasks):
        raise UserError(f"tasks: {tasks!r:.80}; {wanted} is needed")


def _evaluated(evaluation: Evaluation | str | Path) -> dict[str, Any]:
    if isinstance(evaluation, Evaluation):
        result, samples = dict(evaluation), evaluation.samples
    elif isinstance(evaluation, str | Path):
        result, samples = read_result(Path(evaluation))
    else:
        raise UserError(
            f"compare: {kind_of(evaluation)}; give the result of evaluate_model, or the"
            " folder of an evaluation"
        )
    return {"result": result, "samples": samples, "training": None}
