"""Run a suite on models, in memory or behind a server.

With a `TaskStore`, finished tasks are kept and not run again. On several ranks
(`ranks=launch.ranks`) all of them make these calls and return the same; the first one
alone prints, keeps and writes.

Not covered: a model that some of the ranks do not hold.
"""

import contextlib
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.errors import ScorerError, UserError
from fcsd.base.text import Progress
from fcsd.data.rendering import TEMPLATE_DATE, writes_date
from fcsd.evaluation.backend import Backend, Batches
from fcsd.evaluation.code import steps as code
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.config import (
    KINDS,
    EvaluationConfig,
    SuiteConfig,
    TaskConfig,
    check_batch_size,
    items_limit,
)
from fcsd.evaluation.lm_eval import steps as lm_eval
from fcsd.evaluation.lm_eval.tasks import FEWSHOT_SEED
from fcsd.evaluation.own_text import steps as own_text
from fcsd.evaluation.results import (
    Journal,
    Samples,
    TaskStore,
    evaluation_versions,
    task_result,
    text_hash,
    whole_result,
)
from fcsd.evaluation.scores import Result, Row, Rows
from fcsd.evaluation.steps import Context, Steps
from fcsd.model.connectivity.spec import is_converted, is_original
from fcsd.parallel.launch import ALONE, Ranks

if TYPE_CHECKING:
    from fcsd.evaluation.own_text.measure import Original
    from fcsd.evaluation.served import ServedBackend

STEPS: dict[str, Steps] = {
    "likelihood": lm_eval,
    "generation": lm_eval,
    "code": code,
    "own_text": own_text,
}
"""Kind of task -> the module with its steps."""

TASK_FACTS = (
    "higher_is_better",
    "answers_at_limit",
    "answers_with_thoughts",
    "thoughts_closed_by",
    "original",
    "lower_bound",
)
"""Facts about a task that its result has, where they are known."""


@contextlib.contextmanager
def prepare_evaluation(
    tokenizer: PreTrainedTokenizerBase,
    suite: SuiteConfig,
    config: EvaluationConfig,
    *,
    store: TaskStore | None = None,
    ranks: Ranks = ALONE,
    progress: bool = True,
    any_direction: bool = False,
    original: "Original | None" = None,
) -> Iterator["PreparedEvaluation"]:
    """Prepare data and sandbox once, to evaluate one model after another; yield a
    function of a model and its name.

    All data, templates and the sandbox are checked before a model runs.

    config: its batch size, limit, data root and `allow_weak_sandbox` are read. store:
    where the first rank keeps finished tasks and looks for them. ranks: those that
    share the work; by default this process does all of it. any_direction: also accept
    metrics for which less is better, if scores are not compared between models.
    original: the model that tasks of kind own_text compare with.

    Raises:
        UserError: a task, data set, metric, chat template or original that does not
            exist; a sandbox that is too weak.
        ScorerError: the scorer of the code tasks failed; never a score of 0.
    """
    check_batch_size(config.batch_size, ranks)
    # Only the first rank reads the store, and tells the others.
    stored = ranks.from_first(
        lambda: {
            row.task: task
            for row in suite.tasks
            if store is not None and (task := store.get(row))
        }
    )
    missing = [row for row in suite.tasks if row.task not in stored]
    check_original(missing, original)
    prepared: dict[str, Any] = {}
    facts = {task: task_facts for task, (_, task_facts) in stored.items()}
    for row in missing:
        prepared[row.task], task_facts = STEPS[row.kind].prepare(
            row, suite, config.data_folder, tokenizer, items_limit(row, config.limit)
        )
        facts[row.task] = task_facts
        if KINDS[row.kind].distance and original is not None:
            task_facts["original"] = original.name
        compared = task_facts["higher_is_better"] or KINDS[row.kind].distance
        if not (compared or any_direction):
            raise UserError(
                f"task {row.task}: lower is better in {row.metric}; fcsd compares"
                " models only by metrics where higher is better: choose one of those,"
                " or leave the task out"
            )
    code_rows = [row for row in missing if row.kind == "code"]
    finished = {task: samples for task, (samples, _) in stored.items()}
    scorer: CodeScorer | None = None
    # The sandbox starts last, since it runs all canonical solutions at once.
    with contextlib.ExitStack() as stack:

        def start() -> Row:
            """Start the sandbox, one for all ranks, which must pass the canonical
            solutions; return its layers.
            """
            nonlocal scorer
            scorer = stack.enter_context(
                CodeScorer(
                    allow_weak_sandbox=config.allow_weak_sandbox, progress=progress
                )
            )
            for row in code_rows:
                try:
                    scorer.self_check(prepared[row.task], timeout_s=row.timeout_s)
                except ScorerError as error:
                    raise ScorerError(f"task {row.task}: {error}") from error
            return scorer.layers

        if code_rows:
            layers = ranks.from_first(start)
            for row in code_rows:
                facts[row.task]["sandbox"] = layers
        context = Context(tokenizer, config, ranks, progress, scorer, original)
        yield PreparedEvaluation(
            suite, context, finished, missing, prepared, facts, store
        )


