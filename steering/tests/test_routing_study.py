"""The routing study against the same numbers computed from the models' own routers,
step by step.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fcsd.base.text import fit
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.parallel.launch import Ranks
from fcsd.parallel.overlap import attach
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.planning.network.links import LinkModel, read_links, write_links
from fcsd.planning.network.simulate import Payload, simulate
from fcsd_steering.cli import main
from fcsd_steering.routing import study as study_module
from fcsd_steering.routing.placement import balanced
from fcsd_steering.routing.routes import read_routes
from tests.parallel.overlap.ranks import spread
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.terminal import assert_readable

EXPERTS, TOP_K, LAYERS, WORLD, ROWS, BATCH = 8, 2, 3, 4, 20, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original, what it was converted to, twenty rows of text and the links of four
    endpoints.
    """
    folder = tmp_path_factory.mktemp("routing")
    fields = {
        "num_hidden_layers": LAYERS + 1, "vocab_size": 300, "num_experts": EXPERTS, "mlp_only_layers": [0],
    }  # fmt: skip
    tiny_model("qwen2_moe", **fields).save_pretrained(folder / "original")
    tiny_tokenizer(300).save_pretrained(folder / "original")
    convert_checkpoint(folder / "original", folder / "converted", Connectivity("all"))
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(ROWS):
            file.write(
                json.dumps({"text": f"row {n} of several " * (n % 3 + 1)}) + "\n"
            )
    links(folder / "links.json", WORLD)
    return folder


def links(path: Path, size: int) -> None:
    """Endpoint 0 is behind a slow link."""
    off = 1 - np.eye(size)
    beta = np.full((size, size), 1e-8)
    beta[0], beta[:, 0] = 1e-7, 1e-7
    phase = {
        "alpha_s": (1e-4 * off).tolist(), "beta_s_per_byte": (beta * off).tolist(), "repeats": 1,
        "r2": [[None] * size] * size, "refined": [[False] * size] * size,
    }  # fmt: skip
    facts = {
        "collective": "p2p", "backend": "gloo", "world_size": size, "libraries": {},
    }  # fmt: skip
    ports = {"egress_s_per_byte": [None] * size, "ingress_s_per_byte": [None] * size}
    phases = dict.fromkeys(("metadata", "dispatch", "combine"), phase)
    endpoints = [f"n{u}" for u in range(size)]
    write_links(
        path,
        LinkModel.model_validate(
            {"endpoints": endpoints, **facts, **phases, "ports": ports}
        ),
    )


def options(folder: Path, output: Path, *more: str) -> list[str]:
    text = f"{{path: {folder / 'rows.jsonl'}, columns: {{text: text}}}}"
    words = ["--text", text, "--output", str(output), *more]
    if "--batch-size" not in more:
        words += ["--batch-size", str(BATCH)]
    return ["routing", str(folder / "converted"), *words]


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    more = (
        "--against", str(folder / "original"), "--links", str(folder / "links.json"),
    )  # fmt: skip
    assert main(options(folder, folder / "study", *more)) == 0
    study: dict[str, Any] = json.loads((folder / "study" / "routing.json").read_text())
    return study


