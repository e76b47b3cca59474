"""The families that the package serves in SGLang; their names are those of `fcsd_vllm`.
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
"""Families whose layers give (hidden_states, indices of sparse attention); these have none."""

REFUSED = {
    "instella_moe": (
        "fcsd-serving: instella_moe: SGLang has no place for its attention gate; serve"
        " it with vLLM and this plugin, or with AMD's fork of SGLang"
        " (github.com/AMD-AGI/FarSkip-Collective), which takes AMD's checkpoints and"
        " what `fcsd convert --format amd` writes"
    )
}
"""Family that is not served here -> the sentence that says so."""
