"""FSDP2, ZeRO-3 and expert parallelism on two gloo ranks train what one process trains,
and no rank has a whole model.
"""

import contextlib
import importlib.util
import io
import itertools
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.strict import refuse
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_model, load_model
from fcsd.model.load import ModelFolder
from fcsd.parallel import launch as launch_module
from fcsd.parallel.engine import (
    Engine,
    checkpoints_activations,
    precision_rules,
    requested_engine,
)
from fcsd.parallel.launch import Launch, gathered_once, is_sharded, join_launch
from fcsd.parallel.parts import first_row
from fcsd.parallel.place import load_for_launch
from fcsd.parallel.shard import shard_student, shard_teacher, zero_settings
from fcsd.training.config import TrainConfig
from fcsd.training.losses.head import attach_loss_head, final_hidden
from fcsd.training.prepare import freeze_embeddings_and_head
from fcsd.training.teachers.base import ModelTeacher
from tests.float64 import ROUNDINGS, in_float64
from tests.losses import objective_of
from tests.reference.ranks import import_what_deepspeed_imports, run_ranks
from tests.reference.tiny import X, gradients_of, tiny_config, tiny_model
from tests.support import (
    ROOT,
    Bench,
    few,
    history,
    trained_weights,
    user_error,
    write_as,
)

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed: pip install 'fcsd[deepspeed]'",
)
ENGINES = ["fsdp2", pytest.param("zero3", marks=NEEDS_DEEPSPEED)]
EP = ["--expert-parallel", "2"]


