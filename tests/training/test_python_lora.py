"""FCSDTrainer trains the adapters that a recipe trains, and leaves the model with them
merged.
"""

from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fcsd.api.trainer import FCSDTrainer
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, load_model
from fcsd.training.fcsd_config import FCSDConfig
from tests.support import Bench, history, json_lines, same_tensors, user_error

peft = pytest.importorskip("peft", reason="needs peft: pip install 'fcsd[lora]'")
# peft 0.21 reads a property that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"]}


def trainer_of(
    bench: Bench, folder: str, model: Any = None, **changes: Any
) -> FCSDTrainer:
    rows = datasets.Dataset.from_list(json_lines(bench.rows))
    settings: dict[str, Any] = {
        "layers": "all", "max_steps": 12, "max_length": 32, "batch_size_tokens": 128,
        "per_device_train_batch_size": 2, "learning_rate": 1e-3, "warmup_steps": 2, "seed": 0, "logging_steps": 1,
        "save_steps": 4, "disable_tqdm": True,
    }  # fmt: skip
    names = ("optimizers", "eval_dataset", "teacher", "peft_config")
    given = {name: changes.pop(name) for name in names if name in changes}
    return FCSDTrainer(
        model if model is not None else str(bench.base),
        FCSDConfig(str(bench.folder / folder), **settings | changes),
        train_dataset=rows,
        **{"peft_config": peft.LoraConfig(**LORA), **given},
    )


def curve(history: list[dict[str, Any]]) -> list[float]:
    return [entry["kl"] for entry in history if "kl" in entry]


def test_it_trains_the_adapters_that_a_recipe_trains_to_the_last_bit(
    bench: Bench,
) -> None:
    path = bench.recipe("recipe", lora=LORA, teacher={"backend": "adapter_off"})
    assert main(["distill", str(path)]) == 0
    left = bench.folder / "recipe" / "distill"
    trainer = trainer_of(bench, "python")
    before = {
        name: value.clone()
        for name, value in trainer.model.state_dict().items()
        if ".lora_" not in name
    }
    trainer.train()
    assert curve(trainer.state.log_history) == curve(history(bench, "recipe"))
    for name, value in before.items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    trainer.save_model()
    saved = bench.folder / "python"
    for name in ("adapter/adapter_model.safetensors", "model.safetensors"):
        expected = load_file(
            left / name if name.startswith("adapter") else left / "model" / name
        )
        assert same_tensors(load_file(saved / name), expected), name
    # Saving has merged a copy: the training may go on, and evaluate.
    AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    assert any(".lora_" in name for name in trainer.model.state_dict())


def test_adapters_continue_from_a_checkpoint_to_the_same_weights_on_the_same_model(
    bench: Bench,
) -> None:
    def model() -> Any:
        return load_model(bench.base, connectivity=Connectivity("all"))

    whole = trainer_of(bench, "whole", model(), layers=None)
    whole.train()
    rest = trainer_of(bench, "rest", model(), layers=None)
    checkpoint = str(bench.folder / "whole" / "checkpoint-4")
    rest.train(resume_from_checkpoint=checkpoint)
    assert same_tensors(rest.model.state_dict(), whole.model.state_dict())
    # The weights under the adapters are in no checkpoint.
    other = model()
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    with user_error(r"made with other settings \(model: "):
        trainer_of(bench, "rest", other, layers=None).train(checkpoint)
    wider = peft.LoraConfig(**LORA | {"r": 4})
    with user_error(r"peft_config\.r: 2 -> 4"):
        trainer_of(bench, "rest", model(), layers=None, peft_config=wider).train(
            checkpoint
        )


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"target_modules": ["no_such"]}, {}, "^peft_config: peft cannot adapt .*no_such"),
        ({"target_modules": ["lm_head"]}, {}, "^peft_config: target_modules: names the head"),
        ({"modules_to_save": ["lm_head"]}, {}, "^peft_config: modules_to_save: is .'lm_head'.; only adapters"),
        ({"bias": "all"}, {}, "^peft_config: bias: is 'all'; .*: use 'none'"),
        ({"init_lora_weights": "pissa"}, {}, "^peft_config: init_lora_weights: is 'pissa'"),
        ({"layer_replication": [(0, 2), (1, 2)]}, {}, "^peft_config: layer_replication: is"),
        (
            {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"},
            {},
            "^peft_config: peft cannot merge .*aLoRA does not",
        ),
        (3, {}, "^peft_config: an int; a peft.LoraConfig is needed"),
        ({}, {"freeze_routers": True}, "^FCSDConfig: freeze_routers: has no meaning with peft_config"),
        (
            {},
            {"optimizers": (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), None)},
            "^optimizers: peft_config makes the parameters to train",
        ),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_trained_are_refused_before_data_are_read(
    bench: Bench,
    config: Any,
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr("fcsd.api.trainer_inputs.given_rows", read)
    lora = peft.LoraConfig(**LORA | config) if isinstance(config, dict) else config
    with user_error(message) as caught:
        trainer_of(bench, "run", peft_config=lora, **settings)
    assert "\n" not in str(caught.value)


def test_the_teacher_is_the_same_model_and_the_held_out_kl_falls(bench: Bench) -> None:
    held_out = [{"messages": [{"role": "user", "content": "1 + 1"},
                              {"role": "assistant", "content": "2 is it"}]}] * 4  # fmt: skip
    trainer = trainer_of(bench, "run", eval_dataset=held_out, learning_rate=1e-2)
    assert trainer.placed_teacher.model is trainer.model
    before = trainer.evaluate()["eval_kl"]
    trainer.train()
    assert trainer.evaluate()["eval_kl"] < before
