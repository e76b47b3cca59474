"""Calibration end to end: in memory, from folder to folder, killed and resumed, over
ranks, by command.
"""

import copy
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

import fcsd
from fcsd.base.files import safetensors_header
from fcsd.base.text import plus_minus
from fcsd.cli.main import main
from fcsd.data.batches import real_tokens
from fcsd.data.dataset import given_rows
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_model, load_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.families import FAMILIES
from fcsd.model.load import find_model
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import Launch, Ranks
from fcsd.pipeline.calibrate import calibrate
from fcsd.pipeline.context import Run
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report.publish.push import push
from fcsd.training.calibration import checkpoint as folder_module
from fcsd.training.calibration import layer as layer_module
from fcsd.training.calibration import solve
from fcsd.training.calibration.checkpoint import (
    calibrate_checkpoint,
    split_rows,
    take_rows,
)
from fcsd.training.calibration.experts import calls_of
from fcsd.training.calibration.model import calibrate_model, complaint
from fcsd.training.calibration.shards import Layerwise, damage_of_copies
from fcsd.training.losses.head import packing_of
from tests.examples import pack
from tests.model.quantised.test_dequantize import LAYOUTS, write
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import change_json, few, same_tensors, tensors_of, user_error

CPU = Launch(torch.device("cpu"), Engine("one"))
ALL = Connectivity("all")


