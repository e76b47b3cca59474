"""Configurations of published models: those that ship with fcsd."""

import shutil
from pathlib import Path
from typing import Any

from fcsd.base.files import read_json
from fcsd.model.connectivity.checkpoint import CONFIG, read_config
from fcsd.model.connectivity.modeling import classes_of
from fcsd.model.families import Family
from fcsd.model.inspect.shipped import CONFIGS
from tests.support import skip_unavailable


def real_folder(name: str, folder: Path) -> Path:
    """Return a checkpoint folder that holds `config.json` and nothing else."""
    skip_unavailable(read_json(CONFIGS / f"{name}.json")["model_type"])
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(CONFIGS / f"{name}.json", folder / CONFIG)
    return folder


def real_config(name: str, folder: Path) -> tuple[Family, Any]:
    """Return the family and the config object, read as from a checkpoint; `folder` is
    scratch space.
    """
    family = read_config(real_folder(name, folder)).family
    assert family is not None
    return family, classes_of(family).config.from_pretrained(folder)
