"""A quantised checkpoint is rewritten in bfloat16, with the values that the published
formulas give.

The tests make each layout themselves from the numbers of a tiny model, and compute its
values one by one, in float64, from the bits.
"""

import itertools
import json
import math
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fcsd.base.files import write_sealed
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.load import load_model
from fcsd.model.load import ModelFolder
from fcsd.model.quantised import dequantise
from fcsd.model.quantised.dequantise import dequantize_checkpoint
from tests.kills import Places
from tests.reference.tiny import tiny_model
from tests.support import change_json, edited_json, few, in_a_fork, user_error

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Made = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a weight in a file, by their endings, and its values in float64."""


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(
        0, 2**31 - 1, shape, generator=torch.Generator().manual_seed(sum(shape))
    )


def fp4(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def fp8(byte: int) -> float:
    """Return the value of an E4M3 byte."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def fp8_bytes(*shape: int) -> torch.Tensor:
    """Return E4M3 bytes without NaN."""
    codes = numbers(*shape) % 256
    return torch.where((codes & 127) == 127, codes - 1, codes).to(torch.uint8)


def table(rows: int, columns: int, value: Callable[[int, int], float]) -> torch.Tensor:
    return torch.tensor(
        [[value(r, c) for c in range(columns)] for r in range(rows)],
        dtype=torch.float64,
    )


