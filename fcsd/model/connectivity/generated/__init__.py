"""Modules without files: `fcsd.model.connectivity.generated.qwen3_moe` is the text that
checkpoints carry for that family.

They are importable by name (not only in the process that made them), so that models
pickle. Contains no code of its own. Not covered: the text of the files
(`fcsd.model.connectivity.modeling`).
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

from fcsd.model.connectivity.modeling import modeling_source
from fcsd.model.families import FAMILIES


class _Loader(importlib.abc.SourceLoader):
    """Serves the generated text; `inspect`, tracebacks and torch.compile get the source
    through it.
    """

    def get_filename(self, fullname: str) -> str:
        return f"<{fullname}>"

    def get_data(self, path: str | bytes) -> bytes:
        if not str(path).endswith(">"):  # the path of a bytecode cache: there is none
            raise FileNotFoundError(path)
        return modeling_source(
            FAMILIES[str(path).strip("<>").rpartition(".")[2]]
        ).encode()


class _Finder(importlib.abc.PathEntryFinder):
    """Finds the module of each family, for imports from this package alone."""

    def __init__(self, place: str):
        if place != _PLACE:
            raise ImportError

    def find_spec(
        self, fullname: str, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.rpartition(".")[2] not in FAMILIES:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, _Loader(), origin=f"<{fullname}>"
        )


# In place of a folder with the package's modules.
_PLACE = f"<{__name__}>"
__path__ = [_PLACE]
sys.path_hooks.append(_Finder)
