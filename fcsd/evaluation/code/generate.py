"""Code tasks: prompts, completions from a model in memory, greedy or sampled, and the program in a completion.

Not covered: reading the problems (`fcsd.evaluation.code.problems`); running the programs
(`fcsd.evaluation.code.scorer`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.base.text import progress_bar
from fcsd.evaluation.batch import BatchSize, BatchSizer
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.suites import chat_text, require_chat_template
from fcsd.model.positions import num_positions
from fcsd.model.preserve import preserved
from fcsd.parallel.ranks import ALONE, Ranks, input_device

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLING_SEED = 1234
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def extract_code(text: str, *, last: bool = False) -> str:
    """Extract the program in a completion: the first (or last) fenced block (to the end if it is not closed), else
    all of the text."""
    if fenced := _FENCE.findall(text):
        return str(fenced[-1 if last else 0])
    return text


def answer_of(text: str) -> str:
    """Cut off thoughts, which end at `</think>`; without that, all of it is the answer."""
    return text.rpartition("</think>")[2].lstrip()


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Find where the first of the stop strings begins in `text`; its length when there is none."""
    return min((position for word in stop if (position := text.find(word)) >= 0), default=len(text))


def prompts(
    tokenizer: "PreTrainedTokenizerBase", problems: Sequence[Problem], task: CodeTaskConfig
) -> list[str]:
    """Write the texts that the model is given: as one user turn, or as they are with a line break.

    Raises:
        UserError: a chat template is asked for and the tokenizer has none.
    """
    template = task.prompt_template
    if not task.chat_template:
        return [problem.text(template).strip() + "\n" for problem in problems]
    require_chat_template(tokenizer, task)
    first = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
    turns: Any = [[*first, {"role": "user", "content": problem.text(template)}] for problem in problems]
    # Unless they are asked not to, hybrids spend their tokens on thoughts.
    return [chat_text(tokenizer, bool(task.thinking), turn) for turn in turns]


def generate_completions(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    *,
    task: CodeTaskConfig,
    batch_size: BatchSize | BatchSizer,
    progress: bool = True,
    ranks: Ranks = ALONE,
    begin_batch: Callable[[int], None] | None = None,
) -> dict[str, list[str]]:
    """Generate `task.num_samples` completions of every problem under the settings of a code task's row: task_id ->
    texts up to the first stop string, in the order of the problems.

    Temperature 0 is greedy. Samples are drawn from a generator that is seeded for every batch, so the same problems and
    batch size give the same samples, on any number of ranks. Batches are sorted by prompt length, longest first, and
    padded on the left; a batch ends when all its sequences have. The model's training mode, its `use_cache` and the
    state of all random generators are as before, and the tokenizer is not changed.

    Args:
        batch_size: "auto" may shrink where memory runs out; as may a `BatchSizer`, which several tasks share.
        ranks: those that share the work (`fcsd.parallel.ranks`): all of them call this and get all completions.
        begin_batch: called with the number of a batch before this rank generates it.

    Raises:
        UserError: a prompt and its completion do not fit the model's positions, or the tokenizer has no chat template.
    """
    import torch

    tokens = prompt_tokens(model.config, tokenizer, problems, task)
    order = sorted(range(len(problems)), key=lambda index: -len(tokens[index]))
    rows = [index for index in order for _ in range(task.num_samples)]
    sizer = batch_size if isinstance(batch_size, BatchSizer) else BatchSizer(batch_size, model)
    sizer.begin(len(rows), ranks)
    batches = [range(start, min(start + sizer.size, len(rows))) for start in range(0, len(rows), sizer.size)]

    def made(number: int, batch: range) -> list[str]:
        if begin_batch is not None:
            begin_batch(number)
        sequences = {row: tokens[rows[row]] for row in batch}
        texts = sizer.run(lambda size: _generate_pieces(model, tokenizer, sequences, task, ranks, size))
        bar.update(len(batch))
        return texts

    def idle() -> None:
        short = task.model_copy(update={"max_new_tokens": 1})
        _generate(model, tokenizer, [tokens[rows[-1]]], short, ranks)

    bar = progress_bar(
        total=sum(map(len, ranks.deal(batches))),
        desc=f"generation{f' (the first of {ranks.size} ranks)' if ranks.size > 1 else ''}",
        shown=progress and ranks.first,
    )
    with preserved(model), torch.no_grad(), bar:
        model.eval()
        texts = [text for batch in ranks.each(batches, made, idle) for text in batch]
    completions: dict[str, list[str]] = {problem.task_id: [] for problem in problems}
    for row, text in zip(rows, texts, strict=True):
        completions[problems[row].task_id].append(text)
    return completions


