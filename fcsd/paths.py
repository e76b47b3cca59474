"""Where the data that ships with fcsd (suites, task definitions, recipes, configurations) lies."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The shipped folder `name` (eval, recipes, configs), inside an installed wheel or beside it in a checkout."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
