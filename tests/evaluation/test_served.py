"""Evaluation through a server: the same items, prompts and scores as in memory, and
what a server may do wrong.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.files import read_json
from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.evaluation import server as client
from fcsd.evaluation.config import EvaluationConfig, ServerConfig, SuiteConfig
from fcsd.evaluation.lm_eval import served as lm_eval_served
from fcsd.evaluation.results import Journal
from fcsd.evaluation.stage import FINISHED_TASKS, PlannedEvaluation, run_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.export import convert_checkpoint
from fcsd.model.connectivity.load import load_model
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.load import ModelFolder, find_model
from fcsd.parallel.launch import Launch, Ranks, join_launch
from fcsd.pipeline.reference import Reference
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.pipeline.tiny.tasks import write_tiny_data
from fcsd.recipe.recipe import Recipe
from fcsd.report.comparison import compare_all, comparison_text, read_evaluated
from tests.evaluation.vllm_protocol import Engine, serving
from tests.reference.tiny import tiny_model
from tests.support import command_words, evaluate, json_lines, user_error

ITEMS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FarSkip checkpoint `model` beside its original `base`, and the data of suite tiny."""
    root = tmp_path_factory.mktemp("served")
    write_tiny_data(
        root / "tiny",
        num_train=16,
        num_distill=16,
        num_heldout=4,
        num_validation=4,
        num_test=8,
        vocab_size=512,
    )
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=512, num_hidden_layers=2
    )
    model.save_pretrained(root / "base")
    tiny_tokenizer().save_pretrained(root / "base")
    convert_checkpoint(root / "base", root / "model", Connectivity("all"))
    return root


@pytest.fixture(scope="module")
def models(place: Path) -> dict[str, Any]:
    """The converted model, and the same weights with regular connectivity, as a stock
    engine would serve them.
    """
    converted = load_model(place / "model")
    return {"converted": converted, "stock": load_model(place / "model", original=True)}