def _generate_pieces(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    sequences: Mapping[int, list[int]],
    task: CodeTaskConfig,
    ranks: Ranks,
    size: int,
) -> list[str]:
    """Generate from the prompts of a batch, by their number among all, `size` at a time, each time with a seed."""
    import torch

    numbers, texts = list(sequences), list[str]()
    for start in range(0, len(numbers), size):
        piece = numbers[start : start + size]
        torch.manual_seed(SAMPLING_SEED + piece[0])
        texts += _generate(model, tokenizer, [sequences[number] for number in piece], task, ranks)
    return texts


def prompt_tokens(
    config: Any,
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    task: CodeTaskConfig,
) -> list[list[int]]:
    """Tokenize the prompts, and refuse one that leaves no room for its completion."""
    texts = prompts(tokenizer, problems, task)
    # A chat template writes its own special tokens.
    tokens = [tokenizer(text, add_special_tokens=not task.chat_template)["input_ids"] for text in texts]
    longest = max(map(len, tokens), default=0)
    positions = num_positions(config)
    if positions is not None and longest + task.max_new_tokens > positions:
        raise UserError(
            f"task {task.task}: a prompt of {longest} tokens and max_new_tokens {task.max_new_tokens} do not fit"
            f" the model's {positions} positions; lower max_new_tokens"
        )
    return tokens


def _generate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[list[int]],
    task: CodeTaskConfig,
    ranks: Ranks,
) -> list[str]:
    """Generate the completions of one batch of token rows."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import GenerationConfig, StoppingCriteriaList

    stop = [] if task.thinking else task.stop  # thoughts hold anything
    ends = end_tokens(model.generation_config, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends[0] if ends else 0)
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True, pad, "left")
    mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], True, 0, "left")
    width = ids.shape[1]
    sampling: dict[str, Any] = {"do_sample": False}
    if task.temperature:
        # top_k: transformers' own default would cut the distribution to 50 tokens.
        sampling = {"do_sample": True, "temperature": task.temperature, "top_p": task.top_p, "top_k": 0}
    # A fresh configuration: the model's own may sample, or penalise repetition.
    config = GenerationConfig(
        **sampling,
        num_beams=1,
        max_new_tokens=task.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        bos_token_id=tokenizer.bos_token_id,
        use_cache=True,
    )
    criteria = StoppingCriteriaList([StopAtText(tokenizer, stop, width)] if stop else [])
    device = input_device(model)
    made = model.generate(  # type: ignore[operator]
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        generation_config=config,
        stopping_criteria=criteria,
        synced_gpus=True if ranks.lockstep else None,
    )
    texts = tokenizer.batch_decode(
        made[:, width:], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [completion_of(text, task) for text in texts]


def completion_of(text: str, task: CodeTaskConfig) -> str:
    """Return what counts of a generated text: what follows the thoughts, up to the first stop string."""
    answer = answer_of(text) if task.thinking else text
    return answer[: first_stop(answer, task.stop)]


def end_tokens(generation: Any, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that end a sequence, of the tokenizer and of the model's own generation settings."""
    own = getattr(generation, "eos_token_id", None)
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
        """Tell which of the B sequences have ended."""
        import torch

        tail = input_ids[:, max(self.prompt_length, input_ids.shape[1] - self.look_back) :]
        texts = self.tokenizer.batch_decode(
            tail, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        ended = [first_stop(text, self.stop) < len(text) for text in texts]
        return torch.tensor(ended, device=input_ids.device, dtype=torch.bool)
