"""Keep paths of the publisher's machine and secrets out of published files: absolute
paths are cut to their last name, and secrets are found by the rules of detect-secrets.

Not covered: relative paths; secrets without a recognisable form (passwords, hex
digits); pictures and weights.
"""

import itertools
import json
import re
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from fcsd.base.errors import TOKEN, UserError, one_line
from fcsd.base.files import parse_json, safetensors_metadata

PLACE = re.compile(r"(?<![\w/.:~\\-])~?(?:/[\w.@+-]+){2,}")
"""An absolute path of at least two names in a text; a lone `/`, `and/or` and parts of
an address do not match.
"""


# detect-secrets (1.5) has no rule for tokens of Hugging Face and for `github_pat_`.
_VOCABULARY = ("tokenizer.json", "vocab.", "merges.txt", ".model", ".tiktoken", ".bpe")
# Rules that ordinary text also matches: `AP` and nine letters; any IP address.
_ORDINARY = ("ArtifactoryDetector", "IPPublicDetector")


def without_places(text: str) -> str:
    """Replace the absolute paths in a text by their last names."""
    return PLACE.sub(lambda match: PurePath(match[0]).name, text)


def public_text(name: str, text: str) -> str:
    """Return the text of a file without paths of this machine; JSON is cleaned value by
    value.
    """
    if not name.endswith(".json"):
        return without_places(text)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UserError(
            f"{name}: not valid JSON ({one_line(error)}); make the folder again"
        ) from None
    return json.dumps(_public(value), indent=2) + "\n"


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {without_places(key): _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    if not isinstance(value, str):
        return value
    if re.match(r"~?/[^\n]*$", value):
        return PurePath(value).name
    return without_places(value)


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


def refuse_secrets(file: Path, original: Path) -> None:
    """Refuse a file with a token or key in its text, in whatever encoding, or in the
    metadata of its weights; the error names the line and never shows the secret.

    original: the file that the user knows, for the error.
    """
    from huggingface_hub import get_token

    token = get_token()
    rules = {
        # The search includes the user's own token, whatever its form.
        "access token": [TOKEN, *([re.compile(re.escape(token))] if token else [])]
    }
    # Among the many words of a vocabulary, or the bytes of a picture, some match the
    # looser rules by chance.
    if not any(part in file.name for part in (*_VOCABULARY, ".png")):
        rules |= _rules()
    searches = itertools.product(_texts(file), rules.items())
    for text, (name, patterns) in searches:
        for pattern in patterns:
            if match := pattern.search(text):
                line = text.count("\n", 0, match.start()) + 1
                place = f"line {line}"
                if file.suffix in (".safetensors", ".png"):
                    place = "metadata"
                raise UserError(
                    f"{original}, {place}: contains what looks like a secret"
                    f" ({name}); remove it, and revoke it"
                )


_ESCAPE = re.compile(r"\\(?:u00|U000000|x)([0-7][0-9A-Fa-f])")


def _texts(file: Path) -> list[str]:
    """Return the text of a file to search for secrets, with escapes of JSON and YAML
    resolved; of a file with zero bytes also the text without them, for ASCII in UTF-16
    or UTF-32 is ASCII then.
    """
    if file.suffix == ".safetensors":
        data = json.dumps(safetensors_metadata(file), ensure_ascii=False).encode()
    else:
        data = file.read_bytes()
    return [
        _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
        for text in dict.fromkeys(
            version.decode("utf-8", "replace")
            for version in (data, data.replace(b"\0", b""))
        )
    ]
