"""`fcsd estimate`: bytes against a real training's, operations against torch's counter
and by hand, published sizes.
"""

import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.moe as moe
import yaml
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fcsd.base.text import fit, size
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import FAMILIES
from fcsd.planning.cost.estimate import estimate
from fcsd.planning.cost.hardware import GPUS
from fcsd.planning.cost.memory import Layout, memory_parts
from fcsd.planning.cost.settings import Hardware
from fcsd.planning.cost.stand_ins import STAND_INS
from fcsd.planning.cost.table import estimate_table
from fcsd.planning.cost.trace import Setting, Trace, trace_step
from fcsd.planning.cost.tracker import PERSISTENT
from fcsd.recipe.load_recipe import load_recipe
from fcsd.training.config import TrainConfig, micro_batches
from fcsd.training.losses.head import attach_loss_head, final_hidden
from fcsd.training.teachers.config import AdapterConfig
from fcsd.training.teachers.lora import add_adapters
from tests.losses import objective_of
from tests.memory import (
    PLAIN,
    measured_by,
    peak_of_two_steps,
    peak_on_two_ranks,
    selected,
    small_model,
)
from tests.real_configs import real_folder
from tests.reference.tiny import TINY, tiny_config, tiny_model
from tests.support import (
    ROOT,
    UNLIKE,
    change_json,
    command_words,
    edited_json,
    few,
    run_command,
    skip_unavailable,
    user_error,
)
from tests.terminal import assert_readable

MEASURED = {
    "kl": PLAIN,
    "kl, checkpointing": replace(PLAIN, checkpointing=True, num_rows=6),
    "kl, one micro-batch": replace(PLAIN, accumulates=False),
    "jsd, frozen ends": replace(PLAIN, objective=objective_of("jsd"), freeze_embeddings_and_head=True),
    "sft": replace(PLAIN, objective=objective_of("sft"), num_rows=6),
    "kl+l2, checkpointing": replace(PLAIN, objective=objective_of("kl+l2", l2_coefficient=1.0), checkpointing=True),
    "kl, cached teacher": replace(PLAIN, teacher="cache", num_rows=6),
    "kl, lora, adapters off": replace(PLAIN, teacher="adapter_off", adapters=True, num_rows=6),
    "kl, lora, cached, checkpointing": replace(PLAIN, teacher="cache", adapters=True, checkpointing=True, num_rows=6),
}  # fmt: skip


SHARDED = {"fsdp2, kl, checkpointing": replace(PLAIN, checkpointing=True)}


def traced(setting: Setting, layers: Any = "all", **overrides: Any) -> Trace:
    return trace_step(
        lambda: small_model(**overrides),
        lambda model: (
            convert_model(model, Connectivity(layers)) if layers != "none" else None
        ),
        lambda model: decoder_layers(model, FAMILIES["qwen3_moe"]),
        setting,
        adapt=lambda model: add_adapters(
            model, AdapterConfig(), seed=0, dtype=torch.float32
        ),
    )


# ---- memory against a real training


def measure(name: str) -> int:
    if name in SHARDED:
        return peak_on_two_ranks(SHARDED[name])
    return peak_of_two_steps(MEASURED[name])


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, int]:
    return measured_by("tests.planning.cost.test_estimate", selected(request, "name"))


@pytest.mark.parametrize("name", few(MEASURED, 1))
def test_memory_is_that_of_a_real_training(name: str, measured: dict[str, int]) -> None:
    trace = traced(MEASURED[name])
    peak = sum(trace.peak.values())
    assert peak == pytest.approx(measured[name], rel=0.15)
    persistent = sum(trace.peak.get(kind, 0) for kind in PERSISTENT)
    moving = peak - persistent
    # Weights, gradients and moments are easy to get right; the rest must be right on
    # its own, too.
    assert moving == pytest.approx(measured[name] - persistent, rel=0.15, abs=6 << 20)


@pytest.mark.breadth
@pytest.mark.parametrize("name", SHARDED)
def test_memory_of_a_rank_is_that_of_a_real_training_in_shards(
    name: str, measured: dict[str, int]
) -> None:
    setting = replace(SHARDED[name], sharded=True)
    layout = Layout("fsdp2", 2, step_tokens=4 * setting.num_rows * setting.num_tokens)
    parts = memory_parts(traced(setting), setting, layout)
    total = sum(
        number
        for part, number in parts.items()
        if part not in ("fragmentation", "GPU context")
    )
    assert total == pytest.approx(measured[name], rel=0.15)


def test_persistent_bytes_are_those_of_a_count_by_hand() -> None:
    trace = traced(PLAIN)
    number = sum(parameter.numel() for parameter in small_model().parameters())
    assert trace.num_parameters == trace.num_trainable == number
    # and the buffers of the rotation
    assert trace.peak["student"] == pytest.approx(4 * number, rel=1e-4)
    assert trace.peak["optimizer"] == 8 * number
    assert trace.peak["gradients"] == 4 * number
    frozen = traced(replace(PLAIN, freeze_embeddings_and_head=True))
    assert number - frozen.num_trainable == trace.embeddings_and_head == 2 * 4096 * 256
    assert frozen.peak["optimizer"] == 8 * frozen.num_trainable


