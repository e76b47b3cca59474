"""Build the prompts of code tasks, end completions, and extract programs from them."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.data.thoughts import END_OF_PROMPT, Thoughts
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.sanitise import defines, longest_block, sanitised
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.suites import chat_text, require_chat_template
from fcsd.model.positions import num_positions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

SAMPLING_SEED = 1234
# A config or generation_config.json may ask for MTP layers: they draft for one sequence
# alone, and are not loaded.
TOKEN_BY_TOKEN = {"use_mtp": False}
OVERFLOW = (
    "the model's logits are NaN or infinite: it overflows in its precision; evaluate it"
    " in bfloat16 or float32"
)
_FENCE = re.compile(
    r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)


def program_in(problem: Problem, text: str, *, chat: bool = False) -> str:
    """Take the program out of a completion, by the rules of the benchmark's grader
    (`Problem.block`).

    chat: the completion is an answer to a question. Otherwise it continues the head of
    the function, as base models do; if that gives no complete function, it is read as
    an answer, whose program follows the head.
    """
    if problem.block == "first":
        return problem.prefix + str((_FENCE.findall(text) or [text])[0])
    # As EvalPlus does (evalplus/provider/hf.py): the heads of functions are indented
    # with spaces, which Python does not let tabs continue.
    text = text.replace("\t", "    ")
    if problem.entry_point is None:
        return problem.prefix + longest_block(text, least=1)
    # EvalPlus's sanitiser, which also drops calls and tests that follow the function.
    answer = sanitised(text, problem.entry_point)
    if chat or not problem.prefix:
        return answer
    program = sanitised(problem.prefix + text, problem.entry_point)
    # A base model continues the head of the function. Where that gives no complete
    # function but the text alone does, the model has written the whole program.
    if defines(program, problem.entry_point) or not defines(
        answer, problem.entry_point
    ):
        return program
    return f"{problem.prefix}{answer}\n"


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Find where the first of the stop strings begins in `text`; its length when there
    is none.
    """
    return min(
        (position for word in stop if (position := text.find(word)) >= 0),
        default=len(text),
    )


def prompts(
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    task: CodeTaskConfig,
) -> list[str]:
    """Write the prompts: as one user turn through the chat template, or as plain text
    that ends with a line break.
    """
    template = task.prompt_template
    if not task.chat_template:
        return [problem.text(template).strip() + "\n" for problem in problems]
    require_chat_template(tokenizer, task)
    if task.system_prompt:
        first = [{"role": "system", "content": task.system_prompt}]
    else:
        first = []
    turns: Any = [
        [*first, {"role": "user", "content": problem.text(template)}]
        for problem in problems
    ]
    # Unless told otherwise, hybrids spend their tokens on thoughts.
    return [chat_text(tokenizer, bool(task.thinking), turn) for turn in turns]


def prompt_tokens(
    config: Any,
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    task: CodeTaskConfig,
) -> list[list[int]]:
    """Tokenize the prompts, and refuse one that leaves no room for its completion."""
    texts = prompts(tokenizer, problems, task)
    # A chat template writes its own special tokens.
    tokens = [
        tokenizer(text, add_special_tokens=not task.chat_template)["input_ids"]
        for text in texts
    ]
    longest = max(map(len, tokens), default=0)
    positions = num_positions(config)
    if positions is not None and longest + task.max_new_tokens > positions:
        raise UserError(
            f"task {task.task}: a prompt of {longest} tokens and max_new_tokens"
            f" {task.max_new_tokens} do not fit the model's {positions} positions;"
            " lower max_new_tokens"
        )
    return tokens


class Reader:
    """Reads the completions of a code task: the text after the thoughts, up to the
    first stop string.
    """

    def __init__(self, thoughts: Thoughts, task: CodeTaskConfig, prompt: Sequence[int]):
        self.tokenizer, self.task, self.thoughts = thoughts.tokenizer, task, thoughts
        self.prompt = str(self.tokenizer.decode(prompt[-END_OF_PROMPT:]))
        self.thinks = task.chat_template and self.thoughts.are_in(
            self.prompt, bool(task.thinking)
        )

    @property
    def stop(self) -> list[str]:
        """The strings at which generation ends; thoughts hold anything."""
        return [] if self.thinks else list(self.task.stop)

    def ends(self, ends: Sequence[int]) -> list[int]:
        """Return the tokens that end a completion: these of the model, and the special
        tokens among the stop strings, which do not show in the text.
        """
        words = self.thoughts.ends_of_text(self.task.stop)
        return [*ends, *self.tokenizer.convert_tokens_to_ids(words)]

    def tokens(self, tokens: Sequence[int], ends: Sequence[int]) -> tuple[str, bool]:
        """Return the completion that new tokens hold, and whether the token limit ended
        it; ends: the tokens that end a sequence.
        """
        options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
        if self.thinks:
            text = self.thoughts.decode(tokens, **options)
        else:
            text = str(
                self.tokenizer.decode(tokens, skip_special_tokens=True, **options)
            )
        end_ids = {*self.ends(ends), self.tokenizer.pad_token_id}
        return self.text(
            text, len(tokens) >= self.task.max_new_tokens and end_ids.isdisjoint(tokens)
        )

    def text(self, text: str, full: bool) -> tuple[str, bool]:
        """Return the completion in a text, and whether the token limit ended it.

        full: as many tokens were written as are allowed; a stop string may have ended
        the completion before.
        """
        answer = self.thoughts.answer(text, self.prompt) if self.thinks else text
        end = first_stop(answer, self.task.stop)
        return answer[:end], full and end == len(answer)


def end_tokens(generation: Any, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that end a sequence, of the tokenizer and of the model's own
    generation settings.
    """
    model_ends = getattr(generation, "eos_token_id", None)
    if model_ends is None:
        ends = []
    else:
        ends = [model_ends] if isinstance(model_ends, int) else list(model_ends)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    return [int(end) for end in ends]


class RefuseOverflow:
    """Refuses logits that are NaN or infinite, of which the largest is no answer."""

    def __call__(
        self, input_ids: "torch.Tensor", scores: "torch.Tensor"
    ) -> "torch.Tensor":
        """Return the logits of the B sequences, shape (B, V), as they are."""
        # Single tokens may be ruled out by -inf; the largest logit is finite.
        if not bool(scores.amax(-1).isfinite().all()):
            raise UserError(OVERFLOW)
        return scores


class StopAtText:
    """Ends the sequences whose new text holds a stop string. transformers' own
    `stop_strings` looks at the prompt too."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop: Sequence[str],
        prompt_length: int,
    ):
        self.tokenizer = tokenizer
        self.stop = list(stop)
        self.prompt_length = prompt_length
        # A token is at least one byte, so this many tokens reach back beyond any stop
        # string.
        self.look_back = max(len(word.encode()) for word in stop) + 1

    def __call__(
        self, input_ids: "torch.Tensor", scores: Any, **_: Any
    ) -> "torch.Tensor":
        """Tell which of the B sequences have ended."""
        import torch

        tail = input_ids[
            :, max(self.prompt_length, input_ids.shape[1] - self.look_back) :
        ]
        texts = self.tokenizer.batch_decode(
            tail, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        ended = [first_stop(text, self.stop) < len(text) for text in texts]
        return torch.tensor(ended, device=input_ids.device, dtype=torch.bool)