def environment(config: Path) -> dict[str, str]:
    """Return the variables with which `accelerate launch --config_file CONFIG` starts
    its processes.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import (
        _validate_launch_command,
        launch_command_parser,
    )
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    args = launch_command_parser().parse_args(
        ["--config_file", str(config), "-m", "fcsd"]
    )
    args, *_ = _validate_launch_command(args)
    if args.use_deepspeed:
        fields = load_config_from_file(str(config)).deepspeed_config
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        variables = prepare_deepspeed_cmd_env(args)[1]
        import_what_deepspeed_imports()
    else:
        variables = prepare_multi_gpu_env(args)
    return {
        name: value
        for name, value in variables.items()
        if os.environ.get(name) != value
    }


def bytes_on_rank(model: torch.nn.Module) -> dict[str, int]:
    """Return the bytes of each parameter that this rank holds between steps."""
    sizes = {}
    for name, parameter in model.named_parameters():
        local: Any = parameter
        if hasattr(local, "ds_tensor"):
            local = local.ds_tensor
        elif hasattr(local, "to_local"):
            local = local.to_local()
        sizes[name] = local.numel() * local.element_size()
    return sizes


def launched(
    rank: int, variables: dict[str, str], commands: list[list[str]], ends_at: int | None
) -> list[tuple[int, str]]:
    """Run commands on this rank as a launch with these variables; return (exit status,
    lines printed as errors) of each.

    ends_at: the first command is interrupted, on all ranks, in the step after this one.
    """
    from accelerate.state import AcceleratorState

    from fcsd.training.trainer import DistillTrainer

    os.environ.update(variables)
    # the parent may have run alone before
    AcceleratorState._reset_state(reset_partial_state=True)
    multiprocessing.process.current_process()._config["daemon"] = (
        False  # a cache has a worker that reads ahead
    )
    compute = DistillTrainer.compute_loss

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == ends_at:
            DistillTrainer.compute_loss = compute  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    if ends_at is not None:
        DistillTrainer.compute_loss = interrupted  # type: ignore[method-assign]  # a fork of its own
    ends = []
    for command in commands:
        captured = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stderr(captured):
            warnings.simplefilter("ignore")  # DeepSpeed's
            status = main(command)
        text = captured.getvalue()
        ends.append((status, text[-2000:] if status else ""))
    return ends


def import_what_a_training_imports() -> None:
    """Import before forking what would otherwise take each rank two seconds."""
    importlib.import_module("fcsd.pipeline.distill")
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed")


def outcomes(
    name: str,
    *commands: list[str],
    world: int = 2,
    ends_at: int | None = None,
    **variables: str,
) -> list[list[tuple[int, str]]]:
    """Run `commands` one after another under configs/NAME.yaml, on `world` forked ranks."""
    environ = (
        environment(ROOT / "configs" / f"{name}.yaml")
        | {"DS_ACCELERATOR": "cpu"}
        | variables
    )
    import_what_a_training_imports()
    return run_ranks(launched, world, environ, list(commands), ends_at, timeout_s=240)


def launch(name: str, *commands: list[str], **options: Any) -> list[int]:
    """Return the exit statuses of `commands`, which succeed on all ranks or were
    interrupted on all.
    """
    ranks = outcomes(name, *commands, **options)
    statuses = [[status for status, _ in rank] for rank in ranks]
    assert all(row == statuses[0] for row in statuses), ranks
    assert set(statuses[0]) <= {0, 130}, ranks
    return statuses[0]


def compare(bench: Bench, one: str, two: str) -> None:
    """Check for the same loss curve and weights, up to the order of floating-point
    sums.
    """
    for a, b in zip(history(bench, one), history(bench, two), strict=True):
        for key in ("step", "loss", "kl", "learning_rate", "teacher_entropy"):
            assert a[key] == pytest.approx(b[key], rel=1e-3), (key, a, b)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)
    left, right = (
        load_file(bench.folder / n / "distill" / "model" / "model.safetensors")
        for n in (one, two)
    )
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("engine", [*ENGINES, "ep"])
def test_two_ranks_train_what_one_process_trains(bench: Bench, engine: str) -> None:
    """With early stopping, whose work all ranks share: the best weights are kept in
    parts, and the final model is whole.
    """
    stopping = bench.choice if engine == "fsdp2" else bench.early_stopping
    changes = {"early_stopping": stopping | {"every_steps": 4, "min_delta": 0.5}}
    command = ["distill", str(bench.recipe("two", **changes))]
    command += EP if engine == "ep" else []
    assert launch(f"cpu_2_{engine}", command) == [0]
    assert main(["distill", str(bench.recipe("one", **changes))]) == 0
    compare(bench, "one", "two")
    one, two = (
        read_json(bench.folder / name / "distill" / "manifest.json")["results"]
        for name in ("one", "two")
    )
    assert one.keys() == two.keys() and one["best_step"] == two["best_step"] == 12
    stopped = [
        read_json(bench.folder / name / "distill" / "scores.json")
        for name in ("one", "two")
    ]
    assert stopped[0] == stopped[1] and len(stopped[0]["points"]) == 4
    assert files(bench.folder / "two" / "distill") == files(
        bench.folder / "one" / "distill"
    )


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.breadth
@pytest.mark.parametrize("engine", few([*ENGINES, "ep"], 1))
def test_a_run_that_was_ended_continues_to_the_last_bit_on_as_many_ranks(
    bench: Bench, engine: str
) -> None:
    options = EP if engine == "ep" else []
    ended, whole = (
        ["distill", str(bench.recipe(name)), *options] for name in ("ended", "whole")
    )
    codes = launch(f"cpu_2_{engine}", ended, ended, whole, ends_at=6)
    assert codes == [130, 0, 0]
    assert trained_weights(bench, "whole") == trained_weights(bench, "ended")
    assert [p["loss"] for p in history(bench, "whole")] == [
        p["loss"] for p in history(bench, "ended")
    ]


@pytest.mark.parametrize("engine", few([*ENGINES, "ep"], 1))
def test_with_bf16_float32_weights_are_trained_in_bfloat16(
    bench: Bench, engine: str
) -> None:
    train = {
        "max_steps": 4, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
    }  # fmt: skip
    train |= {"warmup_steps": 2, "logging_steps": 1, "save_steps": 2}
    changes: dict[str, Any] = {"train": train | {"bf16": True}}
    if engine == "ep":  # loaded in its dtype, and then cast
        changes["model"] = {"path": str(bench.base), "dtype": "bfloat16"}
    command = ["distill", str(bench.recipe("half", **changes))]
    command += EP if engine == "ep" else []
    assert launch(f"cpu_2_{engine}", command, ends_at=3) == [130]
    assert main(["distill", str(bench.recipe("one", train=train))]) == 0
    checkpoint = bench.folder / "half" / "distill" / "checkpoints" / "checkpoint-2"
    stored = [
        load_file(path) for path in sorted(checkpoint.glob("state-*.safetensors"))
    ]
    assert len(stored) == 2
    assert {tensor.dtype for part in stored for tensor in part.values()} == {
        torch.float32
    }
    whole = load_file(bench.base / "model.safetensors")
    assert sum(
        x.numel() for part in stored for n, x in part.items() if "|" not in n
    ) == sum(x.numel() for x in whole.values())
    # They moved by less than a bfloat16 rounding step, so they are not rounded.
    assert any(
        not torch.equal(x, x.bfloat16().float())
        for part in stored
        for x in part.values()
    )
    logged = [
        p
        for p in read_json(checkpoint / "trainer_state.json")["log_history"]
        if "loss" in p
    ]
    for half, one in zip(logged, history(bench, "one"), strict=False):
        assert half["kl"] != one["kl"]
        assert half["kl"] == pytest.approx(one["kl"], rel=0.05)


SHARED_BY_ALL = {"train": {
    "max_steps": 10, "batch_size_tokens": 128, "per_device_train_batch_size": 1, "learning_rate": 1e-3,
    "warmup_steps": 2, "logging_steps": 1, "save_steps": 2, "gradient_checkpointing": True,
}}  # fmt: skip


@pytest.mark.breadth
def test_a_run_continues_under_another_engine_and_number_of_ranks_with_the_same_data(
    bench: Bench,
) -> None:
    """Two copies, four shards (in two replicas), ZeRO-3 on two ranks, one process: ten
    steps in four launches.
    """
    command = ["distill", str(bench.recipe("many", **SHARED_BY_ALL))]
    mesh = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}  # fmt: skip
    assert launch("cpu_2", command, ends_at=2) == [130]
    assert launch("cpu_2_fsdp2", command, ends_at=4, world=4, **mesh) == [130]
    if importlib.util.find_spec("deepspeed") is not None:
        assert launch("cpu_2_zero3", command, ends_at=6) == [130]
    assert launch("cpu_2_fsdp2", command, ends_at=8) == [130]
    assert main(command) == 0
    assert main(["distill", str(bench.recipe("one", **SHARED_BY_ALL))]) == 0
    compare(bench, "one", "many")


@pytest.mark.parametrize("engine", few(ENGINES, 1))
def test_a_spread_teacher_fills_a_cache_that_one_process_and_two_train_on_alike(
    bench: Bench, engine: str
) -> None:
    teacher = {
        "backend": "cache",
        "cache": str(bench.folder / "cache"),
        "spot_check_rows": 2,
    }
    train = {
        "max_steps": 4, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 1, "logging_steps": 1,
    }  # fmt: skip
    two, one = (
        str(bench.recipe(name, teacher=teacher, train=train)) for name in ("two", "one")
    )
    assert launch(
        f"cpu_2_{engine}", ["run", two, "--only", "cache-teacher"], ["distill", two]
    ) == [0, 0]
    assert main(["distill", one, "--set", "teacher.spot_check_rows=60"]) == 0
    compare(bench, "one", "two")


@pytest.mark.parametrize("engine", ["fsdp2", "ep"])
def test_adapters_on_spread_weights_are_refused_before_anything_is_loaded(
    bench: Bench, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcsd.pipeline.distill.load_for_launch", None)
    command = ["distill", str(bench.recipe("r", lora={"r": 4}))]
    command += EP if engine == "ep" else []
    ((first, one),), ((second, other),) = outcomes(f"cpu_2_{engine}", command)
    assert first == second == 2
    assert "lora: adapters on weights that are sharded over ranks" in one + other


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_every_configuration_and_it_asks_for_what_its_name_says(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "zero3" in config.stem and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install 'fcsd[deepspeed]'")
    variables = environment(config)
    for name, value in {**variables, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    names = {"gpu_1": "ddp", "cpu_2": "ddp", "ep_8": "ddp", "cpu_2_ep": "ddp"}
    engine = requested_engine(16 if "2x8" in config.stem else 8, torch.device("cpu"))
    assert engine.name == names.get(
        config.stem, "zero3" if "zero3" in config.stem else "fsdp2"
    )
    assert engine.replicas == (2 if "2x8" in config.stem else 1)
    refuse(*precision_rules(TrainConfig(bf16=True), engine))
    if engine.name == "zero3":
        kinds = zero_settings()
        offload = "cpu" if "offload" in config.stem else "none"
        assert (
            kinds["offload_optimizer"]["device"]
            == kinds["offload_param"]["device"]
            == offload
        )


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (FSDP | {"FSDP_VERSION": "1"}, "FSDP version 1 is not supported; set fsdp_version: 2"),
        (FSDP | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "NO_WRAP would gather the whole model at once; set TRANSF"),
        (FSDP | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "SIZE_BASED_WRAP would gather"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "train.gradient_checkpointing decides"),
        (FSDP | {"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16 is not supported; .* train.bf16: true"),
        (FSDP | MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
         "dp_replicate_size 3 x dp_shard_size 2 is not the number of processes, 8"),
        (FSDP | MESH | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size 2 is not supported"),
        (MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "8"}, "parallelism_config needs distributed_type: FSDP"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM is not supported"),
        pytest.param(
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "DS_ACCELERATOR": "cpu",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            },
            "DeepSpeed zero_stage 2 is not supported; set zero_stage: 3",
            marks=NEEDS_DEEPSPEED,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_launch_that_cannot_work_is_refused_in_one_line(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with user_error(message) as error:
        requested_engine(8, torch.device("cpu"))
    assert "\n" not in str(error.value)


def test_a_precision_that_recipe_and_launch_do_not_agree_on_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with user_error(
        r"train.dtype bfloat16: ZeRO-3 keeps float32 weights .* train.bf16: true"
    ):
        refuse(*precision_rules(TrainConfig(dtype="bfloat16"), Engine("zero3")))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    refuse(*precision_rules(TrainConfig(bf16=True), Engine("fsdp2")))
    with user_error(r"mixed_precision bf16, the recipe train.bf16 false"):
        refuse(*precision_rules(TrainConfig(), Engine("fsdp2")))


def test_a_layer_class_of_another_model_is_refused() -> None:
    engine = Engine("fsdp2", layer_classes=("LlamaDecoderLayer",))
    with user_error(
        r"cls_to_wrap LlamaDecoderLayer: .* are Qwen2MoeDecoderLayer; leave the key"
    ):
        shard_student(
            model_of("untied"), Launch(torch.device("cpu"), engine), TrainConfig()
        )


def test_more_processes_than_a_machine_has_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accelerate import PartialState

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    PartialState._reset_state()
    with user_error(
        "8 processes were started on this machine, which has 2 devices; set num_proc"
    ):
        join_launch()


def test_activation_checkpointing_is_on_from_a_size_on_unless_the_recipe_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("untied")
    assert not checkpoints_activations(None, model)
    assert checkpoints_activations(True, model)
    monkeypatch.setattr("fcsd.parallel.engine.CHECKPOINTING_FROM", 1000)
    assert checkpoints_activations(None, model)
    assert not checkpoints_activations(False, model)


def model_of(kind: str) -> Any:
    model = tiny_model(
        "qwen2_moe",
        num_hidden_layers=3,
        num_experts=3 if kind == "odd" else 4,
        tie_word_embeddings=kind == "tied",
    )
    if kind == "tied":
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def on_rank(engine: str, build: Any) -> tuple[Any, Launch]:
    """Return the model with which this rank of a sharded run starts, and its launch."""
    from accelerate.state import AcceleratorState

    warnings.simplefilter("ignore")  # DeepSpeed's; in a separate fork
    os.environ.update(
        environment(ROOT / "configs" / f"cpu_2_{engine}.yaml")
        | {"DS_ACCELERATOR": "cpu"}
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    own = join_launch()
    if own.loads_weights:
        return build(), own
    with torch.device("meta"):
        empty = build()
    assert all(parameter.is_meta for parameter in empty.parameters())
    return empty, own


def teacher_on_rank(
    rank: int, engine: str, kind: str, rows: torch.Tensor
) -> tuple[Any, ...]:
    model, own = on_rank(engine, lambda: model_of(kind))
    head = shard_teacher(model, own)
    assert shard_teacher(model, own) is head
    batch = {"input_ids": rows[rank : rank + 1], "labels": rows[rank : rank + 1]}
    batch["position_ids"] = torch.arange(rows.shape[1])[None]
    # the second rank keeps nothing
    batches = [dict(batch), batch | {"labels": torch.full_like(batch["labels"], -100)}]
    ModelTeacher(model, head).prepare(batches)
    body = bytes_on_rank(model.model)
    return (
        head.weight.detach(), batches[0]["teacher_hidden"], batches[1]["teacher_hidden"].shape, body,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", few(["untied", "tied"], 1))
def test_no_rank_holds_more_of_the_teacher_than_its_part_and_the_head(
    engine: str, kind: str
) -> None:
    rows = X
    whole = model_of(kind)
    ranks = run_ranks(teacher_on_rank, 2, engine, kind, rows)
    sizes = {
        name: parameter.numel() * 4
        for name, parameter in whole.model.named_parameters()
    }
    for rank, (head, hidden, none, body) in enumerate(ranks):
        assert torch.equal(head, whole.lm_head.weight)
        assert body.keys() == sizes.keys()
        for name, size in sizes.items():
            # 99 rows are 50 and 49; ZeRO fills up
            assert body[name] <= size / 2 + whole.config.hidden_size * 4, (rank, name)
        expected = final_hidden(whole, rows[rank : rank + 1], None, None)[:-1]
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
        assert none == (0, whole.config.hidden_size)
    assert all(
        ranks[0][3][name] + ranks[1][3][name] >= size for name, size in sizes.items()
    )


def step_of(
    model: Any, rows: torch.Tensor, keep: torch.Tensor, teacher: Any
) -> torch.Tensor:
    hidden = final_hidden(teacher, rows, None, keep)
    outputs = model(
        input_ids=rows,
        keep=keep,
        objective=objective_of("kl"),
        teacher_hidden=hidden,
        teacher_head=teacher.lm_head,
    )
    return outputs["loss"]


def student_of(kind: str) -> Any:
    model = model_of("tied" if kind == "tied" else "untied")
    # layers of several classes with one name
    convert_model(model, Connectivity({"last": 2}))
    if kind == "frozen":
        freeze_embeddings_and_head(model)
    attach_loss_head(model)
    return model.train()


def student_on_rank(
    rank: int, engine: str, kind: str, rows: torch.Tensor, keep: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor], dict[str, int], set[str]]:
    """Return (loss of this rank, gradients, bytes of each parameter, modules that are
    gathered together).
    """
    model, own = on_rank(engine, lambda: student_of(kind))
    teacher = tiny_model("qwen2_moe", seed=1, num_hidden_layers=3, num_experts=4)
    shard_student(model, own, TrainConfig())
    sizes, mine = (
        bytes_on_rank(model),
        (rows[rank : rank + 1], keep[rank : rank + 1], teacher),
    )
    if engine == "fsdp2":
        from torch.distributed.fsdp import FSDPModule

        loss = step_of(model, *mine)
        loss.backward()
        named = model.named_parameters()
        gradients = {
            name: p.grad.full_tensor() for name, p in named if p.grad is not None
        }
        units = {
            name
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
        }
        return float(loss.detach()), gradients, sizes, units
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    wrapped, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=1.0
        ),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero_settings(),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    loss = step_of(wrapped, *mine)
    wrapped.backward(loss)
    named = wrapped.module.named_parameters()
    gradients = {name: safe_get_full_grad(p) for name, p in named if p.requires_grad}
    units = {
        name
        for name, module in model.named_modules()
        if getattr(module, "_z3_leaf", False)
    }
    return float(loss.detach()), gradients, sizes, units


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", few(["untied", "tied", "frozen"], 1))
def test_a_spread_student_has_the_gradients_of_a_whole_one_also_where_a_rank_keeps_nothing(
    engine: str, kind: str
) -> None:
    rows = X
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1] = False
    whole, teacher = (
        student_of(kind),
        tiny_model("qwen2_moe", seed=1, num_hidden_layers=3, num_experts=4),
    )
    loss = step_of(whole, rows, keep, teacher) / 2  # the mean over two ranks
    loss.backward()
    expected = gradients_of(whole)
    ranks = run_ranks(student_on_rank, 2, engine, kind, rows, keep)
    # DeepSpeed has no float64; the unit is the rounding of float32 in one process.
    whole.double().zero_grad()
    with in_float64():
        (step_of(whole, rows, keep, teacher.double()) / 2).backward()
    rounding = max(
        float((whole.get_parameter(name).grad - value).abs().max())
        for name, value in expected.items()
    )
    assert [results[0] for results in ranks] == [
        pytest.approx(2 * float(loss.detach()), rel=1e-5),
        0.0,
    ]
    for _, gradients, sizes, units in ranks:
        assert {
            name for name, value in gradients.items() if value.abs().sum() > 0
        } <= expected.keys()
        assert "lm_head.weight" not in gradients if kind == "frozen" else True
        for name, value in expected.items():
            assert (
                (gradients[name] - value).abs().max() < ROUNDINGS * rounding < 1e-3
            ), name
        assert (
            sum(sizes.values()) <= sum(p.numel() for p in whole.parameters()) * 4 * 0.51
        )
        layers = {f"model.layers.{i}" for i in range(3)}
        assert units >= (
            layers if engine == "fsdp2" else {f"{layer}.mlp" for layer in layers}
        )


def scored_on_rank(
    rank: int, rows: torch.Tensor
) -> list[tuple[list[torch.Tensor], int, list[bool]]]:
    """Return for memory without and with space for all weights: the outputs of three
    passes and the loss of a step after them, the number of gathers in the three passes,
    and whether weights are sharded inside the block, after it, and after the step.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    model, launch = on_rank("fsdp2", lambda: student_of("untied"))
    shard_student(model, launch, TrainConfig())
    gathers, gather, made = [], group.foreach_all_gather, []
    group.foreach_all_gather = lambda *args: (gathers.append(1), gather(*args))[1]
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    for room in (2 * whole, 2 * whole * 1.2):  # of two ranks
        launch_module.available_memory = lambda room=room: int(room)  # type: ignore[assignment]
        model.eval()
        with torch.no_grad(), gathered_once(model, launch.ranks):
            outputs = [
                model(input_ids=rows, objective="hidden")["hidden"].clone()
                for _ in range(3)
            ]
            held, count = [is_sharded(model.model)], len(gathers)
        held.append(is_sharded(model.model))
        loss = step_of(
            model.train(), rows, torch.ones_like(rows).bool(), model_of("untied")
        )
        loss.backward()
        made.append(
            ([*outputs, loss.detach()], count, [*held, is_sharded(model.model)])
        )
        model.zero_grad()
        gathers.clear()
    return made


