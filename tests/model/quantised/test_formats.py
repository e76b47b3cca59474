"""The forms of compressed-tensors against that library's own decompression, to the last bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fcsd.model.quantised import formats

pytestmark = pytest.mark.extras
quantization = pytest.importorskip(
    "compressed_tensors.quantization",
    reason="compressed-tensors is not installed; `make test-extras` does so",
)
ROWS, COLUMNS = 40, 96
PLAIN = {"weight": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point"}
PACKED = PLAIN | {
    "weight": "weight_packed",
    "shape": "weight_shape",
    "global_scale": "weight_global_scale",
}


class Rows:
    """A tensor as the formats read it: by its shape, and in slices of its first
    dimension.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.tensor[rows] if self.tensor.ndim else self.tensor


def weight() -> torch.Tensor:
    return torch.randn(
        ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)
    ).bfloat16()


def largest(group: int) -> torch.Tensor:
    return weight().float().view(ROWS, -1, group).abs().amax(-1)


def integers(bits: int, symmetric: bool) -> dict[str, torch.Tensor]:
    scale = (largest(32) / max(1, 2 ** (bits - 1) - 1)).bfloat16()
    if symmetric:
        return {"weight_scale": scale}
    draw = torch.Generator().manual_seed(bits)
    points = torch.randint(
        -(2 ** (bits - 1)),
        2 ** (bits - 1),
        scale.shape,
        generator=draw,
        dtype=torch.int8,
    )
    return {"weight_scale": scale, "weight_zero_point": points}


def nvfp4() -> dict[str, torch.Tensor]:
    last = 2688 / weight().float().abs().max().reshape(1)
    scale = (last * largest(16) / 6).to(torch.float8_e4m3fn).float()
    return {"weight_scale": scale, "weight_global_scale": last}


POWERS = 2.0 ** torch.floor(torch.log2(largest(32) / 6))
CASES: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor], Any, Any]] = {
    f"int{bits} {'symmetric' if symmetric else 'with zero points'}": (
        "PackedQuantizationCompressor",
        {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric},
        integers(bits, symmetric),
        formats.packed_integers,
        None,
    )
    for bits in (2, 4, 8)
    for symmetric in (True, False)
} | {
    "nvfp4": (
        "NVFP4PackedCompressor",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        nvfp4(),
        formats.nvfp4,
        None,
    ),
    "mxfp4": (
        "MXFP4PackedCompressor",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        {"weight_scale": POWERS},
        formats.mxfp4,
        None,
    ),
    "mxfp8": (
        "MXFP8QuantizationCompressor",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        {"weight_scale": POWERS},
        formats.scaled,
        None,
    ),
    "fp8 of rows": (
        "FloatQuantizationCompressor",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"weight_scale": largest(COLUMNS) / 448},
        formats.scaled,
        None,
    ),
    "fp8 of a tensor": (
        "FloatQuantizationCompressor",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"weight_scale": torch.tensor([0.01])},
        formats.scaled,
        None,
    ),
    "fp8 of blocks, the last of them partial": (
        "FloatQuantizationCompressor",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
        {"weight_scale": torch.linspace(0.005, 0.02, 6).view(3, 2)},
        formats.scaled,
        (16, 64),
    ),
    "int8": (
        "IntQuantizationCompressor",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"weight_scale": largest(COLUMNS) / 127},
        formats.scaled,
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_form_is_decoded_as_its_library_does(case: str) -> None:
    from compressed_tensors import compressors

    name, arguments, scales, decode, block = CASES[case]
    compressor = getattr(compressors, name)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**arguments)
    )
    stored: Mapping[str, torch.Tensor] = compressor.compress(
        {"weight": weight(), **scales}, scheme
    )
    expected = compressor.decompress(dict(stored), scheme)["weight"].to(torch.bfloat16)
    names = PACKED if "weight_packed" in stored else PLAIN
    parts = {part: Rows(stored[key]) for part, key in names.items() if key in stored}
    pieces = [
        decode(parts, begin, min(begin + 7, ROWS), block) for begin in range(0, ROWS, 7)
    ]
    assert torch.equal(torch.cat(pieces).to(torch.bfloat16), expected)
