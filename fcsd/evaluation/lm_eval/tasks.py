"""Likelihood and generation tasks: lm-eval on a model in memory, task by task, without
the network.

Our numbers equal those of plain lm-eval: the same task, the same requests, the mean of
the same item scores. Only means over items are reported, because everything downstream
compares item by item. Prompts that are longer than the model's positions are cut on the
left, as lm-eval does; such samples are marked.

Not covered: tasks that lm-eval scores in another way than by likelihood of choices or
from generated text.
"""

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fcsd.base.errors import UserError
from fcsd.base.strict import did_you_mean
from fcsd.base.text import Work
from fcsd.base.writing import scratch_folder
from fcsd.data.local import fresh_cache
from fcsd.data.rendering import require_chat_template
from fcsd.evaluation.config import (
    KINDS,
    GenerationTaskConfig,
    LMEvalTaskConfig,
    SuiteConfig,
)
from fcsd.evaluation.datasets import (
    damaged_file,
    dataset_location,
    first_line,
    hub_advice,
)
from fcsd.evaluation.lm_eval.columns import check_files, check_rows, columns_of
from fcsd.evaluation.lm_eval.packages import provide_packages, task_folder
from fcsd.evaluation.results import generation_settings, items_of_filter, lm_eval_sample
from fcsd.evaluation.scores import Row, Sample
from fcsd.model.preserve import quiet

Tasks = dict[str, Any]
"""lm-eval's tasks of a suite's row, by name: one, or the members of a group."""

FEWSHOT_SEED = 1234  # lm-eval's default
_GROUP = "fcsd_row"  # the generated group around one row
_MAX_NEW_TOKENS = 256  # where a task sets none (`HFLM.max_gen_toks`)
_LONGEST = 8  # documents of a task whose length is looked at before it is run


def load_task(
    row: LMEvalTaskConfig, suite: SuiteConfig, data_root: Path | None, tokenizer: Any
) -> Tasks:
    """Load lm-eval's tasks of one row (more than one for a group such as `mmlu`), with
    the row's settings.
    """
    require_chat_template(tokenizer, row)
    folder = task_folder(row, suite)
    provide_packages(row.task, folder)
    location = dataset_location(row, data_root)
    overrides: dict[str, Any] = {
        "num_fewshot": row.num_fewshot,
        "dataset_path": location,
        "dataset_name": row.dataset_name,
        "test_split": row.split,
    }
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if row.revision is not None and not Path(location).exists():
        overrides["dataset_kwargs"] = {"revision": row.revision}
    with quiet(), fresh_cache(location), scratch_folder("fcsd-task") as overlay:
        from lm_eval.tasks import TaskManager

        # Only the row's folder is read: lm-eval's thousands of definitions take
        # seconds.
        registry = TaskManager(include_path=[str(folder)], include_defaults=False)
        if row.task not in registry.all_tasks:
            raise UserError(
                f"task {row.task}: not defined in"
                f" {folder}{did_you_mean(row.task, registry.all_tasks)}"
            )
        if row.task in registry.all_tags:
            raise UserError(
                f"task {row.task}: is a tag in lm-eval, not a task or group; add a row"
                " for each of its tasks:"
                f" {', '.join(sorted(registry.task_index[row.task].tags))}"
            )
        if (registry.task_index[row.task].cfg or {}).get("unsafe_code"):
            # Loading it would fetch and run a metric's code, or take `code_eval` from
            # the working directory.
            raise UserError(
                f"task {row.task}: runs generated code inside lm-eval; use kind: code"
            )
        kind = "group" if row.task in registry.all_groups else "task"
        # lm-eval 0.4.13 merges overrides into a registered group only from a YAML file
        # (research: inline dicts fail).
        text = yaml.safe_dump(
            {"group": _GROUP, "task": [{kind: row.task, **overrides}]}
        )
        (overlay / "row.yaml").write_text(text, encoding="utf-8")
        try:
            manager = TaskManager(
                include_path=[str(folder), str(overlay)], include_defaults=False
            )
            with _seeded():
                tasks: Tasks = dict(manager.load([_GROUP])["tasks"])
        except ModuleNotFoundError as error:
            raise UserError(
                f"task {row.task}: needs packages that are not installed"
                f" ({first_line(error)}); pip install 'fcsd[instruct]' has those of"
                " IFEval and MATH"
            ) from error
        except Exception as error:
            # Loading fails with exceptions of many kinds. Look for a damaged file, row
            # or column first, which says more than the exception.
            if damaged := damaged_file(location):
                raise UserError(f"task {row.task}: {damaged}") from error
            _name_the_row(row, suite, registry, location)
            reason = first_line(error)
            if isinstance(error, KeyError):
                reason = f"it has nothing named {error}"
            columns, advice = columns_of(row.task, suite), hub_advice(row, data_root)
            if columns and not advice:
                advice = f"; the task needs the columns {', '.join(columns)}"
            raise UserError(
                f"task {row.task}: cannot be loaded with the data set {location}:"
                f" {reason}{advice}"
            ) from error
    for name, task in tasks.items():
        _apply(task, row)
        _check_data(name, task, row, suite, location)
    return tasks