def test_weights_are_gathered_once_for_a_score_where_they_fit_and_freed_behind_it():
    rows = X
    for none, once in run_ranks(scored_on_rank, 2, rows):
        for one, other in zip(none[0], once[0], strict=True):
            assert torch.equal(one, other)
        # A pass frees three layers and the embedding, but not the final norm; the head
        # is not run here.
        assert none[1] == 3 * 4 + 1 and once[1] == 4 + 1
        assert none[2] == [True] * 3 and once[2] == [False, True, True]


def written_on_rank(rank: int, folder: Path) -> None:
    model, own = on_rank("fsdp2", lambda: model_of("untied"))
    shard_student(model, own, TrainConfig())
    write_as(model, folder, torch.bfloat16, own)


def test_a_spread_student_is_left_whole_in_the_dtype_that_it_came_in(
    tmp_path: Path,
) -> None:
    run_ranks(written_on_rank, 2, tmp_path)
    loaded, state = (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        model_of("untied").state_dict(),
    )
    assert loaded.dtype == torch.bfloat16
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name].to(torch.bfloat16)), name


def with_mtp_written_on_rank(rank: int, original: Path, folder: Path) -> None:
    model, own = on_rank("fsdp2", lambda: load_model(original, weights=rank == 0))
    shard_student(model, own, TrainConfig())
    write_as(model, folder, torch.float32, own)


