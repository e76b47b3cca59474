"""What is published names no place of the publisher's machine (of an absolute path the
last name is left) and holds no secret, by the rules of detect-secrets.

Not covered: relative paths; secrets without a form of their own (passwords, hex
digits); pictures and weights.
"""

import json
import re
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from fcsd.base.errors import UserError

PLACE = re.compile(r"(?<![\w/.:~\\-])~?(?:/[\w.@+-]+){2,}")
"""An absolute path of two names or more in a text; `/` alone, `and/or` and what stands
in an address are none.
"""


_ANYWHERE = re.compile(
    r"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{36,}\b|\bAKIA[A-Z0-9]{16}\b"
)
"""Forms that no vocabulary has by chance; those of Hugging Face and the third are not
among detect-secrets' (1.5).
"""
_VOCABULARY = ("tokenizer.json", "vocab.", "merges.txt", ".model", ".tiktoken", ".bpe")
# `AP` and nine letters; any address
_ORDINARY = ("ArtifactoryDetector", "IPPublicDetector")


def without_places(text: str) -> str:
    """Replace the absolute paths in a text by their last names."""
    return PLACE.sub(lambda match: PurePath(match[0]).name, text)


def public_text(name: str, text: str) -> str:
    """Return what a file of that name publishes: JSON value by value, other text as it stands."""
    if not name.endswith(".json"):
        return without_places(text)
    return json.dumps(_public(json.loads(text)), indent=2) + "\n"


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {without_places(key): _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    if not isinstance(value, str):
        return value
    return (
        PurePath(value).name
        if re.match(r"~?/[^\n]*$", value)
        else without_places(value)
    )


@cache
def _rules() -> dict[str, list[re.Pattern[str]]]:
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    kinds: dict[str, Any] = get_mapping_from_secret_type_to_class()
    return {
        name: [re.compile(pattern) for pattern in kind().denylist]
        for name, kind in kinds.items()
        if issubclass(kind, RegexBasedDetector) and kind.__name__ not in _ORDINARY
    }


def refuse_secrets(file: Path, shown: Path) -> None:
    """Refuse a text file with a token or key, by line and never with its letters;
    `shown`: its name for the user.
    """
    from huggingface_hub import get_token

    text, own = file.read_bytes().decode("utf-8", "replace"), get_token()
    rules = {
        "access token": [_ANYWHERE, *([re.compile(re.escape(own))] if own else [])]
    }
    if not any(part in file.name for part in _VOCABULARY):
        rules |= _rules()
    for name, patterns in rules.items():
        if match := next(
            (each for pattern in patterns if (each := pattern.search(text))), None
        ):
            line = text.count("\n", 0, match.start()) + 1
            raise UserError(
                f"{shown}, line {line}: contains what looks like a secret ({name});"
                " remove it, and revoke it"
            )
