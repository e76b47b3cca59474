"""Stands in for torchvision, which text models do not use but SGLang and transformers
import from.
"""

import sys
from enum import Enum
from types import ModuleType

__version__ = "0.0"
InterpolationMode = Enum(
    "InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
)


class _Empty(ModuleType):
    """A module that has every name, with nothing behind it."""

    def __getattr__(self, name: str) -> object:
        """Return the one value that is read at import, else None."""
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else None


for _path in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _module = _Empty(f"{__name__}.{_path}")
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