def _definitions(row: LMEvalTaskConfig, registry: Any) -> list[Any]:
    """Return lm-eval's definitions of a row's task, or of all members of its group."""
    names = [row.task] if row.task in registry.all_subtasks else registry.all_subtasks
    return [registry.task_index[name].cfg for name in names]


def named_splits(row: LMEvalTaskConfig, suite: SuiteConfig) -> set[tuple[str, str]]:
    """Return the (configuration, split) of a row's data set that its task's definition
    names; "default" for none.
    """
    from lm_eval.tasks import TaskManager

    registry = TaskManager(
        include_path=[str(task_folder(row, suite))], include_defaults=False
    )
    keys = ("training_split", "validation_split", "test_split", "fewshot_split")
    return {
        (row.dataset_name or settings.get("dataset_name") or "default", split)
        for settings in _definitions(row, registry)
        for split in (row.split, *map(settings.get, keys))
        if split
    }


def _name_the_row(
    row: LMEvalTaskConfig, suite: SuiteConfig, registry: Any, location: str
) -> None:
    """Name the row and the column at fault, if there is one, where lm-eval could not
    read the data.
    """
    columns = columns_of(row.task, suite)
    for settings in _definitions(row, registry) if columns else ():
        graded = (
            row.split or settings.get("test_split") or settings.get("validation_split")
        )
        shots = settings.get("fewshot_split") or settings.get("training_split")
        for split in dict.fromkeys([graded, *([shots] if row.num_fewshot else [])]):
            check_files(
                row.task,
                columns,
                location,
                row.dataset_name or settings.get("dataset_name"),
                split,
            )


def _check_data(
    name: str, task: Any, row: LMEvalTaskConfig, suite: SuiteConfig, location: str
) -> None:
    """Check the rows of the graded split and of the shots' split, and whether there are
    enough shots.
    """
    graded = task.config.test_split or task.config.validation_split
    shots = task.config.fewshot_split or task.config.training_split
    splits = [graded, *([shots] if row.num_fewshot and shots else [])]
    for split in dict.fromkeys(splits):
        rows = task.dataset[split]
        if len(rows) == 0:
            raise UserError(f"task {name}: {location} ({split}): the data set is empty")
        check_rows(row.task, columns_of(row.task, suite), rows, f"{location} ({split})")
    # Shots that come from the graded split leave out the question itself.
    if (
        row.num_fewshot
        and shots
        and len(task.dataset[shots]) < row.num_fewshot + (shots == graded)
    ):
        raise UserError(
            f"task {name}: {row.num_fewshot} shots, but {location} ({shots}) has"
            f" {len(task.dataset[shots])} rows"
        )


def _apply(task: Any, row: LMEvalTaskConfig) -> None:
    """Apply the settings that lm-eval does not take as overrides."""
    likelihood = task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood")
    if likelihood == KINDS[row.kind].writes:
        raise UserError(
            f"task {row.task}: kind is {row.kind!r}, but lm-eval's output_type is"
            f" {task.OUTPUT_TYPE}"
        )
    metric, name = row.metric.split(",", 1)
    metrics, filters = list(task._metric_fn_list), [f.name for f in task._filters]
    if metric not in metrics or name not in filters:
        allowed = ", ".join(f"{m},{f}" for m in metrics for f in filters)
        raise UserError(
            f"task {row.task}: metric {row.metric!r} does not exist; allowed: {allowed}"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"task {row.task}: runs generated code inside lm-eval; use kind: code"
        )
    settings: dict[str, Any] = {}
    if isinstance(row, GenerationTaskConfig):
        limits = {"max_gen_toks": row.max_new_tokens, "until": row.stop}
        settings = {key: value for key, value in limits.items() if value is not None}
    # The other fields of the task's file stay unchanged.
    if settings:
        task.set_config(key="generation_kwargs", value=settings, update=True)


