"""Conversion on disk: a checkpoint many times larger than the memory in use, linked or
copied.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest

from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    unconvert_checkpoint,
)
from tests.reference.tiny import tiny_config, tiny_model
from tests.support import start

MIB = 2**20
LAYERS, WIDTH, EXPERT_WIDTH, EXPERTS, VOCABULARY = 6, 1024, 1792, 32, 1000
SHARD_BYTES = 256 * MIB
TOTAL_BYTES = 1_900 * MIB


def synthetic_checkpoint(folder, num_layers=LAYERS, shard_bytes=SHARD_BYTES):
    """Write a qwen3_moe in bfloat16 whose shards have the right headers and sizes, with
    holes in place of the numbers.
    """
    config = tiny_config(
        "qwen3_moe",
        num_hidden_layers=num_layers,
        hidden_size=WIDTH,
        moe_intermediate_size=EXPERT_WIDTH,
        num_experts=EXPERTS,
        vocab_size=VOCABULARY,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    shards, used = [{}], 0
    for name, shape in _tensors(num_layers):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [used, used + size],
        }
        used += size
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = json.dumps(tensors | {"__metadata__": {"format": "pt"}}).encode()
        header += b" " * (-len(header) % 8)
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(
                8
                + len(header)
                + max(row["data_offsets"][1] for row in tensors.values())
            )
        weight_map |= dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return sorted(folder.glob("*.safetensors"))


def _tensors(num_layers):
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    for k in range(num_layers):
        layer = f"model.layers.{k}"
        yield f"{layer}.input_layernorm.weight", (WIDTH,)
        yield f"{layer}.post_attention_layernorm.weight", (WIDTH,)
        for name, rows, columns in (
            ("q", 1024, WIDTH), ("k", 256, WIDTH), ("v", 256, WIDTH), ("o", WIDTH, 1024),
        ):  # fmt: skip
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, columns)
        for name in "qk":
            yield f"{layer}.self_attn.{name}_norm.weight", (128,)
        yield f"{layer}.mlp.gate.weight", (EXPERTS, WIDTH)
        for e in range(EXPERTS):
            expert = f"{layer}.mlp.experts.{e}"
            yield f"{expert}.gate_proj.weight", (EXPERT_WIDTH, WIDTH)
            yield f"{expert}.up_proj.weight", (EXPERT_WIDTH, WIDTH)
            yield f"{expert}.down_proj.weight", (WIDTH, EXPERT_WIDTH)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCABULARY, WIDTH)


CHILD = """
import errno, json, os, sys
from pathlib import Path
from fcsd.model.connectivity import Connectivity, convert_checkpoint, unconvert_checkpoint

def growth(call):  # peak resident memory of a call, above what was resident before it, in bytes
    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

def no_links(*args, **kwargs):
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

tiny, large, small, out = map(Path, sys.argv[1:])
convert_checkpoint(tiny, out / "tiny", Connectivity("all"))  # imports what there is to import
found = {"linked": growth(lambda: convert_checkpoint(large, out / "linked", Connectivity("last:75%")))}
found["undone"] = growth(lambda: unconvert_checkpoint(out / "linked", out / "undone"))
shard = next(large.glob("*.safetensors"))
found["reading one shard"] = growth(lambda: len(shard.read_bytes()))
os.link = no_links
found["copied"] = growth(lambda: convert_checkpoint(small, out / "copied", Connectivity("all")))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return (folder, growth of resident memory in bytes by operation) of one child
    process.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("resident memory is read from Linux's /proc")
    folder = tmp_path_factory.mktemp("streaming")
    tiny_model("qwen3_moe").save_pretrained(folder / "tiny")
    synthetic_checkpoint(folder / "large")
    synthetic_checkpoint(folder / "small", num_layers=1, shard_bytes=128 * MIB)
    names = ("tiny", "large", "small", "out")
    child = start("-c", CHILD, *(str(folder / name) for name in names))
    output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    yield folder, json.loads(output.splitlines()[-1])
    shutil.rmtree(folder)


def test_a_conversion_needs_a_fraction_of_one_shard_of_memory(measured):
    folder, growth = measured
    shards = sorted((folder / "large").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in shards) > TOTAL_BYTES
    assert max(file.stat().st_size for file in shards) <= SHARD_BYTES + MIB
    # the measurement would show a shard
    assert growth["reading one shard"] > 0.9 * shards[0].stat().st_size
    assert growth["linked"] < SHARD_BYTES / 4
    assert growth["undone"] < SHARD_BYTES / 4


def test_a_conversion_links_the_weights_and_copies_no_byte_of_them(measured):
    folder, _ = measured
    for shard in sorted((folder / "large").glob("*.safetensors")):
        for name in ("linked", "undone"):
            assert (
                folder / "out" / name / shard.name
            ).stat().st_ino == shard.stat().st_ino
        assert shard.stat().st_nlink == 3
    config = json.loads((folder / "out" / "linked" / "config.json").read_text())
    assert config["farskip"]["layers"] == [1, 2, 3, 4, 5]


def test_where_weights_cannot_be_linked_they_are_streamed(measured):
    folder, growth = measured
    shards = sorted((folder / "small").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in shards) > 300 * MIB and len(shards) > 2
    assert growth["copied"] < 32 * MIB  # a quarter of a shard
    for shard in shards:
        copy = folder / "out" / "copied" / shard.name
        assert copy.stat().st_ino != shard.stat().st_ino and copy.stat().st_nlink == 1
        assert copy.stat().st_size == shard.stat().st_size


def test_weights_that_are_links_into_a_cache_are_linked_themselves(tmp_path):
    """A snapshot of the Hub's cache holds symbolic links to blobs; a link to the link
    would break with it.
    """
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "blobs", max_shard_size="40KB")
    snapshot = tmp_path / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    convert_checkpoint(snapshot, tmp_path / "far", Connectivity("all"))
    shards = sorted((tmp_path / "far").glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        assert not shard.is_symlink()
        assert shard.stat().st_ino == (tmp_path / "blobs" / shard.name).stat().st_ino
    unconvert_checkpoint(tmp_path / "far", tmp_path / "back")
    assert (tmp_path / "back" / shards[0].name).stat().st_nlink == 3
