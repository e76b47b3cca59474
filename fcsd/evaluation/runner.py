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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.errors import ScorerError, UserError
from fcsd.data.dates import TEMPLATE_DATE, writes_date
from fcsd.evaluation.backend import Backend, Batches, InMemoryBackend
from fcsd.evaluation.code.generate import prompts, questions_of
from fcsd.evaluation.code.problems import Problem, load_problems
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.config import (
    CodeTaskConfig,
    EvaluationConfig,
    OwnTextTaskConfig,
    SuiteConfig,
    TaskConfig,
    check_batch_size,
    items_limit,
)
from fcsd.evaluation.kinds import KINDS
from fcsd.evaluation.lm_eval import tasks as likelihood
from fcsd.evaluation.own_text.text import at_limit as texts_at_limit
from fcsd.evaluation.progress import Progress, Work
from fcsd.evaluation.results import (
    Samples,
    code_sample,
    evaluation_versions,
    task_result,
    text_hash,
    whole_result,
)
from fcsd.evaluation.store import Journal, TaskStore
from fcsd.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from fcsd.evaluation.own_text.measure import Original

TASK_FACTS = (
    "higher_is_better",
    "answers_at_limit",
    "answers_with_thoughts",
    "thoughts_closed_by",
    "original",
    "lower_bound",
)
"""Facts about a task that its result has, where they are known."""
_Answered = tuple[list[dict[str, Any]], dict[str, Any]]
"""Samples of a task, and facts about its answers."""


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
    data_root = Path(config.data_root) if config.data_root is not None else None
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
        prepared[row.task], task_facts = _prepare_task(
            row, suite, data_root, tokenizer, items_limit(row, config.limit)
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
    code = [row for row in missing if row.kind == "code"]
    finished = {task: samples for task, (samples, _) in stored.items()}
    scorer: CodeScorer | None = None
    # The sandbox starts last, since it runs all canonical solutions at once.
    with contextlib.ExitStack() as stack:

        def start() -> dict[str, Any]:
            """Start the sandbox, one for all ranks, and return its layers."""
            nonlocal scorer
            scorer = stack.enter_context(
                _checked_scorer(code, prepared, config, progress)
            )
            return scorer.layers

        if code:
            layers = ranks.from_first(start)
            for row in code:
                facts[row.task]["sandbox"] = layers
        yield PreparedEvaluation(
            tokenizer,
            suite,
            config,
            finished,
            missing,
            prepared,
            facts,
            scorer,
            store,
            ranks,
            progress,
            original,
        )


def check_original(rows: Iterable[TaskConfig], original: Any) -> None:
    """Raise UserError where a task needs an original and none is named."""
    for row in rows:
        if KINDS[row.kind].distance and original is None:
            raise UserError(
                f"task {row.task}: compares what the model writes with its original;"
                " name that with --original MODEL (in Python: original=)"
            )


@contextlib.contextmanager
def _checked_scorer(
    code: Sequence[CodeTaskConfig],
    prepared: Mapping[str, Any],
    config: EvaluationConfig,
    progress: bool,
) -> Iterator[CodeScorer]:
    """Yield a scorer that has passed the canonical solutions of these tasks."""
    with CodeScorer(allow_weak_sandbox=config.allow_weak_sandbox) as scorer:
        for row in code:
            try:
                scorer.self_check(
                    prepared[row.task], timeout_s=row.timeout_s, progress=progress
                )
            except ScorerError as error:
                raise ScorerError(f"task {row.task}: {error}") from error
        yield scorer


def _prepare_task(
    row: TaskConfig,
    suite: SuiteConfig,
    data_root: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
) -> tuple[Any, dict[str, Any]]:
    """Return the items of a task, and the facts of its result that are known before a
    model runs.
    """
    if row.kind == "own_text":
        from fcsd.evaluation.own_text.prompts import load_prompts

        own_prompts = load_prompts(row, data_root, tokenizer)
        return own_prompts[:limit], {
            "num_items_total": len(own_prompts),
            "higher_is_better": not KINDS[row.kind].distance,
        }
    if row.kind == "code":
        problems = load_problems(row, data_root)
        # Only for its errors, before a model runs: for example, a missing chat
        # template.
        prompts(tokenizer, problems[:1], row)
        return problems[:limit], {
            "num_items_total": len(problems),
            "higher_is_better": True,
        }
    task = likelihood.load_task(row, suite, data_root, tokenizer)
    return task, {
        "num_items_total": likelihood.num_items(task, None),
        "higher_is_better": likelihood.higher_is_better(task, row),
        # of a group, as its first task
        "generation": likelihood.generation(next(iter(task.values()))),
    }


@dataclass(frozen=True)
class PreparedEvaluation:
    """A suite whose data and sandbox are ready: call it with a model and its name.

    finished: samples of tasks that the store has. missing: the rows to run. prepared:
    their items. facts: of each task.
    """

    tokenizer: PreTrainedTokenizerBase
    suite: SuiteConfig
    config: EvaluationConfig
    finished: Samples
    missing: Sequence[TaskConfig]
    prepared: Mapping[str, Any]
    facts: Mapping[str, Mapping[str, Any]]
    scorer: CodeScorer | None
    store: TaskStore | None
    ranks: Ranks
    progress: bool
    original: "Original | None" = None

    def __call__(
        self,
        model: PreTrainedModel,
        name: str,
        batches: Batches | None = None,
    ) -> tuple[dict[str, Any], Samples]:
        """Return result and samples of a model in memory, both JSON-able."""
        size = self.config.batch_size
        backend = InMemoryBackend(
            model, self.tokenizer, size, self.ranks, batches, progress=self.progress
        )
        if self.config.capacity_factor is None:
            return self.ask(backend, name)
        from fcsd.model.families.capacity import dropping

        with dropping(
            model, self.config.capacity_factor, self.config.capacity_drop or "order"
        ) as counts:
            result, samples = self.ask(backend, name)
        pairs = self.ranks.share(
            lambda: [int(number) for number in counts.take() or (0, 0)]
        )
        dropped, total = (sum(of_ranks) for of_ranks in zip(*pairs, strict=True))
        # The share counts the tasks that were not finished before; None: all were.
        result["settings"]["dropped_share"] = dropped / total if total else None
        return result, samples

    def ask(self, backend: Backend, name: str) -> tuple[dict[str, Any], Samples]:
        """Return result and samples of a model wherever it is computed, both JSON-able."""
        start = time.monotonic()
        samples = dict(self.finished)
        facts = {task: dict(task_facts) for task, task_facts in self.facts.items()}
        steps = Progress(
            {row.task: self._work(row) for row in self.missing}, len(self.finished)
        )
        answered_by = backend.settings()
        self._tell_unused(name, answered_by["generation_config_unused"])
        with backend.asking():
            for row in self.missing:
                if self.progress and self.ranks.first:
                    steps.start(row.task)
                backend.begin(
                    self.store.journal(row) if self.store is not None else Journal()
                )
                try:
                    samples[row.task], noted = self._run(backend, row)
                except (UserError, ScorerError) as error:
                    if self.store is None or not samples:
                        raise
                    if len(samples) == 1:
                        count_text = "finished task is"
                    else:
                        count_text = f"{len(samples)} finished tasks are"
                    kind = UserError if isinstance(error, UserError) else ScorerError
                    raise kind(
                        f"{error} (the {count_text} kept; run again to continue)"
                    ) from error
                facts[row.task] |= noted
                # Each task is kept as soon as it is finished, so a kill loses no
                # finished task.
                if self.store is not None and self.ranks.first:
                    self.store.put(row, samples[row.task], facts[row.task])
        ordered = {row.task: samples[row.task] for row in self.suite.tasks}
        result = self._result(answered_by, ordered, facts, name)
        seconds = self.ranks.from_first(lambda: time.monotonic() - start)
        return result | {"wall_s": seconds}, ordered

    def _tell_unused(self, name: str, unused: Mapping[str, Any]) -> None:
        """Say which of the model's generation settings change no score."""
        writes = any(KINDS[row.kind].writes for row in self.missing)
        if unused and writes and self.progress and self.ranks.first:
            words = ", ".join(f"{key} {value!s:.60}" for key, value in unused.items())
            print(
                f"{name}: its generation settings have {words}; the suite decides, so"
                " scores do not depend on them",
                file=sys.stderr,
            )

    def _work(self, row: TaskConfig) -> Work:
        items = self.prepared[row.task]
        if row.kind == "own_text":
            return Work(len(items), "tokens", 2 * len(items) * row.max_new_tokens)
        if row.kind == "code":
            return Work(
                len(items), "tokens", len(items) * row.num_samples * row.max_new_tokens
            )
        return likelihood.work(row, items, items_limit(row, self.config.limit))

    def _run(self, backend: Backend, row: TaskConfig) -> _Answered:
        """Return the samples of a task, and facts about its answers."""
        if row.kind == "code":
            return self._run_code(backend, row)
        if row.kind == "own_text":
            return self._run_own_text(backend, row)
        model = backend.language_model
        limit = items_limit(row, self.config.limit)
        samples = likelihood.run_task(model, row, self.prepared[row.task], limit)
        if row.kind == "likelihood":
            return samples, {"thoughts_closed_by": model.closed} if model.closed else {}
        return samples, {
            "answers_at_limit": len(model.at_limit),
            "answers_with_thoughts": len(model.unasked),
        }

    def _run_own_text(self, backend: Backend, row: OwnTextTaskConfig) -> _Answered:
        from fcsd.evaluation.own_text.measure import own_text

        assert self.original is not None

        def in_memory(model: PreTrainedModel) -> InMemoryBackend:
            size, shown = self.config.batch_size, self.progress
            return InMemoryBackend(
                model, self.tokenizer, size, self.ranks, progress=shown
            )

        facts, prompts = self.facts[row.task], self.prepared[row.task]
        samples = own_text(backend, row, prompts, self.original, facts, in_memory)
        served = not isinstance(backend, InMemoryBackend)
        return samples, {**texts_at_limit(samples), "lower_bound": served}

    def _run_code(self, backend: Backend, row: CodeTaskConfig) -> _Answered:
        """Generate on all ranks, and score on the first, which has the scorer; one
        sample a problem.
        """
        problems: Sequence[Problem] = self.prepared[row.task]
        answers = backend.answers(questions_of(backend, problems, row))
        by_problem = [
            answers[first : first + row.num_samples]
            for first in range(0, len(answers), row.num_samples)
        ]
        completions = {
            problem.task_id: [answer.text for answer in several]
            for problem, several in zip(problems, by_problem, strict=True)
        }

        def scored() -> list[dict[str, Any]]:
            assert self.scorer is not None
            options: dict[str, Any] = {
                "timeout_s": row.timeout_s,
                "chat": row.chat_template,
                "progress": self.progress,
            }
            try:
                outcomes = self.scorer.score_samples(problems, completions, **options)
            # Try once more with new servers: generating may have taken hours.
            except ScorerError:
                outcomes = self.scorer.score_samples(problems, completions, **options)
            texts = prompts(self.tokenizer, problems, row)
            return [
                code_sample(row, problem, prompt, completions[problem.task_id], grades)
                for problem, prompt, grades in zip(
                    problems, texts, outcomes, strict=True
                )
            ]

        at_limit = [[answer.at_limit for answer in several] for several in by_problem]
        thoughts = [[answer.thoughts for answer in several] for several in by_problem]
        return self.ranks.from_first(scored), {
            "answers_at_limit": sum(map(any, at_limit)),
            "answers_with_thoughts": sum(map(any, thoughts)),
        }

    def _result(
        self,
        answered_by: dict[str, Any],
        samples: Samples,
        facts: dict[str, dict[str, Any]],
        name: str,
    ) -> dict[str, Any]:
        data_root = None
        if self.config.data_root is not None:
            data_root = Path(self.config.data_root)
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
        sandbox = next(
            (
                task_facts["sandbox"]
                for task_facts in facts.values()
                if "sandbox" in task_facts
            ),
            None,
        )
        # Results record the template and its date, since both change prompts.
        chat_template = date = None
        if any(row.chat_template for row in self.suite.tasks):
            if writes_date(self.tokenizer.chat_template):
                date = f"{TEMPLATE_DATE:%Y-%m-%d}"
            chat_template = text_hash(
                json.dumps(self.tokenizer.chat_template, sort_keys=True)
            )
        settings = {
            "limit": self.config.limit,
            "batch_size": self.config.batch_size,
            "data_root": None if data_root is None else str(data_root),
            **self.config.capacity,
            **answered_by,
            "chat_template_sha256": chat_template,
            "template_date": date,
            "fewshot_seed": likelihood.FEWSHOT_SEED,
            "decoding": "greedy, except in rows with a temperature",
            "suite": self._recorded_suite(facts),
            "versions": {"python": platform.python_version(), **evaluation_versions()},
        }
        return whole_result(self.suite.name, name, tasks, settings, sandbox)

    def _recorded_suite(self, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the suite with what its rows leave to lm-eval's definitions."""
        suite: dict[str, Any] = self.suite.model_dump(mode="json")
        for row in suite["tasks"]:
            generation = facts[row["task"]].get("generation", {})
            row |= {key: generation[key] for key in generation if row.get(key) is None}
        return suite