def test_checkpointing_keeps_layer_inputs_and_farskip_keeps_them_twice() -> None:
    rows, length, width, layers = 64, 128, 256, 5
    setting = replace(PLAIN, num_rows=rows, checkpointing=True)
    regular, farskip = traced(setting, "none"), traced(setting)
    assert (regular.num_pairs, farskip.num_pairs) == (0, layers - 1)
    # At the end of the forward pass, in the loss, only inputs are kept: one per layer,
    # two after a FarSkip layer.
    more = farskip.transient["activations"] - regular.transient["activations"]
    assert more == pytest.approx((layers - 1) * rows * length * width * 4, rel=0.02)
    kept = traced(replace(setting, checkpointing=False))
    assert sum(kept.peak.values()) > 2 * sum(farskip.peak.values())


def test_no_bytes_grow_with_vocabulary_times_tokens() -> None:
    setting = replace(PLAIN, num_rows=16)
    few, many = (
        traced(setting, vocab_size=size).transient["loss"] for size in (4096, 16384)
    )
    head = (16384 - 4096) * 256 * 4
    # the float32 gradient of the head, tiles of at least 128 tokens
    assert many - few < 1.1 * head + (32 << 20)


# ---- operations


def test_operations_are_those_that_torch_counts_in_a_real_step() -> None:
    overrides = {
        "vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    }  # fmt: skip
    # matmuls that torch counts; each token's experts, as grouped
    experts = {"experts_implementation": "batched_mm"}
    student, teacher = small_model(**overrides), small_model(**overrides).eval()
    convert_model(student, Connectivity("all"))
    for model in (student, teacher):
        model.set_attn_implementation("eager")
        model.set_experts_implementation(experts["experts_implementation"])
    attach_loss_head(student)
    ids = torch.randint(0, 512, (2, 32))
    positions, keep = torch.arange(32).expand(2, -1).contiguous(), torch.arange(64)
    counted = {}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden = final_hidden(teacher, ids, positions, keep)
    counted["teacher forward"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss = student(
            input_ids=ids, position_ids=positions, keep=keep, objective=objective_of("kl"), teacher_hidden=hidden,
            teacher_head=teacher.lm_head,
        )["loss"]  # fmt: skip
    counted["forward and loss"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counted["backward"] = counter.get_total_flops()

    trace = traced(replace(PLAIN, num_rows=2, num_tokens=32), **overrides)
    flops = {kind: sum(by.values()) for kind, by in trace.flops.items()}
    # torch has no formula for `addmm_`, with which the loss accumulates the head's
    # gradient.
    assert flops["loss"] == 8 * 64 * 64 * 512
    assert counted["teacher forward"] == flops["teacher forward"]
    assert counted["forward and loss"] == flops["activations"] + flops["loss"] * 3 // 4
    # Fused attention computes its scores once more in the backward pass: 2 B T T heads
    # head_dim per layer.
    again = 3 * 2 * 2 * 32 * 32 * 4 * 64
    assert counted["backward"] == flops["backward"] - again


def test_only_the_chosen_experts_count() -> None:
    one, two, more = (
        sum(sum(by.values()) for by in traced(PLAIN, **overrides).flops.values())
        for overrides in ({"num_experts_per_tok": 1}, {}, {"num_experts": 16})
    )
    tokens, expert, passes = 4 * 128, 3 * 256 * 256 * 5, 1 + 3
    assert two - one == 2 * tokens * expert * passes
    # eight more rows of each router
    assert more - two == 2 * tokens * 8 * 256 * 5 * passes


def test_recomputation_runs_the_layers_once_more() -> None:
    plain, checkpointed = traced(PLAIN), traced(replace(PLAIN, checkpointing=True))
    forward = sum(plain.flops["activations"].values())
    extra = sum(checkpointed.flops["backward"].values()) - sum(
        plain.flops["backward"].values()
    )
    assert extra == forward


# ---- published models


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "Qwen3-30B-A3B", **sections: Any) -> Path:
        model = {"path": str(real_folder(name, tmp_path / name))}
        values = {
            "name": "r", "output_dir": str(tmp_path / "run"), "model": model,
            "data": {"train": [{"path": "nowhere.jsonl"}], "max_length": 1024}, **sections,
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def own_setting_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace only the run's own setting: tracing with and without checkpointing, for the
    table, would take twice as long.
    """
    monkeypatch.setattr("fcsd.planning.cost.estimate.activation_bytes", lambda *_: None)


def few_layers(recipe: Path, number: int = 4) -> Path:
    """Return the same recipe with a config of a few layers, which is quick where the
    size does not matter.
    """
    folder = Path(yaml.safe_load(recipe.read_text())["model"]["path"])
    change_json(folder / "config.json", {"num_hidden_layers": number})
    return recipe


def estimated(path: Path, **hardware: Any) -> dict[str, Any]:
    """Return the facts of a recipe on GPUs with these options."""
    return estimate(load_recipe(path), Hardware(**hardware))


@pytest.mark.breadth
@pytest.mark.usefixtures("own_setting_only")
def test_qwen3_30b_needs_what_the_research_notes_say(
    recipe: Callable[..., Path],
) -> None:
    path = recipe(train={"bf16": True, "gradient_checkpointing": True})
    facts = estimated(path, gpu="h100", num_gpus=8, sharding="fsdp2")
    parts = facts["memory"]["parts"]
    # 8 GPUs: the student's 16 bytes per parameter are 61 GB on each, the teacher's 2
    # bytes are 7.6 GB.
    student = parts["student weights"] + parts["gradients"] + parts["optimizer states"]
    assert student / 1e9 == pytest.approx(61, rel=0.01)
    assert parts["teacher weights"] / 1e9 == pytest.approx(7.6, rel=0.01)
    per_token = facts["flops"]["per_token"]
    assert per_token["loss"] / 1e9 == pytest.approx(2.49, rel=0.01)
    # Without attention's scores, the full distillation with recomputation is 1.63 of 6
    # N, N = 3.04e9 active weights.
    scores = 4 * 1024 * 32 * 128 * 48
    assert (sum(per_token.values()) - scores * (1 + 1 + 3.5)) / (
        6 * 3.04e9
    ) == pytest.approx(1.63, abs=0.02)
    assert facts["hardware"]["supported"]


def test_a_parameter_takes_sixteen_bytes_with_fsdp2_and_eighteen_with_zero3(
    recipe: Callable[..., Path],
) -> None:
    path = few_layers(recipe(train={"bf16": True}))
    for sharding, each in (("fsdp2", 16), ("zero3", 2 + 4 + 4 + 8)):
        facts = estimated(path, gpu="h100", num_gpus=8, sharding=sharding)
        parts = facts["memory"]["parts"]
        names = ("student weights", "master weights", "gradients", "optimizer states")
        held = sum(parts.get(name, 0) for name in names)
        assert held == pytest.approx(each * facts["parameters"]["total"] / 8, rel=1e-6)
        assert ("master weights" in parts) == (sharding == "zero3")


@pytest.mark.usefixtures("own_setting_only")
def test_the_teachers_hidden_states_are_those_of_every_micro_batch_that_holds_them(
    recipe: Callable[..., Path],
) -> None:
    two = {"batch_size_tokens": 2 * 2 * 1024, "per_device_train_batch_size": 2}
    # The width of Qwen3-30B-A3B, in the dtype in which the student computes; the
    # objective, and how many of a step's two micro-batches are held at once.
    blocks = {"name": "kl+l2", "l2_coefficient": 1.0}
    for objective, number, bf16 in (
        ({"name": "kl"}, 2, True), ({"name": "kl"}, 2, False), (blocks, 1, True),
        (blocks | {"l2_until": 0.5}, 2, True),
    ):  # fmt: skip
        train = two | {"bf16": bf16}
        facts = estimated(
            few_layers(recipe(train=train, objective=objective), 2), gpu="h100"
        )
        each = 2 * 1024 * 2048 * (2 if bf16 else 4)
        assert facts["memory"]["parts"]["teacher hidden states"] == number * each


def test_an_average_of_the_weights_takes_four_bytes_a_parameter(
    recipe: Callable[..., Path],
) -> None:
    path = few_layers(recipe(train={"ema_decay": 0.99}))
    facts = estimated(path, gpu="h100", num_gpus=1, sharding="none")
    assert (
        facts["memory"]["parts"]["averaged weights"] == 4 * facts["parameters"]["total"]
    )
    facts = estimated(path, gpu="h100", num_gpus=8, sharding="fsdp2")
    assert (
        facts["memory"]["parts"]["averaged weights"]
        == 4 * facts["parameters"]["total"] // 8
    )


def test_the_disk_holds_twelve_bytes_a_parameter_and_checkpoint(
    recipe: Callable[..., Path],
) -> None:
    path = few_layers(
        recipe(train={"bf16": True, "max_steps": 3000, "save_total_limit": 2})
    )
    facts = estimated(path, gpu="h100", num_gpus=8, sharding="fsdp2")
    number, disk = facts["parameters"]["total"], facts["disk"]
    assert disk["total_bytes"] == 3 * 12 * number + 2 * number
    assert "3 checkpoints of " in estimate_table(facts)
    assert disk["host_copy_bytes"] == 12 * number
    assert "host memory   " in estimate_table(facts)
    for sharding, machines in (("fsdp2", 2), ("hsdp", 1)):
        facts = estimated(path, gpu="h100", num_gpus=16, sharding=sharding)
        assert facts["disk"]["host_copy_bytes"] == 12 * number // machines


@pytest.mark.usefixtures("own_setting_only")
def test_a_score_that_generates_gathers_the_weights_once_where_they_fit_beside_what_stays(
    recipe: Callable[..., Path],
) -> None:
    stopping = {"suite": "paper11", "task": "mbpp_plus"}
    path = few_layers(recipe(train={"bf16": True}, early_stopping=stopping))
    facts = estimated(path, gpu="h200", num_gpus=8, sharding="fsdp2")
    number, scoring = facts["parameters"]["total"], facts["scoring"]
    parts = facts["memory"]["parts"]
    head, context = parts["teacher head"], parts["GPU context"]
    # A rank has a share of 4 bytes per parameter, 8 for its moments and 2 for the
    # teacher, except the teacher's head.
    held = 12 * number // 8 + (2 * number - head) // 8 + head + context
    assert scoring["gathered_bytes"] == 2 * number and scoring["once"]
    assert scoring["free_bytes"] == pytest.approx(141e9 - held, abs=64)  # buffers
    # As a ring over a GPU's links inside a node: 7 of 8 parts come from others.
    assert scoring["seconds"] > 2 * number * 7 / 8 / 900e9
    assert "of weights once for a score" in estimate_table(facts)
    facts = estimated(path, gpu="h200", num_gpus=8, sharding="zero3")
    assert not facts["scoring"]["once"]
    assert "of weights for every token" in estimate_table(facts)
    facts = estimated(path, gpu="h200", num_gpus=8, sharding="none")
    assert facts["scoring"] is None


@pytest.mark.usefixtures("own_setting_only")
def test_own_text_is_part_of_a_step_and_takes_a_pass_for_each_of_its_tokens(
    recipe: Callable[..., Path],
) -> None:
    one = Hardware(gpu="h100", num_gpus=1, sharding="none")

    def facts(hardware: Hardware = one, **objective: Any) -> dict[str, Any]:
        path = few_layers(recipe(train={"bf16": True}, objective=objective))
        return estimate(load_recipe(path), hardware)

    plain, own = facts(), facts(own_text=0.5, own_text_tokens=100)
    assert plain["own_text"] is None and "own text" not in estimate_table(plain)
    settings, written = plain["settings"], own["own_text"]
    texts = settings["rows"] * settings["micro_batches"] / 2
    assert (written["texts"], written["tokens"]) == (texts, 100)
    assert written["batches"] == math.ceil(texts / 32)
    assert written["passes"] == 100 * written["batches"]
    # At least what the host needs for the four layers of every pass.
    assert written["seconds"][1] >= written["passes"] * 4 * 700e-6
    assert written["seconds"] == sorted(written["seconds"])
    with_, without = own["time"], plain["time"]
    assert with_["expected_s"] == pytest.approx(
        without["expected_s"] + written["seconds"][1]
    )
    assert "texts of 100 tokens per rank and step" in estimate_table(own)
    # half a row, where nothing limits it; twice the passes with half the batch
    assert facts(own_text=0.5)["own_text"]["tokens"] == settings["max_length"] // 2
    halves = facts(own_text=0.5, own_text_tokens=100, own_text_batch_size=16)
    assert halves["own_text"]["batches"] == math.ceil(texts / 16)
    for sharding, ranks, name in (
        ("zero3", 1, "ZeRO-3"),
        ("fsdp2", 2, "expert parallelism"),
    ):
        hardware = Hardware(
            gpu="h100", num_gpus=8, sharding=sharding, expert_parallel=ranks
        )
        (reason,) = facts(hardware, own_text=0.5)["refused"]
        assert f"a student under {name} cannot write" in reason
    spread = facts(Hardware(gpu="h100", num_gpus=8, sharding="fsdp2"), own_text=0.5)
    assert spread["refused"] == []


@pytest.mark.usefixtures("own_setting_only")
def test_text_that_the_original_writes_has_its_time_and_its_bytes_before_the_training(
    recipe: Callable[..., Path],
) -> None:
    written = {"max_new_tokens": 200, "prompt_tokens": 56, "batch_size": 64}
    source = {"path": "nowhere.jsonl", "max_examples": 1000}

    def facts(num_gpus: int = 1, **changes: Any) -> dict[str, Any]:
        sources = [source, source | {"written": written | changes}]
        path = few_layers(recipe(data={"train": sources, "max_length": 1024}))
        hardware = Hardware(gpu="h100", num_gpus=num_gpus, sharding="none")
        return estimate(load_recipe(path), hardware)

    found = facts()
    (text,) = found["written"]
    assert (text["source"], text["texts"], text["tokens"]) == (
        "data.train.1",
        1000,
        200,
    )
    # 1000 / 64, rounded up; a pass for each token
    assert (text["batches"], text["passes"]) == (16, 3200)
    # At least what the host needs for the four layers of every pass.
    assert text["seconds"][1] >= 3200 * 4 * 700e-6
    assert text["seconds"] == sorted(text["seconds"])
    # a number of six digits, "1" and two commas with a blank, four letters
    assert text["num_bytes"] == 1000 * 256 * (6 + 2 + 3 + 4)
    (row,) = [row for row in found["totals"] if row["stage"] == "text of the original"]
    assert row["tokens"] == 200_000
    assert row["expected_hours"] == pytest.approx(text["seconds"][1] / 3600)
    assert found["totals"].index(row) == 0
    table = estimate_table(found)
    assert "data.train.1: the original writes 1,000 texts of at most 200" in table
    # Ranks share the batches, and the pass of a batch reads the same weights.
    (shared,) = facts(num_gpus=8)["written"]
    assert (shared["batches"], shared["num_bytes"]) == (2, text["num_bytes"])
    assert shared["seconds"][1] == pytest.approx(text["seconds"][1] / 8, rel=0.01)
    # half the batch, twice the passes
    (halves,) = facts(batch_size=32)["written"]
    assert halves["passes"] == 2 * text["passes"]
    served = facts(server="http://localhost:8000/v1")
    assert served["written"][0]["seconds"] is None
    assert all(row["stage"] != "text of the original" for row in served["totals"])
    assert "behind its server" in estimate_table(served)


def test_attention_of_two_widths_runs_in_the_dtype_of_the_model_and_keeps_no_scores(
    recipe: Callable[..., Path],
) -> None:
    """By hand, DeepSeek-V2-Lite: 16 heads, of width 192 for queries and keys and 128
    for values.
    """
    path = few_layers(recipe("DeepSeek-V2-Lite", train={"bf16": True}), 2)
    facts = estimated(path, gpu="h200", num_gpus=8, sharding="fsdp2")
    assert facts["flops"]["float32_share"] < 0.01  # the routers
    longer = yaml.safe_load(path.read_text())
    longer["data"]["max_length"] = 2048
    longer["train"]["batch_size_tokens"] = 131072
    path.write_text(yaml.safe_dump(longer))
    twice = estimated(path, gpu="h200", num_gpus=8, sharding="fsdp2")
    more = (
        twice["flops"]["per_token"]["student forward"]
        - facts["flops"]["per_token"]["student forward"]
    )
    # two layers, a token's scores and their sums
    assert more == 2 * 2 * 16 * 1024 * (192 + 128)
    without = [
        each["memory"]["activations"]["without_checkpointing_bytes"]
        for each in (facts, twice)
    ]
    assert without[1] < 2.05 * without[0]  # scores would make it four times as much


def test_a_copy_a_node_needs_the_memory_of_eight_shards_and_sends_its_gradients_once_more(
    recipe: Callable[..., Path],
) -> None:
    path = few_layers(
        recipe(
            train={
                "bf16": True,
                "gradient_checkpointing": True,
                "batch_size_tokens": 131072,
            }
        )
    )
    plan = load_recipe(path)
    eight, sixteen, copies = (
        estimate(plan, Hardware(gpu="h100", num_gpus=count, sharding=sharding))
        for count, sharding in ((8, "fsdp2"), (16, "fsdp2"), (16, "hsdp"))
    )
    parts = [each["memory"]["parts"] for each in (eight, sixteen, copies)]
    for name in ("student weights", "gradients", "optimizer states", "teacher weights"):
        assert (
            parts[2][name]
            == parts[0][name]
            == pytest.approx(2 * parts[1][name], rel=1e-6)
        )
    # Gathers stay inside the node: half the micro-batches of eight ranks; shards of the
    # gradients cross the network.
    shard = 4 * eight["parameters"]["trained"] / 8
    slow = estimate(
        plan, Hardware(gpu="h100", num_gpus=16, sharding="hsdp", network_gb_s=0.001)
    )  # next to nothing of it is hidden
    sent = slow["settings"]["micro_batches"] * 2 * (1 / 2) * shard
    assert slow["time"]["sharding_s"] == pytest.approx(sent / (0.001e9 * 0.8), rel=2e-3)
    # A ring uses all network interfaces of a node: a second node makes a step faster,
    # not slower.
    assert sixteen["time"]["step_s"][0] < eight["time"]["step_s"][0]
    with user_error(r"--sharding hsdp: .* a multiple of 8, got 12"):
        estimate(plan, Hardware(gpu="h100", num_gpus=12, sharding="hsdp"))


@pytest.mark.usefixtures("own_setting_only")
def test_gradients_are_sent_in_the_dtype_in_which_they_are_summed(
    recipe: Callable[..., Path],
) -> None:
    """The network is so slow that next to nothing is hidden."""
    path = few_layers(recipe(train={"bf16": True}))
    facts = estimated(
        path, gpu="h100", num_gpus=16, sharding="fsdp2", network_gb_s=0.001
    )
    number, steps = facts["parameters"]["total"], facts["settings"]["micro_batches"]
    # The student is gathered twice in bfloat16, the second time without its head, and
    # the teacher once; gradients are float32.
    head = 151936 * 2048
    sent = (
        15 / 16 * steps * (2 * number + 2 * (number - head) + 2 * number + 4 * number)
    )
    assert facts["time"]["sharding_s"] == pytest.approx(
        sent / (8 * 0.001e9 * 0.8), rel=2e-3
    )


SHIPPED = {
    "qwen3-30b-a3b/distill": 8, "deepseek-v2-lite/distill": 8, "llama-4-scout/distill": 32, "studies/pretrain": 64,
    "qwen3-30b-a3b/economical": 8, "deepseek-v2-lite/economical": 8, "llama-4-scout/economical": 32,
}  # fmt: skip


@pytest.mark.usefixtures("own_setting_only")
@pytest.mark.parametrize("name", few(SHIPPED, 1))
def test_the_figures_in_the_shipped_recipes_are_those_of_the_estimate_without_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("llama-4"):
        skip_unavailable("llama4")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = ROOT / "recipes" / f"{name}.yaml"
    spread = 8 if "--expert-parallel 8" in path.read_text() else 1
    facts = estimated(
        path,
        gpu="h200",
        num_gpus=SHIPPED[name],
        sharding="fsdp2",
        expert_parallel=spread,
    )
    said = " ".join(
        line.removeprefix("#").strip()
        for line in path.read_text().splitlines()
        if line.startswith("#")
    )
    assert f"{facts['memory']['total_bytes'] / 2**30:.0f} GiB per rank" in said
    low, high = facts["time"]["step_s"]
    assert " s per step" not in said or f"{low:.2g} to {high:.2g} s per step" in said
    for row in facts["totals"]:
        if row["stage"] == "calibration":
            assert row["hours"][1] < 1 and "the calibration minutes" in said
            continue
        assert f"{row['hours'][0]:.0f} to {row['hours'][1]:.0f} hours" in said, row
    assert (
        " of disk" not in said
        or f"{size(facts['disk']['total_bytes'])} of disk" in said
    )


def test_of_a_recipe_that_only_pretrains_the_pretraining_is_estimated(
    recipe: Callable[..., Path],
) -> None:
    tiny = load_recipe("tiny/demo", ["pretrain.config.vocab_size=512"])
    whole = estimate(tiny, Hardware(gpu="h100", num_gpus=1))
    assert [row["stage"] for row in whole["totals"]][:3] == [
        "pretrain",
        "calibration",
        "distill",
    ]
    rewired = whole["flops"]["per_token"]["student forward"]
    # 16,384 tokens at 30 to 70 % of 66.9 TFLOP/s: forward passes, sums of 4 layers of
    # width 128 with two experts per token; solving the maps of 4 layers and two for
    # each of 8 experts; folding 0.9M weights.
    gram = 2 * 128**2  # one Gram matrix of 128 inputs, a token
    # two sides, both at once, two experts
    sums = 2 * 2 * gram + 2 * 256**2 + 2 * 256 * 128 + 2 * 2 * 2 * gram
    # Each is solved twice, the second time without some rows, on which two more
    # residuals are computed.
    one, both = (
        2 * (n**3 / 3 + 6 * n**2 * 128) + 2 * 2 * n**2 * 128 for n in (128, 256)
    )
    solved = 2 * one + both + 8 * 2 * one
    flops = 16_384 * (6 * rewired + 4 * sums) + 4 * solved + 2 * 128 * 0.9e6
    by_hand = flops / 66.9e12 / 3600
    assert whole["totals"][1]["hours"] == pytest.approx(
        [by_hand / 0.7, by_hand / 0.3], rel=0.01
    )
    study = yaml.safe_load((ROOT / "recipes" / "studies" / "pretrain.yaml").read_text())
    study["pretrain"]["config"]["num_hidden_layers"] = 2
    path = recipe()
    path.write_text(yaml.safe_dump(study))
    facts = estimated(path, gpu="h200", num_gpus=64, sharding="fsdp2")
    assert facts["run"] == "pretrain" and facts["settings"]["teacher"] is None
    assert [row["stage"] for row in facts["totals"]] == ["pretrain"]
    variant = estimate(
        load_recipe(path),
        Hardware(gpu="h200", num_gpus=64, sharding="fsdp2"),
        variant="farskip",
    )
    assert variant["run"] == "pretrain" and variant["memory"] == facts["memory"]


@pytest.mark.parametrize(
    ("rows", "batch", "max_length", "ranks", "ways"),
    [
        (1, 131072, 4096, 64, "a batch of 262144, or data.max_length 2048, or 32 processes"),
        (1, 65536, 4096, 32, "a batch of 131072, or data.max_length 2048, or 16 processes"),
        (4, 49152, 1024, 8, "per_device_train_batch_size 3"),
        (1, 1000, 64, 3, "a batch of 1152"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_cut_comes_with_what_fits(
    rows: int, batch: int, max_length: int, ranks: int, ways: str
) -> None:
    train = TrainConfig(batch_size_tokens=batch, per_device_train_batch_size=rows)
    with user_error(f"possible: {ways}$"):
        micro_batches(train, max_length, ranks)
    if match := re.search(r"max_length (\d+)", ways):
        assert micro_batches(train, int(match[1]), ranks)[0] == rows
    if match := re.search(r"(\d+) processes", ways):
        assert micro_batches(train, max_length, int(match[1]))[0] == rows


def test_other_trainings_of_a_run_whose_batch_cannot_be_cut_are_named(
    recipe: Callable[..., Path],
) -> None:
    sweep = {"batch_size_tokens": [1024, 4096], "learning_rate": [1e-3], "steps": 2}
    variants = {"short": {"train.batch_size_tokens": 5120}, "same": {"seed": 1}}
    train = {"batch_size_tokens": 2048, "max_steps": 4, "warmup_steps": 1}
    path = few_layers(recipe(train=train, sweep=sweep, variants=variants))
    facts = estimated(path, gpu="h200", num_gpus=2)
    first, second = facts["refused"]
    assert first.startswith("sweep.batch_size_tokens: 1024 is not a multiple of 2048")
    assert second.startswith(
        "variants.short: train.batch_size_tokens: 5120 is not a multiple of 2048"
    )
    assert second in estimate_table(facts)


def test_what_does_not_fit_comes_with_changes_until_it_does(
    recipe: Callable[..., Path],
) -> None:
    path = few_layers(
        recipe(
            train={
                "gradient_checkpointing": False,
                "per_device_train_batch_size": 4,
                "ema_decay": 0.999,
            }
        ),
        8,
    )
    facts = estimated(path, gpu="h100", num_gpus=1)
    assert not facts["memory"]["fits"]
    changes = facts["changes"]
    assert changes[0]["change"] == "train.gradient_checkpointing: true"
    assert changes[1]["change"] == "train.per_device_train_batch_size: 1"
    averaged = facts["memory"]["parts"]["averaged weights"]
    assert averaged == 4 * facts["parameters"]["trained"]
    assert changes[2]["change"] == (
        f"train.ema_decay: null ({size(averaged)} of averaged weights)"
    )
    assert changes[1]["total_bytes"] - changes[2]["total_bytes"] == averaged
    assert changes[3]["change"] == "teacher.backend: cache, filled in advance"
    assert changes[4]["change"].startswith("--sharding fsdp2 --gpus 8")
    assert [row["fits"] for row in changes] == [False] * (len(changes) - 1) + [True]
    assert all(row["supported"] for row in changes)
    text = estimate_table(facts)
    assert "DOES NOT FIT" in text and "supported" in text


def test_a_small_run_fits_and_whole_copies_on_two_ranks_add_buckets(
    recipe: Callable[..., Path],
) -> None:
    path = few_layers(recipe(), 2)
    one, two = (estimated(path, gpu="h200", num_gpus=number) for number in (1, 2))
    assert (
        one["memory"]["fits"] and one["changes"] == [] and one["hardware"]["supported"]
    )
    buckets = two["memory"]["parts"].pop("DDP buckets")
    assert buckets == 4 * one["parameters"]["trained"]
    assert "DDP buckets" not in one["memory"]["parts"]
    assert (
        one["settings"]["micro_batches"] == 2 * two["settings"]["micro_batches"] == 128
    )
    low, high = one["time"]["step_s"]
    assert low < high
    # The teacher computes in its student's float32.
    assert one["flops"]["float32_share"] == 1
    assert one["time"]["tokens_per_second"] == pytest.approx(
        [131072 / high, 131072 / low]
    )
    assert one["totals"][0]["hours"] == pytest.approx(
        [2000 * low / 3600, 2000 * high / 3600]
    )


@pytest.mark.usefixtures("own_setting_only")
def test_experts_that_run_without_being_chosen_are_an_assumption(
    recipe: Callable[..., Path],
) -> None:
    path = recipe("Llama-4-Scout-17B-16E")
    file = Path(yaml.safe_load(path.read_text())["model"]["path"]) / "config.json"
    with edited_json(file) as config:
        config["text_config"] |= {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}
        config["text_config"].pop("moe_layers", None)
    assert any(
        "although a token chooses only" in text
        for text in estimate(load_recipe(path))["assumptions"]
    )
    chosen = estimate(load_recipe(few_layers(recipe(), 2)))
    assert not any(
        "although a token chooses only" in text for text in chosen["assumptions"]
    )


def test_tokens_take_disk_and_time_once_for_all_trainings(
    recipe: Callable[..., Path],
) -> None:
    """By hand from docs/decisions.md: 53,374,976 tokens in 70 s are 762,500 per second;
    eight workers reach 6.1 million.
    """
    data = {"train": [{"path": "nowhere.jsonl"}], "max_length": 1024}
    path = few_layers(recipe(data=data, variants={"long": {"train.max_steps": 5000}}))
    plan = load_recipe(path)
    number = 5000 * plan.train.batch_size_tokens
    facts = estimate(plan, Hardware(gpu="h200"))
    assert facts["tokens"]["num_tokens"] == number
    assert facts["tokens"]["bytes"] == 5 * number
    assert facts["tokens"]["seconds"] == pytest.approx(
        [number / 6.1e6, number / 762_500], rel=1e-4
    )
    few, one = (f"{seconds / 60:,.2g}" for seconds in facts["tokens"]["seconds"])
    assert (
        f"tokens        {number:,} once for all trainings: {size(5 * number)} on disk,"
        f" {few} min with 8 processes, {one} with one" in estimate_table(facts)
    )


def test_half_the_utilisation_takes_the_matmuls_twice_the_time(
    recipe: Callable[..., Path],
) -> None:
    """Operations that move bytes take as long as before; a mask leaves out half of
    attention's pairs.
    """
    train = {"dtype": "bfloat16", "per_device_train_batch_size": 8}
    loaded = load_recipe(few_layers(recipe(train=train), 2))
    slow, fast = (
        estimate(loaded, Hardware(gpu="h200", mfu=mfu))["time"]
        for mfu in ((0.025, 0.05), (0.1, 0.1))
    )
    low, high = slow["step_s"]
    assert high - low == pytest.approx(2 * (low - fast["expected_s"]))
    assert fast["step_s"] == [fast["expected_s"]] * 2
    flops = estimate(loaded, Hardware(gpu="h200"))["flops"]["per_step"]
    # of the scores of two layers: teacher, forward, backward
    half = 131072 * 4 * 1024 * 32 * 128 * 2 * (1 + 1 + 2.5) / 2
    assert high - low == pytest.approx(
        (flops - half) * (1 / 0.025 - 1 / 0.05) / 989.4e12, rel=0.03
    )


@pytest.mark.parametrize(
    "train", [{"bf16": True, "gradient_checkpointing": False}, {"dtype": "bfloat16"}]
)
def test_no_matmul_of_a_bfloat16_run_is_in_float32(
    recipe: Callable[..., Path], train: dict[str, Any]
) -> None:
    """This includes the experts' matmuls under autocast."""
    assert (
        estimate(load_recipe(few_layers(recipe(train=train), 2)))["flops"][
            "float32_share"
        ]
        == 0
    )


def test_published_figures_are_plausible() -> None:
    for gpu in GPUS.values():
        assert gpu.float32_tflops < gpu.bf16_tflops < 5000 and gpu.source
        assert 20 <= gpu.memory_gb <= 400 and gpu.link_gb_s < gpu.memory_gb_s


# ---- the command


def test_the_command_prints_a_table_or_json(
    recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = few_layers(recipe(sweep={}, variants={"sft": {"objective.name": "sft"}}), 2)
    assert main(["estimate", str(path), "--gpus", "2", "--gpu", "mi300x"]) == 0
    text = capsys.readouterr().out
    assert_readable(fit(text, 80))
    for part in (
        "MI300X",
        "student weights",
        "DDP buckets",
        "tokens/s",
        "sweep, at most",
        "assumed:",
    ):
        assert part in text
    assert run_command("estimate", path, "--variant sft --json --mfu 0.2") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["run"] == "distill, variant sft" and facts["time"]["mfu"] == [0.2, 0.2]
    assert "teacher weights" not in facts["memory"]["parts"]
    assert len(facts["totals"]) == 1


def test_the_demo_is_estimated_before_anything_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = command_words(
        "estimate", ROOT / "recipes" / "tiny" / "demo.yaml", "--gpu l40s --json"
    )
    command += ["--set", "pretrain.config.vocab_size=512"]
    assert main([*command, "--pretrain"]) == 0
    pretrain = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    distill = json.loads(capsys.readouterr().out)
    assert pretrain["parameters"] == distill["parameters"]
    assert "teacher weights" in distill["memory"]["parts"]
    assert "teacher weights" not in pretrain["memory"]["parts"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--gpu", "h20"], r"--gpu h20: unknown GPU; allowed: a100, .*did you mean"),
        (["--gpus", "0"], r"--gpus: Input should be greater than or equal to 1, got 0"),
        (["--gpus", "3"],
         r"train.batch_size_tokens: 131072 is not a multiple of 3072 .*; possible: a batch of 132096, or 2 processes$"),
        (["--mfu", "fast"], r"--mfu: a range such as 0.1-0.25, or one number, got 'fast'"),
        (["--mfu", "0.5-0.1"], r"--mfu: 0.5-0.1: a range such as 0.1-0.25, within 0 and 1"),
        (["--expert-parallel", "3"], r"--expert-parallel 3: does not divide the 1 GPUs"),
        (["--gpus", "2", "--expert-parallel", "2"], r"--expert-parallel 2: shards all other .* add --sharding fsdp2"),
        (["--network-gb-s", "0"], r"--network-gb-s: Input should be greater than 0, got 0"),
        (["--variant", "sft"], r"has no variant 'sft'; allowed: none"),
        (["--pretrain"], r"has no `pretrain` section"),
        (["--set", "model.path=nowhere/at/all"], r"nowhere/at/all: no such folder"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    command: list[str],
    message: str,
    recipe: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = few_layers(recipe(), 2)
    assert main(["estimate", str(path), *command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fcsd estimate: error: ") and error.count("\n") == 1
    assert re.search(message, error), error


def test_a_model_whose_config_transformers_refuses_is_an_error(
    recipe: Callable[..., Path],
) -> None:
    path = few_layers(recipe(), "four")  # type: ignore[arg-type]
    with user_error(r"config.json: transformers refuses it: .*num_hidden_layers"):
        estimate(load_recipe(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1-0.25", (0.1, 0.25)), ("0.2", (0.2, 0.2)), ("1", (1.0, 1.0))],
)
def test_a_range_or_a_number_is_a_utilisation(
    text: str, value: tuple[float, float]
) -> None:
    assert Hardware.from_options({"mfu": text}).mfu == value


def of_other_streams(config: Any) -> int:
    """Return the operations by which all layers rewired exceed the original, because
    their branches read other streams.
    """
    if config.model_type == "inkling2_text":
        # Where a block begins, its MLP reads a mix without the new block's own stream:
        # neither its score nor its product.
        blocks = -(-config.num_hidden_layers // config.n_layers_per_attn_res_block)
        return int(blocks * -2 * 2 * config.hidden_size)
    if config.model_type not in ("deepseek_v4", "glm5_next_text"):
        return 0
    # Where a branch and its residual connection see different streams, a hyper-connection
    # with a mix runs on both, and the streams without the branch are mixed once more.
    size, width = config.hc_mult, config.hc_mult * config.hidden_size
    connection = 2 * width * (2 + size) * size
    mix = 2 * width * size
    # attention behind a layer with experts, the MLPs of all layers
    behind_experts = config.mlp_layer_types[:-1]
    attentions = len(behind_experts) - behind_experts.count("dense")
    return int(config.num_hidden_layers + attentions) * (connection + mix)


@pytest.mark.usefixtures("own_setting_only")
@pytest.mark.parametrize("model_type", few(sorted(TINY), kinds=UNLIKE))
def test_the_step_of_every_family_is_followed_without_data(
    model_type: str, tmp_path: Path
) -> None:
    tiny_config(model_type, tie_word_embeddings=False).save_pretrained(
        tmp_path / "model"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "r", "output_dir": str(tmp_path), "model": {"path": str(tmp_path / "model")},
                "data": {"train": [{"path": "nowhere.jsonl"}], "max_length": 32},
                "train": {"batch_size_tokens": 64, "per_device_train_batch_size": 2, "gradient_checkpointing": False},
            }
        )
    )  # fmt: skip
    facts = estimate(load_recipe(path))
    number = sum(
        parameter.numel()
        for parameter in tiny_model(model_type, tie_word_embeddings=False).parameters()
    )
    assert facts["parameters"]["total"] == number and facts["memory"]["fits"]
    per_token = facts["flops"]["per_token"]
    more = per_token["student forward"] - per_token["teacher forward"]
    assert more == of_other_streams(tiny_config(model_type).get_text_config())
    assert per_token["teacher forward"] > 0


def test_code_that_needs_data_is_named_with_the_model(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe()
    tiny_config("dbrx").save_pretrained(tmp_path / "Qwen3-30B-A3B")
    monkeypatch.delitem(STAND_INS, "DbrxExperts")
    with user_error("training step of dbrx cannot be followed without data"):
        estimate(load_recipe(path))


def test_counting_leaves_the_process_as_it_was_for_everybody_else() -> None:
    """While a step is traced, another thread's attention and grouped matmuls are torch's own."""
    before = (
        functional.scaled_dot_product_attention,
        moe._can_use_grouped_mm,
        moe._grouped_mm,
    )
    seen = []

    def elsewhere(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(attend).result())

    def attend() -> tuple[Any, ...]:
        query = torch.ones(1, 1, 2, 4)
        out = functional.scaled_dot_product_attention(
            query, query, torch.ones(1, 1, 2, 2)
        )
        return (
            float(out.sum()), functional.scaled_dot_product_attention, moe._can_use_grouped_mm, moe._grouped_mm,
        )  # fmt: skip

    trace_step(
        small_model,
        lambda model: model.model.layers[0].register_forward_hook(elsewhere),
        lambda model: decoder_layers(model, FAMILIES["qwen3_moe"]),
        PLAIN,
    )
    assert seen == [(4.0, *before)]