@pytest.fixture(scope="module")
def choices(folder: Path) -> dict[str, list[list[np.ndarray]]]:
    """Model -> batch -> layer -> experts (tokens, K), by top-k of the router logits
    that transformers records.
    """
    tokenizer, by_model = tiny_tokenizer(300), {}
    texts = [
        json.loads(line)["text"]
        for line in (folder / "rows.jsonl").read_text().splitlines()
    ]
    for name in ("converted", "original"):
        model, by_model[name] = load_model(folder / name), []
        for j in range(0, ROWS, BATCH):
            rows = [
                [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
                for text in texts[j : j + BATCH]
            ]
            per_layer: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
            for row in rows:
                with torch.no_grad():
                    logits = model(
                        torch.tensor([row]), output_router_logits=True
                    ).router_logits
                for layer in range(LAYERS):
                    per_layer[layer].append(logits[layer].topk(TOP_K).indices.numpy())
            by_model[name].append([np.concatenate(each) for each in per_layer])
    return by_model


def test_counts_and_traffic_are_those_of_the_batches_at_their_endpoints(
    result, choices
) -> None:
    assert result["num_batches"] == ROWS // BATCH
    for facts, name in zip(result["models"], ("converted", "original"), strict=True):
        counts = np.zeros((LAYERS, WORLD, EXPERTS), dtype=int)
        traffic = np.zeros((WORLD, WORLD), dtype=int)
        for j, batch in enumerate(choices[name]):
            for layer, experts in enumerate(batch):
                for expert in experts.ravel():
                    counts[layer, j % WORLD, expert] += 1
                    # whole steps only: batches 8 and 9 would leave two endpoints
                    # without any
                    traffic[j % WORLD, expert // (EXPERTS // WORLD)] += j < 8
        assert facts["layers"] == [1, 2, 3]
        assert facts["counts"] == counts.tolist()
        assert facts["traffic"] == traffic.tolist()
        assert all(1 < loss < EXPERTS for loss in facts["switch_balance_loss"])


def test_moved_routes_are_counted_token_by_token(result, choices) -> None:
    moved = []
    for layer in range(LAYERS):
        pairs = [
            set(one) - set(other)
            for before, after in zip(
                choices["original"], choices["converted"], strict=True
            )
            for one, other in zip(before[layer], after[layer], strict=True)
        ]
        moved.append(sum(map(len, pairs)) / (TOP_K * len(pairs)))
    assert result["comparison"]["layer_moved"] == pytest.approx(moved)
    assert result["comparison"]["routes_moved"] == pytest.approx(np.mean(moved))
    assert 0.05 < np.mean(moved) < 0.95
    assert result["epsilon"] == 1e-6


def kl_by_hand(base: np.ndarray, compared: np.ndarray) -> float:
    p, q = ((loads + 1e-6) / (loads + 1e-6).sum() for loads in (base, compared))
    return float((p * np.log(p / q)).sum())


def kept_loads(batches: list[list[np.ndarray]], factor: float | None) -> np.ndarray:
    """Pairs [L, E] that a capacity factor leaves, in the order of the tokens."""
    loads = np.zeros((LAYERS, EXPERTS), dtype=int)
    for batch in batches:
        for layer, experts in enumerate(batch):
            limit = (
                len(experts)
                if factor is None
                else int(np.ceil(factor * TOP_K * len(experts) / EXPERTS))
            )
            loads[layer] += np.minimum(
                np.bincount(experts.ravel(), minlength=EXPERTS), limit
            )
    return loads


def test_loads_are_compared_with_those_of_the_base_before_and_after_drops(
    result, choices
) -> None:
    shift = result["comparison"]
    for row, factor in (
        (shift, None),
        (next(r for r in shift["capacity"] if r["factor"] == 1.25), 1.25),
    ):
        base, now = (
            kept_loads(choices[name], factor) for name in ("original", "converted")
        )
        by_layer = [
            kl_by_hand(one, other) for one, other in zip(base, now, strict=True)
        ]
        assert row["kl"] == pytest.approx(kl_by_hand(base.sum(0), now.sum(0)))
        assert row["avg_layer_kl"] == pytest.approx(np.mean(by_layer))
        if factor is None:
            assert row["layer_kl"] == pytest.approx(by_layer)
        facts = result["models"][0]
        spread = (
            facts
            if factor is None
            else next(r for r in facts["capacity"] if r["factor"] == factor)
        )
        assert spread["cv"] == pytest.approx(now.sum(0).std() / now.sum(0).mean())
        assert spread["avg_layer_cv"] == pytest.approx(
            (now.std(-1) / now.mean(-1)).mean()
        )


def test_placements_are_decided_on_the_first_half_and_timed_on_the_second(
    folder, result, choices
) -> None:
    placements, links = (
        result["models"][0]["placements"],
        read_links(folder / "links.json"),
    )
    first, second = (choices["converted"][k : k + WORLD] for k in (0, WORLD))
    endpoints = balanced(kept_loads(first, None), WORLD)
    assert placements["balanced"]["endpoints"] == endpoints.tolist()
    times = []
    for layer in range(LAYERS):
        traffic = np.zeros((WORLD, WORLD))
        for source, batch in enumerate(second):
            np.add.at(traffic[source], endpoints[layer][batch[layer].ravel()], 1)
        times.append(
            1e3
            * simulate(links, traffic, Payload(row_width=32, num_experts=EXPERTS)).total
        )
    assert placements["balanced"]["mean_ms"] == pytest.approx(np.mean(times))


def test_capacity_drops_per_batch_and_times_are_of_what_is_left(
    folder, result, choices
) -> None:
    links = read_links(folder / "links.json")
    row = next(row for row in result["models"][0]["capacity"] if row["factor"] == 1.25)
    dropped = total = alone = room = 0
    steps = np.zeros((2, LAYERS, WORLD, WORLD))
    for j, batch in enumerate(choices["converted"]):
        for layer, experts in enumerate(batch):
            # 1.25 K T / E, upwards
            limit = -(-5 * TOP_K * len(experts) // (4 * EXPERTS))
            taken = [0] * EXPERTS
            room += limit * EXPERTS
            for token in experts:
                kept = 0
                for expert in token:
                    total += 1
                    if taken[expert] == limit:
                        dropped += 1
                        continue
                    taken[expert] += 1
                    kept += 1
                    if j < 8:
                        steps[
                            j // WORLD, layer, j % WORLD, expert // (EXPERTS // WORLD)
                        ] += 1
                alone += kept == 0
    assert row["dropped"] == pytest.approx(dropped / total)
    assert row["without_expert"] == pytest.approx(alone / (total / TOP_K))
    assert row["padding"] == pytest.approx(1 - (total - dropped) / room)
    payload = Payload(row_width=32, num_experts=EXPERTS)
    times = [
        1e3 * simulate(links, step, payload).total
        for layers in steps
        for step in layers
    ]
    assert row["mean_ms"] == pytest.approx(np.mean(times))
    assert row["p95_ms"] == pytest.approx(np.percentile(times, 95))
    assert row["mean_ms"] < result["models"][0]["mean_ms"]


def test_the_report_says_what_conversion_did_and_a_finished_study_is_not_run_again(
    folder, result, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(study_module, "load_for_evaluation", None)
    more = (
        "--against", str(folder / "original"), "--links", str(folder / "links.json"),
    )  # fmt: skip
    assert main(options(folder, folder / "study", *more)) == 0
    text = capsys.readouterr().out
    assert text == (folder / "study" / "routing.md").read_text() + "\n"
    assert_readable(fit(text, 80))
    assert f"## What changed against {folder / 'original'}" in text
    assert (
        f"{result['comparison']['routes_moved']:.2%} of the (token, expert) pairs"
        in text
    )
    assert "by traffic and links" in text
    before, after = (result["models"][k]["layer_cv"][0] for k in (1, 0))
    row = next(line for line in text.splitlines() if line.startswith("| 1 "))
    assert [cell.strip() for cell in row.split("|")][-3:-1] == [
        f"{before:.3f}",
        f"{after:.3f}",
    ]
    placements = result["models"][0]["placements"]
    assert np.array(placements["topology_aware"]["endpoints"]).shape == (
        LAYERS,
        EXPERTS,
    )
    assert set(placements) == {"contiguous", "balanced", "topology_aware"}
    for name in ("loads", "traffic", "shift"):
        assert (folder / "study" / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--endpoints", "3"], "8 experts cannot be divided evenly among 3 endpoints; allowed: 1, 2, 4, 8"),
        (["--endpoints", "2", "--links", "{}/links.json"], "the links are between 4 endpoints, but 2 were requested"),
        (["--batch-size", "7"], "20 rows in batches of 7 make 3 batches, but each of the 8 endpoints needs one"),
        (["--against", "{}/other"], "other: its tokenizer differs from that of"),
        (["--links", "{}/none.json"], "none.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_studied_is_refused_in_one_line(
    folder, tmp_path, capsys, words, message
) -> None:
    if not (folder / "other").exists():
        tiny_model("qwen2_moe", num_experts=EXPERTS).save_pretrained(folder / "other")
        tiny_tokenizer(99).save_pretrained(folder / "other")
    given = [word.format(folder) for word in words]
    assert main(options(folder, tmp_path / "study", *given)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1 or error.strip().splitlines()[
        -1
    ].startswith("fcsd-steer routing: error:")


def test_a_study_without_text_is_refused(folder, tmp_path, capsys) -> None:
    assert (
        main(["routing", str(folder / "converted"), "--output", str(tmp_path / "s")])
        == 2
    )
    assert (
        "nothing to route: give a text (--text) or a task of the suite (--task)"
        in capsys.readouterr().err
    )


def _batches() -> list[dict[str, torch.Tensor]]:
    made = []
    for seed in range(3):
        ids = torch.randint(
            3, 300, (2, 9), generator=torch.Generator().manual_seed(seed)
        )
        mask = torch.ones_like(ids)
        mask[1, 9 - seed :] = 0
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def _routes_of_a_rank(rank: int, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    model = spread(folder, None, 2)
    attach(model, "full")
    routes = read_routes(model, _batches(), ranks=Ranks(rank, 2, lockstep=True))
    return routes.experts, routes.probabilities


def test_expert_parallel_ranks_find_what_one_process_finds(folder) -> None:
    wanted = read_routes(load_model(folder / "converted"), _batches())
    assert wanted.num_tokens.tolist() == [18, 17, 16]
    for experts, probabilities in run_ranks(_routes_of_a_rank, 2, folder / "converted"):
        assert np.array_equal(experts, wanted.experts)
        assert probabilities == pytest.approx(wanted.probabilities, rel=1e-4)


def test_counts_are_those_of_each_batch_without_padding() -> None:
    model = tiny_model("qwen3_moe")
    batches = []
    for seed, padding in enumerate((0, 4, 2)):
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[0, 11 - padding :] = 0
        ids = torch.randint(
            3, 99, (2, 11), generator=torch.Generator().manual_seed(seed)
        )
        batches.append({"input_ids": ids, "attention_mask": mask})
    routes = read_routes(model, batches)
    wanted = torch.zeros(3, 4, 8, dtype=torch.long)
    for j, batch in enumerate(batches):
        with torch.no_grad():
            logits = model(
                **batch, output_router_logits=True, use_cache=False
            ).router_logits
        for layer in range(4):
            for token, kept in zip(
                logits[layer], batch["attention_mask"].flatten(), strict=True
            ):
                for expert in token.topk(2).indices.tolist() if kept else []:
                    wanted[j, layer, expert] += 1
    assert routes.batch_loads().tolist() == wanted.tolist()
    assert routes.num_tokens.tolist() == [22, 18, 20]
    assert (routes.layers, routes.top_k, routes.num_experts) == ([0, 1, 2, 3], 2, 8)
