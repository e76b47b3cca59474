"""Several ranks judge a model as one process does: whole copies to the last bit, spread weights but for float noise."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.distill.engines import expert_parallel
from fcsd.evaluate.placed import load_judged
from fcsd.evaluate.ranks import is_spread, ranks_of
from fcsd.evaluate.runner import evaluate
from fcsd.evaluate.suites import load_suite
from fcsd.recipe import Model
from fcsd.testing import run_ranks, tiny_model, tiny_tokenizer
from tests.distill.test_engines import environment
from tests.evaluate.test_runner import TASKS, write_rows
from tests.support import ROOT

ROWS: list[dict[str, Any]] = [
    {"task": "t_group", "kind": "likelihood", "metric": "acc_norm,none", "dataset": "o/choice", "num_fewshot": 1},
    {"task": "t_answers", "kind": "generation", "metric": "exact_match,none", "dataset": "o/answers"},
    {"task": "t_code", "kind": "code", "dataset": "o/code", "max_new_tokens": 6, "stop": ["a"]},
    {"task": "t_sampled", "kind": "code", "dataset": "o/code", "max_new_tokens": 4, "num_samples": 2,
     "temperature": 1.0, "stop": []},
]  # fmt: skip
BATCH = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `model`, `suite.yaml` with its tasks beside it, and `data`: an odd number of batches each."""
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
    rows = [{"lm_eval_include": "mine", **row} if row["kind"] != "code" else row for row in ROWS]
    (root / "suite.yaml").write_text(yaml.safe_dump({"name": "mine", "tasks": rows}))
    model = tiny_model("qwen3_moe", vocab_size=512, max_position_embeddings=1024)
    model.save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    return root


def judged(rank: int, place: Path, variables: dict[str, str], experts: int = 1) -> dict[str, Any]:
    """What this rank finds, the sequences that its model saw, and whether it holds a part of the weights only."""
    from accelerate.state import AcceleratorState

    os.environ.update(variables)
    AcceleratorState._reset_state(reset_partial_state=True)
    with expert_parallel(experts):
        model = load_judged(Model(path=""), place / "model")
    seen: list[int] = []
    passed = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        seen.append(len(ids))
        return passed(*args, **kwargs)

    model.forward = forward
    ranks = ranks_of(model)
    result, samples = evaluate(
        model, tiny_tokenizer(), load_suite(place / "suite.yaml"), data_root=place / "data", batch_size=BATCH,
        progress=False, ranks=ranks,
    )  # fmt: skip
    return {"result": result, "samples": samples, "passes": len(seen), "spread": is_spread(model)}


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    """What one process finds."""
    return judged(0, place, {})


def test_copies_share_the_work_and_find_what_one_process_finds_to_the_last_bit(
    place: Path, alone: dict[str, Any]
) -> None:
    found = run_ranks(judged, 2, place, {})
    assert found[0]["result"] == found[1]["result"] and found[0]["samples"] == found[1]["samples"]
    assert found[0]["samples"] == alone["samples"]
    assert found[0]["result"] | {"wall_s": 0} == alone["result"] | {"wall_s": 0}
    assert sum(each["passes"] for each in found) == alone["passes"]
    assert min(each["passes"] for each in found) > alone["passes"] / 3


@pytest.mark.parametrize(("config", "experts"), [("cpu_2_fsdp2", 1), ("cpu_2_ep", 2)])
def test_ranks_that_spread_the_weights_go_in_step_and_find_what_one_process_finds(
    place: Path, alone: dict[str, Any], config: str, experts: int
) -> None:
    variables = environment(ROOT / "configs" / f"{config}.yaml")
    found = run_ranks(judged, 2, place, variables, experts)
    assert found[0]["result"] == found[1]["result"] and found[0]["samples"] == found[1]["samples"]
    assert all(each["spread"] for each in found) and found[0]["passes"] == found[1]["passes"]
    for task, items in alone["samples"].items():
        for one, other in zip(items, found[0]["samples"][task], strict=True):
            assert one.keys() == other.keys() and one["score"] == other["score"]
            assert one.get("loglikelihoods") == pytest.approx(other.get("loglikelihoods"), abs=1e-4)
            for name in ("completion", "completions", "doc_hash", "prompt_hash"):
                assert one.get(name) == other.get(name)
