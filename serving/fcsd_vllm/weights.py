"""Check the headers of a checkpoint's safetensors files before weights load. Standard
library only.
"""

import json
from pathlib import Path

from fcsd_vllm.refusals import Refused

GATE = ".self_attn.gate_proj."
"""Name of Instella-MoE's attention gate in a checkpoint."""
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def check_weights(folder: str) -> None:
    """Raise Refused for a local checkpoint with an FP8 weight that has no scale
    (`NAME_scale…`) beside it.

    An engine would read that weight with a scale of 1, and serve a different model.
    """
    types = dict(
        entry
        for file in sorted(Path(folder).glob("*.safetensors"))
        for entry in _types(file)
    )
    scaled = {name.partition("_scale")[0] for name in types if "_scale" in name}
    for name, dtype in sorted(types.items()):
        if dtype in _FP8 and "_scale" not in name and name not in scaled:
            raise Refused(
                f"fcsd-serving: {folder}: {name} is FP8 and has no scale ({name}_scale"
                f" or {name}_scale_inv), so its values are unknown; convert the"
                " original again with its scales, or convert a bfloat16 checkpoint"
            )


def check_gates(folder: str, layers: int) -> None:
    """Raise Refused for a local checkpoint in which a layer's gate is missing, which
    vLLM would not notice.
    """
    names = {
        name for file in Path(folder).glob("*.safetensors") for name, _ in _types(file)
    }
    for index in range(layers if names else 0):
        if not any(name.startswith(f"model.layers.{index}{GATE}") for name in names):
            raise Refused(
                f"fcsd-serving: {folder}: model.layers.{index}{GATE}weight is missing,"
                " but config.json has gated_attention; download or convert the"
                " checkpoint again"
            )


def _types(file: Path) -> list[tuple[str, str]]:
    """Return name and dtype of each tensor; nothing for a file in another format, which
    the engine reports.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(length) if length <= file.stat().st_size else b"{}"
    return [
        (name, entry["dtype"])
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    ]