def text(rows: int, seed: int = 0, length: int = 32) -> Tensor:
    return torch.randint(
        3, 90, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def as_rows(ids: Tensor) -> list[dict[str, Any]]:
    return [
        {"input_ids": row, "position_ids": torch.arange(len(row)), "labels": row}
        for row in ids
    ]


@torch.no_grad()
def kl(teacher: Any, student: Any, ids: Tensor) -> float:
    p, q = (
        model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
        for model in (teacher, student)
    )
    return float((p.exp() * (p - q)).sum(-1).mean())


def converted(model: Any, connectivity: Connectivity = ALL) -> Any:
    student = copy.deepcopy(model)
    convert_model(student, connectivity)
    return student


@pytest.mark.parametrize(
    ("model_type", "connectivity"),
    few(
        [
            ("qwen3_moe", Connectivity("all")),
            ("deepseek_v2", Connectivity({"last": 2})),
            ("gpt_oss", Connectivity("all", attention="full")),
            ("qwen2_moe", Connectivity("all", mlp="full")),
            ("cohere2_moe", Connectivity("all")),
            ("minimax", Connectivity("all")),
            ("glm_moe_dsa", Connectivity([1, 2])),
        ],
        4,
    ),
)
def test_a_calibrated_model_is_nearer_to_its_original_on_text_it_has_not_seen(
    model_type: str, connectivity: Connectivity
) -> None:
    teacher = tiny_model(model_type, seed=1)
    student = converted(teacher, connectivity)
    before = kl(teacher, student, text(32, seed=1))
    results = calibrate_model(student, teacher, text(128), progress=False)
    assert kl(teacher, student, text(32, seed=1)) < 0.95 * before
    assert [result["layer"] for result in results] == student.config.farskip["layers"]
    for result in results:
        pairs = [
            *result["reads"].values(),
            *(result[key] for key in ("adds", "experts") if result[key]),
        ]
        assert all(after <= before for before, after in pairs)
    names = {
        name.split(".")[2]
        for name, value in teacher.state_dict().items()
        if not torch.equal(value, student.state_dict()[name])
    }
    assert names <= {str(k) for k in student.config.farskip["layers"]}


def by_hand(
    x: Tensor, y: Tensor, held_out: Tensor, ridge: float, towards: Tensor
) -> Tensor:
    """Return the ridge regression of x A ≈ y towards another map, or that map itself if
    A fits only the sample.
    """

    def regression(x: Tensor, y: Tensor) -> Tensor:
        pull = (ridge * x.square().sum(0).mean()).sqrt() * torch.eye(
            x.shape[1], dtype=x.dtype
        )
        return torch.linalg.lstsq(
            torch.cat([x, pull]), torch.cat([y, pull @ towards])
        ).solution

    def residual(matrix: Tensor) -> Tensor:
        return (x @ matrix - y)[held_out].square().sum()

    fits = residual(regression(x[~held_out], y[~held_out])) <= 1.15 * residual(towards)
    return regression(x, y) if fits else towards


def test_every_expert_reads_by_the_ridge_regression_on_the_tokens_it_is_chosen_for():
    teacher = tiny_model(
        "qwen3_moe", seed=1, dtype=torch.float64, experts_implementation="eager"
    )
    ids, student = text(96), converted(teacher, Connectivity({"last": 1}))
    calibrated = copy.deepcopy(student)
    (result,) = calibrate_model(calibrated, teacher, ids, progress=False)
    read: list[Tensor] = []
    for model in (student, teacher):
        model.model.layers[-1].mlp.register_forward_pre_hook(
            lambda _, args: read.append(args[0].detach())
        )
        model.model(ids)
    x, y = (value.flatten(0, 1) for value in read)
    held_out, own = torch.arange(len(x)) // ids.shape[1] % 4 == 3, 0
    identity, none = (
        torch.eye(x.shape[1], dtype=x.dtype),
        torch.zeros(len(x), dtype=torch.bool),
    )
    shared = by_hand(x, y, none, 1e-3, identity)
    old, new = (model.model.layers[-1].mlp for model in (student, calibrated))
    gate = old.gate.weight.detach() @ shared.T
    torch.testing.assert_close(new.gate.weight.detach(), gate, rtol=1e-8, atol=1e-10)
    choices = (x @ gate.T).topk(student.config.num_experts_per_tok).indices
    squares = torch.zeros(3, dtype=x.dtype)
    for number, weight in enumerate(old.experts.gate_up_proj.detach()):
        chosen = (choices == number).any(-1)
        reads = by_hand(x[chosen], y[chosen], held_out[chosen], 0.03, shared)
        torch.testing.assert_close(
            new.experts.gate_up_proj[number].detach(),
            weight @ reads.T,
            rtol=1e-6,
            atol=1e-9,
        )
        own += not torch.equal(reads, shared)
        parts = (y, x @ shared - y, x @ reads - y)
        squares += torch.stack([part[chosen].square().sum() for part in parts])
    assert own
    wanted = (squares[1:] / squares[0]).tolist()
    assert result["reads"]["mlp.experts"] == pytest.approx(wanted, rel=1e-6)
    assert wanted[1] < 0.99 * wanted[0]


def test_every_expert_has_the_ridge_regression_of_what_those_before_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand, on the last layer: the layers before it are as a calibration without
    such maps leaves them. A map that fits only the sample, as every fourth row shows,
    is not used; otherwise the map is solved on all rows.
    """
    teacher = tiny_model(
        "qwen3_moe", seed=1, dtype=torch.float64, experts_implementation="eager"
    )
    ids, last = text(96), Connectivity({"last": 1})
    calibrated, shared = converted(teacher, last), converted(teacher, last)
    (result,) = calibrate_model(calibrated, teacher, ids, progress=False)
    monkeypatch.setattr(layer_module, "fold_adds", lambda *_: None)
    calibrate_model(shared, teacher, ids, progress=False)
    seen: dict[str, Tensor] = {}
    for name, model in (("teacher", teacher), ("student", shared)):
        layer, block = model.model.layers[-1], model.model.layers[-1].mlp
        layer.register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out})
        )
        block.experts.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({f"{name} args": args})
        )
        model.model(ids)
    missing = (seen["teacher"] - seen["student"]).detach().flatten(0, 1)
    experts, (hidden, choices, weights) = (
        shared.model.layers[-1].mlp.experts,
        seen["student args"],
    )
    before, own = missing.square().sum(), 0
    identity = torch.eye(hidden.shape[1], dtype=hidden.dtype)
    for number, down in enumerate(experts.down_proj.detach()):
        tokens, slots = (choices == number).nonzero(as_tuple=True)
        gate, up = (hidden[tokens] @ experts.gate_up_proj[number].T).chunk(2, -1)
        added = (
            torch.nn.functional.silu(gate)
            * up
            @ down.T
            * weights[tokens, slots][:, None]
        ).detach()
        wanted, held_out = added + missing[tokens], tokens // ids.shape[1] % 4 == 3
        change = by_hand(added, wanted, held_out, 0.01, identity) - identity
        own += bool(change.any())
        missing[tokens] -= added @ change
        torch.testing.assert_close(
            calibrated.model.layers[-1].mlp.experts.down_proj[number].detach(),
            down + change.T @ down,
            rtol=1e-6,
            atol=1e-9,
        )
    assert own
    assert result["experts"][1] == pytest.approx(
        float(missing.square().sum() / before), rel=1e-6
    )
    assert result["experts"][1] < 0.99


def test_an_expert_that_few_tokens_choose_keeps_the_maps_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = tiny_model("qwen3_moe", seed=1)
    own, reads, neither = (
        converted(teacher, Connectivity({"last": 1})) for _ in range(3)
    )
    ids = text(5)  # 160 tokens, of which an expert has 40 on average
    calibrate_model(own, teacher, ids, progress=False)
    monkeypatch.setattr(layer_module, "fold_adds", lambda *_: None)
    calibrate_model(reads, teacher, ids, progress=False)
    monkeypatch.setattr(solve, "FITS_THE_SAMPLE", 0.0)  # no map of their own
    calibrate_model(neither, teacher, ids, progress=False)
    one, two, three = (
        model.model.layers[-1].mlp.experts for model in (own, reads, neither)
    )
    with calls_of(three) as calls:
        neither.model(ids)
    few = torch.bincount(calls[0].choices.flatten(), minlength=8) < 32
    assert few.any()
    for number in few.nonzero()[:, 0].tolist():
        assert torch.equal(one.down_proj[number], two.down_proj[number])
        assert torch.equal(two.gate_up_proj[number], three.gate_up_proj[number])


def test_a_teacher_that_is_a_linear_map_away_is_recovered() -> None:
    """Parallel layers, the first of which computes the same as the regular one: only
    its maps differ.
    """
    teacher = tiny_model(
        "cohere2_moe", dtype=torch.float64, experts_implementation="eager"
    )
    student = copy.deepcopy(teacher)
    convert_model(student, Connectivity([0]), regular_ok=True)
    layer, generator = student.model.layers[0], torch.Generator().manual_seed(0)
    with torch.no_grad():
        scale = 1 + 0.3 * torch.rand(32, generator=generator)
        layer.input_layernorm.weight.mul_(scale)
        layer.self_attn.o_proj.weight.mul_(1.5)
        mixed = torch.eye(32) + 0.1 * torch.randn(32, 32, generator=generator)
        layer.mlp.down_proj.weight.copy_(mixed.double() @ layer.mlp.down_proj.weight)
    held_out = text(8, seed=1)
    assert kl(teacher, student, held_out) > 1e-2
    calibrate_model(student, teacher, text(64), ridge=1e-13, progress=False)
    assert kl(teacher, student, held_out) < 1e-12


def test_padding_is_no_text() -> None:
    examples = [
        {"input_ids": [5, 6, 7], "loss_mask": [False, True, False]},
        {"input_ids": [8, 9], "loss_mask": [True] * 2},
    ]
    (row,) = pack(examples, 8, pad_token_id=0)
    batch = {name: torch.as_tensor(value)[None] for name, value in row.items()}
    assert real_tokens(batch).tolist() == [[True] * 5 + [False] * 3]
    assert len(take_rows(as_rows(text(9)), 65)) == 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bfloat16 checkpoint in two files, experts one by one, as the Hub has them."""
    folder = tmp_path_factory.mktemp("base") / "model"
    model = tiny_model("qwen3_moe", seed=1, vocab_size=300).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    tiny_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    words = [
        f"Line {n} of {n * n % 97} says {n % 7} more, and then {n * 31 % 89}."
        for n in range(400)
    ]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in words))
    return path


