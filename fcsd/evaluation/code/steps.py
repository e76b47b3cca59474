"""Code tasks in an evaluation (`fcsd.evaluation.steps`)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.base.errors import ScorerError, UserError
from fcsd.evaluation.backend import Backend, Served
from fcsd.evaluation.code import prompts as code_prompts
from fcsd.evaluation.code.problems import Problem, load_problems
from fcsd.evaluation.config import CodeTaskConfig, SuiteConfig
from fcsd.evaluation.context import Answered, Context
from fcsd.evaluation.datasets import dataset_location, hub_advice
from fcsd.evaluation.progress import Work
from fcsd.evaluation.results import code_samples

_GENERATED = ("test",)


def prepare(
    row: CodeTaskConfig,
    suite: SuiteConfig,
    data_root: Path | None,
    tokenizer: Any,
    limit: int | None,
) -> tuple[list[Problem], dict[str, Any]]:
    """Read the problems."""
    problems = load_problems(row, data_root)
    # Only for its errors, before a model runs: for example, a missing chat template.
    code_prompts.prompts(tokenizer, problems[:1], row)
    facts = {"num_items_total": len(problems), "higher_is_better": True}
    return problems[:limit], facts


def work(
    row: CodeTaskConfig,
    items: Sequence[Problem],
    limit: int | None,
    context: Context,
) -> Work:
    """Count the tokens that the completions may have."""
    return Work(len(items), "tokens", len(items) * row.num_samples * row.max_new_tokens)


def check_server(
    row: CodeTaskConfig, items: Sequence[Problem], limit: int | None, served: Served
) -> None:
    """Refuse a server whose context is too short."""
    texts = code_prompts.prompts(served.tokenizer, items, row)
    tokens = code_prompts.prompt_tokens(served.config, served.tokenizer, texts, row)
    num_tokens = max(map(len, tokens), default=0) + row.max_new_tokens
    served.server.refuse(served.server.context_rule(row.task, num_tokens, "completion"))


def run(
    row: CodeTaskConfig,
    items: Sequence[Problem],
    facts: Mapping[str, Any],
    backend: Backend,
    context: Context,
) -> Answered:
    """Generate `num_samples` programs a problem on all ranks, and score them on the
    first, which has the scorer.
    """
    prompts = code_prompts.prompts(context.tokenizer, items, row)
    answers = backend.answers(code_prompts.questions_of(backend, prompts, row))
    by_problem = [
        answers[first : first + row.num_samples]
        for first in range(0, len(answers), row.num_samples)
    ]
    completions = {
        problem.task_id: [answer.text for answer in several]
        for problem, several in zip(items, by_problem, strict=True)
    }

    def scored() -> list[dict[str, Any]]:
        assert context.scorer is not None
        options: dict[str, Any] = {
            "timeout_s": row.timeout_s,
            "chat": row.chat_template,
            "progress": context.progress,
        }
        try:
            outcomes = context.scorer.score_samples(items, completions, **options)
        # Try once more with new servers: generating may have taken hours.
        except ScorerError:
            outcomes = context.scorer.score_samples(items, completions, **options)
        return code_samples(row, items, prompts, completions, outcomes)

    at_limit = [[answer.at_limit for answer in several] for several in by_problem]
    thoughts = [[answer.thoughts for answer in several] for several in by_problem]
    return context.ranks.from_first(scored), {
        "answers_at_limit": sum(map(any, at_limit)),
        "answers_with_thoughts": sum(map(any, thoughts)),
    }


def texts(
    row: CodeTaskConfig, suite: SuiteConfig, data_root: Path | None, tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the columns of all problems, without generated tests."""
    for index, problem in enumerate(_load(row, data_root)):
        # Generated inputs and outputs, megabytes of numbers; a reader sees the
        # other columns.
        visible_columns = {
            name: value for name, value in problem.items() if name not in _GENERATED
        }
        yield str(problem.get("task_id", index)), visible_columns


def _load(row: CodeTaskConfig, data_root: Path | None) -> Any:
    """Read a split; the revision is one of the Hub, and holds for no folder."""
    from fcsd.data.config import SourceConfig
    from fcsd.data.sources import load_source

    location = dataset_location(row, data_root)
    options: dict[str, Any] = {
        "path": location,
        "name": row.dataset_name,
        "split": row.split,
        "revision": None if Path(location).exists() else row.revision,
        "columns": {},
    }
    # Not validated: a test set may have any columns, but a training source's columns
    # make an example.
    try:
        return load_source(SourceConfig.model_construct(**options))
    except UserError as error:
        advice = "" if Path(location).exists() else hub_advice(row, data_root)
        raise UserError(f"task {row.task}: {error}{advice}") from error


def prompts(
    row: CodeTaskConfig,
    suite: SuiteConfig,
    data_root: Path | None,
    tokenizer: Any,
    limit: int | None,
) -> list[list[int]]:
    """Tokenize the problems' prompts."""
    problems = load_problems(row, data_root)[:limit]
    # A chat template writes its own special tokens.
    special = not row.chat_template
    return [
        tokenizer(text, add_special_tokens=special)["input_ids"]
        for text in code_prompts.prompts(tokenizer, problems, row)
    ]
