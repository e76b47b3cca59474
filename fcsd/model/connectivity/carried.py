"""What a conversion carries over beside config and weights: tokenizer, processor, generation defaults, licence.

The files of tokenizer and processor stay as they are: `modeling_farskip.py` enters the model type in transformers'
tables of both. Only code that they name and that does not lie beside them is then named in its repository.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import write_json
from fcsd.model.connectivity.checkpoint import read_checkpoint_json

CARRIED = (
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
    "LICENSE*",
)
"""Patterns. No pickles, and no code except what a tokenizer or processor names as its own."""

_CLASS = re.compile(r"([\w.-]+/[\w.-]+--)?\w+(\.\w+)+")  # no path in it leads out of the folder

_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def carry_over(source: Path, folder: Path, repository: str | None = None) -> None:
    """Copy what a checkpoint has beside config and weights, so that tokenizer and processor load in `folder`.

    Args:
        source: the base checkpoint, or a FarSkip checkpoint.
        folder: the new checkpoint.
        repository: `owner/name` that `source` is a snapshot of; code is then named there instead of copied.
    """
    for pattern in CARRIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                target = folder / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    for name in _CODE:
        if (source / name).is_file():
            _keep_code(source, folder, name, repository)


def _keep_code(source: Path, folder: Path, file: str, repository: str | None) -> None:
    """Keep the code that a tokenizer or processor brings with it: `module.Class` in its auto_map."""
    values = read_checkpoint_json(source / file)
    auto_map: dict[str, Any] = values.get("auto_map") or {}
    if isinstance(auto_map, list):  # an old form, which names the tokenizer only
        auto_map = {"AutoTokenizer": auto_map}
    changed = False
    for auto, classes in auto_map.items() if isinstance(auto_map, dict) else [("", auto_map)]:
        names = classes if isinstance(classes, list) else [classes]
        if not auto or not all(
            name is None or (isinstance(name, str) and _CLASS.fullmatch(name)) for name in names
        ):
            raise UserError(
                f"{source / file}: auto_map: Auto class to module.Class is needed, got {str(classes)[:80]!r};"
                " fetch the file again"
            )
        for place, name in enumerate(names):
            if not name or "--" in name:
                continue
            module = source / f"{name.split('.')[0]}.py"
            if module.is_file():
                _copy_module(module, folder)
            elif repository is not None:
                names[place], changed = f"{repository}--{name}", True
        auto_map[auto] = names if isinstance(classes, list) else names[0]
    if changed:
        write_json(folder / file, values | {"auto_map": auto_map})


def _copy_module(module: Path, folder: Path) -> None:
    from transformers.dynamic_module_utils import get_relative_import_files

    for file in (module, *map(Path, get_relative_import_files(module))):
        shutil.copyfile(file, folder / file.name)