def test_a_spread_student_keeps_the_mtp_layers_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    tiny_model("deepseek_v3", num_hidden_layers=2).save_pretrained(
        tmp_path / "original"
    )
    tensors = load_file(tmp_path / "original" / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(3, 5).to(torch.float16)
    save_file(tensors, tmp_path / "original" / "model.safetensors", {"format": "pt"})
    run_ranks(with_mtp_written_on_rank, 2, tmp_path / "original", tmp_path / "left")
    files = (tmp_path / "left").glob("*.safetensors")
    left = {name: value for file in files for name, value in load_file(file).items()}
    assert left.keys() == tensors.keys()
    assert all(torch.equal(left[name], value) for name, value in tensors.items())


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("configuration", "options"),
    few([("cpu_2_ep", EP), pytest.param("cpu_2_zero3", [], marks=NEEDS_DEEPSPEED)], 1),
    ids=["ep", "zero3"],
)
def test_the_trainings_of_a_sweep_share_a_launch_and_a_spread_teacher(
    bench: Bench, configuration: str, options: list[str]
) -> None:
    sweep = {
        "batch_size_tokens": [128], "learning_rate": [1e-3, 2e-3], "steps": 2, "warmup_steps": 1, "last_steps": 1,
    }  # fmt: skip
    assert launch(
        configuration, ["sweep", str(bench.recipe("two", sweep=sweep)), *options]
    ) == [0]
    assert main(["sweep", str(bench.recipe("one", sweep=sweep))]) == 0
    two, one = (
        read_json(bench.folder / name / "sweep" / "sweep.json")["candidates"]
        for name in ("two", "one")
    )
    for spread, alone in zip(two, one, strict=True):
        assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-3)