@pytest.fixture
def engine(
    place: Path, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Engine:
    monkeypatch.delenv(client.API_KEY, raising=False)
    return Engine(models["converted"], tiny_tokenizer())


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


def config_of(place: Path, **changes: Any) -> EvaluationConfig:
    options = {
        "data_root": str(place / "tiny" / "data"),
        "batch_size": 4,
        "limit": ITEMS,
    } | changes
    return EvaluationConfig(**options)


def evaluated(
    place: Path, output: Path, url: str | None = None, **changes: Any
) -> dict[str, list[Any]]:
    """Samples by task, of the first items of suite tiny."""
    if url is not None:
        changes["server"] = ServerConfig(
            url=url, concurrency=changes.pop("concurrency", 4)
        )
    own = {
        name: changes.pop(name) for name in ("suite", "server_check") if name in changes
    }
    options: dict[str, Any] = {
        "suite": load_suite("tiny"),
        "config": config_of(place, **changes),
    }
    model = find_model(ModelConfig(path=str(place / "model")))
    evaluation = PlannedEvaluation("model", model, **(options | own))
    run_evaluation(evaluation, output, join_launch())
    return {
        path.stem.removeprefix("samples_"): json_lines(path)
        for path in output.glob("samples_*.jsonl")
    }


@pytest.fixture(scope="module")
def in_memory(place: Path) -> Path:
    evaluated(place, place / "in_memory")
    return place / "in_memory"


def only(kind: str) -> SuiteConfig:
    """Return suite tiny with only its task of one kind."""
    suite = load_suite("tiny")
    return suite.model_copy(
        update={"tasks": [row for row in suite.tasks if row.kind == kind]}
    )


def test_a_server_gives_the_samples_of_the_model_in_memory_item_by_item(
    place: Path, in_memory: Path, tmp_path: Path, engine: Engine, url: str
) -> None:
    engine.faults = [429, "drop", 503, "abort", 500]
    served = evaluated(place, tmp_path / "served", url)
    assert set(served) == {"tiny_code", "tiny_choice", "tiny_answers"}
    for task, samples in served.items():
        known = json_lines(in_memory / f"samples_{task}.jsonl")
        assert len(samples) == len(known) == ITEMS
        for one, other in zip(samples, known, strict=True):
            received, computed = (
                one.pop("loglikelihoods", []),
                other.pop("loglikelihoods", []),
            )
            assert received == pytest.approx(computed, abs=1e-4)
            assert one == other
    assert all(
        isinstance(token, int) for body in engine.bodies for token in body["prompt"]
    )
    assert not engine.faults, "all were met"
    settings = read_json(tmp_path / "served" / "results.json")["settings"]
    check = settings["server"].pop("check")
    assert check["dtype"] == "float32"
    assert check["mean_difference"] < 1e-4
    assert check["prompts"] == 8
    assert settings["server"] == {
        "engine": "vllm", "version": "0.32.0", "dtype": None, "parallelism": "tp2-ep", "model": "served",
        "context": 514, "concurrency": 4,
    }  # fmt: skip
    compared = read_evaluated(in_memory, [tmp_path / "served"])
    said = comparison_text(compare_all(compared), compared)
    assert "engine: in memory (in_memory), vllm 0.32.0 tp2-ep, by HTTP (served)" in said


def test_an_evaluation_whose_server_went_away_asks_for_the_rest_only(
    place: Path,
    tmp_path: Path,
    engine: Engine,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.0)
    whole = evaluated(place, tmp_path / "whole", url, suite=only("generation"))
    asked = len(engine.bodies)
    engine.bodies.clear()
    # The probe, the check's eight prompts and two items are answered; then the server
    # is gone.
    engine.faults = [*["well"] * 11, *["drop"] * 40]
    with user_error(
        r"server http://127\S+ has not answered for 0 s \(.*fcsd has kept the answers received so far"
    ):
        evaluated(place, tmp_path / "cut", url, suite=only("generation"), concurrency=1)
    (kept,) = (tmp_path / "cut" / FINISHED_TASKS).glob("*.jsonl")
    assert len(Journal(kept)) == 2
    # the last line is cut off, as a kill may do
    kept.write_bytes(kept.read_bytes()[:-9])
    engine.faults = [*["well"] * 10, "another"]
    with user_error("now serves another/model instead of served"):
        evaluated(place, tmp_path / "cut", url, suite=only("generation"), concurrency=1)
    engine.faults, engine.root = [], "served"
    engine.bodies.clear()
    assert evaluated(place, tmp_path / "cut", url, suite=only("generation")) == whole
    assert len(engine.bodies) == asked - 2
    assert not (tmp_path / "cut" / FINISHED_TASKS).exists()


def test_tasks_of_one_engine_are_not_taken_for_those_of_another(
    place: Path, tmp_path: Path, engine: Engine, url: str
) -> None:
    options = {
        "suite": only("likelihood"),
        "cache": str(tmp_path / "cache"),
        "server_check": False,
    }

    def asked(output: str, **changes: Any) -> int:
        engine.bodies.clear()
        evaluated(place, tmp_path / output, url, **(options | changes))
        return len(engine.bodies)

    first = asked("a")
    assert asked("b") == 1, "the probe alone"
    assert asked("c", server_check=True) == first + 8
    engine.parallel = ""
    assert asked("d") == first
    engine.version = "0.33.0"
    assert asked("e") == first
    assert (
        read_json(tmp_path / "e" / "results.json")["settings"]["server"]["check"]
        is None
    )
    in_memory = evaluated(
        place, tmp_path / "f", None, suite=options["suite"], cache=options["cache"]
    )
    assert len(in_memory["tiny_choice"]) == ITEMS
    assert len(list((tmp_path / "cache").iterdir())) == 5


def test_every_sample_has_a_seed_of_its_own_whatever_the_concurrency(
    place: Path, tmp_path: Path, engine: Engine, url: str
) -> None:
    (row,) = only("code").tasks
    drawn = row.model_copy(
        update={"num_samples": 2, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 4}
    )
    suite = SuiteConfig(name="drawn", tasks=[drawn])
    options: dict[str, Any] = {"suite": suite, "server_check": False, "limit": 3}
    engine.token_ids = False  # an engine that gives only texts
    one = evaluated(place, tmp_path / "one", url, **options)
    sent = [body for body in engine.bodies if "seed" in body]
    assert sorted(body["seed"] for body in sent) == list(range(1234, 1240))
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in sent} == {
        (0.8, 0.9, -1)
    }
    assert (
        len({each for sample in one["tiny_code"] for each in sample["completions"]}) > 3
    )
    again = evaluated(place, tmp_path / "again", f"{url}/v1/", **options, concurrency=1)
    assert again == one


