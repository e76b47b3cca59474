"""Several ranks evaluate a model as one process does: whole copies to the last bit,
sharded weights up to floating-point noise.
"""

import contextlib
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from fcsd.base.errors import UserError
from fcsd.evaluation.config import EvaluationConfig
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.load import ModelFolder
from fcsd.model.preserve import preserved
from fcsd.parallel.launch import Ranks, is_sharded, join_launch
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.losses.heldout_kl import mean_kl, read_original
from tests.evaluation.test_runner import TASKS, write_rows
from tests.parallel.test_engines import environment
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import ROOT, evaluate, few, user_error

ROWS: list[dict[str, Any]] = [
    {"task": "t_group", "kind": "likelihood", "metric": "acc_norm,none", "dataset": "o/choice", "num_fewshot": 1},
    {"task": "t_answers", "kind": "generation", "metric": "exact_match,none", "dataset": "o/answers"},
    {"task": "t_code", "kind": "code", "dataset": "o/code", "max_new_tokens": 12, "stop": ["<unused82>"]},
    {"task": "t_sampled", "kind": "code", "dataset": "o/code", "max_new_tokens": 4, "num_samples": 2,
     "temperature": 1.0, "stop": []},
]  # fmt: skip
BATCH = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FarSkip checkpoint `model`, `suite.yaml` with its tasks beside it, `data`: an
    odd number of batches each.
    """
    root = tmp_path_factory.mktemp("ranks")
    for name in ("t_group", "t_one", "t_two", "t_answers"):
        named = TASKS[name] if "group" in TASKS[name] else {"task": name, **TASKS[name]}
        (root / "mine").mkdir(exist_ok=True)
        (root / "mine" / f"{name}.yaml").write_text(yaml.safe_dump(named))
    rng = random.Random(0)
    choice = [
        {"question": f"q {n}: " + "".join(rng.choices("abc ", k=rng.randint(3, 20))),
         "choices": [letter * rng.randint(1, 4) for letter in "xyz"], "answer": n % 3}
        for n in range(5)
    ]  # fmt: skip
    write_rows(root / "data/o/choice", choice, "test", "train")
    answers = [{"question": f"{'and ' * n}{n}", "answer": str(n)} for n in range(5)]
    write_rows(root / "data/o/answers", answers, "test")
    code = [
        {"task_id": n, "prompt": f"add {n}" * (n + 1), "code": f"def f(x): return x + {n}", "test_imports": [],
         "test_list": [], "test": f"assert f(1) == {n + 1}"}
        for n in range(5)
    ]  # fmt: skip
    write_rows(root / "data/o/code", code, "test")
    rows = [
        {"lm_eval_include": "mine", **row} if row["kind"] != "code" else row
        for row in ROWS
    ]
    (root / "suite.yaml").write_text(yaml.safe_dump({"name": "mine", "tasks": rows}))
    model = tiny_model("qwen3_moe", vocab_size=512, max_position_embeddings=1024)
    convert_model(model, Connectivity("all"))
    model.save_pretrained(root / "model")
    tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=1024, seed=1
    ).save_pretrained(root / "other")
    tiny_tokenizer().save_pretrained(root / "model")
    return root


def judged(
    rank: int, place: Path, variables: dict[str, str], experts: int = 1
) -> dict[str, Any]:
    """Return the results of this rank, the number of forward passes, and whether it
    holds only a part of the weights.
    """
    os.environ.update(variables)
    launch = join_launch(expert_parallel=experts).for_evaluation()
    ranks, rows = launch.ranks, None if experts > 1 else text_rows()
    known = None
    if rows:
        other = load_for_evaluation(ModelFolder(ModelConfig(), place / "other"), launch)
        known = read_original(other, rows, ranks=ranks)
        del other
    model = load_for_evaluation(ModelFolder(ModelConfig(), place / "model"), launch)
    assert ranks.lockstep == is_sharded(model)
    passes = []
    forward = model.forward
    model.forward = lambda *args, **kwargs: (
        passes.append(1),
        forward(*args, **kwargs),
    )[1]  # type: ignore[method-assign]
    gathers, gather = [], _fsdp_param_group.foreach_all_gather
    _fsdp_param_group.foreach_all_gather = lambda *args: (
        gathers.append(1),
        gather(*args),
    )[1]
    result, samples = evaluate(
        model, tiny_tokenizer(), load_suite(place / "suite.yaml"), data_root=place / "data", batch_size=BATCH,
        progress=False, ranks=ranks,
    )  # fmt: skip
    _fsdp_param_group.foreach_all_gather, num_gathers = gather, len(gathers)
    kl = mean_kl(known, model, rows, ranks=ranks) if known is not None else None
    return {
        "gathers": num_gathers,
        "result": result, "samples": samples, "kl": kl, "passes": len(passes), "spread": is_sharded(model),
    }  # fmt: skip


def text_rows() -> list[Any]:
    """Return five rows of random tokens, each one example."""
    draws = random.Random(1)
    rows = []
    for length in (9, 4, 12, 7, 5):
        ids = [draws.randrange(1, 512) for _ in range(length)]
        rows.append(
            {"input_ids": ids, "labels": ids, "position_ids": list(range(length))}
        )
    return rows


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    """Return the results of one process."""
    return judged(0, place, {})


@pytest.mark.breadth
def test_copies_share_the_work_and_find_what_one_process_finds_to_the_last_bit(
    place: Path, alone: dict[str, Any]
) -> None:
    ranks = run_ranks(judged, 2, place, {})
    assert ranks[0]["result"] == ranks[1]["result"]
    assert ranks[0]["samples"] == ranks[1]["samples"]
    assert ranks[0]["samples"] == alone["samples"]
    assert ranks[0]["result"] | {"wall_s": 0} == alone["result"] | {"wall_s": 0}
    assert ranks[0]["kl"] == ranks[1]["kl"] == alone["kl"] and alone["kl"]["kl"] > 0.01
    assert sum(each["passes"] for each in ranks) == alone["passes"]
    # what one ends at, the other does not
    assert alone["passes"] / 3 < ranks[1]["passes"] < ranks[0]["passes"] - 5


@pytest.mark.parametrize(
    ("config", "experts"), few([("cpu_2_fsdp2", 1), ("cpu_2_ep", 2)], 1)
)
def test_ranks_that_spread_the_weights_go_in_step_and_find_what_one_process_finds(
    place: Path, alone: dict[str, Any], config: str, experts: int
) -> None:
    variables = environment(ROOT / "configs" / f"{config}.yaml")
    ranks = run_ranks(judged, 2, place, variables, experts)
    assert ranks[0]["result"] == ranks[1]["result"]
    assert ranks[0]["samples"] == ranks[1]["samples"]
    assert all(each["spread"] for each in ranks)
    assert ranks[0]["passes"] == ranks[1]["passes"]
    assert ranks[0]["passes"] < alone["passes"] * 0.75
    # once for all tasks: of each layer, of the embedding and of the final norm
    if config == "cpu_2_fsdp2":
        assert ranks[0]["gathers"] == ranks[1]["gathers"] == 4 + 2
    for task, items in alone["samples"].items():
        for one, other in zip(items, ranks[0]["samples"][task], strict=True):
            assert one.keys() == other.keys() and one["score"] == other["score"]
            assert one.get("loglikelihoods") == pytest.approx(
                other.get("loglikelihoods"), abs=1e-4
            )  # sums of float32
            for name in ("completion", "completions", "doc_hash", "prompt_hash"):
                assert one.get(name) == other.get(name)
    if experts == 1:
        assert ranks[0]["kl"] == ranks[1]["kl"] == pytest.approx(alone["kl"], rel=1e-4)


# ---- the group's own arithmetic and errors


@pytest.mark.parametrize("batches", range(6))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_are_dealt_once_and_idle_passes_make_the_ranks_even(
    batches: int, size: int
) -> None:
    ranks = [Ranks(rank, size, lockstep=True) for rank in range(size)]
    shares = [each.deal(range(batches)) for each in ranks]
    assert sorted(number for share in shares for number in share) == list(
        range(batches)
    )
    assert (
        len(
            {
                len(share) + each.idle_passes(batches)
                for share, each in zip(shares, ranks, strict=True)
            }
        )
        == 1
    )
    assert all(Ranks(rank, size).idle_passes(batches) == 0 for rank in range(size))


def raised_on(rank: int, wrong: int, error: Exception) -> list[str]:
    """Return what `share` and `from_first` raise here when rank `wrong` raises `error`."""
    ranks, messages = Ranks(rank, 2), []

    def fail() -> int:
        if rank == wrong:
            raise error
        return rank

    for call in (ranks.share, ranks.from_first):
        try:
            messages.append(str(call(fail)))
        except Exception as raised:
            messages.append(
                f"{type(raised).__name__}: {raised}".strip().replace("\n", " | ")
            )
    return messages


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UserError("no such task"), "UserError: no such task"),
        (KeyError("x"), "RuntimeError: Traceback .*in fail.*KeyError: 'x'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(error: Exception, shown: str) -> None:
    own = f"{type(error).__name__}: {error}"
    (first, second), (third, fourth) = run_ranks(raised_on, 2, 0, error)
    assert first == second == own
    assert re.fullmatch(shown, third)
    assert re.fullmatch(shown, fourth)
    (first, second), others = run_ranks(raised_on, 2, 1, error)
    assert re.fullmatch(shown, first) and second == "0" and others == [own, "0"]


def short_of_memory(rank: int, place: Path) -> Any:
    """Evaluate with batch_size auto where the second rank has memory for three
    sequences.
    """
    launch = join_launch()
    model = load_for_evaluation(ModelFolder(ModelConfig(), place / "model"), launch)
    forward, most = model.forward, []

    def narrow(*args: Any, **kwargs: Any) -> Any:
        most.append(len(kwargs.get("input_ids", args[0] if args else None)))
        if rank == 1 and most[-1] > 3:
            raise torch.OutOfMemoryError
        return forward(*args, **kwargs)

    model.forward = narrow  # type: ignore[method-assign]
    suite = load_suite(place / "suite.yaml")
    suite.tasks[:] = suite.tasks[:2]
    _, samples = evaluate(
        model, tiny_tokenizer(), suite, data_root=place / "data", batch_size="auto", progress=False,
        ranks=launch.ranks,
    )  # fmt: skip
    return samples, most


def test_a_copy_that_runs_out_of_memory_tries_again_alone(
    place: Path, alone: dict[str, Any]
) -> None:
    (first, wide), (second, narrow) = run_ranks(short_of_memory, 2, place)
    assert first == second and max(wide) > 3 and min(narrow) <= 2 < max(narrow)
    for task, items in first.items():
        for one, other in zip(items, alone["samples"][task], strict=True):
            assert one["score"] == other["score"]
            assert one.get("completion") == other.get("completion")
            assert one.get("loglikelihoods") == pytest.approx(
                other.get("loglikelihoods"), abs=1e-4
            )  # sums of float32


def test_an_automatic_batch_size_is_refused_where_no_rank_can_try_again_alone(
    place: Path,
) -> None:
    with (
        user_error(r"'auto' needs .* shards the weights over 2; give a number"),
        prepare_evaluation(
            tiny_tokenizer(),
            load_suite(place / "suite.yaml"),
            EvaluationConfig(batch_size="auto"),
            ranks=Ranks(0, 2, lockstep=True),
        ),
    ):
        pass


def test_the_random_state_of_other_ranks_devices_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading it would create a context on each device, which takes memory from the
    rank that computes there.
    """
    asked: list[Any] = []

    @contextlib.contextmanager
    def fork_rng(devices: Any) -> Iterator[None]:
        asked.extend(devices)
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    with preserved(tiny_model("qwen3_moe", num_hidden_layers=1)):
        assert asked == [3]
