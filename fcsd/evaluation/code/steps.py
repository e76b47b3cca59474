"""Code tasks in an evaluation (`fcsd.evaluation.steps`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import ScorerError, UserError
from fcsd.base.text import Work
from fcsd.data.rendering import chat_writer, require_chat_template
from fcsd.data.thoughts import END_OF_PROMPT
from fcsd.evaluation.backend import Backend
from fcsd.evaluation.code.problems import Problem, load_problems
from fcsd.evaluation.code.sanitise import program_in
from fcsd.evaluation.config import CodeTaskConfig, SuiteConfig
from fcsd.evaluation.datasets import dataset_location, reading
from fcsd.evaluation.results import code_samples
from fcsd.evaluation.scores import Row, Sample
from fcsd.evaluation.steps import Answered, Context
from fcsd.model.load import num_positions
from fcsd.training.generation import SAMPLING_SEED, Decoding, Question, Reader, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fcsd.evaluation.served import ServedBackend

_GENERATED = ("test",)


def prepare(
    row: CodeTaskConfig,
    suite: SuiteConfig,
    data_root: Path | None,
    tokenizer: Any,
    limit: int | None,
) -> tuple[list[Problem], Row]:
    """Read the problems."""
    problems = load_problems(row, data_root)
    # Only for its errors, before a model runs: for example, a missing chat template.
    prompt_texts(tokenizer, problems[:1], row)
    facts = {"num_items_total": len(problems), "higher_is_better": True}
    return problems[:limit], facts


def work(row: CodeTaskConfig, items: Sequence[Problem], context: Context) -> Work:
    """Count the tokens that the completions may have."""
    return Work(len(items), "tokens", len(items) * row.num_samples * row.max_new_tokens)


def check_server(
    row: CodeTaskConfig,
    items: Sequence[Problem],
    served: "ServedBackend",
    context: Context,
) -> None:
    """Refuse a server whose context is too short."""
    texts = prompt_texts(served.tokenizer, items, row)
    tokens = prompt_tokens(served.config, served.tokenizer, texts, row)
    num_tokens = max(map(len, tokens), default=0) + row.max_new_tokens
    served.server.refuse(served.server.context_rule(row.task, num_tokens, "completion"))


def check_positions(
    row: CodeTaskConfig, items: Sequence[Problem], config: Any, context: Context
) -> None:
    """Refuse prompts that leave no room for their programs."""
    texts = prompt_texts(context.tokenizer, items, row)
    prompt_tokens(config, context.tokenizer, texts, row)


def run(
    row: CodeTaskConfig,
    items: Sequence[Problem],
    facts: Row,
    backend: Backend,
    context: Context,
) -> Answered:
    """Generate `num_samples` programs a problem on all ranks, and score them on the
    first, which has the scorer.
    """
    prompts = prompt_texts(context.tokenizer, items, row)
    answers = backend.answers(questions_of(backend, prompts, row))
    by_problem = [
        answers[first : first + row.num_samples]
        for first in range(0, len(answers), row.num_samples)
    ]
    completions = {
        problem.task_id: [answer.text for answer in several]
        for problem, several in zip(items, by_problem, strict=True)
    }

    def scored() -> list[Sample]:
        assert context.scorer is not None
        programs = {
            problem.task_id: [
                program_in(problem, text, chat=row.chat_template)
                for text in completions[problem.task_id]
            ]
            for problem in items
        }
        score, limit = context.scorer.score_samples, row.timeout_s
        try:
            outcomes = score(items, programs, timeout_s=limit)
        # Try once more with new servers: generating may have taken hours.
        except ScorerError:
            outcomes = score(items, programs, timeout_s=limit)
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
        # A file has one split, whatever a suite calls it.
        "split": "train" if Path(location).is_file() else row.split,
        "revision": None if Path(location).exists() else row.revision,
        "columns": {},
    }
    # Not validated: a test set may have any columns, but a training source's columns
    # make an example.
    with reading(row, data_root, location):
        return load_source(SourceConfig.model_construct(**options))


def prompts(
    row: CodeTaskConfig, items: Sequence[Problem], tokenizer: Any, limit: int | None
) -> list[list[int]]:
    """Tokenize the problems' prompts."""
    return _tokens(tokenizer, prompt_texts(tokenizer, items, row), row)


def _tokens(
    tokenizer: Any, texts: Sequence[str], row: CodeTaskConfig
) -> list[list[int]]:
    # A chat template writes its own special tokens.
    special = not row.chat_template
    return [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]


def prompt_texts(
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    task: CodeTaskConfig,
) -> list[str]:
    """Write the prompts: as one user turn through the chat template, or as plain text
    that ends with a line break.
    """
    template = task.prompt_template
    if not task.chat_template:
        return [problem.plain_text(template) for problem in problems]
    first = []
    if task.system_prompt:
        first = [{"role": "system", "content": task.system_prompt}]
    turns: Any = [
        [*first, {"role": "user", "content": problem.text(template)}]
        for problem in problems
    ]
    require_chat_template(tokenizer, task)
    # Unless told otherwise, hybrids spend their tokens on thoughts.
    return [*map(chat_writer(tokenizer, bool(task.thinking)), turns)]


def prompt_tokens(
    config: Any,
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    task: CodeTaskConfig,
) -> list[list[int]]:
    """Tokenize prompts, and refuse one that leaves no room for its completion."""
    tokens = _tokens(tokenizer, texts, task)
    longest = max(map(len, tokens), default=0)
    positions = num_positions(config)
    if positions is not None and longest + task.max_new_tokens > positions:
        raise UserError(
            f"task {task.task}: a prompt of {longest} tokens and max_new_tokens"
            f" {task.max_new_tokens} do not fit the model's {positions} positions;"
            " lower max_new_tokens"
        )
    return tokens


def questions_of(
    backend: Backend, texts: Sequence[str], task: CodeTaskConfig
) -> list[Question]:
    """Return `num_samples` questions for each prompt, in their order. Their answers
    are what follows the thoughts, up to the first stop string.

    Temperature 0 is greedy. The n-th sample of all is drawn with the n-th seed, so
    neither the batch size nor the number of ranks changes it.
    """
    decoding = Decoding(
        Sampling(task.temperature, task.top_p) if task.temperature else None
    )
    thoughts, asked = backend.thoughts, list[Question]()
    for prompt in prompt_tokens(backend.config, backend.tokenizer, texts, task):
        reader = Reader(
            thoughts,
            str(thoughts.tokenizer.decode(prompt[-END_OF_PROMPT:])),
            task.stop,
            task.max_new_tokens,
            backend.ends,
            task.chat_template,
            bool(task.thinking),
            clean_up=False,
        )
        for _ in range(task.num_samples):
            seed = SAMPLING_SEED + len(asked)
            asked.append(Question(prompt, reader, seed, decoding))
    return asked
