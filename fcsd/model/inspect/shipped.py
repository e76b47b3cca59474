"""Find the configs of published models that ship with fcsd, for a machine that does not
reach the Hub.

`configs/NAME.json` is a model's `config.json`; `configs/models.yaml` has the Hub's
names, sources and published sizes.
"""

from pathlib import Path
from typing import Any

from fcsd.base.files import read_yaml

CONFIGS = Path(__file__).with_name("configs")
_MODELS = CONFIGS / "models.yaml"


def shipped_models() -> dict[str, dict[str, Any]]:
    """Return the entries of `models.yaml` by the names of their files."""
    models: dict[str, dict[str, Any]] = read_yaml(_MODELS)
    return models


def shipped_config(repository: str) -> Path | None:
    """Return the config of a Hub repository `owner/name`; None if fcsd has none."""
    for name, model in shipped_models().items():
        if repository in model["ids"]:
            return CONFIGS / f"{name}.json"
    return None


def shipped_ids() -> list[str]:
    """Return one repository of each model with a shipped config, sorted."""
    ids = (model["ids"][0] for model in shipped_models().values())
    return sorted(ids, key=str.lower)
