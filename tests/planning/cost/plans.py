"""Plans and links that several test modules of this folder share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.plan import planned
from fcsd.base.files import read_json
from fcsd.base.writing import write_json
from fcsd.planning.cost.planned import Planned
from fcsd.planning.network.links import LinkModel
from tests.real_configs import CONFIGS

EIGHT: dict[str, Any] = {
    "gpu": "mi325x",
    "unfused_attention": True,
    "keep_activations": True,
}


BARE = dict.fromkeys(
    ("kernel_us", "matmul_us", "core_us", "gap_us", "fused_norm_us"), 0.0
)
"""A server whose kernels have no least duration, whose norms are not fused, and whose step
has no gaps.
"""


def lite(tmp_path: Path) -> str:
    """Return a folder with the config of the first four layers of DeepSeek-V2-Lite, one
    of which is dense.
    """
    (tmp_path / "lite").mkdir()
    write_json(
        tmp_path / "lite" / "config.json",
        read_json(CONFIGS / "DeepSeek-V2-Lite.json") | {"num_hidden_layers": 4},
    )
    return str(tmp_path / "lite")


def lite_with(**settings: Any) -> Planned:
    """Return DeepSeek-V2-Lite, planned with these settings."""
    return planned("DeepSeek-V2-Lite", {}, settings)


def with_values(one: Planned, **values: float) -> Planned:
    return one.assuming(**values)


def with_links(one: Planned, links: LinkModel) -> Planned:
    return replace(one, machine=replace(one.machine, links=links))


def even_links(ranks: int, beta: float) -> LinkModel:
    rows = [[beta] * ranks] * ranks
    zero = [[1e-5] * ranks] * ranks
    phase = {
        "alpha_s": zero, "beta_s_per_byte": rows, "r2": rows, "refined": [[True] * ranks] * ranks, "repeats": 3,
    }  # fmt: skip
    return LinkModel.model_validate(
        {
            "endpoints": [str(i) for i in range(ranks)], "collective": "all_to_all_single", "backend": "nccl",
            "world_size": ranks, "libraries": {}, "metadata": phase, "dispatch": phase, "combine": phase,
            "ports": {"egress_s_per_byte": [None] * ranks, "ingress_s_per_byte": [None] * ranks},
        }
    )  # fmt: skip