def run_folder(
    base: Path, work: Path, ids: Tensor, launch: Launch = CPU, left_out: Any = ()
) -> dict[str, Any]:
    """Calibrate to `work/model`."""
    work.mkdir(exist_ok=True)
    checkpoint = find_model(ModelConfig(path=str(base)))
    return calibrate_checkpoint(
        checkpoint,
        work,
        Connectivity([1, 3]),
        as_rows(ids),
        ridge=1e-3,
        launch=launch,
        left_out=left_out,
    )


def test_from_folder_to_folder_only_the_rewired_layers_change_and_killed_and_resumed_it_is_the_same(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = text(24)
    whole = run_folder(base, tmp_path / "whole", ids)
    assert whole["tokens"] == 24 * 32
    assert [result["layer"] for result in whole["layers"]] == [1, 3]
    model = tmp_path / "whole" / "model"
    old, new = tensors_of(base), tensors_of(model)
    assert old.keys() == new.keys()
    assert {value.dtype for value in new.values()} == {torch.bfloat16}
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert {name.split(".")[2] for name in changed} == {"1", "3"}
    assert not any("norm" in name for name in changed)
    assert any("experts.7.up_proj" in name for name in changed)
    config = json.loads((model / "config.json").read_text())
    assert config["farskip_calibration"] == {
        "tokens": 768,
        "ridge": 1e-3,
        "layers": [1, 3],
    }
    teacher = load_model(base, dtype=torch.float32)
    plain = load_model(base, connectivity=Connectivity([1, 3]), dtype=torch.float32)
    held_out = text(32, seed=1)
    calibrated = load_model(model, dtype=torch.float32)
    assert kl(teacher, calibrated, held_out) < kl(teacher, plain, held_out)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    # after a layer was written but not recorded; before it was written
    for place in ("_save", "write_changed"):
        work = tmp_path / place
        with monkeypatch.context() as patch:
            original, calls = getattr(folder_module, place), iter(range(9))
            patch.setattr(
                folder_module,
                place,
                lambda *a: original(*a) if next(calls) < 1 else stop(),  # noqa: B023
            )
            with pytest.raises(KeyboardInterrupt):
                run_folder(base, work, ids)
        assert "farskip_calibration" not in json.loads(
            (work / "model" / "config.json").read_text()
        )
        resumed = run_folder(base, work, ids)
        assert resumed["layers"] == whole["layers"]
        assert same_tensors(tensors_of(work / "model"), new)
    assert same_tensors(tensors_of(base), old)


@pytest.mark.parametrize(
    ("seconds_per_layer", "expected"), few([(1.0, [1, 4]), (18.0, [1, 2, 4])], 1)
)
def test_slow_saves_are_spaced_out_and_a_killed_calibration_solves_from_the_last_one(
    base: Path,
    tmp_path: Path,
    seconds_per_layer: float,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams of many gigabytes take longer to save than a layer to solve. A save takes
    two seconds here, so that none follows within 18.
    """
    ids, clock, saved = text(24), [0.0], []
    save, write = folder_module._save, folder_module.write_changed
    whole = run_folder(base, tmp_path / "whole", ids)

    def slow_save(state: Any, *rest: Any) -> None:
        save(state, *rest)
        saved.append(state.next_layer)
        clock[0] += 2.0

    def slow_write(*arguments: Any) -> Any:
        clock[0] += seconds_per_layer
        return write(*arguments)

    def dies_in_layer_3(*arguments: Any) -> Any:
        if clock[0] >= 2.0 + seconds_per_layer:  # in the second rewired layer
            write(*arguments)
            raise KeyboardInterrupt
        return slow_write(*arguments)

    monkeypatch.setattr(folder_module, "_save", slow_save)
    monkeypatch.setattr(folder_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(folder_module, "write_changed", dies_in_layer_3)
    with pytest.raises(KeyboardInterrupt):
        run_folder(base, tmp_path / "killed", ids)
    assert saved == expected[:-1]
    monkeypatch.setattr(folder_module, "write_changed", slow_write)
    result = run_folder(base, tmp_path / "killed", ids)
    assert result["layers"] == whole["layers"] and saved[-1] == 4
    clock[0] = 0.0
    saved.clear()
    run_folder(base, tmp_path / "slow", ids)
    assert saved == expected
    expected_tensors = tensors_of(tmp_path / "whole" / "model")
    for name in ("killed", "slow"):
        assert same_tensors(tensors_of(tmp_path / name / "model"), expected_tensors)


def test_a_rank_without_text_adds_nothing_and_the_weights_are_those_of_one_process(
    base: Path, tmp_path: Path
) -> None:
    ids = text(24)  # one batch, and two ranks

    def rank(number: int) -> bool:
        ranks = Ranks(number, 2, lockstep=True)
        run_folder(
            base,
            tmp_path / "two" / "out",
            ids,
            Launch(CPU.device, Engine("ddp"), ranks),
        )
        teacher = load_model(base, dtype=torch.float32)
        students = [converted(teacher, Connectivity([1, 3])) for _ in range(2)]
        calibrate_model(students[0], teacher, ids, ranks=ranks, progress=False)
        calibrate_model(students[1], teacher, ids, progress=False)
        pairs = zip(*(model.state_dict().values() for model in students), strict=True)
        return all(
            torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs
        )

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run_folder(base, tmp_path / "one" / "out", ids)
    assert run_ranks(rank, 2) == [True, True]
    one, two = (tensors_of(tmp_path / name / "out") for name in ("one", "two"))
    assert all(
        torch.allclose(one[name].float(), two[name].float(), rtol=2**-7, atol=1e-5)
        for name in one
    )


def packed(lengths: list[list[int]], size: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of examples with these lengths, padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in lengths:
        num = sum(row)
        ids = torch.randint(3, 90, (num,), generator=generator)
        positions = torch.cat(
            [torch.arange(length) for length in row] + [torch.zeros(size - num).long()]
        )
        padding = torch.full((size - num,), -100)
        ids, labels = (
            torch.cat([ids, torch.zeros(size - num).long()]),
            torch.cat([ids, padding]),
        )
        rows.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return rows


@torch.no_grad()
def kl_by_hand(
    teacher: Any, student: Any, rows: list[dict[str, Any]]
) -> tuple[float, float, int]:
    """Return the KL of each next token, one example at a time, its standard error by
    rows, and how many tokens.
    """
    by_row = []
    for row in rows:
        begins = [
            *(row["position_ids"] == 0).nonzero()[:, 0].tolist(),
            len(row["labels"]),
        ]
        values = []
        for begin, end in itertools.pairwise(begins):
            if (row["labels"][begin:end] != -100).any():
                ids = row["input_ids"][None, begin:end]
                p, q = (
                    m(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
                    for m in (teacher, student)
                )
                values.append((p.exp() * (p - q)).sum(-1))
        by_row.append(torch.cat(values))
    sums, counts = [float(v.sum()) for v in by_row], [len(v) for v in by_row]
    mean, n = sum(sums) / sum(counts), len(sums)
    squares = sum(
        (total - mean * count) ** 2 for total, count in zip(sums, counts, strict=True)
    )
    return mean, (n / (n - 1) * squares) ** 0.5 / sum(counts), sum(counts)


LEFT_OUT_LENGTHS = [[20, 12], [9, 9, 9], [31], [5, 20], [16, 16]]
LEFT_OUT = packed(LEFT_OUT_LENGTHS, 32, seed=3)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_moe", {"tie_word_embeddings": True}),
        *few(
            ((name, {}) for name in FAMILIES),
            kinds={"deepseek_v3", "gpt_oss", "instella_moe", "qwen2_moe"},
        ),
    ],
)
def test_the_kl_of_a_calibration_is_that_of_both_models_on_rows_that_no_map_was_solved_on(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Compare calibrated and copied weights to 1e-5; layers after the last rewired one
    run as well.
    """
    teacher = tiny_model(model_type, seed=1, **fields)
    teacher.save_pretrained(tmp_path / "base")
    if packing_of(teacher.config) == "leaks":
        left_out = packed([[sum(row)] for row in LEFT_OUT_LENGTHS], 32, seed=3)
    else:
        left_out = LEFT_OUT
    num_layers = teacher.config.get_text_config().num_hidden_layers
    wired = Connectivity(list(range(1, num_layers - 1)) or [1])
    results = calibrate_checkpoint(
        find_model(ModelConfig(path=str(tmp_path / "base"))),
        tmp_path / "work",
        wired,
        as_rows(text(24)),
        ridge=1e-3,
        launch=CPU,
        left_out=left_out,
    )
    copied = load_model(tmp_path / "base", connectivity=wired, dtype=torch.float32)
    calibrated = load_model(tmp_path / "work" / "model", dtype=torch.float32)
    for name, student in (("copied", copied), ("calibrated", calibrated)):
        mean, error, num_tokens = kl_by_hand(teacher, student, left_out)
        assert mean > 1e-4 and results["kl"]["num_tokens"] == num_tokens
        assert results["kl"][name]["kl"] == pytest.approx(mean, abs=1e-5, rel=1e-5)
        assert results["kl"][name]["stderr"] == pytest.approx(error, rel=1e-3)


@pytest.mark.breadth
def test_the_kl_of_a_calibration_is_the_same_after_a_kill_and_on_two_ranks(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, left_out = text(24), LEFT_OUT * 30  # two batches of them, one of text
    options: dict[str, Any] = {"left_out": left_out}
    whole = run_folder(base, tmp_path / "whole", ids, **options)
    teacher = load_model(base, dtype=torch.float32)
    mean, _, _ = kl_by_hand(
        teacher, load_model(tmp_path / "whole" / "model", dtype=torch.float32), LEFT_OUT
    )
    assert whole["kl"]["calibrated"]["kl"] == pytest.approx(mean, abs=1e-5)
    without = run_folder(base, tmp_path / "without", ids)
    assert without["kl"] is None and without["layers"] == whole["layers"]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in range(1, 4):  # after each layer, the last of which is regular
        work = tmp_path / str(number)
        with monkeypatch.context() as patch:
            save, calls = folder_module._save, iter(range(9))
            patch.setattr(
                folder_module,
                "_save",
                lambda *a: save(*a) if next(calls) < number else stop(),  # noqa: B023
            )
            with pytest.raises(KeyboardInterrupt):
                run_folder(base, work, ids, **options)
        assert run_folder(base, work, ids, **options)["kl"] == whole["kl"]

    def rank(number: int) -> dict[str, Any]:
        launch = Launch(CPU.device, Engine("ddp"), Ranks(number, 2, lockstep=True))
        return run_folder(base, tmp_path / "two", ids, launch, **options)["kl"]  # type: ignore[no-any-return]

    (tmp_path / "two").mkdir()
    one, two = run_ranks(rank, 2)
    assert one == two
    for name in ("copied", "calibrated"):
        assert one[name]["kl"] == pytest.approx(whole["kl"][name]["kl"], abs=1e-4)


def test_what_measures_a_calibration_shares_no_example_with_what_it_is_solved_on():
    rows = as_rows(text(100))
    solved, left_out = split_rows(rows, 1600, 16)  # the next ones, an eighth as many
    assert solved == rows[:50] and left_out == rows[50:57]
    again = [*rows[:50], rows[3], rows[4], *rows[60:70]]
    assert split_rows(again, 1600, 16)[1] == rows[60:67]
    few_rows = split_rows(rows[:20], 1600, 16)  # all are needed: the last of them
    assert few_rows == (rows[:17], rows[17:20])
    # 640 tokens, 8 x 80: none can be held out
    assert split_rows(rows[:20], 1600, 80) == (rows[:20], [])
    repeated = [rows[0]] * 40
    assert split_rows(repeated, 1600, 1)[1] == []


@pytest.mark.parametrize(
    "what",
    few([
        "streams", "model", "config", "state", "streams are gone", "model is gone", "streams of another run",
    ], 2),
)  # fmt: skip
def test_what_a_killed_calibration_left_is_begun_again_where_it_is_damaged(
    base: Path,
    tmp_path: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = text(8)
    run_folder(base, tmp_path / "whole", ids)
    calls, save = iter(range(9)), folder_module._save

    def stop_behind_layer_1(*arguments: Any) -> None:
        save(*arguments)
        if next(calls) == 1:
            raise KeyboardInterrupt

    def killed(folder: Path, ids: Tensor) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(folder_module, "_save", stop_behind_layer_1)
            with pytest.raises(KeyboardInterrupt):
                run_folder(base, folder, ids)
        (streams,) = folder.glob("streams-*")
        return streams

    work = tmp_path / "out"
    streams = killed(work, ids)
    if what in ("model", "model is gone"):
        solved = json.loads((work / "state.json").read_text())["written"]
        name = next(name for name in sorted(solved) if ".1." in name)
        (file,) = [
            f
            for f in (work / "model").glob("*.safetensors")
            if name in safetensors_header(f)[0]
        ]
        if what == "model":
            header, begin = safetensors_header(file)
            change_byte(file, begin + header[name]["data_offsets"][0])
        else:
            file.unlink()
    elif what == "streams of another run":
        calls = iter(range(9))
        shutil.copy(killed(tmp_path / "another", text(8, seed=1)), streams)
    elif what == "config":
        change_json(work / "model" / "config.json", {"num_experts_per_tok": 1})
    elif what == "state":
        state = (work / "state.json").read_text()
        (work / "state.json").write_text(state.replace('"layer": 1', '"layer": 0'))
        assert (work / "state.json").read_text() != state
    elif what == "streams":
        change_byte(streams, streams.stat().st_size - 1)
    else:
        streams.unlink()
    capsys.readouterr()
    run_folder(base, tmp_path / "out", ids)
    assert "fcsd calibrates it again from the first layer" in capsys.readouterr().err
    whole = tmp_path / "whole" / "model"
    assert same_tensors(tensors_of(work / "model"), tensors_of(whole))
    assert (work / "model" / "config.json").read_text() == (
        whole / "config.json"
    ).read_text()


def change_byte(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_a_tensor_that_a_calibration_has_not_come_to_is_the_originals_when_it_continues(
    base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "copy")
    files = [file.name for file in base.glob("*.safetensors")]
    assert damage_of_copies(tmp_path / "copy", base, files, {}) is None
    change_byte(tmp_path / "copy" / files[0], (base / files[0]).stat().st_size - 1)
    assert damage_of_copies(tmp_path / "copy", base, files, {}) is None
    assert (tmp_path / "copy" / files[0]).read_bytes() == (base / files[0]).read_bytes()
    (tmp_path / "copy" / files[0]).write_bytes((base / files[0]).read_bytes()[:-1])
    assert damage_of_copies(tmp_path / "copy", base, files, {}) == files[0]


@pytest.mark.breadth
def test_two_ranks_of_fsdp2_share_the_rows_and_give_the_weights_of_one_process(
    base: Path, tmp_path: Path
) -> None:
    ids = text(200, length=64)  # four batches, the last of them short
    run_folder(base, tmp_path / "one", ids)

    counts: list[int] = []

    def rank(number: int) -> list[int]:
        unlink, write = Path.unlink, folder_module.write_json

        def late(path: Path, **options: Any) -> None:
            time.sleep(0.3 * number)
            unlink(path, **options)

        def counted(path: Path, value: Any) -> None:
            if path.name == "config.json":
                counts.append(len(list(path.parents[1].glob("streams-*"))))
            write(path, value)

        Path.unlink, folder_module.write_json = late, counted  # type: ignore[assignment,method-assign]
        engine = Engine("fsdp2", reshard=True)
        run_folder(
            base,
            tmp_path / "two",
            ids,
            Launch(torch.device("cpu"), engine, Ranks(number, 2, lockstep=True)),
        )
        return counts

    # When the first rank reports that the model is calibrated, a late rank no longer
    # works in the folder.
    assert run_ranks(rank, 2) == [[2], []]
    one, two, old = (
        tensors_of(folder)
        for folder in (tmp_path / "one" / "model", tmp_path / "two" / "model", base)
    )
    distances = [
        float(
            (one[n].float() - two[n].float()).norm()
            / (one[n].float() - old[n].float()).norm().clamp(min=1e-9)
        )
        for n in one
    ]
    # bfloat16 rounds a few of the weights in the other direction
    assert max(distances) < 0.02


def test_one_layer_is_in_memory_at_a_time(base: Path) -> None:
    models = Layerwise(read_checkpoint(base), ALL, torch.device("cpu"))

    def loaded() -> set[str]:
        return {
            name for name, value in models.model.named_parameters() if not value.is_meta
        }

    outside = {"model.embed_tokens.weight", "model.norm.weight"}
    assert loaded() == outside
    for index in (0, 3):
        with models.layer(index):
            inside = {
                name
                for name, _ in models.model.named_parameters()
                if f".layers.{index}." in name
            }
            assert loaded() == outside | inside
    assert loaded() == outside


def test_the_command_calibrates_and_tells_what_it_did(
    base: Path, rows: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    words = [
        "calibrate", str(base), str(out), "--layers", "last:75%", "--text",
        f"{{path: {rows}, columns: {{text: text}}}}",
    ]  # fmt: skip
    assert main([*words, "--tokens", "2000", "--max-length", "64"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n" and "layer 0" not in said.err
    assert re.search(
        r"\btext: \d+ examples read: \d+ cut, 0 without loss, 0 left out$",
        said.err,
        flags=re.M,
    )
    every = [
        *words[:2],
        str(tmp_path / "all"),
        "--layers",
        "all",
        "--text",
        str(tmp_path / "gone.jsonl"),
    ]
    assert main(every) == 2
    said_of_first = f"run `fcsd layers {base}`; the selection last:3 leaves out layer 0"
    assert said_of_first in capsys.readouterr().err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["stage"] == "calibrate"
    assert 2000 <= manifest["results"]["tokens"] < 2064
    assert manifest["settings"]["data"]["train"][0]["path"] == str(rows)
    assert "data.train.0" in manifest["inputs"]
    assert [result["layer"] for result in manifest["results"]["layers"]] == [1, 2, 3]
    assert not (tmp_path / "out.partial").exists()
    kl = manifest["results"]["kl"]
    assert 250 <= kl["num_tokens"] <= 2064 // 8 + 64
    assert 0 < kl["calibrated"]["kl"] < kl["copied"]["kl"]
    measured = (
        "KL to the original {} nats per token, with copied weights {}, on {:,} tokens"
        " that no map".format(
            *(
                plus_minus(kl[name]["kl"], kl[name]["stderr"])
                for name in ("calibrated", "copied")
            ),
            kl["num_tokens"],
        )
    )
    tokens = manifest["results"]["tokens"]
    assert re.search(
        rf"^calibrate: {tokens:,} tokens, 3 layers; {re.escape(measured)}",
        said.err,
        flags=re.M,
    )
    model, tokenizer = fcsd.load(out)
    assert model.config.farskip["layers"] == [1, 2, 3]
    assert tokenizer("Line 1")["input_ids"]
    push(out, "me/model", dry_run=tmp_path / "push")
    card = (tmp_path / "push" / "README.md").read_text()
    assert f" {measured} was fitted on." in card
    assert (
        "are folded into the weights of 3 layers, which are therefore not the"
        " original's. Data: `text.jsonl`" in card
    )
    capsys.readouterr()
    for number, other in enumerate((["convert", "--layers", "all"], ["unconvert"])):
        assert main([*other, str(out), str(tmp_path / f"other{number}")]) == 0
        message = capsys.readouterr().err
        assert (
            f"{out}: its weights were calibrated for its own connectivity (layers"
            " [1, 2, 3], " in message
        )
        assert "calibrate before use" not in message
    change_json(
        out / "config.json", {"farskip_trained": True}
    )  # as a training leaves it
    (out / "manifest.json").unlink()
    push(out, "me/model", dry_run=tmp_path / "trained")
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "Rewired and trained with fcsd; how is not recorded. Calibrated with" in card
    assert "not trained" not in card
    for again in (out, base):  # a calibrated model, and a folder that exists
        capsys.readouterr()
        assert (
            main(
                [
                    "calibrate",
                    str(again),
                    str(tmp_path / "other" if again == out else out),
                    *words[3:],
                ]
            )
            == 2
        )
        message = capsys.readouterr().err
        assert (
            "is calibrated already" if again == out else "exists and is not empty"
        ) in message
        assert len(message.splitlines()) == 1


def write_recipe(recipe: dict[str, Any], folder: Path) -> Path:
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


def test_trainings_of_a_recipe_start_from_the_calibrated_weights_and_a_variant_need_not(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    train = {
        "max_steps": 1, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-9,
    }  # fmt: skip
    recipe = {
        "name": "r", "output_dir": str(tmp_path / "run"), "model": {"path": str(base)},
        "connectivity": {"layers": [1, 3]}, "calibration": {"tokens": 1500},
        "data": {"train": [{"path": str(rows), "columns": {"text": "text"}}], "max_length": 64},
        "train": train | {"warmup_steps": 0},
        "variants": {
            "same": {"train.learning_rate": 2e-9}, "copied": {"calibration": None},
            "untrained": {"train.max_steps": 0},
            "rewired": {"calibration": None, "train.max_steps": 0},
        },
    }  # fmt: skip
    for variant in (None, "copied", "untrained", "rewired"):
        fcsd.run_stage("distill", recipe, variant=variant)
    same = calibrate(Run(fcsd.load_recipe(write_recipe(recipe, tmp_path)), CPU), "same")
    assert same.folder.name == "fcsd" and same.state() == "finished"
    run = tmp_path / "run"
    # shared by the variant of its settings
    assert [path.name for path in (run / "calibrate").iterdir()] == ["fcsd"]
    calibrated, original = (
        tensors_of(run / "calibrate" / "fcsd" / "model"),
        tensors_of(base),
    )
    assert any(not torch.equal(calibrated[name], original[name]) for name in original)
    for folder, start in (("distill", calibrated), ("variants/copied", original)):
        weights = tensors_of(run / folder / "model")
        assert (
            max(
                float((value - start[name]).abs().max())
                for name, value in weights.items()
            )
            < 1e-6
        ), folder
    tokens = json.loads((run / "calibrate" / "fcsd" / "manifest.json").read_text())[
        "results"
    ]["tokens"]
    for name, start, results, said in (
        (
            "untrained",
            calibrated,
            {"steps": 0, "tokens": tokens},
            "not trained. Calibrated with fcsd",
        ),
        (
            "rewired",
            original,
            {"steps": 0},
            "not trained: the weights are the original's",
        ),
    ):
        folder = run / "variants" / name
        weights = tensors_of(folder / "model")
        assert same_tensors(weights, start)
        assert json.loads((folder / "manifest.json").read_text())["results"] == results
        assert fcsd.load(folder / "model")[0].config.farskip["layers"] == [1, 3]
        push(folder / "model", "me/model", dry_run=tmp_path / "push" / name)
        assert said in (tmp_path / "push" / name / "README.md").read_text()
    config = json.loads((run / "distill" / "model" / "config.json").read_text())
    assert config["farskip_calibration"]["layers"] == [1, 3]
    weights_file, *_ = sorted(
        (run / "calibrate" / "fcsd" / "model").glob("*.safetensors")
    )
    shutil.copyfile(weights_file, tmp_path / "copy")
    change_byte(tmp_path / "copy", weights_file.stat().st_size - 1)
    os.replace(tmp_path / "copy", weights_file)
    shutil.rmtree(run / "distill")
    with user_error(
        r"calibrate/fcsd: differs from what the stage wrote \(model: .*remove the folder"
    ):
        fcsd.run_stage("distill", recipe)
    with user_error("adapter_off uses the student's weights as the original's"):
        fcsd.run_stage(
            "distill", recipe | {"lora": {}, "teacher": {"backend": "adapter_off"}}
        )


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    teacher = tiny_model("qwen3_moe")
    yield converted(teacher), teacher


def test_a_data_set_is_made_into_the_rows_that_a_training_would_have(
    pair: tuple[Any, Any],
) -> None:
    student, teacher = pair
    tokenizer = tiny_tokenizer(99)
    chats = [
        {
            "messages": [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": f"{n + 1}"}],
        }
        for n in range(60)
    ]  # fmt: skip
    options: dict[str, Any] = {"max_length": 32, "shuffle": False, "loss_on": "all"}
    packed = given_rows(chats, tokenizer, name="rows", **options)
    others = [copy.deepcopy(student) for _ in range(3)]
    expected = fcsd.calibrate(student, teacher, packed)
    data = datasets.Dataset.from_list(chats)
    assert (
        fcsd.calibrate(others[0], teacher, data, tokenizer=tokenizer, max_length=32)
        == expected
    )
    assert fcsd.calibrate(others[1], teacher, list(text(24))) == fcsd.calibrate(
        others[2], teacher, text(24)
    )


def test_rows_that_are_no_tokens_are_refused_with_what_is_needed(
    pair: tuple[Any, Any],
) -> None:
    chats = [{"messages": [{"role": "user", "content": "a"}]}]
    for rows, message in (
        (chats, "rows: a data set with 'messages'; give the model's tokenizer, too"),
        (datasets.Dataset.from_list(chats), "rows: a data set with 'messages'; give the model's tokenizer, too"),
        ([torch.arange(3), torch.arange(4)], r"rows: a list of Tensor; give token ids \(N, T\), tensors \(T,\) of one"),
        (torch.arange(3), "rows: a Tensor of Tensor; give token ids"),
        ([[3, 4], [5, 6]], "rows: a list of list; give token ids"),
        (5, "rows: an int; give token ids"),
    ):  # fmt: skip
        with user_error(message):
            fcsd.calibrate(*pair, rows)
    with user_error(r"data set rows, row 1: .*'content': 5}; correct it$"):
        fcsd.calibrate(
            *pair,
            [{"messages": [{"role": "user", "content": 5}]}],
            tokenizer=tiny_tokenizer(99),
        )


def test_a_row_that_is_repeated_is_no_more_text(
    pair: tuple[Any, Any], base: Path, tmp_path: Path
) -> None:
    student, teacher = pair
    row = text(1, length=120)
    # cut in other places, too
    for rows in (row.repeat(64, 1), row.repeat(1, 64).view(60, 128)):
        with user_error(
            r"1[12]\d distinct tokens of 7680 in all .* more of it \(--tokens;"
        ):
            calibrate_model(student, teacher, rows, progress=False)
    # Just enough different tokens: held-out text shows the difference.
    with user_error(
        r"too short or too uniform: on held-out text, the inputs of rewired"
        r" layers differ from the original's"
    ):
        run_folder(base, tmp_path / "work", text(1, length=132).repeat(64, 1))
    config = json.loads((tmp_path / "work" / "model" / "config.json").read_text())
    assert "farskip_calibration" not in config


@pytest.mark.parametrize(
    ("rows", "connectivity", "is_ruled_out"),
    [(5, Connectivity({"last": 3}), True), (16, ALL, False), (256, ALL, None)],
)
def test_text_that_was_left_out_tells_that_there_is_too_little_of_it(
    rows: int,
    connectivity: Connectivity,
    is_ruled_out: bool | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    teacher = tiny_model("qwen3_moe", seed=1)
    student, held_out = converted(teacher, connectivity), text(32, seed=1)
    before = kl(teacher, student, held_out)
    results = fcsd.calibrate(student, teacher, text(rows))
    verdict = complaint(results)
    assert (verdict[0] if verdict is not None else None) is is_ruled_out
    assert capsys.readouterr().err.endswith(
        "" if verdict is None else f"{verdict[1]}\n"
    )
    assert (kl(teacher, student, held_out) > before) is bool(is_ruled_out)


def test_what_is_left_of_text_that_was_left_out_is_that_of_maps_solved_without_it():
    """By hand, for the input of the last layer's MoE block: every fourth row is held
    out, and equal rows count as one.
    """
    teacher = tiny_model(
        "qwen3_moe", seed=1, dtype=torch.float64, experts_implementation="eager"
    )
    ids, student = text(12), converted(teacher, Connectivity({"last": 1}))
    ids = torch.cat([ids, ids[3:4]])
    read: list[Tensor] = []
    for model in (student, teacher):
        handle = model.model.layers[-1].mlp.register_forward_pre_hook(
            lambda _, args: read.append(args[0])
        )
        model.model(ids)
        handle.remove()
    x, y = (value.detach().flatten(0, 1) for value in read)
    held_out = (
        (torch.arange(13) % 4 == 3) | (torch.arange(13) == 12)
    ).repeat_interleave(ids.shape[1])
    own, none = x[~held_out], torch.zeros(int((~held_out).sum()), dtype=torch.bool)
    matrix = by_hand(
        own, y[~held_out], none, 1e-3, torch.eye(x.shape[1], dtype=x.dtype)
    )
    wanted = [
        float((z - y)[held_out].square().sum() / y[held_out].square().sum())
        for z in (x, x @ matrix)
    ]
    (result,) = calibrate_model(student, teacher, ids, progress=False)
    assert result["held_out"]["mlp"] == pytest.approx(wanted, rel=1e-6)


def test_bad_input_is_one_line(
    pair: tuple[Any, Any], base: Path, tmp_path: Path
) -> None:
    student, teacher = pair
    with user_error(r"87 distinct tokens of 96 in all .* at least 128 distinct"):
        fcsd.calibrate(student, teacher, text(3))
    with user_error(
        r"has the token id 150, but the model has 99 tokens; .* own tokenizer"
    ):
        fcsd.calibrate(student, teacher, text(24) + 61)
    with user_error("is not converted; convert the student first"):
        fcsd.calibrate(teacher, teacher, text(24))
    with user_error(
        "the teacher has to be the student's original, a regular qwen3_moe of width 32"
    ):
        fcsd.calibrate(student, tiny_model("olmoe"), text(24))
    offload: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": tmp_path}
    offloaded, _ = fcsd.load(base, layers="all", **offload)
    with user_error(r"student: .* is not in the memory of a device"):
        fcsd.calibrate(offloaded, teacher, text(24))
    student.config.quantization_config = {"quant_method": "fp8"}
    with user_error("quantised, so folded maps would be rounded"):
        fcsd.calibrate(student, teacher, text(24))
    del student.config.quantization_config
    with torch.no_grad():
        teacher.model.layers[1].mlp.gate.weight.fill_(float("nan"))
    with user_error(r"NaN or infinite in 1 tensors: 'model\.layers\.1"):
        fcsd.calibrate(student, teacher, text(24))
    good, teacher = converted(tiny_model("qwen3_moe")), tiny_model("qwen3_moe")
    fcsd.calibrate(good, teacher, text(24))
    with user_error("is calibrated already; give the original"):
        fcsd.calibrate(good, teacher, text(24))
    fcsd.convert_checkpoint(base, tmp_path / "converted")
    write(tmp_path / "quantised", *LAYOUTS["block fp8"])
    for name, message in (
        ("converted", "is converted already; give the original"),
        ("quantised", "are quantised, .*`fcsd dequantize`"),
    ):
        with user_error(message):
            run_folder(tmp_path / name, tmp_path / "out", text(24))