@pytest.mark.breadth
def test_a_model_from_scratch_is_that_of_the_first_rank(bench: Bench) -> None:
    keep = (
        "model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_experts",
        "num_attention_heads", "num_key_value_heads", "shared_expert_intermediate_size", "num_experts_per_tok",
        "max_position_embeddings",
    )  # fmt: skip
    config = {
        name: value
        for name, value in tiny_config("qwen2_moe").to_dict().items()
        if name in keep
    }
    data = {"train": [{"path": str(bench.rows)}], "max_length": 32}
    train = {
        "max_steps": 2, "batch_size_tokens": 128, "warmup_steps": 1, "learning_rate": 1e-3, "logging_steps": 1,
    }  # fmt: skip
    plan = {
        "config": config, "tokenizer": str(bench.base), "data": data, "train": train,
    }  # fmt: skip
    two, one = (
        str(bench.recipe(name, model=None, pretrain=plan)) for name in ("two", "one")
    )
    assert launch("cpu_2_fsdp2", ["pretrain", two]) == [0]
    assert main(["pretrain", one]) == 0
    left, right = (
        load_file(bench.folder / n / "pretrain" / "model" / "model.safetensors")
        for n in ("two", "one")
    )
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=1e-4, rtol=1e-2)


# ---- expert parallelism


