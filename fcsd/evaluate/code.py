"""Code tasks: problems in the MBPP+ schema, greedy completions from a model in memory, and the program in a
completion.

Not covered: several samples a problem; running the programs (`fcsd.evaluate.scorer`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fcsd.errors import UserError
from fcsd.evaluate.state import preserved, quiet
from fcsd.evaluate.suites import SuiteTask, dataset_location, first_line, require_chat_template
from fcsd.local_data import fresh_cache

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_COLUMNS = ("task_id", "prompt", "code", "test_imports", "test_list", "test")


@dataclass(frozen=True)
class Problem:
    """One row of a data set in the MBPP+ schema.

    Attributes:
        task_id: the row's id, as text.
        prompt: the instruction.
        canonical: a correct program, standing alone.
        tests: programs that raise unless the solution is right, run in this order in one namespace.
        visible_tests: assertions that a prompt may show (`test_list`).
        prefix: what stands before every solution (empty for MBPP+).
    """

    task_id: str
    prompt: str
    canonical: str
    tests: tuple[str, ...]
    visible_tests: tuple[str, ...] = ()
    prefix: str = field(default="", repr=False)

    def program(self, code: str) -> str:
        """The program to run for the extracted `code`."""
        return self.prefix + code

    def text(self, template: str) -> str:
        """The prompt as the model is shown it; `{prompt}`, `{test}` and `{tests}` are replaced."""
        parts = {
            "{prompt}": self.prompt,
            "{test}": self.visible_tests[0] if self.visible_tests else "",
            "{tests}": "\n".join(self.visible_tests),
        }
        return re.sub(r"\{(?:prompt|tests?)\}", lambda match: parts[match[0]], template)


def load_problems(task: SuiteTask, data_root: Path | None = None) -> list[Problem]:
    """The problems of a code task, in the order of the data set.

    Raises:
        UserError: nothing there, unknown split, a missing or wrongly typed column, no rows, or an id given
        twice.
    """
    location = dataset_location(task, data_root)
    return read_problems(location, task.split or "test", task.dataset_name, task.revision)


def read_problems(
    path: str | Path, split: str = "test", name: str | None = None, revision: str | None = None
) -> list[Problem]:
    """Problems from a folder in hub layout (parquet or jsonl), a .jsonl or .parquet file, or a hub id.

    Columns: `task_id`, `prompt`, `code`, `test_imports` (list of text), `test_list` (list of text), `test`.
    """
    rows = _load_rows(str(path), split, name, revision)
    where = f"{path} ({split})"
    missing = [column for column in _COLUMNS if column not in rows.column_names]
    if not len(rows):
        raise UserError(f"{where}: the data set is empty")
    if missing:
        raise UserError(
            f"{where}: no column {', '.join(missing)}; code tasks need the MBPP+ schema:"
            f" {', '.join(_COLUMNS)} (found {', '.join(rows.column_names) or 'none'})"
        )
    problems = [_problem(row, f"{where}, row {index}") for index, row in enumerate(rows)]
    seen: set[str] = set()
    for problem in problems:
        if problem.task_id in seen:
            raise UserError(f"{where}: task_id {problem.task_id} is given twice")
        seen.add(problem.task_id)
    return problems


def _load_rows(path: str, split: str, name: str | None, revision: str | None) -> Any:
    import datasets

    local = Path(path)
    try:
        if local.suffix in (".jsonl", ".json", ".parquet"):
            if not local.is_file():
                raise UserError(f"{path}: no such file")
            if not local.stat().st_size:
                raise UserError(f"{path}: the file is empty")
            builder = "parquet" if local.suffix == ".parquet" else "json"
            with quiet(), fresh_cache(local):
                return datasets.load_dataset(builder, data_files={split: path}, split=split)
        if local.is_absolute() and not local.is_dir():
            raise UserError(f"{path}: no such folder")
        with quiet(), fresh_cache(local):
            return datasets.load_dataset(path, name, split=split, revision=revision)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{path}: cannot read split {split!r} of this data set: {first_line(error)}"
        ) from error


def _problem(row: dict[str, Any], where: str) -> Problem:
    for column in ("prompt", "code", "test"):
        if not isinstance(row[column], str):
            raise UserError(f"{where}: {column} must be text, got {type(row[column]).__name__}")
    for column in ("test_imports", "test_list"):
        if not isinstance(row[column], list) or not all(isinstance(item, str) for item in row[column]):
            raise UserError(f"{where}: {column} must be a list of texts")
    if not isinstance(row["task_id"], int | str):
        raise UserError(f"{where}: task_id must be a number or text, got {type(row['task_id']).__name__}")
    if not row["test"].strip():
        raise UserError(f"{where}: test is empty, so that every program would pass")
    imports = "\n".join(row["test_imports"])
    return Problem(
        task_id=str(row["task_id"]),
        prompt=row["prompt"],
        canonical=row["code"],
        tests=tuple(part for part in (imports, row["test"]) if part),
        visible_tests=tuple(row["test_list"]),
    )


_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def extract_code(text: str, stop: Sequence[str] = ()) -> str:
    """The program in a completion: the first fenced block (to the end if it is not closed), else the text up
    to the first of the `stop` strings."""
    fenced = _FENCE.search(text)
    if fenced:
        return fenced[1]
    return text[: first_stop(text, stop)]


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Where the first of the stop strings begins in `text`; its length when there is none."""
    return min((position for word in stop if (position := text.find(word)) >= 0), default=len(text))