def block_fp8(rows: int, columns: int, block: tuple[int, int] = (16, 16)) -> Made:
    codes, scales = (
        fp8_bytes(rows, columns),
        2.0 ** -(4 + numbers(9, 9) % 5).float() * 1.25,
    )
    grid = scales[
        : math.ceil(rows / block[0]), : math.ceil(columns / block[1])
    ].contiguous()
    values = table(
        rows,
        columns,
        lambda r, c: fp8(int(codes[r, c])) * float(grid[r // block[0], c // block[1]]),
    )
    return {"": codes.view(torch.float8_e4m3fn), "_scale_inv": grid}, values


def tensor_fp8(rows: int, columns: int) -> Made:
    codes, scale = fp8_bytes(rows, columns), torch.tensor(0.0175)
    values = table(rows, columns, lambda r, c: fp8(int(codes[r, c])) * float(scale))
    return {"": codes.view(torch.float8_e4m3fn), "_scale": scale}, values


def row_fp8(rows: int, columns: int) -> Made:
    codes, scale = (
        fp8_bytes(rows, columns),
        (0.01 + numbers(rows, 1) % 7 * 0.003).float(),
    )
    values = table(
        rows, columns, lambda r, c: fp8(int(codes[r, c])) * float(scale[r, 0])
    )
    return {"": codes.view(torch.float8_e4m3fn), "_scale": scale}, values


def int8(rows: int, columns: int) -> Made:
    codes = (numbers(rows, columns) % 255 - 127).to(torch.int8)
    scale, point = (
        (0.002 + numbers(rows, 1) % 5 * 0.001).float(),
        (numbers(rows, 1) % 9 - 4).to(torch.int8),
    )
    values = table(
        rows,
        columns,
        lambda r, c: (int(codes[r, c]) - int(point[r, 0])) * float(scale[r, 0]),
    )
    return {"": codes, "_scale": scale, "_zero_point": point}, values


def int4(rows: int, columns: int) -> Made:
    """Pack groups of 16 columns with a zero point for each: eight values per int32,
    along the rows for the zero points.
    """
    codes, groups = numbers(rows, columns) % 16, columns // 16
    scale = (0.01 + numbers(rows, groups) % 5 * 0.0078125).bfloat16()
    points = numbers(rows, groups) % 16
    padded = torch.nn.functional.pad(points, (0, 0, 0, -rows % 8))

    def packed(eight: torch.Tensor) -> int:
        word = sum(int(code) << 4 * place for place, code in enumerate(eight))
        return int(struct.unpack("<i", struct.pack("<I", word))[0])

    words = [
        [packed(codes[r, c : c + 8]) for c in range(0, columns, 8)] for r in range(rows)
    ]
    point_words = [
        [packed(padded[r : r + 8, g]) for g in range(groups)]
        for r in range(0, len(padded), 8)
    ]
    values = table(
        rows,
        columns,
        lambda r, c: (
            (int(codes[r, c]) - int(points[r, c // 16])) * float(scale[r, c // 16])
        ),
    )
    return {
        "_packed": torch.tensor(words, dtype=torch.int32),
        "_scale": scale,
        "_zero_point": torch.tensor(point_words, dtype=torch.int32),
        "_shape": torch.tensor([rows, columns]),
    }, values


def _fp4_parts(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = numbers(rows, columns) % 16
    return codes, (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def modelopt_nvfp4(rows: int, columns: int) -> Made:
    (codes, packed), scale = (
        _fp4_parts(rows, columns),
        fp8_bytes(rows, columns // 16) & 127,
    )
    last = torch.tensor(0.0004)
    values = table(
        rows,
        columns,
        lambda r, c: fp4(int(codes[r, c])) * fp8(int(scale[r, c // 16])) * float(last),
    )
    return {
        "": packed,
        "_scale": scale.view(torch.float8_e4m3fn),
        "_scale_2": last,
    }, values


def compressed_nvfp4(rows: int, columns: int) -> Made:
    (codes, packed), scale = (
        _fp4_parts(rows, columns),
        fp8_bytes(rows, columns // 16) & 127,
    )
    last = torch.tensor([2048.0])
    values = table(
        rows,
        columns,
        lambda r, c: fp4(int(codes[r, c])) * fp8(int(scale[r, c // 16])) / float(last),
    )
    return {
        "_packed": packed,
        "_scale": scale.view(torch.float8_e4m3fn),
        "_global_scale": last,
    }, values


def compressed_mxfp4(rows: int, columns: int) -> Made:
    (codes, packed), scale = (
        _fp4_parts(rows, columns),
        (118 + numbers(rows, columns // 32) % 6).to(torch.uint8),
    )
    values = table(
        rows,
        columns,
        lambda r, c: fp4(int(codes[r, c])) * 2.0 ** (int(scale[r, c // 32]) - 127),
    )
    return {"_packed": packed, "_scale": scale}, values


def mxfp8(rows: int, columns: int) -> Made:
    """The scale of 32 columns is a byte, too, and is an exponent."""
    codes, scale = (
        fp8_bytes(rows, columns),
        (115 + numbers(rows, columns // 32) % 6).to(torch.uint8),
    )
    values = table(
        rows,
        columns,
        lambda r, c: fp8(int(codes[r, c])) * 2.0 ** (int(scale[r, c // 32]) - 127),
    )
    return {"": codes.view(torch.float8_e4m3fn), "_scale": scale}, values


def renamed(made: Made, scale: str) -> Made:
    parts, values = made
    (name,) = parts.keys() - {""}
    return {"": parts[""], scale: parts[name]}, values


def integers_of_two_sizes(rows: int, columns: int) -> Made:
    """Use INT4 where there are 32 rows, else INT8: a checkpoint may have both, and its
    config one list for all.
    """
    if rows == 32:
        return int4(rows, columns)
    codes = numbers(rows, columns) % 256
    scale = (0.001 + numbers(rows, 1) % 5 * 0.001).float()
    words = codes.to(torch.uint8).contiguous().view(torch.int32)
    values = table(
        rows, columns, lambda r, c: (int(codes[r, c]) - 128) * float(scale[r, 0])
    )
    return {
        "_packed": words,
        "_scale": scale,
        "_shape": torch.tensor([rows, columns]),
    }, values


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"0": {"weights": {"num_bits": 4}}},
}
LAYOUTS: dict[str, tuple[Callable[..., Made], dict[str, Any]]] = {
    "block fp8": (block_fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "block fp8 with a last block that is partial": (
        lambda rows, columns: block_fp8(rows, columns, (24, 20)),
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
    ),
    "fp8 of compressed-tensors": (row_fp8, {"quant_method": "compressed-tensors"}),
    "fp8 of modelopt": (tensor_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "int8": (int8, {"quant_method": "compressed-tensors"}),
    "packed int4": (int4, COMPRESSED),
    "packed int4 and int8": (integers_of_two_sizes, COMPRESSED),
    "mxfp8": (mxfp8, COMPRESSED),
    "mxfp8 of its own method": (
        lambda rows, columns: renamed(mxfp8(rows, columns), "_scale_inv"),
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    ),
    "block fp8 with scales named as in DeepSeek-V4": (
        lambda rows, columns: renamed(block_fp8(rows, columns), ".scale"),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
    ),
    "nvfp4 of modelopt": (
        modelopt_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "nvfp4 of compressed-tensors": (compressed_nvfp4, COMPRESSED),
    "mxfp4 of compressed-tensors": (compressed_mxfp4, COMPRESSED),
}


def write(
    folder: Path,
    make: Callable[..., Made],
    settings: dict[str, Any],
    *,
    shards: int = 1,
    cache_scale: bool = True,
) -> dict[str, torch.Tensor]:
    """Write a tiny model whose experts and attention are quantised, and return its
    values. cache_scale: it has a scale of its key cache, too, which transformers knows
    no place for.
    """
    model = tiny_model(
        "qwen3_moe",
        vocab_size=64,
        num_hidden_layers=1,
        hidden_size=64,
        moe_intermediate_size=32,
    )
    model.bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    expected: dict[str, torch.Tensor] = {}
    for name in [*tensors]:
        if not ("experts" in name or "_proj" in name):
            expected[name] = tensors[name]
            continue
        parts, values = make(*tensors.pop(name).shape)
        for end, value in parts.items():
            # A scale of a module, and not of its weight.
            base = name.removesuffix(".weight") if end.startswith(".") else name
            tensors[base + end] = value.contiguous()
        expected[name] = values.to(torch.float32).to(torch.bfloat16)
    if cache_scale:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    files = {
        f"model-{k:05}-of-{shards:05}.safetensors": names[k::shards]
        for k in range(shards)
    }
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    change_json(folder / "config.json", {"quantization_config": settings})
    return expected


def read(folder: Path) -> dict[str, torch.Tensor]:
    return dict(
        itertools.chain.from_iterable(
            load_file(file).items() for file in folder.glob("*.safetensors")
        )
    )


def assert_same(
    tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype and torch.equal(
            tensors[name], value
        ), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_the_values_of_its_formula(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(tmp_path / "quantised", *LAYOUTS[layout])
    # several chunks, which start in the middle of a block
    monkeypatch.setattr(dequantise, "CHUNK_VALUES", 1000)
    assert main(["dequantize", str(tmp_path / "quantised"), str(tmp_path / "out")]) == 0
    assert_same(read(tmp_path / "out"), expected)
    assert "quantization_config" not in json.loads(
        (tmp_path / "out" / "config.json").read_text()
    )
    assert not (tmp_path / "out.partial").exists()
    assert load_model(tmp_path / "out").dtype == torch.bfloat16


def write_gpt_oss(
    folder: Path, vocab_size: int = 64, num_hidden_layers: int = 1
) -> dict[str, torch.Tensor]:
    """Write a tiny gpt-oss in MXFP4, and return its values as transformers unpacks
    them.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = tiny_model(
        "gpt_oss",
        vocab_size=vocab_size,
        num_hidden_layers=num_hidden_layers,
        hidden_size=64,
        intermediate_size=32,
    )
    model.bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    expected = dict(tensors)
    for name in [
        name
        for name in tensors
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        # as they are in memory: in, out
        number, rows, columns = tensors.pop(name).shape
        blocks = (numbers(number, columns, rows // 32, 16) % 256).to(torch.uint8)
        scales = (120 + numbers(number, columns, rows // 32) % 9).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
        first = fp4(int(blocks[1, 2, 0, 3]) >> 4) * 2.0 ** (int(scales[1, 2, 0]) - 127)
        assert float(expected[name][1, 7, 2]) == first
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_json(
        folder / "config.json", {"quantization_config": {"quant_method": "mxfp4"}}
    )
    return expected


def test_gpt_oss_experts_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    expected = write_gpt_oss(tmp_path / "q")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "out")
    assert_same(read(tmp_path / "out"), expected)


@pytest.mark.breadth
def test_a_copy_that_is_killed_at_any_place_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcsd.model.quantised.copy.SHARD_BYTES", 20_000)
    write(tmp_path / "q", *LAYOUTS["block fp8"], shards=3)

    def run(folder: Path, **watched: Any) -> int:
        folder.mkdir(exist_ok=True)
        Places(folder, **watched).watch()
        dequantize_checkpoint(tmp_path / "q", folder / "out")
        return 0

    def contents(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (folder / "out").iterdir()}

    output, record = tmp_path / "output", tmp_path / "moments"
    assert in_a_fork(lambda: run(tmp_path / "whole", record=record), output) == 0, (
        output.read_text()
    )
    whole, moments = contents(tmp_path / "whole"), record.read_text().splitlines()
    assert sum(name.endswith(".safetensors") for name in whole) > 3
    assert len(moments) > 2 * len(
        [name for name in whole if name.endswith(".safetensors")]
    )
    for number, moment in enumerate(moments):
        folder = tmp_path / str(number)
        status = in_a_fork(
            lambda folder=folder, moment=moment: run(folder, kill=moment), output
        )
        assert status == -signal.SIGKILL, (moment, output.read_text())
        if not (folder / "out").exists():
            assert in_a_fork(lambda folder=folder: run(folder), output) == 0, (
                moment,
                output.read_text(),
            )
        assert contents(folder) == whole, moment


def test_a_damaged_shard_of_a_cut_off_copy_is_written_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcsd.model.quantised.copy.SHARD_BYTES", 20_000)
    write(tmp_path / "q", *LAYOUTS["block fp8"], shards=3)

    def run(folder: Path, **watched: Any) -> int:
        folder.mkdir(exist_ok=True)
        Places(folder, **watched).watch()
        dequantize_checkpoint(tmp_path / "q", folder / "out")
        return 0

    output = tmp_path / "output"
    assert in_a_fork(lambda: run(tmp_path / "whole"), output) == 0
    moment = "after rename to out.partial/model/config.json, 1"
    assert in_a_fork(lambda: run(tmp_path / "cut", kill=moment), output) < 0
    partial = tmp_path / "cut" / "out.partial"
    for shard, change in zip(
        sorted(partial.glob("model/*.safetensors")), ("flip", "cut"), strict=False
    ):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data if change == "flip" else data[: len(data) // 2])
    dequantize_checkpoint(tmp_path / "q", tmp_path / "cut" / "out")
    assert capfd.readouterr().err.count("is damaged; fcsd writes it again") == 2
    for file in (tmp_path / "whole" / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "cut" / "out" / file.name).read_bytes()


def test_a_copy_is_read_only_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "q", *LAYOUTS["block fp8"])
    out = tmp_path / "out"
    dequantize_checkpoint(tmp_path / "q", out)
    model = ModelFolder(ModelConfig(path=str(out)), out)
    model.fingerprints("model")
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (out / "model.safetensors").write_bytes(data)
    with user_error("is not what `fcsd dequantize` wrote"):
        ModelFolder(model.config, out).fingerprints("model")


def test_a_begun_copy_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "q", *LAYOUTS["int8"])
    (tmp_path / "out.partial").mkdir()
    record = tmp_path / "out.partial" / "dequantize.json"
    write_sealed(record, {"source": "x", "shards": {}})
    with user_error("unfinished copy of another checkpoint"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "out")


@pytest.mark.parametrize(
    "method", few(["gptq", "awq", "auto-round", "quark", "bitsandbytes"], 2)
)
def test_methods_that_are_not_taken_back_are_named(method: str, tmp_path: Path) -> None:
    write(tmp_path / "q", block_fp8, {"quant_method": method})
    with user_error(rf"'{method}'.*fp8, mxfp4, compressed-tensors, modelopt"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("layout", few(LAYOUTS, 4))
def test_a_scale_that_makes_a_weight_nan_is_named_and_nothing_is_written(
    layout: str, tmp_path: Path
) -> None:
    write(tmp_path / "q", *LAYOUTS[layout])
    file = next((tmp_path / "q").glob("*.safetensors"))
    tensors = load_file(file)
    module = "model.layers.0.self_attn.q_proj"
    scale = next(
        tensor
        for name, tensor in tensors.items()
        if name.startswith(module) and "scale" in name and "input" not in name
    )
    # All bits are NaN in every dtype that scales have.
    scale.view(-1).view(torch.uint8).fill_(255)
    save_file(tensors, file, metadata={"format": "pt"})
    with user_error(rf"'{module}\.weight': has values .* NaN"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_packed_tensor_whose_shape_is_no_pair_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "q", *LAYOUTS["packed int4"])
    file = next((tmp_path / "q").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_shape"))
    tensors[name] = torch.ones(2, 2, dtype=torch.int64)
    save_file(tensors, file, metadata={"format": "pt"})
    with user_error("do not fit"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "out")


def test_scales_of_other_blocks_are_refused_by_the_tensors_name(tmp_path: Path) -> None:
    write(tmp_path / "q", *LAYOUTS["block fp8"])
    with edited_json(tmp_path / "q" / "config.json") as config:
        config["quantization_config"]["weight_block_size"] = [128, 5]
    with user_error(r"tensor 'model\..*scales of shape .*blocks of 128 x 5"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "out")


@pytest.mark.parametrize(
    ("parts", "message"), [("mxfp6", "do not fit"), ("int3", "none of 2, 4, 8 bits")]
)
def test_forms_that_look_like_known_ones_are_refused_before_anything_is_written(
    parts: str, message: str, tmp_path: Path
) -> None:
    """MXFP6 has the names of MXFP4; integers of 3 bits span two int32 in some versions
    only.
    """

    def made(rows: int, columns: int) -> Made:
        if parts == "mxfp6":
            packed = torch.zeros(rows, columns * 6 // 8, dtype=torch.uint8)
            return {
                "_packed": packed,
                "_scale": packed[:, : columns // 32],
            }, torch.zeros(rows, columns)
        packed = torch.zeros(rows, columns * 3 // 32, dtype=torch.int32)
        shape = torch.tensor([rows, columns])
        return {
            "_packed": packed,
            "_scale": torch.ones(rows, 1),
            "_shape": shape,
        }, torch.zeros(rows, columns)

    write(tmp_path / "q", made, COMPRESSED)
    with user_error(message):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "out")
    assert not [*tmp_path.glob("out*/*.safetensors")]


def test_an_expert_that_is_missing_is_seen(tmp_path: Path) -> None:
    write(tmp_path / "q", *LAYOUTS["fp8 of modelopt"])
    file = next((tmp_path / "q").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(
        name for name in tensors if "experts.1" in name or "experts.gate" in name
    )
    save_file(
        {key: value for key, value in tensors.items() if not key.startswith(name)}, file
    )
    weight_map = dict.fromkeys(
        (key for key in tensors if not key.startswith(name)), file.name
    )
    (tmp_path / "q" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    with user_error("missing"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_quantised_is_refused(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", vocab_size=64, num_hidden_layers=1).save_pretrained(
        tmp_path / "plain"
    )
    with user_error("is not quantised"):
        dequantize_checkpoint(tmp_path / "plain", tmp_path / "out")