@pytest.mark.breadth
def test_an_expert_parallel_run_continues_under_other_engines_and_comes_from_them(
    bench: Bench,
) -> None:
    """Runs on two ranks, under FSDP2, on four ranks in pairs that share the experts
    (each expert in two parts), and in one process.
    """
    command = ["distill", str(bench.recipe("many", **SHARED_BY_ALL))]
    assert launch("cpu_2_ep", [*command, *EP, "--overlap", "off"], ends_at=2) == [130]
    assert launch("cpu_2_fsdp2", command, ends_at=4) == [130]
    assert launch("cpu_2_ep", [*command, *EP], ends_at=8, world=4) == [130]
    assert main(command) == 0
    assert main(["distill", str(bench.recipe("one", **SHARED_BY_ALL))]) == 0
    compare(bench, "one", "many")


def loaded_on_rank(rank: int, folder: Path, size: int) -> dict[str, Any]:
    """Return name -> the first of this rank's rows, and their number; check that they
    are those of the checkpoint.
    """
    from accelerate.state import AcceleratorState

    os.environ.update(environment(ROOT / "configs" / "cpu_2_ep.yaml"))
    AcceleratorState._reset_state(reset_partial_state=True)
    launch = join_launch(expert_parallel=size)
    model = load_for_launch(ModelFolder(ModelConfig(path=str(folder)), folder), launch)
    whole = load_model(folder)
    for _ in range(2):  # the runs of a sweep share it
        assert torch.equal(shard_teacher(model, launch).weight, whole.lm_head.weight)
    rows = {}
    for (name, parameter), expected in zip(
        model.named_parameters(), whole.parameters(), strict=True
    ):
        local, start = parameter.to_local(), first_row(parameter)
        assert torch.equal(local, expected[start : start + len(local)]), name
        rows[name] = (start, len(local))
    return rows


