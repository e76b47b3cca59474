"""Turn texts into token ids with a single beginning and a single end, even if a text is
a whole chat that has them already.
"""

from __future__ import annotations

from typing import Any

_NO_ENDS = (
    "bos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def tokenized_texts(
    texts: list[str], tokenizer: Any, end_of_turn: str = ""
) -> list[list[int]]:
    """Tokenize texts; add the tokens that the tokenizer begins texts with, and its
    end-of-sequence token, unless a text has them.

    A text has an end if its last token, white space aside, is a special token or
    `end_of_turn`.
    """
    prefix, suffix = _put_around(tokenizer)
    ends = _ends(tokenizer, end_of_turn)
    options = {"return_attention_mask": False, "return_token_type_ids": False}
    encoded = tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
    tokenized = []
    for text, ids in zip(texts, encoded, strict=True):
        begun = [] if ids[: len(prefix)] == prefix else prefix
        ended = [] if text.rstrip().endswith(ends) else suffix
        tokenized.append([*begun, *ids, *ended])
    return tokenized


def _put_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that go before a text, and those after it, the last of which is
    the end-of-sequence token.
    """
    # The tokenizer shows them around a letter.
    bare, with_special = (
        list(tokenizer("a", add_special_tokens=special)["input_ids"])
        for special in (False, True)
    )
    begin = next(
        (
            n
            for n in range(len(with_special))
            if with_special[n : n + len(bare)] == bare
        ),
        0,
    )
    prefix = with_special[:begin]
    suffix = with_special[begin + len(bare) :]
    end = tokenizer.eos_token_id
    return prefix, suffix if suffix[-1:] == [end] else [*suffix, end]


def _ends(tokenizer: Any, end_of_turn: str) -> tuple[str, ...]:
    """Return the tokens that may end a text: those of a turn, or of the whole text."""
    special = {
        str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    no_ends = {tokenizer.special_tokens_map.get(name) for name in _NO_ENDS}
    ends = (special - no_ends) | {tokenizer.eos_token, end_of_turn}
    return tuple(token for token in ends if token.strip())
