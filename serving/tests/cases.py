"""Which families the tests run on, and how much of each. Standard library only: fcsd's
Python makes the checkpoints, the engine's reads them.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fcsd_sglang.families import FAMILIES as IN_SGLANG

BREADTH = bool(os.environ.get("FCSD_SERVING_BREADTH"))
"""Whether every connectivity of every family is made and run."""
MANY = (
    "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "instella_moe", "llama4_text", "glm4_moe", "gpt_oss",
    "qwen3_next",
)  # fmt: skip
"""Families of which every connectivity is always made, and all and gap are run."""
FEW = (
    "ernie4_5_moe", "minimax_m2", "granitemoe", "granitemoeshared", "granitemoehybrid", "gemma4_text", "gemma4",
    "lfm2_moe", "qwen3_5_moe_text", "qwen3_5_moe", "mimo_v2_flash", "nemotron_h", "mixtral", "olmoe", "llama4",
)  # fmt: skip
"""Families of which one rank runs all layers; the rest needs FCSD_SERVING_BREADTH=1."""
ONLY_IN_SGLANG = ("hunyuan_v1_moe",)
"""vLLM runs all layers of it in its Transformers backend."""
MTP = ("deepseek_v3", "glm4_moe", "qwen3_next")
"""Families whose MTP layers draft (vLLM 0.32.0 on a CPU crashes with those of Qwen3.5,
converted or not).
"""
WRAPPERS = ("qwen3_5_moe", "gemma4", "llama4")
"""Those of them whose layers are those of another one, and run on one rank only."""
LAYERS = ("all", "half", "gap")
FULL = ("attention_full", "mlp_full")
IN_SGLANG_CASES = [
    *(
        f"{family}-{connectivity}"
        for family in IN_SGLANG
        for connectivity in ("original", *LAYERS, *FULL)
    ),
    *(f"{family}-mixed" for family in ("deepseek_v2", "glm4_moe")),
]
"""The checkpoints of `make test-sglang`."""
