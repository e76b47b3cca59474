"""The families that the package serves in SGLang; their names are those of `fcsd_vllm`. Standard library only."""

from typing import Any

from fcsd_vllm.families import FAMILIES as ALL
from fcsd_vllm.families import Family

FAMILIES: dict[str, Family] = {
    name: ALL[name] for name in ("qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")
}
"""Model type of the base -> row."""

MODULES = {
    "qwen3_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v2",
    "glm4_moe": "glm4_moe",
}
"""Model type of the base -> module below `sglang.srt.models` with the stock class of the architecture."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
"""Config fields that transformers' class does not write, because it has one way, and that SGLang asks for."""

GIVES_PAIR = ("deepseek_v2", "deepseek_v3")
"""Families whose layers give (hidden_states, indices of sparse attention); these have none."""
