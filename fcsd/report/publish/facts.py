"""Collect what a model card says about a run from its folder, and what it inherits from the original."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from fcsd.base.errors import UserError
from fcsd.base.files import check_regular, read_json
from fcsd.model.connectivity.checkpoint import files_like
from fcsd.recipe.recipe import Recipe

CARD = "README.md"
HERE = "path/to/this/folder"  # stands in a card for the repository id as long as there is none


LICENCE_KEYS = ("license", "license_name", "license_link")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Facts:
    """The facts that a card states.

    name, where: title, and the repository id or `HERE`.
    config: config.json of the checkpoint.
    base: hub id of the original, or None.
    licence: `license`, `license_name`, `license_link`, as far as they are known.
    training: manifest of the stage that left the checkpoint (`distill`, `convert`, `pretrain`), or None.
    untrained: whether the weights are known to be those of the original.
    chat: whether the tokenizer has a chat template.
    result, comparison: what `fcsd evaluate` measured on the checkpoint, and `scores.compare` with the original.
    figures: file beside the card -> caption.
    report: whether `report.md` of the run lies beside the card.
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
    result: Mapping[str, Any] | None = None
    comparison: Mapping[str, Any] | None = None
    figures: Mapping[str, str] = field(default_factory=dict)
    report: bool = False


def facts_of_run(
    recipe: Recipe, report: Mapping[str, Any], config: Mapping[str, Any], original: Path | None, folder: Path
) -> Facts:
    """Collect what a run knows about its main model; `folder` has the figures."""
    publication = recipe.publication
    base = publication.base_model or recipe.model.path or None
    inherited = inherited_from(original) if original is not None else {}
    captions = {"deltas.png": "Difference to the original.", "loss.png": "Training loss."}
    main = report["models"].get("fcsd")
    return Facts(
        name=publication.repo_id or f"{recipe.name}-farskip",
        where=publication.repo_id or HERE,
        config=config,
        base=hub_id(base) if base is not None else None,
        licence=licence_of(inherited, publication.license),
        language=tuple(publication.language or inherited.get("language", [])),
        training=report["training"].get("fcsd"),
        chat=has_chat_template(folder),
        result=main["result"] if main is not None else None,
        comparison=report["comparisons"].get("fcsd"),
        report=True,
        figures={file: caption for file, caption in captions.items() if (folder / file).is_file()},
    )


def hub_id(text: str) -> str | None:
    """Return `text` where it is `owner/name` and no local path, otherwise None."""
    return text if _HUB_ID.fullmatch(text) and not Path(text).exists() else None


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


def licence_of(inherited: Mapping[str, Any], stated: str | None) -> dict[str, Any]:
    """Return what a card says of the licence: what is stated, or what the original's card says."""
    if stated is not None:
        return {"license": stated}
    return {key: inherited[key] for key in LICENCE_KEYS if key in inherited}


def has_chat_template(folder: Path) -> bool:
    """Tell whether the tokenizer in a checkpoint folder can put a conversation into words."""
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json(file).get("chat_template"))


def front_matter(card: Path) -> dict[str, Any]:
    """Read the metadata of a model card; {} where it has none, UserError where it is no mapping in YAML."""
    check_regular(card)
    try:
        return metadata_load(card) or {}
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{card}: the metadata between the --- lines is not YAML: {reason}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{card}: the metadata between the --- lines must be keys and values") from None
