"""Turn texts into token ids with one beginning and one end, also where a text holds a
whole chat already.
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
    """Tokenize texts, with what the tokenizer begins texts with and its end-of-sequence
    token, unless a text has them.

    A text has an end where a special token is its last, or `end_of_turn`, white space
    aside.
    """
    before, after = _put_around(tokenizer)
    ends = _ends(tokenizer, end_of_turn)
    options = {"return_attention_mask": False, "return_token_type_ids": False}
    encoded = tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
    tokenized = []
    for text, ids in zip(texts, encoded, strict=True):
        begun = [] if ids[: len(before)] == before else before
        ended = [] if text.rstrip().endswith(ends) else after
        tokenized.append([*begun, *ids, *ended])
    return tokenized


def _put_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that go before a text, and those after it: the end-of-sequence
    token is the last.
    """
    bare, whole = (
        list(tokenizer("a", add_special_tokens=special)["input_ids"])
        for special in (False, True)
    )
    begin = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    before, after, end = (
        whole[:begin],
        whole[begin + len(bare) :],
        tokenizer.eos_token_id,
    )
    return before, after if after[-1:] == [end] else [*after, end]


def _ends(tokenizer: Any, end_of_turn: str) -> tuple[str, ...]:
    """Return what may end a text: of a turn, or of all."""
    special = {
        str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    others = {tokenizer.special_tokens_map.get(name) for name in _NO_ENDS}
    ends = (special - others) | {tokenizer.eos_token, end_of_turn}
    return tuple(token for token in ends if token.strip())
