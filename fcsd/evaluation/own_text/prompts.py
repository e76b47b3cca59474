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
from fcsd.data.chat import check_text
from fcsd.data.config import SourceConfig
from fcsd.data.examples import Completion, Conversation, read_example
from fcsd.data.messages import BadExample
from fcsd.data.rendering import chat_writer, require_chat_template
from fcsd.data.sources import columns_of, open_source
from fcsd.data.template import message_form_of
from fcsd.data.tokens import token_ids
from fcsd.data.write_rows import BadRows
from fcsd.evaluation.config import OwnTextTaskConfig
from fcsd.evaluation.datasets import dataset_location, reading
from fcsd.evaluation.results import text_hash

# How a suite writes columns, in advice.
_COLUMNS = "columns: {1}, or of prompts without answers {{prompt: NAME}}"


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

    A document that is not longer than `prompt_tokens` is left out. A prompt that occurs
    again is another sample.

    Raises:
        UserError: no such data set, no prompt in it, conversations without a template,
            or documents with one.
    """
    require_chat_template(tokenizer, row)
    location = dataset_location(row, data_root)
    columns = row.columns
    if row.has_prompts_alone and columns is not None:
        columns = {"text": columns["prompt"]}
    source = SourceConfig(
        path=location,
        name=row.dataset_name,
        split=row.split,
        revision=None if Path(location).exists() else row.revision,
        columns=columns,
    )
    with reading(row, data_root, location):
        opened = open_source(source, _COLUMNS)
    found = prompts_in(
        row,
        opened.examples,
        columns_of(opened.settings),
        tokenizer,
        BadRows(setting=None),
    )
    prompts = list(itertools.islice(found, row.num_prompts))
    if not prompts:
        raise UserError(
            f"task {row.task}: {row.dataset} has no document of more than"
            f" {row.prompt_tokens} tokens; give longer ones, or lower prompt_tokens"
        )
    return prompts


def prompts_in(
    row: OwnTextTaskConfig,
    examples: Any,
    columns: Mapping[Any, str],
    tokenizer: Any,
    bad_rows: BadRows,
) -> Iterator[Prompt]:
    """Yield the prompts of examples, in order; UserError as `load_prompts`, or where
    `bad_rows` does not allow an example that makes no prompt.
    """
    for number, example in enumerate(examples):
        bad: list[tuple[str, str]] = []
        try:
            read = read_example(example, columns)
            prompt = _prompt(row, number, read, tokenizer)
        except BadExample as error:
            bad, prompt = [(f"{_where(row)}, row {number + 1}", str(error))], None
        bad_rows.add(bad, 1)
        if prompt is not None:
            yield prompt


def _where(row: OwnTextTaskConfig) -> str:
    return f"task {row.task}: {row.dataset}"


def _prompt(
    row: OwnTextTaskConfig, number: int, read: Any, tokenizer: Any
) -> Prompt | None:
    """Return the prompt of an example; None where it is a document that is too short.

    Raises: BadExample where it makes none.
    """
    if row.has_prompts_alone and isinstance(read, str):
        read = Completion(read, "")
    if isinstance(read, Conversation) or (
        row.chat_template and isinstance(read, Completion)
    ):
        return _question(row, number, read, tokenizer)
    if row.chat_template:
        raise UserError(
            f"{_where(row)} has documents, which a chat template does not take; leave"
            " chat_template (--apply-chat-template) out, or give conversations"
        )
    if isinstance(read, Completion):
        ids = tokenizer(check_text(read.prompt))["input_ids"]
        # Some tokenizers end each text, but the model shall continue this one.
        end = tokenizer.eos_token_id
        if ids and ids[-1] == end and not read.prompt.endswith(tokenizer.eos_token):
            ids = ids[:-1]
        if not ids:
            raise BadExample("the prompt is empty")
        return Prompt(number, read.prompt, read.prompt, tuple(ids))
    if isinstance(read, dict):
        ids = token_ids(read["input_ids"], None).tolist()
    else:
        ids = tokenizer(check_text(read))["input_ids"]
    if len(ids) <= row.prompt_tokens:
        return None
    ids = tuple(ids[: row.prompt_tokens])
    source = json.dumps(ids) if isinstance(read, dict) else read
    return Prompt(number, source, str(tokenizer.decode(ids)), ids)


def _question(
    row: OwnTextTaskConfig,
    number: int,
    read: Conversation | Completion,
    tokenizer: Any,
) -> Prompt:
    """Write a conversation up to its last answer through the chat template, or all of
    it where a question ends it.
    """
    if not row.chat_template:
        raise UserError(
            f"{_where(row)}, row {number + 1}: is a conversation, which needs"
            " chat_template: true; set it in the suite (--apply-chat-template), or give"
            " documents"
        )
    if isinstance(read, Completion):
        read = Conversation([{"role": "user", "content": read.prompt}])
    end = len(read.messages)
    answers = [
        index
        for index, message in enumerate(read.messages)
        if message["role"] == "assistant"
    ]
    if answers and read.messages[-1]["role"] != "user":
        # Turns of tools follow an answer that calls them: the last answer is cut off
        # with all that follows it.
        end = answers[-1]
    messages = read.messages[:end]
    if not messages:
        raise BadExample("has no message before the answer")
    if row.system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": row.system_prompt}, *messages]
    asked = Conversation(messages, tools=read.tools, options=read.options)
    template = str(tokenizer.get_chat_template(tools=asked.tools))
    form = message_form_of(tokenizer, template, asked)
    if isinstance(form, str):
        raise BadExample(f"the tokenizer's chat template {form}")
    options = dict(asked.options)
    if tools := form.tools(asked.tools):
        options["tools"] = tools
    turns = form.applied(messages)
    try:
        text = chat_writer(tokenizer, bool(row.thinking))(turns, **options)
    except UserError as error:
        raise BadExample(str(error)) from error
    ids = tokenizer(check_text(text), add_special_tokens=False)["input_ids"]
    return Prompt(number, json.dumps(messages, sort_keys=True), text, tuple(ids))


def prompt_hash(prompt: Prompt) -> str:
    """Return the hash of a prompt's tokens."""
    return text_hash(json.dumps(prompt.tokens))
