"""Early stopping in a real training, by every kind of task: weights do not change, and
nothing is lost.
"""

import contextlib
import io
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.base.errors import ScorerError
from fcsd.base.files import data_dir, read_json
from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.evaluation.code import scorer as scorer_module
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.config import SuiteConfig, TaskConfig
from fcsd.model.load import load_tokenizer
from fcsd.pipeline.scoring import early_stopping
from fcsd.training import trainer as trainer_module
from tests.reference.ranks import run_ranks
from tests.support import (
    Bench,
    evaluate,
    few,
    history,
    make_bench,
    run_of,
    trained_weights,
    user_error,
    write_rows,
)
from tests.training.test_parallel import ranks

TRAIN = {
    "max_steps": 4, "batch_size_tokens": 64, "per_device_train_batch_size": 1, "learning_rate": 1e-3,
    "warmup_steps": 1, "logging_steps": 1, "save_steps": 2,
}  # fmt: skip
OFTEN = {"every_steps": 1, "patience": 50}


@pytest.fixture
def metrics(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return an early_stopping section of each kind."""
    folder = bench.folder.parent / "answers"
    write_rows(
        folder / "test.jsonl",
        [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(5)],
    )
    answers = {
        "metric": "exact_match,none", "kind": "generation", "task": "tiny_answers", "dataset": str(folder),
    }  # fmt: skip
    return {
        "code": bench.early_stopping | OFTEN,
        "likelihood": bench.choice | OFTEN,
        "generation": of(bench.choice | OFTEN, **answers, max_new_tokens=2),
        "heldout_kl": OFTEN | {"metric": "heldout_kl"},
        "own_text": OFTEN | {"task": own_row(bench), "suite": "s", "limit": 3},
    }


def own_row(bench: Bench) -> dict[str, Any]:
    questions = [
        {
            "prompt": [{"role": "user", "content": f"{n} - 1"}],
            "completion": [{"role": "assistant", "content": "x"}],
        }
        for n in range(8)
    ]
    path = bench.folder / "questions.jsonl"
    write_rows(path, questions)
    return {
        "kind": "own_text", "task": "own", "dataset": str(path), "chat_template": True, "num_prompts": 6,
        "max_new_tokens": 5,
    }  # fmt: skip


def of(stopping: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the same section with other keys of its task."""
    return stopping | {"task": stopping["task"] | changes}


def recipe(
    bench: Bench, name: str, stopping: dict[str, Any] | None, **changes: Any
) -> Path:
    rows = {"path": str(bench.rows)}
    data = {"train": [rows], "heldout": rows, "heldout_examples": 5, "max_length": 32}
    return bench.recipe(
        name, data=data, early_stopping=stopping, **({"train": TRAIN} | changes)
    )


def outcome_of(bench: Bench, name: str) -> tuple[str, list[float]]:
    """Return the fingerprint of the weights, and the loss of every step."""
    losses = [entry["loss"] for entry in history(bench, name)]
    return trained_weights(bench, name), losses


def scores(bench: Bench, name: str) -> Any:
    return read_json(bench.folder / name / "distill" / "scores.json")


# ---- nothing is disturbed


def test_scores_of_no_kind_change_a_bit_of_the_weights(
    bench: Bench, metrics: dict[str, dict[str, Any]]
) -> None:
    """Uses dropout, so that a random number drawn by a score would show; each kind in
    one process.
    """
    lora = {"r": 4, "target_modules": ["q_proj"], "lora_dropout": 0.3}
    options = {"lora": lora, "train": TRAIN | {"gradient_checkpointing": True}}
    assert main(["distill", str(recipe(bench, "none", None, **options))]) == 0
    for kind, stopping in metrics.items():
        assert main(["distill", str(recipe(bench, kind, stopping, **options))]) == 0
        assert outcome_of(bench, kind) == outcome_of(bench, "none"), kind
        record = scores(bench, kind)
        assert [point["step"] for point in record["points"]] == [0, 1, 2, 3, 4]
        assert (record["num_items"], record["num_items_total"]) == {
            "code": (1, 1), "likelihood": (4, 8), "generation": (4, 5), "heldout_kl": (record["num_items"], None),
            "own_text": (3, 6),
        }[kind]  # fmt: skip
        assert all(
            (point["stderr"] is None) == (kind == "code") for point in record["points"]
        )
        results = read_json(bench.folder / kind / "distill" / "manifest.json")[
            "results"
        ]["early_stopping"]
        share = results["scoring_s"] / results["run_s"]
        assert 0 < share < 1
        assert results["share_of_time"] == pytest.approx(share, abs=0.01)


@pytest.mark.breadth
def test_on_two_ranks_they_change_none_either_and_are_those_of_one_process(
    bench: Bench,
) -> None:
    """The number of rows is odd; the tests of engines have a task on sharded
    weights.
    """
    train = TRAIN | {"max_steps": 2}
    stopping = {
        "two": OFTEN | {"metric": "heldout_kl"},
        "none": None,
        "choice": bench.choice | OFTEN,
    }
    for name, section in stopping.items():
        path = recipe(bench, name, section, train=train)
        assert [
            status for status, _ in run_ranks(ranks, 2, ["distill", str(path)], "")
        ] == [0, 0]
        assert outcome_of(bench, name) == outcome_of(bench, "two")
    assert len(scores(bench, "choice")["points"]) == 3
    assert (
        main(["distill", str(recipe(bench, "one", stopping["two"], train=train))]) == 0
    )
    one, two = scores(bench, "one"), scores(bench, "two")
    assert one["num_items"] == two["num_items"] and two["num_items"] % 2 == 1
    for a, b in zip(one["points"], two["points"], strict=True):
        assert [a["score"], a["stderr"]] == pytest.approx(
            [b["score"], b["stderr"]], rel=1e-3
        )


# ---- the same scorer, in its own process


def test_a_score_is_what_evaluate_gives(
    bench: Bench, metrics: dict[str, dict[str, Any]]
) -> None:
    """The saved model is the best one, which is the last."""
    assert (
        main(
            [
                "distill",
                str(recipe(bench, "r", metrics["likelihood"], train=TRAIN | {"max_steps": 1})),
            ]
        )
        == 0
    )  # fmt: skip
    from fcsd.model.connectivity import load_model

    folder = bench.folder / "r" / "distill" / "model"
    row = validate(TaskConfig, metrics["likelihood"]["task"], "row")
    result, _ = evaluate(
        load_model(folder), load_tokenizer(folder), SuiteConfig(name="s", tasks=[row]), data_root=None, batch_size=3,
        limit=4, progress=False,
    )  # fmt: skip
    task = result["tasks"]["tiny_choice"]
    record = scores(bench, "r")
    assert (record["best_score"], record["best_stderr"]) == pytest.approx(
        (task["value"], task["stderr"])
    )


def test_own_text_is_scored_as_evaluate_does_and_less_is_better(bench: Bench) -> None:
    """Against the teacher of the run, or a copy of it where the run has none."""
    for name, objective in (("kl", None), ("sft", {"name": "ce"})):
        stopping = OFTEN | {"task": own_row(bench), "suite": "s"}
        changes = {} if objective is None else {"objective": objective}
        path = recipe(bench, name, stopping, train=TRAIN | {"max_steps": 2}, **changes)
        assert main(["distill", str(path)]) == 0
        record = scores(bench, name)
        folder = bench.folder / name
        model, suite = folder / "distill/model", bench.folder / f"{name}-stopping.yaml"
        words = ["evaluate", model, "--suite", suite, "--output", folder / "out"]
        words += ["--original", bench.base]
        assert main([str(word) for word in words]) == 0
        task = read_json(folder / "out/results.json")["tasks"]["own"]
        best = min(record["points"], key=lambda point: (point["score"], -point["step"]))
        assert record["best_score"] <= best["score"] / (1 - 0.02) + 1e-9
        assert (record["best_score"], record["best_stderr"]) == pytest.approx(
            (task["value"], task["stderr"]), rel=1e-3
        )


def test_one_sandbox_serves_all_scores_and_ends_with_the_run(
    bench: Bench, metrics: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[Any] = []
    spawn = scorer_module.SandboxServer._spawn

    def noted(self: Any) -> None:
        spawn(self)
        servers.append((self._process.pid, Path(self.folder)))

    monkeypatch.setattr(scorer_module.SandboxServer, "_spawn", noted)
    monkeypatch.setattr(scorer_module, "default_num_workers", lambda *_: 1)
    assert main(["distill", str(recipe(bench, "r", metrics["code"]))]) == 0
    ((pid, folder),) = servers
    assert not Path(f"/proc/{pid}").exists() and not folder.exists()


def test_where_lm_eval_says_so_lower_is_better(
    bench: Bench, metrics: dict[str, dict[str, Any]]
) -> None:
    from fcsd.model.connectivity import load_model

    task = yaml.safe_load(
        (data_dir("eval") / "tasks" / "tiny" / "tiny_choice.yaml").read_text()
    )
    task["task"], task["metric_list"][0]["higher_is_better"] = "mistakes", False
    (bench.folder / "mine").mkdir()  # beside the suite file
    (bench.folder / "mine" / "mistakes.yaml").write_text(yaml.safe_dump(task))
    stopping = of(metrics["likelihood"], task="mistakes", lm_eval_include="mine")
    model = load_model(bench.base)
    for section, higher in ((stopping, False), (metrics["likelihood"], True)):
        with early_stopping(run_of(recipe(bench, "r", section))) as (_, score):
            assert score is not None and score(model).higher_is_better is higher


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("likelihood", {"metric": "acc_norm,none"}, r"metric 'acc_norm,none' does not exist; allowed: acc,none"),
        ("likelihood", {"kind": "generation"}, r"kind is 'generation', but lm-eval's output_type is multiple_choice"),
        ("likelihood", {"task": "tiny_choise"}, r"task tiny_choise: not defined in .*did you mean 'tiny_choice'"),
        ("likelihood", {"split": "validation"}, r"task tiny_choice: cannot be loaded"),
        ("code", {"dataset": "absent/absent"}, r"task problems: absent/absent: cannot read"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_said_before_training(
    bench: Bench,
    metrics: dict[str, dict[str, Any]],
    kind: str,
    change: dict[str, Any],
    message: str,
) -> None:
    plan = run_of(recipe(bench, "r", of(metrics[kind], **change)))
    with user_error(message), early_stopping(plan):
        pass


# ---- what goes wrong in the middle


def failing(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> list[int]:
    """Make the n-th calls of the scorer fail, for n in `calls`, counted from 1."""
    grade, made = CodeScorer.score_samples, []

    def fails(self: Any, *args: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) in calls:
            raise ScorerError("the sandbox server has ended")
        return grade(self, *args, **options)

    monkeypatch.setattr(CodeScorer, "score_samples", fails)
    return made


@pytest.fixture(scope="module")
def by_code(
    base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    """Return the output of an undisturbed run that is scored by code."""
    bench = make_bench(base_checkpoint, tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", bench.folder / "cache")
        assert (
            main(["distill", str(recipe(bench, "whole", bench.early_stopping | OFTEN))])
            == 0
        )
    return outcome_of(bench, "whole"), scores(bench, "whole")


def test_a_scorer_that_fails_once_is_asked_again(
    bench: Bench,
    metrics: dict[str, dict[str, Any]],
    by_code: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = failing(monkeypatch, {3})
    assert main(["distill", str(recipe(bench, "r", metrics["code"]))]) == 0
    assert len(made) == 6 and (outcome_of(bench, "r"), scores(bench, "r")) == by_code


@pytest.mark.parametrize("step", few([3, 4], 1))
def test_one_that_fails_twice_leaves_a_checkpoint_from_which_the_run_continues_with_that_score(
    bench: Bench,
    metrics: dict[str, dict[str, Any]],
    by_code: Any,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["distill", str(recipe(bench, "r", metrics["code"]))]
    captured = io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stderr(captured):
        failing(patch, {step + 1, step + 2})
        assert main(command) == 2
    assert re.search(
        rf"error: early stopping: no score at step {step}: the sandbox server has"
        r" ended; the training is not lost: run the same command again to continue with this score from"
        rf" \S*checkpoint-{step}\n",
        captured.getvalue(),
    )
    kept = read_json(
        bench.folder
        / "r"
        / "distill"
        / "checkpoints"
        / f"checkpoint-{step}"
        / "early_stopping.json"
    )
    assert [point["step"] for point in kept["points"]] == list(range(step))
    captured = io.StringIO()
    # No score depends on the batch size, and a smaller one helps where memory ran out.
    with contextlib.redirect_stderr(captured):
        assert main([*command, "--set", "early_stopping.batch_size=1"]) == 0
    assert f"step {step}: pass@1 0.0000 (1 of 1 items)" in captured.getvalue()
    assert (outcome_of(bench, "r"), scores(bench, "r")) == by_code
    results = read_json(bench.folder / "r" / "distill" / "manifest.json")["results"][
        "early_stopping"
    ]
    assert results["scoring_s"] > kept["time"]["scoring_s"] > 0
    assert results["run_s"] > kept["time"]["run_s"]


@pytest.mark.parametrize(
    ("owner", "method", "is_due", "last"),
    [
        (trainer_module.DistillTrainer, "compute_loss", lambda self, calls: self.state.global_step == 2, 3),
        (CodeScorer, "score_samples", lambda self, calls: calls == 3, 2),
    ],
    ids=["before a score", "during a score"],
)  # fmt: skip
def test_a_run_that_a_signal_ends_makes_no_further_score_until_it_continues(
    bench: Bench,
    metrics: dict[str, dict[str, Any]],
    by_code: Any,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    is_due: Callable[[Any, int], bool],
    last: int,
) -> None:
    command = ["distill", str(recipe(bench, "r", metrics["code"]))]
    does, calls = getattr(owner, method), []

    def signalled(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if is_due(self, len(calls)):
            os.kill(os.getpid(), signal.SIGTERM)
        return does(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, signalled)
        assert main(command) == 128 + signal.SIGTERM
    if owner is CodeScorer:
        assert len(calls) == 3
    folder = bench.folder / "r" / "distill" / "checkpoints" / f"checkpoint-{last}"
    assert read_json(folder / "early_stopping.json")["points"][-1]["step"] == 2
    assert main(command) == 0
    assert (outcome_of(bench, "r"), scores(bench, "r")) == by_code


# ---- a sweep


@pytest.mark.parametrize("kind", few(["own_text", "heldout_kl"], 1))
def test_a_sweep_chooses_by_the_score_that_a_training_of_a_candidate_ends_with(
    bench: Bench, metrics: dict[str, dict[str, Any]], kind: str
) -> None:
    rates, stopping = [1e-3, 1e-2], metrics[kind]
    plan = {
        "batch_size_tokens": [64], "learning_rate": rates, "steps": 2, "warmup_steps": 1,
        "choose_by": "early_stopping",
    }  # fmt: skip
    train = TRAIN | {"max_steps": 2}
    path = recipe(bench, "swept", stopping, train=train, sweep=plan)
    assert main(["sweep", str(path)]) == 0
    result = read_json(bench.folder / "swept/sweep/sweep.json")
    ends = {}
    for rate in rates:
        one = recipe(bench, f"{rate}", stopping, train=train | {"learning_rate": rate})
        assert main(["distill", str(one)]) == 0
        ends[rate] = scores(bench, f"{rate}")["points"][-1]["score"]
    assert ends[1e-3] != ends[1e-2]
    found = {row["learning_rate"]: row["score"] for row in result["candidates"]}
    assert found == ends
    assert result["learning_rate"] == min(ends, key=lambda rate: ends[rate])
    # no weights are kept for candidates
    assert not list((bench.folder / "swept/sweep").rglob("best"))


@pytest.mark.breadth
def test_a_sweep_by_scores_that_is_killed_goes_on_to_the_same_choice(
    bench: Bench, metrics: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {
        "batch_size_tokens": [64], "learning_rate": [1e-3, 1e-2], "steps": 4, "warmup_steps": 1,
        "choose_by": "early_stopping",
    }  # fmt: skip
    whole, cut = (
        recipe(bench, name, metrics["own_text"], sweep=plan)
        for name in ("whole", "cut")
    )
    assert main(["sweep", str(whole)]) == 0
    compute = trainer_module.DistillTrainer.compute_loss

    def signalled(self: Any, *args: Any, **options: Any) -> Any:
        if self.state.global_step == 2 and self.args.learning_rate == 1e-2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.DistillTrainer, "compute_loss", signalled)
        assert main(["sweep", str(cut)]) == 128 + signal.SIGTERM
    folder = bench.folder / "cut/sweep"
    assert not (folder / "sweep.json").exists()
    assert list(folder.glob("*0.01/checkpoints/checkpoint-3"))
    assert main(["sweep", str(cut)]) == 0
    assert read_json(folder / "sweep.json") == read_json(
        bench.folder / "whole/sweep/sweep.json"
    )