def own_original(name: str, config: Any) -> bool:
    """Tell whether a model that is evaluated without a named original is one itself,
    and say so on stderr. config: its config, or that as a dictionary.
    """
    if not is_original(config):
        return False
    print(
        f"{name}: is not converted, and no original is named: it counts as its own"
        " original, and own text measures no conversion",
        file=sys.stderr,
    )
    return True


def refuse_converted(name: str, config: Any) -> None:
    """Raise UserError where the model that is named as the original is converted."""
    if is_converted(config):
        raise UserError(
            f"{name}: is named as the original, but is converted itself (FarSkip); name"
            " the model that it was converted from with --original (in Python:"
            " original=; fcsd.load(…, original=True) undoes an untrained conversion)"
        )


def check_original(rows: Iterable[TaskConfig], original: Any) -> None:
    """Raise UserError where a task needs an original and none is named."""
    for row in rows:
        if KINDS[row.kind].distance and original is None:
            raise UserError(
                f"task {row.task}: compares what the model writes with its original;"
                " name that with --original MODEL (in Python: original=)"
            )


@dataclass(frozen=True)
class PreparedEvaluation:
    """A suite whose data and sandbox are ready: call it with a model and its name.

    finished: samples of tasks that the store has. missing: the rows to run. prepared:
    their items. facts: of each task.
    """

    suite: SuiteConfig
    context: Context
    finished: Samples
    missing: Sequence[TaskConfig]
    prepared: Mapping[str, Any]
    facts: Rows
    store: TaskStore | None

    def check_server(self, served: "ServedBackend") -> None:
        """Refuse a task that the server cannot answer. It is not asked."""
        for row in self.missing:
            items = self.prepared[row.task]
            STEPS[row.kind].check_server(row, items, served, self.context)

    def check_positions(self, config: Any) -> None:
        """Refuse a task whose prompts and answers do not fit a model's positions.

        config: of the model, which need not be loaded.
        """
        for row in self.missing:
            items = self.prepared[row.task]
            STEPS[row.kind].check_positions(row, items, config, self.context)

    def __call__(
        self,
        model: PreTrainedModel,
        name: str,
        batches: Batches | None = None,
    ) -> tuple[Result, Samples]:
        """Return result and samples of a model in memory, both JSON-able."""
        config, backend = self.context.config, self.context.in_memory(model, batches)
        if config.capacity_factor is None:
            return self.evaluate(backend, name)
        from fcsd.model.families.capacity import dropping

        with dropping(
            model, config.capacity_factor, config.capacity_drop or "order"
        ) as counts:
            result, samples = self.evaluate(backend, name)
        pairs = self.context.ranks.share(
            lambda: [int(number) for number in counts.take() or (0, 0)]
        )
        dropped, total = (sum(of_ranks) for of_ranks in zip(*pairs, strict=True))
        # The share counts the tasks that were not finished before; None: all were.
        result["settings"]["dropped_share"] = dropped / total if total else None
        return result, samples

    def evaluate(self, backend: Backend, name: str) -> tuple[Result, Samples]:
        """Return result and samples of a model wherever it is computed, both JSON-able."""
        start = time.monotonic()
        samples, context = dict(self.finished), self.context
        facts = {task: dict(task_facts) for task, task_facts in self.facts.items()}
        work = {
            row.task: STEPS[row.kind].work(row, self.prepared[row.task], context)
            for row in self.missing
        }
        progress = Progress(work, len(self.finished))
        answered_by = backend.settings()
        self._tell_unused(name, answered_by["generation_config_unused"])
        with backend.asking():
            for row in self.missing:
                if context.progress and context.ranks.first:
                    progress.start(row.task)
                backend.begin(
                    self.store.journal(row) if self.store is not None else Journal()
                )
                try:
                    samples[row.task], noted = STEPS[row.kind].run(
                        row, self.prepared[row.task], facts[row.task], backend, context
                    )
                except (UserError, ScorerError) as error:
                    if self.store is None or not samples:
                        raise
                    kept = f"{len(samples)} finished tasks are"
                    if len(samples) == 1:
                        kept = "finished task is"
                    raise type(error)(
                        f"{error} (the {kept} kept; run again to continue)"
                    ) from error
                facts[row.task] |= noted
                # Each task is kept as soon as it is finished, so a kill loses no
                # finished task.
                if self.store is not None and context.ranks.first:
                    self.store.put(row, samples[row.task], facts[row.task])
        ordered = {row.task: samples[row.task] for row in self.suite.tasks}
        result = self._result(answered_by, ordered, facts, name)
        seconds = context.ranks.from_first(lambda: time.monotonic() - start)
        return result | {"wall_s": seconds}, ordered

    def _tell_unused(self, name: str, unused: Mapping[str, Any]) -> None:
        """Say which of the model's generation settings change no score."""
        if not (unused and self.context.progress and self.context.ranks.first):
            return
        if any(KINDS[row.kind].writes for row in self.missing):
            words = ", ".join(f"{key} {value!s:.60}" for key, value in unused.items())
            print(
                f"{name}: its generation settings have {words}; the suite decides, so"
                " scores do not depend on them",
                file=sys.stderr,
            )

    def _result(
        self, answered_by: Row, samples: Samples, facts: Rows, name: str
    ) -> Result:
        config, tokenizer = self.context.config, self.context.tokenizer
        data_root = config.data_folder
        tasks = {}
        for row in self.suite.tasks:
            task_facts = facts[row.task]
            summed = task_result(
                row, samples[row.task], task_facts["num_items_total"], data_root
            )
            tasks[row.task] = summed | {
                key: task_facts[key] for key in TASK_FACTS if key in task_facts
            }
        # Tasks that were finished earlier may have run in another sandbox; the result
        # records the first one.
        sandboxes = [of["sandbox"] for of in facts.values() if "sandbox" in of]
        # Results record the template and its date, since both change prompts.
        chat_template = date = None
        if any(row.chat_template for row in self.suite.tasks):
            if writes_date(tokenizer.chat_template):
                date = f"{TEMPLATE_DATE:%Y-%m-%d}"
            chat_template = text_hash(
                json.dumps(tokenizer.chat_template, sort_keys=True)
            )
        suite = self._recorded_suite(facts)
        settings = {
            "limit": config.limit,
            "batch_size": config.batch_size,
            "data_root": None if data_root is None else str(data_root),
            **config.capacity,
            **answered_by,
            "chat_template_sha256": chat_template,
            "template_date": date,
            "fewshot_seed": FEWSHOT_SEED,
            "decoding": _decoding(suite),
            "suite": suite,
            "versions": {"python": platform.python_version(), **evaluation_versions()},
        }
        return whole_result(
            self.suite.name, name, tasks, settings, sandboxes[0] if sandboxes else None
        )

    def _recorded_suite(self, facts: Rows) -> Row:
        """Return the suite with what its rows leave to lm-eval's definitions."""
        suite: Row = self.suite.model_dump(mode="json")
        for row in suite["tasks"]:
            generation = facts[row["task"]].get("generation", {})
            row |= {key: generation[key] for key in generation if row.get(key) is None}
        return suite


def _decoding(suite: Row) -> str:
    """Say how the tasks of a recorded suite decode."""
    sampled = [
        f"{row['task']} at temperature {row['temperature']:g}"
        for row in suite["tasks"]
        if row.get("temperature")
    ]
    return f"greedy, except {', '.join(sampled)}" if sampled else "greedy"