def generation(task: Any) -> Row:
    """Describe how the answers to one of lm-eval's tasks are generated, in the words of
    a suite's row; {} where none are.
    """
    if task.OUTPUT_TYPE != "generate_until":
        return {}
    return generation_settings(task.config.generation_kwargs or {}, _MAX_NEW_TOKENS)


def num_items(tasks: Tasks, limit: int | None) -> int:
    """Count the items that a row's tasks are evaluated on."""
    counts = [len(task.eval_docs) for task in tasks.values()]
    return sum(counts if limit is None else [min(count, limit) for count in counts])


def work(row: LMEvalTaskConfig, tasks: Tasks, limit: int | None) -> Work:
    """Estimate the work of a row for a model, from a few prompts of every task."""
    items = num_items(tasks, limit)
    if KINDS[row.kind].writes:
        tokens = [generation(task)["max_new_tokens"] for task in tasks.values()]
        return Work(items, "tokens", items * max(tokens))
    characters = 0.0
    for task in tasks.values():
        documents, count = task.eval_docs, num_items({"": task}, limit)
        # Four evenly spaced documents represent a task.
        chosen = {count * part // 4 for part in range(4)}
        read = sum(_characters_read(task, documents[index]) for index in chosen)
        characters += count * read / len(chosen)
    return Work(items, "characters", characters)


def _characters_read(task: Any, document: Any) -> int:
    """Count the prompt characters read for one item; single-token choices share one
    forward pass.
    """
    context = task.fewshot_context(document, task.config.num_fewshot or 0)
    requests = task.construct_requests(
        doc=document, ctx=context, metadata=(task.task_name, 0, 1)
    )
    pairs = [
        request.args
        for request in (requests if isinstance(requests, list) else [requests])
    ]
    letters = len({context for context, _ in pairs}) == 1 and all(
        len(choice.strip()) == 1 for _, choice in pairs
    )
    return sum(
        len(context) + len(choice)
        for context, choice in (pairs[:1] if letters else pairs)
    )


def longest_requests(
    language_model: Any, row: LMEvalTaskConfig, tasks: Tasks, limit: int | None
) -> Iterator[list[Any]]:
    """Build the requests about the few documents of each task that have the longest
    text.
    """
    for task in tasks.values():
        # Documents represent their prompts, which would take long to build.
        documents = [
            str(task.eval_docs[index]) for index in range(num_items({"": task}, limit))
        ]
        order = sorted(range(len(documents)), key=lambda index: -len(documents[index]))
        longest = sorted(order[:_LONGEST])
        chat = language_model.apply_chat_template
        yield [
            request
            for requests in item_requests(task, row, longest, chat)
            for request in requests
        ]


def item_requests(
    task: Any,
    row: LMEvalTaskConfig,
    documents: Sequence[int],
    chat_template: Callable[..., str],
) -> list[list[Any]]:
    """Build the requests about each of these documents; chat_template writes turns as
    text, if the row wants that.
    """
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with quiet(), _no_bars_while_building():
        task.build_all_requests(
            samples=list(documents),
            system_instruction=row.system_prompt,
            apply_chat_template=row.chat_template,
            fewshot_as_multiturn=row.chat_template,
            chat_template=chat_template if row.chat_template else None,
        )
    by_item: dict[int, list[Any]] = {}
    for request in task.instances:
        by_item.setdefault(request.doc_id, []).append(request)
    return list(by_item.values())


def higher_is_better(tasks: Tasks, row: LMEvalTaskConfig) -> bool:
    """Tell whether more is better in the row's metric, as lm-eval says; True where it
    says nothing.
    """
    metric = row.metric.split(",", 1)[0]
    return all(
        task.higher_is_better().get(metric) is not False for task in tasks.values()
    )


def run_task(
    language_model: Any,
    row: LMEvalTaskConfig,
    tasks: Tasks,
    limit: int | None,
    documents: dict[str, list[int]] | None = None,
) -> list[Sample]:
    """Evaluate one row and return its samples in the order of the data set (group
    members one after another).

    documents: task -> the numbers of the documents to evaluate; None: all of them, or
    the first `limit`. A sample has `cut` if the model has been shown the end of the
    prompt only.

    Raises:
        UserError: a metric that is not a mean; more than the model's positions hold;
            out of memory.
    """
    # a task that is run for another model draws the same examples
    for task in tasks.values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    language_model.think(row)
    # Some graders draw numbers: IFEval's, for what a prompt leaves open.
    with quiet(), _no_bars_while_building(), _seeded():
        from lm_eval.evaluator import evaluate

        try:
            output: Any = evaluate(
                lm=language_model,
                task_dict={"tasks": tasks, "groups": {}, "group_map": {}},
                limit=limit,
                samples=documents,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=row.chat_template,
                fewshot_as_multiturn=row.chat_template,
                system_instruction=row.system_prompt,
            )
        except UserError as error:
            raise UserError(f"task {row.task}: {error}") from error
    metric, name = row.metric.split(",", 1)
    samples = []
    for task, items in output["samples"].items():
        values, member = output["results"][task], None if task == row.task else task
        chosen = items_of_filter(items, name)
        scores = [float(item[metric]) for item in chosen]
        _require_mean(row, float(values[row.metric]), scores)
        beside = [
            key
            for key in tasks[task].aggregation()
            if KINDS[row.kind].writes and key != metric
            if _adds_up(chosen, key, values.get(f"{key},{name}"))
        ]
        for item, score in zip(chosen, scores, strict=True):
            requests = item["arguments"]
            sample = lm_eval_sample(item, score, member, requests)
            answer = _prediction(tasks[task], item, metric)
            if answer is not None:
                sample["prediction"] = answer
            if beside:
                sample["metrics"] = {key: item[key] for key in beside}
            if any(str(context) in language_model.cut for context, *_ in requests):
                sample["cut"] = True
            samples.append(sample)
    return samples


def _prediction(task: Any, item: Sample, metric: str) -> int | str | None:
    """Return the answer that was scored: the number of a choice, counted from 0, or the
    text that the task's filter found; None where the metric chooses none, or the task
    has a rule of its own (the second choice set of TruthfulQA).
    """
    if task.OUTPUT_TYPE == "generate_until":
        found = item["filtered_resps"][0]
        return found if isinstance(found, str) else None
    own_rule = task.OUTPUT_TYPE != "multiple_choice" or task.config.process_results
    if own_rule or metric not in ("acc", "acc_norm"):
        return None
    choices = task.doc_to_choice(item["doc"])
    values = [float(response[0][0]) for response in item["resps"]][: len(choices)]
    if metric == "acc_norm":
        values = [
            value / len(choice) if choice else -math.inf
            for value, choice in zip(values, choices, strict=True)
        ]
    return max(range(len(values)), key=values.__getitem__)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed Python's generator as lm-eval's command does, and put it back: GPQA's
    definition shuffles the choices with it when loaded, and two models must get the
    same questions.
    """
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _no_bars_while_building() -> Iterator[None]:
    """Suppress the bars that lm-eval 0.4.13 draws without a name for every task, so 57
    for MMLU.
    """
    from lm_eval.api import task

    bar = task.tqdm
    task.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        task.tqdm = bar


def _adds_up(items: Sequence[Sample], key: str, value: Any) -> bool:
    """Tell whether a metric of these items is a mean over them, or, of lists, over all
    that they hold: then it is told beside the row's own.
    """
    numbers: list[float] = []
    for item in items:
        part = item.get(key)
        parts: list[Any] = part if isinstance(part, list) else [part]
        if not all(isinstance(number, bool | int | float) for number in parts):
            return False
        numbers += parts
    if not numbers or not isinstance(value, int | float):
        return False
    return math.isclose(value, math.fsum(numbers) / len(numbers), abs_tol=1e-9)


def _require_mean(row: LMEvalTaskConfig, value: float, scores: list[float]) -> None:
    if not math.isclose(
        value, math.fsum(scores) / len(scores), rel_tol=1e-6, abs_tol=1e-9
    ):
        raise UserError(
            f"task {row.task}: metric {row.metric!r} is not a mean over items (lm-eval"
            f" gives {value:.6g}); choose one that is, because models are compared item"
            " by item"
        )
