"""Collect the facts for the model card of a run from its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcsd.recipe.recipe import Recipe
from fcsd.training.card.facts import (
    HERE,
    Facts,
    has_chat_template,
    hub_id,
    inherited_from,
    licence_of,
)


def facts_of_run(
    recipe: Recipe,
    report: Mapping[str, Any],
    config: Mapping[str, Any],
    original: Path | None,
    folder: Path,
) -> Facts:
    """Collect the facts that a run records about its main model.

    folder: the publish folder, of whose figures the card shows those that exist.
    """
    publication = recipe.publication
    base = publication.base_model or recipe.model.path or None
    inherited = inherited_from(original) if original is not None else {}
    # The figures that the card shows; a run may have drawn only some of them.
    captions = {
        "deltas.png": "Difference to the original.",
        "loss.png": "Training loss.",
    }
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
        figures={
            file: caption
            for file, caption in captions.items()
            if (folder / file).is_file()
        },
    )