def test_a_server_as_long_as_the_model_cuts_a_prompt_to_leave_a_token_to_write(
    place: Path, tmp_path: Path, engine: Engine, url: str
) -> None:
    """vLLM takes as many tokens as the model has positions, one of which it writes."""
    folder = tmp_path / "short"
    longest = max(
        len(body["prompt"]) for body in asked_in_full(place, tmp_path, engine, url)
    )
    model = load_model(place / "base")
    model.config.max_position_embeddings = longest - 2
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    short = Engine(model, tiny_tokenizer())
    short.context = longest - 2
    with serving(short) as address:
        server = config_of(place, server=ServerConfig(url=address))
        model_of = find_model(ModelConfig(path=str(folder)))
        evaluation = PlannedEvaluation("short", model_of, only("likelihood"), server)
        run_evaluation(evaluation, tmp_path / "cut", join_launch())
    assert max(len(body["prompt"]) for body in short.bodies) == longest - 3
    assert (
        read_json(tmp_path / "cut" / "results.json")["tasks"]["tiny_choice"][
            "prompts_cut"
        ]
        > 0
    )


def asked_in_full(
    place: Path, tmp_path: Path, engine: Engine, url: str
) -> list[dict[str, Any]]:
    evaluated(
        place, tmp_path / "full", url, suite=only("likelihood"), server_check=False
    )
    return engine.bodies


def stock(engine: Engine, models: dict[str, Any]) -> None:
    engine.model = models["stock"]


def smaller(engine: Engine, models: dict[str, Any]) -> None:
    engine.model = tiny_model("qwen3_moe", vocab_size=70, num_hidden_layers=1)


def silent(engine: Engine, models: dict[str, Any]) -> None:
    engine.prompt_logprobs = False


def narrow(engine: Engine, models: dict[str, Any]) -> None:
    engine.context = 40


def page(engine: Engine, models: dict[str, Any]) -> None:
    engine.html = True


def locked(engine: Engine, models: dict[str, Any]) -> None:
    engine.api_key = "sesame"


def elsewhere(engine: Engine, models: dict[str, Any]) -> None:
    engine.root = models["elsewhere"]


def relative(engine: Engine, models: dict[str, Any]) -> None:
    engine.root = os.path.relpath(models["elsewhere"])


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (stock, "likelihood", "serves served, which is not .*model in float32: .* 8 prompts differ by"),
        (smaller, "likelihood", r"HTTP 400\): Token id \d+ is out of vocabulary .*is it this model"),
        (silent, "generation", "returns no prompt_logprobs, .*--no-server-check"),
        (narrow, "code", r"accepts 40 tokens, but task tiny_code needs \d+ .*--max-model-len"),
        (narrow, "likelihood", r"task tiny_choice: the server accepts 40 tokens.*--max-model-len \d+"),
        (narrow, "generation", r"task tiny_answers: the server accepts 40 tokens.*--max-model-len \d+"),
        (page, "likelihood", "answers /v1/models with HTTP 200 and text/html, not JSON"),
        (locked, "likelihood", rf"requires a key; set {client.API_KEY} \(HTTP 401\)"),
        (elsewhere, "likelihood", "serves .*base.*, which is not the model in .*vllm serve .*model"),
        (relative, "likelihood", r"serves \.\..*base \(here .*base\), which is not the model in .*vllm serve .*model"),
    ],
)  # fmt: skip
def test_a_server_that_will_not_do_is_refused_in_one_line_before_the_first_task(
    fault: Any, kind: str, message: str, place: Path, tmp_path: Path, engine: Engine, url: str,
    models: dict[str, Any],
) -> None:  # fmt: skip
    fault(engine, models | {"elsewhere": str(place / "base")})
    with user_error(message) as caught:
        evaluated(place, tmp_path / "out", url, suite=only(kind))
    assert "\n" not in str(caught.value)
    assert all(body["max_tokens"] == 1 for body in engine.bodies), "no task was begun"