@pytest.mark.parametrize(
    ("world", "size", "held"), few([(2, 2, 2), (4, 2, 1), (4, 4, 1)], 2)
)
def test_a_rank_holds_whole_experts_of_its_own(
    tmp_path: Path, world: int, size: int, held: int
) -> None:
    model_of("untied").save_pretrained(tmp_path)
    ranks = run_ranks(loaded_on_rank, world, tmp_path, size)
    for name in ranks[0]:
        rows = sorted(rank[name] for rank in ranks)
        if ".experts." in name:
            assert rows == [(start, held) for start in range(0, 4, held)]
        else:
            assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(rows)), name


def test_a_model_whose_experts_cannot_be_spread_is_refused(
    bench: Bench, tmp_path: Path
) -> None:
    tiny_model("llama4_text").save_pretrained(tmp_path / "llama4")
    model_of("odd").save_pretrained(tmp_path / "odd")
    for folder, message in (
        ("llama4", "has no `ep_plan`"),
        ("odd", "Cannot evenly shard 3 experts"),
    ):
        ranks = run_ranks(refusal, 2, tmp_path / folder)
        assert all(
            f"{folder}: cannot be sharded with --expert-parallel 2" in line
            for line in ranks
        )
        assert all(
            message in line and "Launch FSDP2 instead" in line and "\n" not in line
            for line in ranks
        )


