"""PEFT LoRA on rewired models: attached before and after conversion, merged, saved,
loaded.
"""

import peft
import pytest
import torch

from fcsd.model.connectivity import (
    Connectivity,
    convert_model,
    farskip_layers,
    load_model,
)
from fcsd.model.families import FAMILIES
from tests.float64 import BOUND, error
from tests.reference.tiny import X, converted, gradients_of, logits, tiny_model
from tests.support import COMMON, few, user_error

EXPERTS = {family: f"{FAMILIES[family].moe}.experts.down_proj" for family in COMMON}

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),
    # For experts that a family has not fused, PEFT uses a pattern that then matches
    # nothing.
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
    ),
]


def lora(family, *, experts=True):
    """Return adapters on attention and on the fused experts."""
    return peft.LoraConfig(
        r=4,
        target_modules=["o_proj"],
        target_parameters=[EXPERTS[family]] if experts else None,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )


def with_adapters(model, config, seed=0):
    # both adapter matrices are random, so that adapters change the outputs
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("family", few(COMMON, 4))
def test_adapters_attached_before_and_after_the_conversion_are_the_same(family):
    after = with_adapters(converted(family), lora(family))
    before = with_adapters(tiny_model(family), lora(family))
    regular = logits(before)
    convert_model(before.get_base_model(), Connectivity("all"))
    assert farskip_layers(before.get_base_model()) == [0, 1, 2, 3]
    assert torch.equal(logits(before), logits(after))
    assert (logits(after) - regular).abs().max() > 0.5
    assert (logits(after) - logits(converted(family))).abs().max() > 0.5


@pytest.mark.parametrize("family", COMMON)
def test_a_wrapped_model_is_refused_and_the_message_names_the_way(family):
    model = with_adapters(tiny_model(family), lora(family))
    with user_error(
        r"convert before wrapping the model \(PEFT, FSDP, DDP\).*`get_base_model\(\)`"
    ):
        convert_model(model, Connectivity("all"))
    assert farskip_layers(model.get_base_model()) == []


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", few(COMMON, 4))
def test_merged_adapters_give_the_outputs_of_the_adapters(family, tmp_path):
    model = with_adapters(converted(family), lora(family))
    expected = logits(model)
    merged = model.merge_and_unload()
    assert type(merged).__name__ == f"FarSkip{FAMILIES[family].causal_lm}"
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert error(logits(merged), expected) < BOUND
    merged.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert farskip_layers(loaded) == [0, 1, 2, 3]
    assert error(logits(loaded), expected) < BOUND


@pytest.mark.parametrize("family", COMMON)
def test_only_adapters_have_gradients_and_checkpointing_does_not_change_them(family):
    model = with_adapters(converted(family), lora(family)).train()

    def step():
        model.zero_grad()
        model(input_ids=X, labels=X, use_cache=False).loss.backward()
        return gradients_of(model)

    plain = step()
    assert plain.keys() == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    base = model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    checkpointed = step()
    assert all(
        torch.equal(checkpointed[name], gradient) for name, gradient in plain.items()
    )


@pytest.mark.parametrize("family", few(COMMON, 4))
def test_saved_adapters_are_loaded_onto_a_rewired_model(family, tmp_path):
    model = with_adapters(converted(family), lora(family))
    model.save_pretrained(tmp_path)
    # warns of adapters that are missing
    loaded = peft.PeftModel.from_pretrained(converted(family), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), logits(converted(family)))


@pytest.mark.parametrize("family", few(COMMON, 4))
@pytest.mark.parametrize(
    "targets", ["all-linear", ["o_proj", "gate_proj", "up_proj", "down_proj"]]
)
def test_names_of_modules_mean_the_same_adapters_as_in_the_original(family, targets):
    """For experts that transformers has fused, PEFT translates names by model type."""

    def adapted(model):
        config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        try:
            adapters = with_adapters(model, config)
            logits(adapters)
        except (ValueError, AttributeError) as error:
            return str(error).split(":")[0]
        return {
            name: p.shape for name, p in adapters.named_parameters() if "lora_" in name
        }

    original = adapted(tiny_model(family))
    assert adapted(converted(family)) == original
    if family == "llama4_text" and targets == "all-linear":
        assert "tuple" in original, (
            "PEFT can adapt Llama 4's router now; delete this exception"
        )
