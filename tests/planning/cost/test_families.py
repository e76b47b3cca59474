"""Plans of every family: each layer's matrices are in its steps, the experts compute what
tokens chose, and every phase has a time.
"""

import math
from pathlib import Path

import pytest

from fcsd.model.connectivity.stack import decoder_layers, is_one_of
from fcsd.model.families import FAMILIES
from fcsd.planning.cost.exact import compared
from fcsd.planning.cost.planned import Planned, PlanSettings, prepare
from tests.reference.tiny import TINY, tiny_config, tiny_model
from tests.support import few

# One of each way in which layers are followed: plainly, several streams, one branch a
# layer, indexers, linear attention, and experts that loop over data.
KINDS = {
    "qwen3_moe", "deepseek_v4", "nemotron_h", "glm5_next", "qwen4_exp_text", "step3p7", "dbrx", "jetmoe",
}  # fmt: skip
LENGTH, ROWS = 24, 2
ELSEWHERE = {"jetmoe"}
"""Its block of experts has no module of their own, and its attention has experts, too."""
BIASES = {"gpt_oss", "muse_spark"}
"""Their experts have biases, or a norm, which no matmul reads."""


def planned(folder: Path, **settings: object) -> Planned:
    return prepare(
        PlanSettings.model_validate(
            {"model": str(folder), "gpu": "h100", "gpus_per_node": 2, "batch": ROWS, "length": LENGTH}
            | settings
        )
    )  # fmt: skip


@pytest.mark.parametrize("model_type", few(sorted(TINY), kinds=KINDS))
def test_the_layers_of_every_family_are_priced_in_every_phase(
    model_type: str, tmp_path: Path
) -> None:
    tiny_config(model_type, tie_word_embeddings=False).save_pretrained(tmp_path)
    family = FAMILIES[model_type]
    model = tiny_model(model_type, tie_word_embeddings=False)
    stack = decoder_layers(model, family)
    train = planned(tmp_path)
    work = train.work
    assert work.num_parameters == sum(p.numel() for p in model.parameters())
    for layer, module in zip(work.layers, stack, strict=True):
        block = getattr(module, family.moe)
        assert layer.moe == is_one_of(block, family.moe_block)
        # No matrix is left out, and none is read twice; convolutions are read by
        # kernels, or by modules. An expert's weights include its biases.
        matrices = convolutions = 0
        for name, parameter in module.named_parameters():
            if "vision_moe" not in name:  # the experts of images
                in_experts = layer.moe and "experts" in name.split(".")
                if "conv" in name:
                    convolutions += parameter.numel()
                elif parameter.ndim > 1 or in_experts:
                    matrices += parameter.numel()
        steps = {name: step for name, step in layer.steps.items() if step.weights}
        read = sum(step.weights for step in steps.values())
        if model_type not in ELSEWHERE:
            # Jamba does not call one of its smallest, dt_proj, as a module.
            least = 0.99 * matrices if model_type == "jamba" else matrices
            assert least <= read <= matrices + convolutions
        attention = [name for name in steps if name.startswith("attention")]
        one_branch = family.layout == "blocks"
        assert bool(attention) == (
            not one_branch or not is_one_of(block, (family.moe_block, family.mlp_block))
        )
        assert ("mlp" in steps) == (not layer.moe and not (one_branch and attention))
        # Each token chooses K of the E experts, with two operations for each element of
        # their matrices.
        if layer.moe and model_type not in ELSEWHERE:
            experts = layer.work("experts")
            share = work.experts_per_token / work.num_experts
            chosen = 2 * share * ROWS * LENGTH * experts.weights
            biases = 1 if model_type in BIASES else 0
            assert chosen * (1 - 0.05 * biases) <= experts.flops <= chosen
    for phase in ("train", "prefill", "decode"):
        plan = train if phase == "train" else planned(tmp_path, phase=phase)
        times = compared(plan)
        assert math.isfinite(times["speed_up"]) and times["regular_s"] > 0
        assert (plan.cached > 0) == (phase != "train")