def refusal(rank: int, folder: Path) -> str:
    from accelerate.state import AcceleratorState

    os.environ.update(environment(ROOT / "configs" / "cpu_2_ep.yaml"))
    AcceleratorState._reset_state(reset_partial_state=True)
    # fcsd has a plan for Llama 4, transformers has none.
    launch = join_launch(expert_parallel=2, overlap="off")
    with pytest.raises(UserError) as error:
        load_for_launch(ModelFolder(ModelConfig(path=str(folder)), folder), launch)
    return str(error.value)


def test_sizes_and_launches_that_expert_parallelism_cannot_have_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert requested_engine(8, cpu, 4) == Engine("ep", expert_parallel=4)
    assert requested_engine(8, cpu).name == "ddp"
    for size in (3, 0, -2, 16):
        with user_error(r"does not divide the number of proc.*, 8;"):
            requested_engine(8, cpu, size)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with user_error(r"launch with distributed_type: MULTI_GPU .*ep_8"):
        requested_engine(8, cpu, 4)


@pytest.mark.parametrize(
    "engine", few(["fsdp2", "", pytest.param("zero3", marks=NEEDS_DEEPSPEED), "ep"], 1)
)
def test_loads_are_balanced_over_all_ranks(
    bench: Bench, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loads are balanced over the whole step, of which each of two ranks has half: the
    loss is that of one process, up to rounding.
    """
    train = {
        "max_steps": 4, "batch_size_tokens": 128, "learning_rate": 1e-3, "warmup_steps": 1, "logging_steps": 1,
        "balance_loss_coefficient": 0.1, "balance_loss_over": "batch",
    }  # fmt: skip
    two = bench.recipe(
        "two",
        train=train | {"per_device_train_batch_size": 2},
        objective={"name": "sft"},
    )
    command = ["distill", str(two)] + (EP if engine == "ep" else [])
    assert launch(f"cpu_2_{engine}".rstrip("_"), command) == [0]
    one = bench.recipe(
        "one",
        train=train | {"per_device_train_batch_size": 4},
        objective={"name": "sft"},
    )
    assert main(["distill", str(one)]) == 0
    for a, b in zip(history(bench, "two"), history(bench, "one"), strict=True):
        for key in ("loss", "ce", "balance", "load_max_over_mean", "dead_experts"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), (key, a, b)
        # two MoE layers
        assert a["loss"] == pytest.approx(a["ce"] + 0.1 * a["balance"] * 2, rel=1e-4)
    cut = bench.recipe(
        "one",
        train=train | {"per_device_train_batch_size": 2},
        objective={"name": "sft"},
    )
    capsys.readouterr()
    assert main(["distill", str(cut)]) == 2
    assert "train.per_device_train_batch_size: 4 -> 2" in capsys.readouterr().err


@pytest.mark.parametrize("variable", [("WORLD_SIZE", "2"), ("LOCAL_RANK", "3")])
def test_a_launch_without_a_launcher_is_refused(
    variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import PartialState

    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(*variable)
    PartialState._reset_state()
    with user_error(f"launch .*{'='.join(variable)}.* cannot be joined.*unset"):
        join_launch()
