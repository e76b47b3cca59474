"""The families that the package serves in SGLang, with names as in `fcsd_vllm`.
Standard library only.
"""

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
"""Model type of the base -> module below `sglang.srt.models` with the stock class of
the architecture.
"""

GIVES_PAIR = ("deepseek_v2", "deepseek_v3")
"""Families whose layers return (hidden_states, indices of sparse attention), although
these have no such indices.
"""

REFUSED = {
    "instella_moe": (
        "fcsd-serving: instella_moe: SGLang does not support its attention gate; serve"
        " it with vLLM and this plugin, or with AMD's fork of SGLang"
        " (github.com/AMD-AGI/FarSkip-Collective), which loads AMD's checkpoints and"
        " those of `fcsd convert --format amd`"
    )
}
"""Family that is not served -> the message about it."""