def prompts(tokenizer: "PreTrainedTokenizerBase", problems: Sequence[Problem], task: SuiteTask) -> list[str]:
    """The texts that the model is given: as one user turn, or as they are with a line break.

    Raises:
        UserError: a chat template is asked for and the tokenizer has none.
    """
    template = task.prompt_template or "{prompt}"
    if not task.chat_template:
        return [problem.text(template).strip() + "\n" for problem in problems]
    require_chat_template(tokenizer, task)
    made = []
    for problem in problems:
        turn = [{"role": "user", "content": problem.text(template)}]
        # enable_thinking: hybrids would spend their tokens on thoughts; templates without the switch ignore
        # it
        text = tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        made.append(str(text))
    return made


def generate_completions(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    *,
    task: SuiteTask,
    batch_size: int,
    progress: bool = True,
) -> dict[str, str]:
    """Greedy completions under the settings of a code task's row, task_id -> text up to the first stop
    string, in the order of the problems.

    Batches are sorted by prompt length, longest first, and padded on the left; a batch ends when all its
    sequences have. The model's training mode, its `use_cache` and the state of all random generators are as
    before, and the tokenizer is not changed.

    Raises:
        UserError: a prompt and its completion do not fit the model's positions, or the tokenizer has no chat
        template.
    """
    import torch

    assert task.max_new_tokens is not None and task.stop is not None
    max_new_tokens, stop = task.max_new_tokens, task.stop
    texts = prompts(tokenizer, problems, task)
    # A chat template writes its own special tokens.
    tokens = [tokenizer(text, add_special_tokens=not task.chat_template)["input_ids"] for text in texts]
    longest = max(map(len, tokens), default=0)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + max_new_tokens > positions:
        raise UserError(
            f"task {task.task}: a prompt of {longest} tokens and max_new_tokens {max_new_tokens} do not fit"
            f" the model's {positions} positions; lower max_new_tokens"
        )
    order = sorted(range(len(problems)), key=lambda index: -len(tokens[index]))
    completions: dict[str, str] = {}
    with (
        preserved(model),
        torch.no_grad(),
        tqdm(total=len(problems), desc="generation", disable=not progress) as bar,
    ):
        model.eval()
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for index, text in zip(
                batch,
                _generate(model, tokenizer, [tokens[index] for index in batch], max_new_tokens, stop),
                strict=True,
            ):
                completions[problems[index].task_id] = text
            bar.update(len(batch))
    return {problem.task_id: completions[problem.task_id] for problem in problems}


def _generate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[list[int]],
    max_new_tokens: int,
    stop: Sequence[str],
) -> list[str]:
    """Completions of one batch of token rows."""
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    ends = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends[0] if ends else 0)
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, row in enumerate(rows):
        ids[line, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        mask[line, width - len(row) :] = 1
    # A fresh configuration: the model's own may sample, or penalise repetition.
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        bos_token_id=tokenizer.bos_token_id,
        use_cache=True,
    )
    criteria = StoppingCriteriaList([StopAtText(tokenizer, stop, width)] if stop else [])
    device = next(model.get_input_embeddings().parameters()).device
    made = model.generate(  # type: ignore[operator]
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        generation_config=config,
        stopping_criteria=criteria,
    )
    texts = tokenizer.batch_decode(
        made[:, width:], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [text[: first_stop(text, stop)] for text in texts]


def _end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that end a sequence, of the tokenizer and of the model's own generation settings."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = [] if own is None else [own] if isinstance(own, int) else list(own)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    return [int(end) for end in ends]


class StopAtText:
    """Ends the sequences whose new text holds a stop string. transformers' own `stop_strings` looks at the
    prompt too."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str], prompt_length: int):
        self.tokenizer, self.stop, self.prompt_length = tokenizer, list(stop), prompt_length
        # A token is at least one byte, so this many tokens reach back beyond any stop string.
        self.look_back = max(len(word.encode()) for word in stop) + 1

    def __call__(self, input_ids: "torch.Tensor", scores: Any, **_: Any) -> "torch.Tensor":
        """Which of the sequences B have ended."""
        import torch

        tail = input_ids[:, max(self.prompt_length, input_ids.shape[1] - self.look_back) :]
        texts = self.tokenizer.batch_decode(
            tail, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        ended = [first_stop(text, self.stop) < len(text) for text in texts]
        return torch.tensor(ended, device=input_ids.device, dtype=torch.bool)
