"""The balance of experts' loads against sums written out token by token, and the bias
that balances them instead.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainerCallback

from fcsd.api.trainer import FCSDTrainer
from fcsd.cli.main import main
from fcsd.data.batches import NO_LOSS, counted_tokens
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.families import FAMILIES
from fcsd.model.families.routers import find_routers
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.config import TrainConfig, may_change
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.losses.balance import Balance
from fcsd.training.meters import Meters
from tests.float64 import in_float64
from tests.reference.tiny import gradients_of, tiny_model
from tests.support import (
    few,
    interrupt_at,
    make_bench,
    same_tensors,
    trained_weights,
    user_error,
)

ALONE = SimpleNamespace(num_processes=1, reduce=lambda values, _: values)
PACKED = [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1, 0, 0]]
"""Positions of two rows: three examples; two and padding, of which the last has two
tokens behind its last loss.
"""


def batch(rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 99, (2, 10), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, 5:7] = NO_LOSS
    labels[1, 6:] = NO_LOSS
    return {
        "input_ids": ids[rows],
        "labels": labels[rows],
        "position_ids": torch.tensor(PACKED)[rows],
    }


def written_out(
    logits: list[torch.Tensor], top_k: int, examples: list[list[int]]
) -> float:
    """Return the loss times its tokens, sums over examples and layers, by counting;
    places of tokens in each example."""
    total = 0.0
    for layer in logits:
        p = layer.softmax(-1)
        num_experts = p.shape[-1]
        for places in examples:
            counts = [0] * num_experts
            for t in places:
                for e in layer[t].argsort(descending=True)[:top_k].tolist():
                    counts[e] += 1
            for e in range(num_experts):
                f = num_experts * counts[e] / (top_k * len(places))
                total += (
                    len(places) * f * float(sum(p[t, e] for t in places)) / len(places)
                )
    return total


EXAMPLES = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14, 15]]
COUNTED = [place for places in EXAMPLES for place in places]


def run(model: Any, inputs: dict[str, torch.Tensor], balance: Balance) -> Any:
    with balance.recorded(model) as record:
        model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
        )
    return record.take()


def test_what_counts_is_the_text_up_to_the_last_token_with_loss() -> None:
    assert counted_tokens(batch()).flatten().nonzero().flatten().tolist() == COUNTED


@pytest.mark.parametrize("over", ["sequence", "batch"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradient_are_those_of_the_sums(
    over: Any, checkpointing: bool
) -> None:
    with in_float64():
        model = tiny_model("qwen3_moe").double()
        if checkpointing:
            model.train().activation_checkpointing_enable({"use_reentrant": False})
        balance = Balance(
            TrainConfig(balance_loss_coefficient=0.1, balance_loss_over=over),
            model,
            ALONE,
        )
        balance.begin_step(len(COUNTED))
        routed = run(model, batch(), balance)
        logits = [one.logits.detach().view(20, -1) for one in routed]
        top_k = find_routers(model)[0].top_k
        expected = written_out(
            logits, top_k, EXAMPLES if over == "sequence" else [COUNTED]
        )
        meters = Meters(ALONE, "ce")
        value = balance.share(routed, batch(), meters)
        assert float(value.detach()) == pytest.approx(
            0.1 * expected / len(COUNTED), rel=1e-12
        )
        assert meters.means(1)["balance"] == pytest.approx(
            expected / len(COUNTED) / len(logits), rel=1e-6
        )
        value.backward()
        # changes its own layer and, through the stream, the later ones
        weight = find_routers(model)[0].module.weight
        step = torch.zeros_like(weight)
        step[0, 0] = 1e-6
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * step)
                again = Balance(
                    TrainConfig(balance_loss_coefficient=0.1, balance_loss_over=over),
                    model,
                    ALONE,
                )
                again.begin_step(len(COUNTED))
                sides.append(
                    float(
                        again.share(
                            run(model, batch(), again), batch(), Meters(ALONE, "ce")
                        )
                    )
                )
                weight.sub_(sign * step)
        assert float(weight.grad[0, 0]) == pytest.approx(
            (sides[0] - sides[1]) / 2e-6, rel=1e-5
        )


@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_the_gradient_of_the_balance_is_the_same_with_activation_checkpointing(
    family: str,
) -> None:
    model = tiny_model(family).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{family} does not support activation checkpointing")
    convert_model(model, Connectivity("all"))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)  # routers that sample in training
        balance = Balance(TrainConfig(balance_loss_coefficient=0.1), model, ALONE)
        balance.begin_step(len(COUNTED))
        routed = run(model, batch(), balance)
        balance.share(routed, batch(), Meters(ALONE, "ce")).backward()
        return gradients_of(model)

    plain = gradients()
    model.activation_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradients()
    assert plain and same_tensors(checkpointed, plain)


def test_the_loss_over_sequences_does_not_depend_on_how_a_batch_is_cut() -> None:
    with in_float64(), torch.no_grad():
        model = tiny_model("qwen3_moe").double()
        balance = Balance(TrainConfig(balance_loss_coefficient=1.0), model, ALONE)
        whole = balance.add(run(model, batch(), balance), batch())
        loads = balance.loads
        balance.begin_step(1)
        parts = [
            balance.add(
                run(model, batch(slice(k, k + 1)), balance), batch(slice(k, k + 1))
            )
            for k in (0, 1)
        ]
        assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)
        assert torch.equal(balance.loads, loads)
        assert int(loads.sum()) == len(COUNTED) * loads.shape[0] * 2


def test_a_balanced_router_has_one_and_a_collapsed_one_as_much_as_experts() -> None:
    model = tiny_model("qwen3_moe")
    for router in find_routers(model):
        torch.nn.init.zeros_(router.module.weight)
    balance = Balance(TrainConfig(balance_loss_coefficient=1.0), model, ALONE)
    balance.begin_step(len(COUNTED))
    meters = Meters(ALONE, "ce")
    balance.share(run(model, batch(), balance), batch(), meters)
    # however ties are broken
    assert meters.means(1)["balance"] == pytest.approx(1.0, rel=1e-5)
    meters.add_loads(balance.end_step())
    router = find_routers(model)[0]
    logged = meters.means(1)
    assert logged["load_max_over_mean"] == pytest.approx(
        router.num_experts / router.top_k
    )
    assert logged["dead_experts"] == len(find_routers(model)) * (
        router.num_experts - router.top_k
    )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "lfm2_moe", "ernie4_5_moe"])
def test_the_bias_of_an_expert_with_more_than_the_mean_falls_and_that_of_others_rises(
    model_type: str,
) -> None:
    model = tiny_model(model_type)
    balance = Balance(TrainConfig(balance_bias_rate=0.25), model, ALONE)
    before = [bias.clone() for bias in balance.biases]
    balance.begin_step(1)
    assert (
        float(balance.share(run(model, batch(), balance), batch(), Meters(ALONE, "ce")))
        == 0
    )
    loads = balance.end_step()
    assert loads is not None
    for load, old, new in zip(loads.tolist(), before, balance.biases, strict=True):
        mean = sum(load) / len(load)
        for e, number in enumerate(load):
            sign = (number < mean) - (number > mean)
            assert float(new[e].detach() - old[e].detach()) == pytest.approx(
                0.25 * sign, abs=1e-6
            )
    names = [
        name
        for name, _ in [*model.named_buffers(), *model.named_parameters()]
        if "bias" in name
    ]
    assert any(name.endswith(("correction_bias", "expert_bias")) for name in names)


def test_a_family_without_the_bias_is_refused_with_what_it_has() -> None:
    with user_error(r"balance_bias_rate: .*; use train\.balance_loss_coefficient"):
        Balance(TrainConfig(balance_bias_rate=0.1), tiny_model("qwen3_moe"), ALONE)


class Watched(TrainerCallback):
    """Record how the biases of the first layer move in every step, whether they stay
    untouched between steps, and whether checkpoints hold them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.trainer: Any = None
        self.moves: list[torch.Tensor] = []
        self.before = torch.zeros(0)
        self.untouched: list[bool] = []
        self.saved: list[bool] = []

    def now(self) -> torch.Tensor:
        return torch.tensor(self.trainer.step_loss.balance.state()[0])

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        if len(self.before):
            self.untouched.append(torch.equal(self.now(), self.before))
        self.before = self.now()

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.moves.append(self.now() - self.before)
        self.before = self.now()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        stored = json.loads(
            (
                self.folder / f"checkpoint-{state.global_step}" / "balance.json"
            ).read_text()
        )
        self.saved.append(torch.equal(torch.tensor(stored[0]), self.before))


