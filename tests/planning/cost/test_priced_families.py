"""Plans of every family: each layer's matrices are in its steps, the experts compute what
tokens chose, and every phase has a time.
"""

import math
from pathlib import Path

import pytest

from fcsd.cli.main import main
from fcsd.model.connectivity.stack import decoder_layers, is_one_of
from fcsd.model.families import FAMILIES
from fcsd.planning.cost.exact import compared
from fcsd.planning.cost.planned import Planned, prepare
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.times import plan_times
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


@pytest.mark.parametrize(
    "model_type",
    few(
        sorted(TINY), kinds=KINDS & {"deepseek_v3", "gpt_oss", "llama4_text", "minimax"}
    ),
)
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
        matrices = convolutions = twice = 0
        for name, parameter in module.named_parameters():
            if "vision_moe" not in name:  # the experts of images
                in_experts = layer.moe and "experts" in name.split(".")
                if "conv" in name:
                    convolutions += parameter.numel()
                elif parameter.ndim > 1 or in_experts:
                    matrices += parameter.numel()
                if "v_proj_delayed" in name:  # zaya's also multiplies a row of zeros
                    twice += parameter.numel()
        steps = {name: step for name, step in layer.steps.items() if step.weights}
        read = sum(step.weights for step in steps.values())
        if model_type not in ELSEWHERE:
            # Jamba does not call one of its smallest, dt_proj, as a module.
            least = 0.99 * matrices if model_type == "jamba" else matrices
            assert least <= read <= matrices + convolutions + twice
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


@pytest.mark.parametrize(
    ("family", "options"),
    [("nemotron_h", "--layers moe"), ("qwen3_moe", "--layers last:1 --mlp full")],
)
def test_what_cannot_be_converted_to_is_no_plan(
    family: str, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    words = f"plan {tmp_path} --gpu h100 --phase decode {options}".split()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "change nothing" in error and error.count("\n") == 1


def test_a_layer_of_one_branch_has_one_sum_over_the_ranks(tmp_path: Path) -> None:
    """Nemotron-H: Mamba, experts, attention, experts; a mixer's sum is that of the shared
    expert behind it, beside the routed experts, whose hides beside the mixer behind them.
    """
    tiny_config("nemotron_h").save_pretrained(tmp_path)
    plan = planned(tmp_path, phase="decode")
    assert [layer.moe for layer in plan.work.layers] == [False, True, False, True]
    sent = plan.roofline.all_reduce(plan.work)
    side = plan.roofline.all_reduce(plan.work, "side")
    times = plan_times(plan)
    assert times["communication_s"] == pytest.approx(4 * sent)
    first, last = times["windows"]
    layers = plan.roofline.layers(plan.work, 1)
    mixer = layers[2]["attention a"] + layers[2]["attention b"]
    assert first["routed_s"] == pytest.approx(mixer) and last["routed_s"] == 0
    assert first["attention_s"] == pytest.approx(layers[1]["experts"])
    # All but the last one's on the side.
    assert times["overlapped_communication_s"] == pytest.approx(sent + 3 * side)
    # A mixer has no MLP, and experts no attention, whose kernels would take a while.
    assert layers[0]["mlp"] == 0 and layers[1]["attention b"] == 0


def test_a_wide_server_runs_a_mixer_with_the_experts_behind_it(tmp_path: Path) -> None:
    """Mamba, experts, attention, experts: the first dispatch runs beside all of Mamba,
    the second beside attention from its kernel on.
    """
    tiny_config("nemotron_h").save_pretrained(tmp_path)
    plan = planned(tmp_path, phase="decode", data_parallel=2)
    layers = plan.roofline.layers(plan.work, 2)
    first, last = plan_times(plan)["windows"]
    assert (first["layer"], last["layer"]) == (1, 3)
    mamba = layers[0]["attention a"] + layers[0]["attention b"]
    assert first["dispatch_s"] == pytest.approx(mamba)
    assert first["combine_s"] == pytest.approx(
        layers[1]["shared expert"] + layers[2]["attention a"]
    )
    assert last["dispatch_s"] == pytest.approx(layers[2]["attention b"])
    assert last["combine_s"] == pytest.approx(layers[3]["shared expert"])


@pytest.mark.breadth
def test_a_plan_says_that_fcsd_does_not_overlap_the_family_and_nothing_else_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for model_type in ("nemotron_h", "qwen3_next", "phimoe"):
        tiny_config(model_type).save_pretrained(tmp_path / model_type)
        words = ["plan", str(tmp_path / model_type), "--gpus-per-node", "2"]
        assert main(words) == 0
        printed = capfd.readouterr()
        says = "NOT IN FCSD: its training does not overlap nemotron_h, because each of"
        assert (says in printed.out) == (model_type == "nemotron_h")
        assert "NOT SERVED" not in printed.out
        says = "NOT SERVED: no engine runs phimoe with overlap"
        assert main([*words, "--phase", "decode", "--tp", "2"]) == 0
        served = capfd.readouterr().out
        assert (says in served) == ("NOT SERVED" in served) == (model_type == "phimoe")
        assert "NOT IN FCSD" not in served
        # transformers' advice on kernels is for those who run the model
        assert not printed.err
