"""Find the meaning of a data set's columns: a recipe names it, or the names show it.

A column that would set the prompt, the answer or the loss is either read or refused by
name, because nobody would notice if a training ignored it. All other columns (an id, a
source, a score) are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fcsd.base.errors import UserError

Column = Literal[
    "messages", "prompt", "input", "response", "completion", "text",
    "tools", "system", "history", "chat_template_kwargs",
]  # fmt: skip

# Meaning -> name of column; a data set has the first of these forms whose columns it
# has completely.
_KNOWN: tuple[dict[Any, str], ...] = (
    {"input_ids": "input_ids"},
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "prompt", "response": "response"},
    {"prompt": "prompt", "input": "input", "response": "completion"},
    {"prompt": "prompt", "completion": "completion"},  # TRL
    {"prompt": "instruction", "response": "output"},  # Alpaca
    {"text": "text"},
)

# Columns that are read along with those, under these names or those that a recipe
# gives: TRL's and LLaMA-Factory's.
_BESIDE: dict[str, tuple[str, ...]] = {
    "input_ids": (
        "labels",
        "attention_mask",
        "completion_mask",
        "assistant_masks",
        "loss_mask",
        "text",  # of the tokens, which is compared with test items
    ),
    "messages": ("tools", "system", "chat_template_kwargs"),
    "response": ("input", "tools", "system", "history", "chat_template_kwargs"),
    "completion": ("tools", "system", "chat_template_kwargs"),
    "text": (),
}

PATH_AND_COLUMNS = "{{path: {}, columns: {}}}"
"""How a recipe writes a source."""

_CHATS = ("messages", "response", "completion")
_NOT_TEXT = "fcsd distils text only"
_A_PREFERENCE = (
    "fcsd learns every answer and has no preferences; keep the rows with answers to"
    " learn"
)
_A_WEIGHT = (
    "all tokens with loss count alike; a message may have `weight: 0`, a source of a"
    " recipe a `weight`"
)
_A_MASK = "it masks tokens, and is only read together with 'input_ids'"
_THOUGHTS = "put thoughts into the key 'reasoning_content' of the assistant's message"
_OTHER_MASK = (
    "masks of the loss are 'loss_mask', 'completion_mask' and 'assistant_masks'; rename"
    " it"
)
_LABELS = "the labels of packed rows alone say where loss is"
_PACKED = (
    "the rows are already packed; give one example per row, or 'position_ids' and"
    " 'labels' in Python"
)

# Columns that are refused unless `columns` names them: names -> the forms in which they
# are, and the reason.
_REFUSED: dict[tuple[str, ...], tuple[Collection[str], str]] = {
    ("image", "images", "video", "videos", "audio", "audios"): (_CHATS, _NOT_TEXT),
    ("pixel_values", "pixel_values_videos", "input_features"): ((*_CHATS, "input_ids"), _NOT_TEXT),
    ("rejected", "rejected_response", "rejected_messages", "kto_tag"): (_CHATS, _A_PREFERENCE),
    # TRL's; beside messages it may mean anything
    ("label",): (("completion",), _A_PREFERENCE),
    ("weight", "weights", "sample_weight", "loss_weight", "loss_scale", "advantage", "advantages"): (
        (*_BESIDE, "packed"), _A_WEIGHT,
    ),
    ("completion_mask", "assistant_masks", "loss_mask"): ((*_CHATS, "text"), _A_MASK),
    ("labels",): (_CHATS, _A_MASK),
    # Beside tokens these are read.
    ("loss_mask", "assistant_masks", "completion_mask"): (("packed",), _LABELS),
    # verl's, OpenRLHF's, and singular or plural of those that are read
    ("assistant_mask", "completion_masks", "loss_masks", "response_mask", "action_mask", "prompt_mask",
     "label_mask", "labels_mask", "mask"): (("input_ids", "packed"), _OTHER_MASK),
    ("reasoning_content", "thinking"): (("response", "completion"), _THOUGHTS),
    ("system_prompt", "system_message"): (_CHATS, "it sets the prompt; say `system: {name}` under `columns`"),
    ("functions",): (_CHATS, "it is an old form of 'tools': a list of {{type: function, function: …}}"),
    ("history",): (("messages", "completion"), "it goes with 'prompt' and 'response'"),
    ("input",): (
        ("completion",), "it goes with 'prompt' and 'response'; say `response: completion` under `columns`",
    ),
    ("position_ids", "seq_lengths"): (("input_ids",), _PACKED),
}  # fmt: skip


def check_meanings(columns: Collection[str]) -> None:
    """Raise ValueError if columns of these meanings do not make an example."""
    for kind in _KNOWN:
        last = [*kind][-1]
        if (
            kind.keys() <= set(columns)
            and last != "input_ids"
            and {*columns} - {*kind} <= {*_BESIDE[last]}
        ):
            return
    raise ValueError(
        "columns must name 'messages', or 'text', or 'prompt' and 'response' (and"
        " optionally 'input' and 'history'), or 'prompt' and 'completion', with"
        " 'tools', 'system' and 'chat_template_kwargs' in addition to messages or"
        f" prompts if needed, got {', '.join(sorted(columns)) or 'nothing'}"
    )


def column_meanings(
    path: str,
    names: Sequence[str],
    columns: Mapping[Any, str] | None,
    form: str = PATH_AND_COLUMNS,
) -> dict[Any, str]:
    """Return the columns to read: meaning -> name of the column.

    The columns in `_BESIDE` are read wherever a data set has them.

    columns: the meanings that a recipe gives; None: they are inferred from the names.
    form: the notation of path and columns in the advice of an error.

    Raises:
        UserError: a column is missing, the names have no known meaning, or a column is
            refused.
    """
    inferred = next((kind for kind in _KNOWN if set(kind.values()) <= set(names)), None)
    missing = [column for column in (columns or {}).values() if column not in names]
    # Suggest a form: the one that the names match, or else plain text.
    if missing or (columns is None and inferred is None):
        kinds = (
            "'messages', 'text', 'prompt' with 'response', 'prompt' with 'completion',"
            " 'instruction' with 'output', or 'input_ids'"
        )
        example = inferred or ({"text": "content"} if columns is None else None)
        raise UserError(
            f"data set {path}: no column {', '.join(map(repr, missing)) or kinds}; it"
            f" has {', '.join(map(repr, names))}; name the right ones under `columns`"
            + (f", for example {form.format(path, example)}" if example else "")
        )
    meanings = dict(columns if columns is not None else inferred or {})
    # The form decides which further columns are read, and which are refused.
    kind = next(
        (
            key
            for key in ("input_ids", "messages", "completion", "response", "text")
            if key in meanings
        ),
        None,
    )
    if kind is None:  # a test set, whose columns have no meanings
        return meanings
    refuse_unread(path, kind, names, [*meanings.values()])
    accompanying = [
        name
        for name in _BESIDE[kind]
        if name in names and name not in meanings.values()
    ]
    return {name: name for name in accompanying} | meanings


def refuse_unread(
    path: str, kind: str, names: Sequence[str], read: Sequence[str]
) -> None:
    """Raise UserError for a column that would set the prompt, the answer or the loss
    but is not among those that are read.

    kind: the form of the data set, or "packed" for packed rows.
    """
    for refused, (kinds, reason) in _REFUSED.items():
        for name in names:
            if (
                name in read
                or name not in refused
                or kind not in kinds
                # A recipe that reads `chosen` has decided to ignore its counterpart.
                or (name == "rejected" and "chosen" in read)
            ):
                continue
            raise UserError(
                f"data set {path}: a column {name!r} beside"
                f" {', '.join(map(repr, read))} is not read:"
                f" {reason.format(name=name)}; remove the column to train without it"
            )