RATE = 0.0625


def biased_trainer(
    folder: Path, num_rows: int, **settings: Any
) -> tuple[FCSDTrainer, Watched]:
    """Return a trainer that moves biases, with one packed row per step, and the
    callback that watches it.
    """
    ids = torch.randint(
        3, 99, (num_rows, 12), generator=torch.Generator().manual_seed(1)
    ).tolist()
    rows = [
        {"input_ids": row, "labels": row, "position_ids": [*range(12)]} for row in ids
    ]
    watch = Watched(folder)
    arguments: dict[str, Any] = {
        "objective": "ce", "layers": "none", "max_length": 12, "learning_rate": 1e-3, "seed": 0, "disable_tqdm": True,
        "balance_bias_rate": RATE, "logging_steps": 100,
    }  # fmt: skip
    watch.trainer = FCSDTrainer(
        tiny_model("deepseek_v3", vocab_size=300),
        FCSDConfig(str(folder), **arguments | settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_tokenizer(300),
        callbacks=[watch],
    )
    return watch.trainer, watch


@pytest.mark.parametrize(("steps", "num_rows"), few([(3, 3), (10, 10), (25, 10)], 1))
def test_the_biases_move_once_a_step_and_a_checkpoint_holds_them_as_they_are_behind_it(
    tmp_path: Path, steps: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[torch.Tensor] = []
    add_loads = Meters.add_loads
    monkeypatch.setattr(
        Meters,
        "add_loads",
        lambda self, loads: (noted.append(loads), add_loads(self, loads))[1],
    )
    trainer, watch = biased_trainer(
        tmp_path, num_rows, max_steps=steps, save_strategy="epoch"
    )
    trainer.train()
    assert len(watch.moves) == steps == len(noted)
    for move, loads in zip(watch.moves, noted, strict=True):
        load = loads[0].double()
        expected = (RATE * (load.mean() - load).sign()).tolist()
        assert move.tolist() == pytest.approx(expected, abs=1e-6) and move.any()
    # Neither between the steps nor after the last one.
    assert all(watch.untouched) and len(watch.untouched) == steps - 1
    assert torch.equal(watch.now(), watch.before)
    assert watch.saved == [True] * -(-steps // num_rows)
    # The meters also count each step once: the busiest expert over the mean of all
    # steps.
    loads = torch.stack(noted).sum(0).double()
    (logged,) = [
        entry for entry in trainer.state.log_history if "load_max_over_mean" in entry
    ]
    busiest = float((loads.amax(1) / loads.mean(1)).mean())
    assert logged["load_max_over_mean"] == pytest.approx(busiest)


def test_a_training_that_continues_at_the_end_of_an_epoch_ends_as_one_that_was_not_interrupted(
    tmp_path: Path,
) -> None:
    whole, _ = biased_trainer(tmp_path / "whole", 4, max_steps=8, save_steps=4)
    whole.train()
    rest, _ = biased_trainer(tmp_path / "rest", 4, max_steps=8, save_strategy="no")
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert same_tensors(whole.model.state_dict(), rest.model.state_dict())


def test_a_step_that_is_skipped_moves_no_bias(tmp_path: Path) -> None:
    trainer, watch = biased_trainer(tmp_path, 3, max_steps=6, save_steps=1)
    compute, calls = trainer.compute_loss, iter(range(100))

    def lost(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        return loss * float("nan") if next(calls) in (1, 2) else loss

    trainer.compute_loss = lost  # type: ignore[method-assign]
    trainer.train()
    # The second and third steps are skipped, the third as the last one of its epoch.
    moved = [bool(move.any()) for move in watch.moves]
    assert moved == [True, False, False, *[True] * 3]
    assert watch.untouched == [True] * 5


@pytest.mark.breadth
def test_a_run_that_was_ended_continues_with_its_biases(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tiny_model("deepseek_v3", vocab_size=300).save_pretrained(tmp_path / "base")
    tiny_tokenizer(300).save_pretrained(tmp_path / "base")
    bench = make_bench(tmp_path / "base", tmp_path)
    train = {
        "max_steps": 6, "batch_size_tokens": 128, "learning_rate": 1e-3, "warmup_steps": 1, "logging_steps": 1,
        "save_steps": 2, "balance_bias_rate": 0.05,
    }  # fmt: skip
    ended, whole = (str(bench.recipe(name, train=train)) for name in ("ended", "whole"))
    with monkeypatch.context() as patch:
        interrupt_at(3, patch)
        assert main(["distill", ended]) == 130
    assert main(["distill", ended]) == main(["distill", whole]) == 0
    assert trained_weights(bench, "ended") == trained_weights(bench, "whole")
    stopping = bench.recipe("stops", train=train, early_stopping=bench.choice)
    assert main(["distill", str(stopping)]) == 2
    assert (
        "train.balance_bias_rate does not work with early_stopping"
        in capsys.readouterr().err
    )


def test_the_loss_over_the_batch_is_of_the_micro_batches_so_far_and_its_cut_is_fixed():
    train = TrainConfig(balance_loss_coefficient=1.0, balance_loss_over="batch")
    with in_float64(), torch.no_grad():
        model = tiny_model("qwen3_moe").double()
        balance, parts = Balance(train, model, ALONE), [slice(0, 1), slice(1, 2)]
        whole = float(balance.add(run(model, batch(), balance), batch()))
        balance.begin_step(1)
        cut = [
            float(balance.add(run(model, batch(part), balance), batch(part)))
            for part in parts
        ]
        first = Balance(train, model, ALONE)
        alone = float(first.add(run(model, batch(parts[0]), first), batch(parts[0])))
    # knows nothing about what comes after it
    assert cut[0] == pytest.approx(alone, rel=1e-12)
    assert sum(cut) != pytest.approx(whole, rel=1e-3)
    rows = "train.per_device_train_batch_size"
    assert rows not in may_change(train)
    assert rows in may_change(
        train.model_copy(update={"balance_loss_over": "sequence"})
    )
