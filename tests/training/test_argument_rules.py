"""Arguments of transformers: each is honoured, or refused in one line; none is silently
overruled.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from fcsd.api.trainer import FCSDTrainer
from fcsd.api.trainer_inputs import TrainerInputs
from fcsd.base.errors import UserError
from fcsd.parallel.launch import join_launch
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.argument_rules import MAY_CHANGE_ARGUMENTS, REFUSED
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.ready_trainer import fit_to_engine
from tests.reference.tiny import tiny_model
from tests.support import user_error

DECIDES = {
    # the batch, and how many of them there are
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    # the learning rate
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    # the optimiser
    "weight_decay", "optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "neftune_noise_alpha",
    # how numbers are rounded
    "bf16", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "full_determinism",
    # the order of the data
    "seed", "data_seed", "train_sampling_strategy",
}  # fmt: skip
"""Arguments that the weights depend on."""


def test_every_argument_of_transformers_is_in_one_table() -> None:
    tables = [set(REFUSED), MAY_CHANGE_ARGUMENTS, DECIDES]
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields - set.union(*tables) == set()
    assert sum(map(len, tables)) == len(set.union(*tables))


OTHER_VALUES: dict[str, Any] = {
    "fp16": True, "label_smoothing_factor": 0.1, "auto_find_batch_size": True, "save_only_model": True,
    "use_liger_kernel": True, "liger_kernel_config": {"rope": True}, "bf16_full_eval": True, "fp16_full_eval": True,
    "fsdp": "full_shard", "fsdp_config": {"min_num_params": 1}, "deepspeed": {"zero_optimization": {"stage": 3}},
    "parallelism_config": object(), "average_tokens_across_devices": False, "logging_nan_inf_filter": True,
    "remove_unused_columns": True, "label_names": ["answers"], "length_column_name": "size",
    "save_on_each_node": True, "use_cache": True, "debug": "underflow_overflow",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_without_a_meaning_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    with user_error(rf"^FCSDConfig: {name}: has no meaning here; \w") as caught:
        FCSDConfig(str(tmp_path), **{name: OTHER_VALUES[name]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_steps": 5, "num_train_epochs": 2}, "num_train_epochs: 2 has no meaning with max_steps 5"),
        ({"max_steps": 5, "warmup_steps": 6}, r"warmup_steps \(6\) is more than max_steps \(5\)"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "'constant' has no warm-up; use 'constant_with_warmup'"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 0.1}, "'constant' has no warm-up"),
        (
            {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {"num_cycles": 2}},
            "the schedule 'constant_with_warmup' has no settings; leave them out",
        ),
        (
            {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_cycles": 2}},
            "the schedule 'linear' cannot be made with {'num_cycles': 2} .*unexpected keyword argument 'num_cycles'",
        ),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "the schedule 'cosine_with_min_lr' cannot be made with {}"),
        ({"train_sampling_strategy": "group_by_length"}, "'group_by_length' has no meaning here; rows have one"),
        ({"include_for_metrics": ["loss"]}, "include_for_metrics: 'loss' has no meaning here"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches and dispatch_batches"),
        ({"balance_loss_over": "batch"}, "balance_loss_over: 'batch' has no meaning without balance_loss_coefficient"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
            "activation_checkpointing_kwargs: re-entrant checkpointing is not supported, .*; set use_reentrant=False",
        ),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: must be greater than 0, got 0"),
        ({"num_train_epochs": 0}, "num_train_epochs: must be greater than 0, got 0; or set max_steps"),
        ({"save_strategy": "best", "metric_for_best_model": "kl"}, "save_strategy: 'best' needs an evaluation and"),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, "save_strategy: 'best' needs .* for example 'kl'"),
    ],
)  # fmt: skip
def test_arguments_of_which_one_overrules_the_other_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with user_error(rf"^FCSDConfig: .*{message}") as caught:
        FCSDConfig(str(tmp_path), **values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"max_steps": 5, "num_train_epochs": 3.0},
        {"num_train_epochs": 2},
        {"lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 0.1},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
        {"lr_scheduler_type": "step", "lr_scheduler_kwargs": {"milestones": [0.5]}, "warmup_steps": 2},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 0.2}, "max_steps": 9},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"factor": 0.5}, "eval_strategy": "epoch"},
        {"balance_loss_over": "batch", "balance_loss_coefficient": 0.1},
        {"dataloader_drop_last": True, "per_device_eval_batch_size": 4, "max_grad_norm": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_agree_are_taken(values: dict[str, Any], tmp_path: Path) -> None:
    FCSDConfig.of(FCSDConfig(str(tmp_path), **values))


def test_plain_arguments_of_transformers_are_taken_with_all_their_defaults(
    tmp_path: Path,
) -> None:
    config = FCSDConfig.of(TrainingArguments(str(tmp_path), use_cpu=True))
    assert config.per_device_train_batch_size == 8 and not config.logging_nan_inf_filter
    with user_error("label_smoothing_factor: has no meaning here"):
        FCSDConfig.of(
            TrainingArguments(str(tmp_path), use_cpu=True, label_smoothing_factor=0.1)
        )


def test_arguments_that_are_set_later_are_checked_as_those_of_the_constructor(
    tmp_path: Path,
) -> None:
    config = FCSDConfig(str(tmp_path), warmup_steps=0.1, metric_for_best_model="kl")
    assert FCSDConfig.of(config) is config
    config.label_smoothing_factor = 0.1
    with user_error("label_smoothing_factor: has no meaning here"):
        FCSDConfig.of(config)


@pytest.mark.parametrize(
    ("library", "name"), [("transformers", "HfArgumentParser"), ("trl", "TrlParser")]
)
def test_the_parsers_of_transformers_and_trl_read_it_from_a_command_line(
    library: str, name: str, tmp_path: Path
) -> None:
    make_parser = getattr(importlib.import_module(library), name)
    line = (
        "--layers last:90% --mlp first:1 --temperature 2 --objective jsd --no_packing"
        " --freeze_routers --lr_scheduler_type step --lr_scheduler_kwargs"
        """ {"milestones":[0.5],"gamma":0.1} --columns {"text":"content"}"""
    )
    arguments = ["--output_dir", str(tmp_path), *line.split()]
    (config,) = make_parser(FCSDConfig).parse_args_into_dataclasses(arguments)
    assert (config.layers, config.mlp) == ("last:90%", "first:1")
    assert (config.temperature, config.packing, config.freeze_routers) == (
        2,
        False,
        True,
    )
    assert config.columns == {"text": "content"}
    assert config.lr_scheduler_kwargs == {"milestones": [0.5], "gamma": 0.1}
    (plain,) = make_parser(FCSDConfig).parse_args_into_dataclasses(arguments[:4])
    assert plain == FCSDConfig(str(tmp_path), layers="last:90%")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {
                "batch_size_tokens": 256,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 3,
            },
            (
                "batch_size_tokens: 256 are 4 micro-batches of 2 x max_length 32 tokens"
                " on 1 processes, but gradient_accumulation_steps is 3; leave one of"
                " them out"
            ),
        ),
        (
            {"batch_size_tokens": 128, "per_device_train_batch_size": 8},
            (
                "batch_size_tokens: 128 are 4 rows of max_length 32 for each of 1"
                " processes, but per_device_train_batch_size is 8; leave it out, or make"
                " the batch larger"
            ),
        ),
    ],
)
def test_a_batch_in_tokens_and_another_in_rows_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        TrainerInputs(FCSDConfig(str(tmp_path), max_length=32, **values), join_launch())
    assert str(caught.value) == message


def test_a_batch_in_tokens_and_the_same_one_in_rows_agree(tmp_path: Path) -> None:
    values = {
        "batch_size_tokens": 256,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    args, launch = FCSDConfig(str(tmp_path), max_length=32, **values), join_launch()
    for _ in range(2):  # as of two trainers with the same arguments
        TrainerInputs(args, launch)
        fit_to_engine(args, args.sections(), launch)
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (
            2,
            4,
        )


@pytest.mark.parametrize("objective", ["sft", "kl"])
def test_a_models_own_loss_of_the_routers_is_refused_unless_the_experts_are_balanced(
    objective: str, tmp_path: Path
) -> None:
    from fcsd.pipeline.tiny.models import tiny_tokenizer

    ids = list(range(3, 19))
    rows = [{"input_ids": ids, "labels": ids, "position_ids": [*range(16)]}] * 2

    def trainer(**settings: Any) -> FCSDTrainer:
        model = tiny_model("qwen3_moe", vocab_size=300)
        model.config.output_router_logits = True
        arguments = FCSDConfig(
            str(tmp_path), objective=objective, layers="all", max_length=16, **settings
        )
        return FCSDTrainer(
            model, arguments, train_dataset=rows, processing_class=tiny_tokenizer(300)
        )

    with user_error(
        r"^output_router_logits: true in the model's config .*; set"
        r" balance_loss_coefficient to"
    ):
        trainer()
    assert trainer(balance_loss_coefficient=0.01).step_loss.balance is not None


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
@pytest.mark.parametrize(
    "kwargs",
    [None, {}, {"preserve_rng_state": True}, {"use_reentrant": False}],
    ids=str,
)
def test_the_balance_is_in_the_gradient_with_whatever_checkpointing_is_asked_for(
    kwargs: dict[str, Any] | None, tmp_path: Path
) -> None:
    def norm(**settings: Any) -> float:
        trainer = balanced(tmp_path, **settings)
        trainer.train()
        return float(trainer.state.log_history[0]["grad_norm"])

    plain = norm()
    assert plain > 2 * norm(balance_loss_coefficient=1e-6)  # the loss is seen
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        assert norm(**{name: True, f"{name}_kwargs": kwargs}) == pytest.approx(plain)


def test_a_model_that_checkpoints_its_layers_reentrantly_is_not_trained(
    tmp_path: Path,
) -> None:
    trainer = balanced(tmp_path)
    trainer.model.activation_checkpointing_enable({"use_reentrant": True})
    with user_error(r"^\w+: re-entrant checkpointing is not supported, .*False"):
        trainer.train()
    trainer.model.activation_checkpointing_enable({"use_reentrant": False})
    trainer.train()


def test_a_model_that_cannot_checkpoint_its_layers_is_named(tmp_path: Path) -> None:
    with user_error(
        r"^activation_checkpointing: \w*JetMoe\w* does not support it; leave it out"
    ):
        balanced(
            tmp_path,
            "jetmoe",
            activation_checkpointing=True,
            balance_loss_coefficient=None,
        )


def balanced(folder: Path, family: str = "qwen3_moe", **settings: Any) -> FCSDTrainer:
    """Return a trainer of one step whose loss is mostly the balance of the experts."""
    ids = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {
        "objective": "ce", "layers": "all", "max_length": 12, "max_steps": 1, "per_device_train_batch_size": 4,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "balance_loss_coefficient": 100.0,
    }  # fmt: skip
    return FCSDTrainer(
        tiny_model(family, vocab_size=300),
        FCSDConfig(str(folder), **arguments | settings),
        train_dataset=[{"input_ids": row} for row in ids.tolist()],
        processing_class=tiny_tokenizer(300),
    )


def test_what_says_how_a_model_is_loaded_or_moved_is_refused_where_that_is_done_already(
    tmp_path: Path,
) -> None:
    model = tiny_model("qwen3_moe", vocab_size=300)

    def trainer(settings: dict[str, Any], **arguments: Any) -> FCSDTrainer:
        return FCSDTrainer(
            model, FCSDConfig(str(tmp_path), layers="all", **settings), **arguments
        )

    with user_error(
        "model_init_kwargs: applies only to a model given by its path, but model is a"
    ):
        trainer({"model_init_kwargs": {"dtype": "bfloat16"}})
    with user_error(
        r"^FCSDConfig: teacher_model_init_kwargs: .* but teacher was left out"
    ):
        trainer({"teacher_model_init_kwargs": {"dtype": "bfloat16"}})