def test_items_beyond_a_rows_limit_need_no_room_on_the_server(
    place: Path, tmp_path: Path, engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    looked: list[int | None] = []
    longest = lm_eval_served.longest_requests

    def noted(model: Any, row: Any, tasks: Any, limit: int | None) -> Any:
        looked.append(limit)
        return longest(model, row, tasks, limit)

    monkeypatch.setattr(lm_eval_served, "longest_requests", noted)
    suite = only("generation")
    rows = [row.model_copy(update={"limit": 1}) for row in suite.tasks]
    suite = suite.model_copy(update={"tasks": rows})
    evaluated(place, tmp_path / "out", url, suite=suite, server_check=False)
    assert looked == [1]


def test_an_answer_that_the_server_cut_short_is_an_error(
    place: Path, tmp_path: Path, engine: Engine, url: str
) -> None:
    engine.faults = ["well", *["short"] * 4]
    with user_error(
        "ends answers after 31 tokens, but the task allows 32; raise the server's limit"
    ):
        evaluated(
            place, tmp_path / "out", url, suite=only("generation"), server_check=False
        )


def _choice(**changes: Any) -> Any:
    return lambda answer: answer["choices"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (_choice(text=None), "generation", r"without the requested fields \(text: None\)"),
        (_choice(text=None), "code", r"without the requested fields \(text: None\)"),
        (lambda answer: answer.update(choices=5), "generation", "without the requested fields"),
        (lambda answer: answer.update(choices=[5]), "likelihood", "without the requested fields"),
        (lambda answer: answer.update(error={"message": "full"}), "code", r"refuses .* \(HTTP 200\): full$"),
        (
            lambda answer: answer["choices"][0]["prompt_logprobs"][-1].update(
                {token: {"logprob": float("nan"), "rank": 1} for token in map(str, range(512))}
            ),
            "likelihood", "log-probabilities that are NaN or infinite",
        ),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_and_never_a_score(
    change: Any, kind: str, message: str, place: Path, tmp_path: Path, engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine.token_ids = False
    complete = engine.complete

    def changed(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, answer = complete(body)
        if len(engine.bodies) > 1:  # the first looks at the server alone
            change(answer)
        return status, answer

    monkeypatch.setattr(engine, "complete", changed)
    with serving(engine) as url, user_error(message):
        evaluated(place, tmp_path / "out", url, suite=only(kind), server_check=False)


@pytest.mark.parametrize("kind", ["likelihood", "generation", "code"])
def test_a_model_that_overflows_has_no_score(place: Path, kind: str) -> None:
    model = load_model(place / "base")
    for norm in (model.model.layers[1].post_attention_layernorm, model.model.norm):
        norm.weight.data.fill_(3e38)  # finite, as weights must be
    with user_error("logits are NaN or infinite: it overflows"):
        evaluate(
            model,
            tiny_tokenizer(),
            only(kind),
            progress=False,
            data_root=str(place / "tiny" / "data"),
            batch_size=4,
            limit=2,
        )


def test_likelihoods_need_prompt_logprobs_and_answers_do_not(
    place: Path, in_memory: Path, tmp_path: Path, engine: Engine, url: str
) -> None:
    engine.prompt_logprobs = False
    with user_error("returns no prompt_logprobs, which task tiny_choice needs"):
        evaluated(
            place, tmp_path / "a", url, suite=only("likelihood"), server_check=False
        )
    made = evaluated(
        place, tmp_path / "b", url, suite=only("generation"), server_check=False
    )
    known = json_lines(in_memory / "samples_tiny_answers.jsonl")
    assert made["tiny_answers"] == known


def test_a_key_opens_the_server_and_is_written_nowhere(
    place: Path,
    tmp_path: Path,
    engine: Engine,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    engine.api_key = "sesame"
    monkeypatch.setenv(client.API_KEY, "wrong")
    with user_error(f"rejects the key in {client.API_KEY}") as caught:
        evaluated(place, tmp_path / "out", url, suite=only("likelihood"))
    monkeypatch.setenv(client.API_KEY, "sesame")
    evaluated(place, tmp_path / "out", url, suite=only("likelihood"))
    left = [
        path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()
    ]
    assert left and not any(
        "sesame" in text or "wrong" in text for text in [*left, *capfd.readouterr()]
    )
    assert "wrong" not in str(caught.value)


def test_a_recipe_asks_the_server_about_the_model_that_it_serves_and_says_which_it_wants_next(
    place: Path, tmp_path: Path, engine: Engine, url: str
) -> None:
    rows = {"path": str(place / "tiny" / "heldout.jsonl")}
    raw = {
        "name": "r", "output_dir": str(tmp_path / "run"), "model": {"path": str(place / "base")},
        "data": {"train": [rows], "heldout": rows, "heldout_examples": 2},
        "evaluation": {
            "suite": "tiny", "data_root": str(place / "tiny" / "data"), "limit": 2,
            "server": {"url": url, "concurrency": 2},
        },
    }  # fmt: skip
    recipe = validate(Recipe, raw, "recipe")

    def evaluate(
        name: str, server: ServerConfig | None, launch: Launch
    ) -> dict[str, Any]:
        original = ModelFolder(
            recipe.model.model_copy(update={"path": str(place / "base")}),
            place / "base",
        )
        model = ModelFolder(
            recipe.model.model_copy(update={"path": str(place / name)}), place / name
        )
        config = recipe.evaluation.model_copy(update={"server": server})
        reference = Reference(original, recipe.data)
        evaluation = PlannedEvaluation(
            name, model, load_suite("tiny"), config, reference
        )
        run_evaluation(evaluation, tmp_path / name, launch)
        return dict(read_json(tmp_path / name / "results.json"))

    server, launch = recipe.evaluation.server, join_launch()
    with user_error(
        r"serves served, which is not .*/base in .*Serve it: vllm serve .*/base$"
    ):
        evaluate("base", server, launch)
    result = evaluate("model", server, launch)
    assert result["settings"]["server"]["check"]["mean_difference"] < 1e-4
    assert result["kl_to_original"]["kl"] > 0, "in memory"
    assert (
        evaluate("model", server and ServerConfig(url="http://127.0.0.1:9"), launch)
        == result
    ), "is finished"
    with user_error(r"another .*server|server.*differ|settings"):
        evaluate("model", None, launch)
    with user_error("works with one process, but this launch has 2"):
        evaluate("model", server, Launch(launch.device, launch.engine, Ranks(0, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server", "http://127.0.0.1:9"], "server http://127.0.0.1:9 cannot be reached ("),
        (["--server", "localhost:8000"], "--server: url: an address such as http://localhost:8000 is needed"),
        (["--server", "http://me:secret@host"], "leave it out, and give a key in the environment variable"),
        (["--server", "http://me:sec/ret@host"], "holds a name or password"),
        (["--server", "me:secret@host:8000"], "holds a name or password"),
        (["--server", "http://host/v1?api_key=secret"], "or something after ? or #; leave it out"),
        (["--server", "http://host/#secret"], "or something after ? or #"),
        (["--server", "http://a", "--batch-size", "8"], "--batch-size has no meaning with --server"),
        (
            ["--server", "http://a", "--device-map", "auto", "--no-server-check"],
            "--device-map has no meaning with --server and --no-server-check",
        ),
        (["--concurrency", "3"], "--concurrency has no meaning without --server"),
        (["--no-server-check"], "--no-server-check has no meaning without --server"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_an_error_of_one_line(
    options: list[str], message: str, place: Path, tmp_path: Path, capfd: Any
) -> None:
    words = command_words(
        "evaluate", place / "model", "--suite tiny --data-root", place / "tiny" / "data"
    )
    assert main([*words, "--output", str(tmp_path / "out"), *options]) == 2
    said = capfd.readouterr().err
    assert message in said and said.count("\n") == 1 and "secret" not in said
