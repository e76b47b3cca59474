import copy
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml

from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.results import read_result, write_result
from fcsd.evaluation.scores import compare
from fcsd.evaluation.suites import load_suite
from fcsd.model.connectivity.load import load_model
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import change_json, evaluate, few, user_error

CHOICE = {
    "dataset_path": "o/choice", "output_type": "multiple_choice", "test_split": "test", "fewshot_split": "train",
    "doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
ANSWERS = {
    "dataset_path": "o/answers", "output_type": "generate_until", "test_split": "test", "doc_to_text": "question",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "t_choice": CHOICE,
    "t_answers": ANSWERS,
    "t_group": {"group": "t_group", "task": ["t_one", "t_two"]},
    "t_one": CHOICE,
    "t_two": CHOICE | {"test_split": "train"},
    "t_mistakes": CHOICE | {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": False}]},
    "t_median": CHOICE | {"metric_list": [{"metric": "acc", "aggregation": "median", "higher_is_better": True}]},
}  # fmt: skip
CODE = {
    "task": "t_code", "kind": "code", "dataset": "o/code", "max_new_tokens": 4, "stop": [], "timeout_s": 4.0,
}  # fmt: skip


def write_rows(folder: Path, rows: list[dict[str, Any]], *splits: str) -> None:
    folder.mkdir(parents=True)
    files = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    front = yaml.safe_dump(
        {"configs": [{"config_name": "default", "data_files": files}]}
    )
    (folder / "README.md").write_text(f"---\n{front}---\n")
    for offset, split in enumerate(splits):
        shifted = rows[offset:] + rows[:offset]
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in shifted)
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with suites, tasks (below `mine`) and data."""
    root = tmp_path_factory.mktemp("evaluation")
    (root / "mine").mkdir()
    for name, task in TASKS.items():
        named = task if "group" in task else {"task": name, **task}
        (root / "mine" / f"{name}.yaml").write_text(yaml.safe_dump(named))
    rng = random.Random(0)
    choice = [
        {
            "question": f"q {n}: " + "".join(rng.choices("abc ", k=rng.randint(3, 20))),
            "choices": [c * rng.randint(1, 4) for c in "xyz"],
            "answer": n % 3,
        }
        for n in range(12)
    ]
    write_rows(root / "data/o/choice", choice, "test", "train")
    write_rows(
        root / "data/o/answers",
        [{"question": f"{n} and", "answer": str(n)} for n in range(6)],
        "test",
    )
    code = [
        {"task_id": n, "prompt": f"add {n}", "code": f"def f(x): return x + {n}", "test_imports": [],
         "test_list": [], "test": f"assert f(1) == {n + 1}"}
        for n in range(4)
    ]  # fmt: skip
    write_rows(root / "data/o/code", code, "test")
    return root


def suite(place: Path, *rows: dict[str, Any]) -> SuiteConfig:
    path = place / "suite.yaml"
    defaults = {"t_code": {}}
    made = [
        {"lm_eval_include": "mine", **row} if row["task"] not in defaults else row
        for row in rows
    ]
    path.write_text(yaml.safe_dump({"name": "mine", "tasks": made}))
    return load_suite(path)


def likelihood(task: str = "t_choice", **changes: Any) -> dict[str, Any]:
    return {
        "task": task, "kind": "likelihood", "metric": "acc,none", "dataset": "o/choice",
    } | changes  # fmt: skip


GENERATION = {
    "task": "t_answers", "kind": "generation", "metric": "exact_match,none", "dataset": "o/answers",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_moe", vocab_size=512, max_position_embeddings=1024)


def judge(model: Any, place: Path, *rows: dict[str, Any], **options: Any) -> Any:
    options = {
        "data_root": place / "data",
        "batch_size": 4,
        "progress": False,
    } | options
    tokenizer = options.pop("tokenizer", None) or tiny_tokenizer()
    return evaluate(model, tokenizer, suite(place, *rows), **options)


def plain_lm_eval(
    model: Any, place: Path, task: str, shots: int, data: str, **options: Any
) -> Any:
    """Return the same task through lm-eval's own front door."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(place / "mine")], include_defaults=False)
    spec = {
        "group": "g",
        "task": [{"task": task, "dataset_path": str(place / "data" / data), "num_fewshot": shots}],
    }  # fmt: skip
    lm = HFLM(pretrained=copy.deepcopy(model), tokenizer=tiny_tokenizer(), batch_size=1)
    return lm_eval.simple_evaluate(lm, tasks=[spec], task_manager=manager, **options)


@pytest.mark.parametrize("shots", few([0, 3], 1))
@pytest.mark.parametrize("chat", [False, True])
def test_likelihood_numbers_are_those_of_plain_lm_eval(
    model: Any, place: Path, shots: int, chat: bool
) -> None:
    plain = plain_lm_eval(
        model,
        place,
        "t_choice",
        shots,
        "o/choice",
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    theirs = plain["results"]["t_choice"]
    prompts = {s["doc_id"]: s["prompt_hash"] for s in plain["samples"]["t_choice"]}
    for metric in ("acc,none", "acc_norm,none"):
        made, samples = judge(
            model,
            place,
            likelihood(metric=metric, num_fewshot=shots, chat_template=chat),
        )
        numbers = made["tasks"]["t_choice"]
        assert numbers["value"] == pytest.approx(float(theirs[metric]))
        assert numbers["stderr"] == pytest.approx(
            float(theirs[metric.replace(",", "_stderr,")])
        )
        assert numbers["num_items"] == 12 and numbers["num_fewshot"] == shots
        assert {s["doc_id"]: s["prompt_hash"] for s in samples["t_choice"]} == prompts


def test_generated_answers_are_those_of_plain_lm_eval(model: Any, place: Path) -> None:
    made, samples = judge(model, place, GENERATION)
    plain = plain_lm_eval(model, place, "t_answers", 0, "o/answers")
    theirs = [
        s["resps"][0][0]
        for s in sorted(plain["samples"]["t_answers"], key=lambda s: s["doc_id"])
    ]
    assert [s["completion"] for s in samples["t_answers"]] == theirs
    assert (
        made["tasks"]["t_answers"]["value"]
        == plain["results"]["t_answers"]["exact_match,none"]
    )


THINKS = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}assistant:{% if enable_thinking is defined and not"
    " enable_thinking %}no thoughts{% else %}thoughts{% endif %}{% endif %}"
)


def test_a_task_has_a_limit_of_its_own_and_the_smaller_one_counts(
    model: Any, place: Path
) -> None:
    rows = [row | {"limit": 3} for row in (likelihood(), GENERATION, CODE)]
    made, _ = judge(model, place, *rows, likelihood("t_group"))
    counts = {
        task: (row["num_items"], row["num_items_total"])
        for task, row in made["tasks"].items()
    }
    assert counts == {
        "t_choice": (3, 12), "t_answers": (3, 6), "t_code": (3, 4), "t_group": (24, 24)
    }  # fmt: skip
    # Each says that it is a part; the whole is no quick look.
    assert made["complete"]
    made, _ = judge(model, place, *rows, limit=2)
    assert {row["num_items"] for row in made["tasks"].values()} == {2}


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_thinking_is_switched_off_in_every_kind_of_task(
    switch: str, model: Any, place: Path
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template = THINKS.replace("enable_thinking", switch)
    rows = [
        row | {"chat_template": True}
        for row in (likelihood(num_fewshot=1), GENERATION, CODE)
    ]
    made, samples = judge(model, place, *rows, tokenizer=tokenizer, limit=2)
    prompts = [sample["prompt"] for items in samples.values() for sample in items]
    assert len(prompts) == 6
    assert all(prompt.endswith("assistant:no thoughts") for prompt in prompts)
    assert all(row["chat_template"] for row in made["tasks"].values())
    recorded = made["settings"]["chat_template_sha256"]
    assert recorded == hashlib.sha256(json.dumps(template).encode()).hexdigest()


def test_batch_size_and_order_of_tasks_do_not_change_the_scores(
    model: Any, place: Path
) -> None:
    rows = [likelihood(), GENERATION, CODE]
    one, one_samples = judge(model, place, *rows, batch_size=1)
    many, many_samples = judge(model, place, *rows[::-1], batch_size=7)
    assert {k: v["value"] for k, v in one["tasks"].items()} == {
        k: v["value"] for k, v in many["tasks"].items()
    }
    for a, b in zip(one_samples["t_choice"], many_samples["t_choice"], strict=True):
        assert a["loglikelihoods"] == pytest.approx(b["loglikelihoods"], abs=1e-4)
    assert one_samples["t_code"] == many_samples["t_code"]
    again, again_samples = judge(model, place, *rows, batch_size=1)
    assert again_samples == one_samples
    again.pop("wall_s"), one.pop("wall_s")
    assert again == one


def test_a_group_counts_every_item_of_its_members_once(model: Any, place: Path) -> None:
    made, samples = judge(model, place, likelihood("t_group", num_fewshot=1))
    assert made["tasks"]["t_group"]["num_items"] == 24
    assert {s["doc_id"].split("/")[0] for s in samples["t_group"]} == {"t_one", "t_two"}
    assert len({s["doc_id"] for s in samples["t_group"]}) == 24


def test_a_result_is_complete_plain_json_and_survives_the_folder(
    model: Any, place: Path, tmp_path: Path
) -> None:
    made, samples = judge(
        model,
        place,
        likelihood(),
        GENERATION,
        CODE | {"headline": False},
        limit=3,
        name="m",
    )
    assert made["model"] == "m"
    assert made["settings"]["limit"] == 3
    assert made["sandbox"]["network_off"]
    assert [row["num_items"] for row in made["tasks"].values()] == [3, 3, 3]
    assert made["mean"] == pytest.approx(
        (made["tasks"]["t_choice"]["value"] + made["tasks"]["t_answers"]["value"]) / 2
    )
    write_result(made, samples, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        "results.json", "samples_t_answers.jsonl", "samples_t_choice.jsonl", "samples_t_code.jsonl",
    ]  # fmt: skip
    assert read_result(tmp_path) == (made, samples)
    both = {"result": made, "samples": samples}
    assert compare(both, both)["mean"]["delta"] == 0


def test_evaluating_leaves_model_tokenizer_and_random_state_as_they_were(
    place: Path,
) -> None:
    model, tokenizer = (
        tiny_model("qwen3_moe", vocab_size=512, max_position_embeddings=1024),
        tiny_tokenizer(),
    )
    model.train()
    model.model.layers[1].eval()
    model.config.use_cache = False
    tokenizer.padding_side = "right"
    before = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(5)
    expected = torch.rand(2).tolist(), numpy.random.rand(), random.random()
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(5)
    judge(
        model, place, likelihood(num_fewshot=2), GENERATION, CODE, tokenizer=tokenizer
    )
    assert (torch.rand(2).tolist(), numpy.random.rand(), random.random()) == expected
    assert [module.training for module in model.modules()] == before
    assert model.config.use_cache is False and tokenizer.padding_side == "right"
    assert all(
        torch.equal(value, weights[name]) for name, value in model.state_dict().items()
    )
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (likelihood("t_choise"), r"task t_choise: not defined in .*mine; did you mean 't_choice'\?"),
        (likelihood(metric="f2,none"), r"metric 'f2,none' does not exist; allowed: acc,none, acc_norm,none"),
        (likelihood(metric="acc,strict"), "metric 'acc,strict' does not exist"),
        (likelihood(lm_eval_include="nowhere"), "task t_choice: no folder 'nowhere' with its definition"),
        (likelihood(dataset="o/none"), "task t_choice: .*none: no such folder; the data root must hold"),
        (likelihood(split="nope"), "task t_choice: cannot be loaded with the data set .*choice"),
        (likelihood(kind="generation"), "kind is 'generation', but lm-eval's output_type is multiple_choice"),
        (CODE | {"split": "nope"}, "cannot read split 'nope'"),
        (likelihood("t_median"), "is not a mean over items"),
        (likelihood("t_mistakes"),
         "task t_mistakes: lower is better in acc,none; fcsd compares models only by metrics"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_run_is_refused_with_its_name(
    model: Any, place: Path, row: dict[str, Any], message: str
) -> None:
    with user_error(message):
        judge(model, place, row)


def test_nothing_is_asked_of_the_model_before_everything_is_there(place: Path) -> None:
    class Untouchable(torch.nn.Module):
        config = generation_config = None

        def forward(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("asked")

    with user_error("task t_answers"):
        judge(
            Untouchable(),
            place,
            likelihood(dataset="o/choice"),
            GENERATION | {"dataset": "o/none"},
        )


def test_a_missing_data_root_or_template_is_refused(model: Any, place: Path) -> None:
    with user_error(r"nowhere: no such folder \(data root\)"):
        judge(model, place, likelihood(), data_root=place / "nowhere")
    for row in (likelihood(chat_template=True), CODE | {"chat_template": True}):
        with user_error("chat_template: true, but the tokenizer has no chat template"):
            judge(model, place, row, tokenizer=tiny_tokenizer(chat_template=False))


def test_a_failed_write_leaves_nothing_under_a_final_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        write_result(
            {"schema_version": 1, "tasks": {}},
            {"t": [{"score": float("nan")}]},
            tmp_path,
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("family", few(["qwen3_moe", "deepseek_v3"], 1))
def test_a_config_that_asks_for_mtp_is_answered_token_by_token(
    family: str, place: Path, tmp_path: Path
) -> None:
    """transformers takes generation settings from config.json where there is no
    generation_config.json.
    """
    model = tiny_model(family, vocab_size=512, max_position_embeddings=512)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").unlink(missing_ok=True)
    change_json(tmp_path / "model/config.json", {"use_mtp": True})
    drafting = load_model(tmp_path / "model")
    assert drafting.generation_config.use_mtp
    rows = [
        {"task": "t_answers", "kind": "generation", "metric": "exact_match,none", "dataset": "o/answers"},
        CODE,
    ]  # fmt: skip
    plan = {
        "data_root": str(place / "data"), "batch_size": 2, "limit": 2, "allow_weak_sandbox": True,
    }  # fmt: skip
    _, samples = evaluate(
        drafting, tiny_tokenizer(), suite(place, *rows), progress=False, **plan
    )
    assert drafting.generation_config.use_mtp, "the model is left as it was"
    _, expected = evaluate(
        model, tiny_tokenizer(), suite(place, *rows), progress=False, **plan
    )
    assert samples == expected


def test_a_row_that_leaves_a_setting_to_lm_eval_is_compared_by_the_tasks_own(
    model: Any, place: Path, tmp_path: Path
) -> None:
    results = []
    for number, changes in enumerate(({}, {"max_new_tokens": 4}, {"stop": ["x"]})):
        made, samples = judge(model, place, GENERATION | changes, limit=2)
        write_result(made, samples, tmp_path / str(number))
        results.append({"result": made, "samples": samples})
    own, same, other = results
    compare(own, same)
    with user_error(r"^t_answers: stop is \['.n'\] against \['x'\]"):
        compare(own, other)
