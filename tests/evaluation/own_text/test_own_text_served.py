"""Own text of a model behind a server: what its likeliest tokens tell."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.cli.main import main
from fcsd.evaluation import server as client
from fcsd.evaluation.results import read_result
from fcsd.evaluation.served import TOP
from fcsd.model.connectivity.load import load_model
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.own_text.test_compared import evaluate, place
from tests.evaluation.vllm_protocol import Engine, serving
from tests.support import few

__all__ = ["place"]  # a fixture


@pytest.fixture
def engine(place: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.delenv(client.API_KEY, raising=False)
    return Engine(load_model(place / "last"), tiny_tokenizer())


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


def served(place: Path, url: str, output: Path, *options: str) -> int:
    words = ("--original", place / "original", "--server", url, *options)
    return evaluate(place, "last", output, *words)


def log_probabilities(model: Any, ids: list[int], count: int) -> Any:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -count - 1 : -1]
    return logits.double().log_softmax(-1)


def test_a_served_model_has_a_lower_bound_of_its_divergence(
    place: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served(place, url, tmp_path / "out") == 0
    assert "own_texts: a lower bound" in " ".join(capsys.readouterr().out.split())
    result, samples = read_result(tmp_path / "out")
    model, original = (load_model(place / name) for name in ("last", "original"))
    prompts = [
        tiny_tokenizer()(f"{n} and {n * n} is the number of them")["input_ids"][:6]
        for n in range(5)
    ]
    for prompt, sample in zip(prompts, samples["own_texts"], strict=True):
        ids, count = prompt + sample["tokens"], len(sample["tokens"])
        own, other = (log_probabilities(m, ids, count) for m in (model, original))
        bounds, exact = [], []
        for place_of_own, place_of_other, token in zip(
            own, other, sample["tokens"], strict=True
        ):
            exact.append(
                float((place_of_own.exp() * (place_of_own - place_of_other)).sum())
            )
            # The likeliest tokens and the sampled one, and all others together.
            chosen = {*place_of_own.topk(TOP).indices.tolist(), token}
            p = [math.exp(place_of_own[t]) for t in chosen]
            q = [math.exp(place_of_other[t]) for t in chosen]
            p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
            bounds.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        assert sample["score"] == pytest.approx(sum(bounds) / count, rel=1e-3)
        assert 0 < sample["score"] <= sum(exact) / count + 1e-6
        nats = [-float(row[t]) for row, t in zip(other, sample["tokens"], strict=True)]
        assert sample["nats"] == pytest.approx(sum(nats) / count, rel=1e-4)
    row = result["tasks"]["own_texts"]
    assert row["lower_bound"] is True and "forward_kl" not in row["metrics"]
    assert {"own_text_kl_16", "nats_above", "greedy_equal"} <= row["metrics"].keys()
    # The likeliest text does not depend on who computes it.
    in_memory = read_result(place / "results/last")[1]["own_texts"]
    assert [s["greedy_tokens"] for s in samples["own_texts"]] == [
        s["greedy_tokens"] for s in in_memory
    ]
    # It is compared with the original, whose divergence is 0, and with nothing exact.
    original, out = place / "results/original", tmp_path / "out"
    pages = tmp_path / "pages"
    assert main(["compare", *map(str, (original, out, "--output", pages))]) == 0
    printed = capsys.readouterr().out
    value = f"{row['value']:.3f} ± {row['stderr']:.3f}"
    assert f"{value} (lower bound)" in printed
    assert f"diverges from the original by at least {value} nats" in printed
    assert "distance from the original, a lower bound" in printed
    assert "own_texts, model: a lower bound, because the server" in printed
    for page in ("comparison.md", "comparison.html"):
        assert f"{value} (lower bound)" in (pages / page).read_text()
    assert f"{row['value']:.3f} (lower bound)" in (pages / "items.html").read_text()
    compared = json.loads((pages / "comparison.json").read_text())["comparisons"]
    assert compared["out"]["tasks"]["own_texts"]["lower_bound"] == ["converted"]
    exact = place / "results/last"
    for folders in ((exact, out), (out, exact)):
        assert main(["compare", *map(str, folders)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "own_texts: one of the two was measured behind a server" in said
    shutil.copytree(out, tmp_path / "again")
    assert main(["compare", str(out), str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.count(f"{value} (lower bound)") == 2


def test_answers_of_a_server_are_kept_and_not_asked_for_again(
    place: Path, engine: Engine, url: str, tmp_path: Path
) -> None:
    engine.faults = [404]
    assert served(place, url, tmp_path / "out") == 2
    first = len(engine.bodies)
    assert served(place, url, tmp_path / "out") == 0
    asked = [str(sorted(body.items(), key=str)) for body in engine.bodies[first:]]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("lacks", few(["prompt_logprobs", "token_ids"], 1))
def test_a_server_that_tells_too_little_is_refused_by_name(
    place: Path,
    engine: Engine,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lacks: str,
) -> None:
    setattr(engine, lacks, False)
    assert served(place, url, tmp_path / "out", "--no-server-check") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"returns no {lacks}, which task own_texts needs" in said


@pytest.mark.parametrize(
    ("damaged", "words"),
    few(
        [
            (
                lambda entry: dict([*entry.items()][:5]),
                "needs those of the 20 likeliest",
            ),
            (
                lambda entry: {t: e | {"logprob": math.nan} for t, e in entry.items()},
                "log-probabilities that are NaN",
            ),
        ],
        1,
    ),
    ids=["too few", "NaN"],
)
def test_log_probabilities_that_tell_no_divergence_are_refused(
    place: Path,
    engine: Engine,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damaged: Any,
    words: str,
) -> None:
    whole = engine._prompt_logprobs
    monkeypatch.setattr(
        engine,
        "_prompt_logprobs",
        lambda *given: [entry and damaged(entry) for entry in whole(*given)],
    )
    assert served(place, url, tmp_path / "out", "--no-server-check") == 2
    assert words in " ".join(capsys.readouterr().err.split())
