"""Read the prompts that a model continues: conversations up to their last answer, and
the beginnings of documents.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.config import SourceConfig
from fcsd.data.examples import Completion, Conversation, read_example
from fcsd.data.messages import BadExample
from fcsd.data.sources import columns_of, open_source
from fcsd.data.template import message_form_of
from fcsd.evaluation.config import OwnTextTaskConfig
from fcsd.evaluation.results import text_hash
from fcsd.evaluation.suites import (
    chat_text,
    dataset_location,
    hub_advice,
    require_chat_template,
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as tokens. doc_id: its row in the data set. source: what the
    data set has, before a template or a tokenizer.
    """

    doc_id: int
    source: str
    text: str
    tokens: tuple[int, ...]


def load_prompts(
    row: OwnTextTaskConfig, data_root: Path | None, tokenizer: Any
) -> list[Prompt]:
    """Read the first `num_prompts` prompts of the row's data set.

    A document that is not longer than `prompt_tokens` is left out.

    Raises:
        UserError: no such data set, no prompt in it, conversations without a template,
            or documents with one.
    """
    require_chat_template(tokenizer, row)
    location = dataset_location(row, data_root)
    source = SourceConfig(
        path=location,
        name=row.dataset_name,
        split=row.split,
        revision=None if Path(location).exists() else row.revision,
        columns=row.columns,
    )
    try:
        opened = open_source(source)
    except UserError as error:
        advice = "" if Path(location).exists() else hub_advice(row, data_root)
        raise UserError(f"task {row.task}: {error}{advice}") from error
    found = prompts_in(row, opened.examples, columns_of(opened.settings), tokenizer)
    prompts = list(itertools.islice(found, row.num_prompts))
    if not prompts:
        raise UserError(
            f"task {row.task}: {row.dataset} has no document of more than"
            f" {row.prompt_tokens} tokens; give longer ones, or lower prompt_tokens"
        )
    return prompts


def prompts_in(
    row: OwnTextTaskConfig, examples: Any, columns: Mapping[Any, str], tokenizer: Any
) -> Iterator[Prompt]:
    """Yield the prompts of examples, in order; UserError as `load_prompts`."""
    for number, example in enumerate(examples):
        try:
            read = read_example(example, columns)
        except BadExample as error:
            raise UserError(
                f"task {row.task}: {row.dataset}, row {number + 1}: {error}"
            ) from error
        if isinstance(read, Conversation) or (
            row.chat_template and isinstance(read, Completion)
        ):
            yield _question(row, number, read, tokenizer)
        elif row.chat_template:
            raise UserError(
                f"task {row.task}: {row.dataset} has documents, which a chat template"
                " does not take; set chat_template: false, or give conversations"
            )
        elif isinstance(read, Completion):
            ids = tokenizer(read.prompt)["input_ids"]
            yield Prompt(number, read.prompt, read.prompt, tuple(ids))
        else:
            document = read["input_ids"] if isinstance(read, dict) else None
            ids = document or tokenizer(read)["input_ids"]
            if len(ids) > row.prompt_tokens:
                ids = tuple(int(token) for token in ids[: row.prompt_tokens])
                text = str(tokenizer.decode(ids))
                source = json.dumps(ids) if isinstance(read, dict) else read
                yield Prompt(number, source, text, ids)


def _question(
    row: OwnTextTaskConfig,
    number: int,
    read: Conversation | Completion,
    tokenizer: Any,
) -> Prompt:
    """Write a conversation up to its last answer through the chat template."""
    where = f"task {row.task}: {row.dataset}, row {number + 1}"
    if not row.chat_template:
        raise UserError(
            f"{where}: is a conversation, which needs chat_template: true; set it in"
            " the suite (--apply-chat-template), or give documents"
        )
    if isinstance(read, Completion):
        read = Conversation([{"role": "user", "content": read.prompt}])
    answers = [
        index
        for index, message in enumerate(read.messages)
        if message["role"] == "assistant"
    ]
    end = len(read.messages)
    if answers:
        # Turns of tools follow an answer that calls them: the last answer is cut off
        # with all that follows it.
        end = answers[-1]
    messages = read.messages[:end]
    if not messages:
        raise UserError(f"{where}: has no message before the answer")
    if row.system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": row.system_prompt}, *messages]
    asked = Conversation(messages, tools=read.tools, options=read.options)
    template = str(tokenizer.get_chat_template(tools=asked.tools))
    form = message_form_of(tokenizer, template, asked)
    if isinstance(form, str):
        raise UserError(f"{where}: the tokenizer's chat template {form}")
    options = dict(asked.options)
    if tools := form.tools(asked.tools):
        options["tools"] = tools
    turns = form.applied(messages)
    text = chat_text(tokenizer, bool(row.thinking), turns, **options)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(number, json.dumps(messages, sort_keys=True), text, tuple(ids))


def prompt_hash(prompt: Prompt) -> str:
    """Return the hash of a prompt's tokens."""
    return text_hash(json.dumps(prompt.tokens))
