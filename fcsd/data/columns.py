"""What the columns of a data set mean: said by a recipe, or seen from their names.

A column that would set the prompt, the answer or the loss is read, or refused by name:
a training on less than the data say looks like any other. All other columns (an id, a
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

# The first of these whose columns are all there is what a data set holds: meaning ->
# name.
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

# What is read beside each, under these names or under those that are said: TRL's
# columns, and LLaMA-Factory's.
_BESIDE: dict[str, tuple[str, ...]] = {
    "input_ids": (
        "labels",
        "attention_mask",
        "completion_mask",
        "assistant_masks",
        "loss_mask",
    ),
    "messages": ("tools", "system", "chat_template_kwargs"),
    "response": ("input", "tools", "system", "history", "chat_template_kwargs"),
    "completion": ("tools", "system", "chat_template_kwargs"),
    "text": (),
}

_CHATS = ("messages", "response", "completion")
_NOT_TEXT = "fcsd distils text only"
_A_PREFERENCE = (
    "fcsd learns every answer and prefers none; keep the rows with answers to be"
    " learned"
)
_A_WEIGHT = (
    "all tokens with loss count alike; a message may have `weight: 0`, a source of a"
    " recipe a `weight`"
)
_A_MASK = "it masks tokens, and is read beside 'input_ids'"
_THOUGHTS = "thoughts are a key 'reasoning_content' of the assistant's message"
_PACKED = (
    "the rows are packed already; give one example a row, or 'position_ids' and"
    " 'labels' in Python"
)

# Refused by name beside these, unless `columns` names them: names -> beside which, and
# why.
_REFUSED: dict[tuple[str, ...], tuple[Collection[str], str]] = {
    ("image", "images", "video", "videos", "audio", "audios"): (_CHATS, _NOT_TEXT),
    ("pixel_values", "pixel_values_videos", "input_features"): ((*_CHATS, "input_ids"), _NOT_TEXT),
    ("rejected", "rejected_response", "rejected_messages", "kto_tag"): (_CHATS, _A_PREFERENCE),
    # TRL's; beside messages it says anything
    ("label",): (("completion",), _A_PREFERENCE),
    ("weight", "weights", "sample_weight", "loss_weight", "loss_scale", "advantage", "advantages"): (
        _BESIDE, _A_WEIGHT,
    ),
    ("completion_mask", "assistant_masks", "loss_mask"): ((*_CHATS, "text"), _A_MASK),
    ("labels",): (_CHATS, _A_MASK),
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
    """Raise ValueError where columns of these meanings make no example."""
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
        " 'tools', 'system' and 'chat_template_kwargs' beside messages and prompts"
        f" where there are any, got {', '.join(sorted(columns)) or 'nothing'}"
    )


def column_meanings(
    path: str,
    names: Sequence[str],
    columns: Mapping[Any, str] | None,
    form: str = "{{path: {}, columns: {}}}",
) -> dict[Any, str]:
    """Return what each column that is read means: meaning -> its name.

    What `_BESIDE` has is read where a column has its name, said or not.

    columns: what was said of them; None: seen from the names. form: how a caller writes
    path and columns, for the advice of an error, which is a UserError: one is not
    there, the names say nothing, or one is refused.
    """
    known = next((kind for kind in _KNOWN if set(kind.values()) <= set(names)), None)
    missing = [column for column in (columns or {}).values() if column not in names]
    if missing or (columns is None and known is None):
        kinds = (
            "'messages', 'text', 'prompt' with 'response', 'prompt' with 'completion',"
            " 'instruction' with 'output', or 'input_ids'"
        )
        example = known or ({"text": "content"} if columns is None else None)
        raise UserError(
            f"data set {path}: no column {', '.join(map(repr, missing)) or kinds}; it"
            f" has {', '.join(map(repr, names))}; name the right ones under `columns`"
            + (f", for example {form.format(path, example)}" if example else "")
        )
    said = dict(columns if columns is not None else known or {})
    kind = next(
        (
            key
            for key in ("input_ids", "messages", "completion", "response", "text")
            if key in said
        ),
        None,
    )
    if kind is None:  # a test set, whose columns have no meanings
        return said
    _refuse(path, kind, [name for name in names if name not in said.values()], said)
    free = [
        name for name in _BESIDE[kind] if name in names and name not in said.values()
    ]
    return {name: name for name in free} | said


def _refuse(
    path: str, kind: str, names: Sequence[str], said: Mapping[Any, str]
) -> None:
    """Refuse columns that would set the prompt, the answer or the loss, and are not read."""
    for refused, (kinds, reason) in _REFUSED.items():
        for name in names:
            if (
                name not in refused
                or kind not in kinds
                or (name == "rejected" and "chosen" in said.values())
            ):
                continue
            raise UserError(
                f"data set {path}: a column {name!r} beside"
                f" {', '.join(map(repr, said.values()))} is not read:"
                f" {reason.format(name=name)}; remove the column to train without it"
            )
