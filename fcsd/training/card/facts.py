"""The facts of a model card, and those that it inherits from the original's."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from fcsd.base.artifact import read_manifest
from fcsd.base.errors import UserError, without_credentials
from fcsd.base.files import check_regular, implicit_values, read_json
from fcsd.model.connectivity.checkpoint import files_like

CARD = "README.md"
# placeholder for the repository id in a card
HERE = "path/to/this/folder"


LICENCE_KEYS = ("license", "license_name", "license_link")
_OF_RESULTS = re.compile(r"\b(results?|evaluations?|benchmarks?|scores?)\b", re.I)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Facts:
    """The facts that a card states.

    name, where: title, and the repository id or `HERE`. config: config.json of the
    checkpoint. base: Hub id of the original, or None. licence: `license`,
    `license_name`, `license_link`, as far as they are known. training: manifest of the
    stage that wrote the checkpoint (`distill`, `convert`, `pretrain`), or its
    substitute from `fcsd.training.card.trainer`; None: not known. untrained: whether
    the weights are known to be those of the original. chat: whether the tokenizer has a
    chat template. tags: in addition to those of every card. result, comparison: the
    result of `fcsd evaluate` for the checkpoint, and that of `scores.compare` with the
    original. figures: file beside the card -> caption. report: whether `report.md` of
    the run lies beside the card.
    """

    name: str
    config: Mapping[str, Any]
    where: str = HERE
    base: str | None = None
    licence: Mapping[str, Any] = field(default_factory=dict)
    language: tuple[str, ...] = ()
    training: Mapping[str, Any] | None = None
    untrained: bool = False
    chat: bool = True
    tags: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    comparison: dict[str, Any] | None = None
    figures: Mapping[str, str] = field(default_factory=dict)
    report: bool = False


def hub_id(text: str) -> str | None:
    """Return `text` where it is `owner/name` and no local path, otherwise None."""
    return text if _HUB_ID.fullmatch(text) and not Path(text).exists() else None


def origin_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return `path` and `revision` of the original from a stage's manifest; {} if it
    has none.
    """
    origin: dict[str, Any] = record.get("settings", {}).get("model") or record.get(
        "results", {}
    ).get("model")
    return origin or {}


def recorded_origin(folder: Path) -> tuple[str, str | None] | None:
    """Return path and revision of the original of a checkpoint folder, if the stage
    that wrote it has recorded them.
    """
    origin = origin_of(
        read_manifest(folder.parent if folder.name == "model" else folder)
    )
    return (str(origin["path"]), origin.get("revision")) if origin.get("path") else None


def inherited_from(folder: Path) -> dict[str, Any]:
    """Read licence and languages on the card in a checkpoint folder; {} without a card."""
    files_like(folder, [CARD])
    if not (folder / CARD).is_file():
        return {}
    data = front_matter(folder / CARD)
    inherited = {key: data[key] for key in (*LICENCE_KEYS, "language") if data.get(key)}
    if isinstance(inherited.get("language"), str):
        inherited["language"] = [inherited["language"]]
    return inherited


def inherited_by(base: str, revision: str | None) -> dict[str, Any]:
    """Read licence and languages of the original: from the card in its folder, or in
    its repository.
    """
    if Path(base).is_dir():
        return inherited_from(Path(base))
    if hub_id(base) is None:
        return {}
    try:
        return inherited_from(
            Path(hf_hub_download(base, CARD, revision=revision)).parent
        )
    except UserError:
        raise
    # Offline, no such repository, no card: a card without a licence can still be
    # written.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = without_credentials(f"the card of {base} cannot be read: {reason}")
        print(f"note: {text}", file=sys.stderr)
        return {}


def licence_of(inherited: Mapping[str, Any], stated: str | None) -> dict[str, Any]:
    """Return a card's licence fields: the stated licence, or the original card's."""
    if stated is not None:
        return {"license": stated}
    return {key: inherited[key] for key in LICENCE_KEYS if key in inherited}


def with_linked_licence(facts: Facts, folder: Path) -> Facts:
    """Make the licence link point to the file in the original's repository, unless the
    folder has a copy.
    """
    link = str(facts.licence.get("license_link") or "")
    if not link or "://" in link or (folder / link).is_file():
        return facts
    absolute_link = None
    if facts.base:
        absolute_link = f"https://huggingface.co/{facts.base}/blob/main/{link}"
    return replace(facts, licence={**facts.licence, "license_link": absolute_link})


def has_chat_template(folder: Path) -> bool:
    """Tell whether the tokenizer in a checkpoint folder has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json(file).get("chat_template"))


def has_results(card: str) -> bool:
    """Tell whether the text of a model card reports figures under a heading such as
    `## Results` or `## Evaluation`.
    """
    body = REGEX_YAML_BLOCK.sub("", card, count=1)
    # Lines of code that begin with # are no headings.
    body = re.sub(r"^(```|~~~).*?^\1", "", body, flags=re.MULTILINE | re.DOTALL)
    depth = 0  # of the heading that the figures may follow
    for line in body.splitlines():
        if heading := re.match(r"(#{1,6})\s+(.*)", line):
            level = len(heading[1])
            if depth == 0 or level <= depth:
                depth = level if _OF_RESULTS.search(heading[2]) else 0
        elif depth and re.search(r"\d", line):
            return True
    return False


class _TextLoader(yaml.SafeLoader):
    """A SafeLoader that leaves every value but null as it is written: `no` is a
    language, and `1.10` a name.
    """

    yaml_implicit_resolvers = implicit_values("null", "merge")


def front_matter(card: Path) -> dict[str, Any]:
    """Read the metadata of a model card, as texts; {} if there is none, UserError if it
    is no YAML mapping.
    """
    check_regular(card)
    try:
        block = REGEX_YAML_BLOCK.search(card.read_text(encoding="utf-8-sig"))
        # A subclass of SafeLoader, which builds plain values only.
        data = yaml.load(block[2], Loader=_TextLoader) if block else None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{card}: the metadata between the --- lines is not YAML: {reason}"
        ) from None
    except (ValueError, RecursionError):
        data = ""
    if data is not None and not isinstance(data, dict):
        raise UserError(
            f"{card}: the metadata between the --- lines must be keys and values"
        )
    return data or {}
