"""Tables made for a model from text, `fcsd-steer bias`, and biases on ranks and in compiled models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated import UNEQUAL
from test_bias import random_tables

from fcsd.base.errors import UserError
from fcsd.model.connectivity import Connectivity, convert_model, load_model
from fcsd.model.families.choices import recording
from fcsd.model.families.routers import find_routers
from fcsd.parallel.launch import Ranks
from fcsd.parallel.overlap import attach
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.planning.network.links import write_links
from fcsd.planning.network.simulate import Payload
from fcsd_steering.cli import main
from fcsd_steering.routing.bias import read_tables, router_bias
from fcsd_steering.routing.bottleneck import Deployment
from fcsd_steering.routing.camoe import camoe
from fcsd_steering.routing.placement import contiguous
from fcsd_steering.routing.tables import (
    Calibration,
    make_tables,
    read_windows,
    windows_by_layer,
)
from tests.parallel.overlap.ranks import spread
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import few

BATCHES = [
    {
        "input_ids": torch.randint(
            3, 99, (2, 40), generator=torch.Generator().manual_seed(k)
        )
    }
    for k in range(16)
]


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return Calibration(tiny_model("qwen3_moe"), BATCHES, 4)


@pytest.fixture(scope="module")
def deployment(calibration: Calibration) -> Deployment:
    placement = np.tile(contiguous(8, 4), (4, 1))
    return Deployment(UNEQUAL, Payload(10_000, 8), placement)


def test_counts_are_those_of_the_models_own_choices_by_endpoint(
    calibration: Calibration,
) -> None:
    assert calibration.counts.shape == (4, 4, 4, 8)
    with recording(calibration.model) as recorded, torch.no_grad():
        calibration.model(BATCHES[6]["input_ids"])
        routed = recorded.take()[1]
    np.testing.assert_array_equal(
        calibration.counts[1, 1, 2],
        torch.bincount(routed.experts.flatten(), minlength=8),
    )
    with recording(calibration.model) as recorded, torch.no_grad():
        spreads = []
        for batch in BATCHES:
            calibration.model(batch["input_ids"])
            spreads.append(recorded.take()[3].logits.std(-1).mean())
    assert calibration.logit_std[3] == pytest.approx(
        float(torch.stack(spreads).mean()), rel=1e-5
    )


@pytest.mark.parametrize("family", ["muse_spark", "gemma4_text"])
def test_the_spread_is_that_of_the_logits_that_the_bias_is_added_to(
    family: str,
) -> None:
    """One scales them afterwards, the other records what a softmax makes of them."""
    model = tiny_model(family)
    deviations = Calibration(model, BATCHES[:4], 2).logit_std
    linears: list[float] = []
    plain = torch.nn.functional.linear

    def linear(given: Any, weight: Any, *rest: Any) -> Any:
        output = plain(given, weight, *rest)
        if weight.shape[0] == find_routers(model)[-1].num_experts:
            linears.append(float(output.double().std(-1).mean()))
        return output

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "linear", linear)
        for batch in BATCHES[:4]:
            model(**batch, use_cache=False)
    expected = np.reshape(linears, (4, -1)).mean(0)
    np.testing.assert_allclose(deviations, expected, rtol=1e-6)


def test_a_batch_that_is_all_padding_counts_for_nothing(
    calibration: Calibration,
) -> None:
    masks = [
        torch.full((2, 40), float(number != 5)).long() for number in range(len(BATCHES))
    ]
    padded = [
        {**batch, "attention_mask": mask}
        for batch, mask in zip(BATCHES, masks, strict=True)
    ]
    short = Calibration(calibration.model, padded, 4)
    assert short.counts[1, :, 1].sum() == 0 and short.counts[1, :, 2].sum() > 0
    rest = Calibration(calibration.model, BATCHES[:5] + BATCHES[6:], 4)
    np.testing.assert_allclose(short.logit_std, rest.logit_std, rtol=1e-6)


def test_tables_of_each_kind_lower_the_time_of_the_models_own_exchanges(
    calibration: Calibration, deployment: Deployment
) -> None:
    tables, facts = make_tables(calibration, deployment, "camoe", 0.3)
    expected = camoe(
        calibration.counts.mean(0),
        UNEQUAL,
        deployment.payload,
        deployment.placement,
        0.3,
    )
    np.testing.assert_array_equal(tables.tables, expected)
    assert (
        facts["after_s"]
        == deployment.mean_time(calibration.respond(tables))
        < facts["before_s"]
    )
    assert facts["before_s"] == deployment.mean_time(calibration.counts)
    ours, our_facts = make_tables(calibration, deployment, "bottleneck", 0.3)
    assert our_facts["after_s"] <= facts["after_s"] and ours.kind == "bottleneck"
    assert np.abs(ours.tables).mean() < np.abs(tables.tables).mean()
    scaled, _ = make_tables(calibration, deployment, "camoe", 0.3, scaled=True)
    ratio = np.abs(scaled.tables[2]).mean() / np.abs(tables.tables[2]).mean()
    assert ratio == pytest.approx(calibration.logit_std[2], rel=1e-4)
    windows = deployment.paths(calibration.counts).max((-2, -1)).mean(0) * [
        [0.93, 1],
        [1, 1],
        [1, 1],
        [1, 1],
    ]
    hidden, facts = make_tables(
        calibration, deployment, "windows", windows=windows * 1.02
    )
    assert hidden.tables[0].any() and facts["left"] == []


def ranks(rank: int, folder: Path) -> dict[str, Any]:
    """Choices and logits of each rank's batch, endpoint = rank: spread, and for rank
    0's sake alone.
    """
    by_name = {}
    for name, connectivity, overlap in (
        ("regular", None, None),
        ("farskip", Connectivity("all"), None),
        ("overlapped", Connectivity("all"), "full"),
    ):
        model = spread(folder, connectivity, 2).eval()
        if overlap:
            attach(model, overlap)
        alone = load_model(folder, connectivity=connectivity).eval()
        by_name[name] = []
        for each in (model, alone):
            with (
                router_bias(each, random_tables(alone)) as steering,
                recording(each) as seen,
                torch.no_grad(),
            ):
                steering.endpoint = rank + 1
                logits = each(BATCHES[rank]["input_ids"], use_cache=False).logits
                by_name[name].append(
                    (torch.stack([routed.experts for routed in seen.take()]), logits)
                )
        with torch.no_grad():
            by_name[name].append(
                alone(BATCHES[rank]["input_ids"], use_cache=False).logits
            )
        if name == "regular":
            both = Calibration(
                model, BATCHES[:9], 2, ranks=Ranks(rank, 2, lockstep=True)
            )
            one = Calibration(alone, BATCHES[:9], 2)
            assert np.array_equal(both.counts, one.counts)
            tables = random_tables(alone)
            assert np.array_equal(both.respond(tables), one.respond(tables))
    return by_name


@pytest.mark.breadth
def test_ranks_that_share_the_experts_have_biases_of_their_own(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    for by_name in run_ranks(ranks, 2, tmp_path):
        for name, (
            (experts, logits),
            (alone_experts, alone_logits),
            unbiased,
        ) in by_name.items():
            assert torch.equal(experts, alone_experts), name
            torch.testing.assert_close(logits, alone_logits, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(logits, unbiased, atol=0.1)


def test_ranks_that_share_their_tokens_are_refused() -> None:
    from transformers.distributed import DistributedConfig

    model = tiny_model("qwen3_moe")
    model.config.distributed_config = DistributedConfig(tp_size=2, ep_size=2)
    with (
        pytest.raises(UserError, match="no source endpoint"),
        router_bias(model, random_tables(model)),
    ):
        pass


def test_tables_for_experts_in_other_places_are_refused_on_as_many_ranks() -> None:
    from transformers.distributed import DistributedConfig

    model = tiny_model("qwen3_moe")
    model.config.distributed_config = DistributedConfig(fsdp_size=2, ep_size=2)
    tables = random_tables(model)
    two = dataclasses.replace(
        tables,
        tables=tables.tables[:, :2],
        placement=np.tile(np.arange(8) // 4, (4, 1)),
    )
    with router_bias(model, two):
        pass
    turns = dataclasses.replace(two, placement=np.tile(np.arange(8) % 2, (4, 1)))
    with (
        pytest.raises(UserError, match="another placement of the experts"),
        router_bias(model, turns),
    ):
        pass


@pytest.mark.parametrize("name", few(["deepseek_v3", "qwen3_moe"], 1))
def test_a_compiled_model_is_biased_without_a_graph_for_each_endpoint(
    name: str,
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny_model(name, num_hidden_layers=2)
    convert_model(model, Connectivity("all"))
    ids = BATCHES[0]["input_ids"]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    torch._dynamo.reset()
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with router_bias(model, random_tables(model)) as steering:
            for endpoint in range(3):
                steering.endpoint = endpoint
                biased = model(ids, use_cache=False).logits
                torch.testing.assert_close(
                    compiled(ids, use_cache=False).logits, biased
                )
                assert not torch.allclose(biased, plain)
            assert counter.frame_count == 1
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, links, text."""
    folder = tmp_path_factory.mktemp("bias")
    tiny_model("qwen3_moe", vocab_size=512).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    write_links(folder / "links.json", UNEQUAL)
    rows = [{"text": f"{k} is a number, and {k * k} its square"} for k in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def bias(
    folder: Path, *options: str, model: str = "model", out: Path | None = None
) -> int:
    fixed = [
        "--links", str(folder / "links.json"), "--text",
        f"{{path: {folder / 'rows.jsonl'}, columns: {{text: text}}}}", "--batch-size", "2",
    ]  # fmt: skip
    return main(
        ["bias", str(folder / model), str(out or folder / "tables"), *fixed, *options]
    )


def test_the_command_writes_tables_that_fit_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        bias(folder, "--strength", "0.5", "--selection", "--placement", "balanced") == 0
    )
    assert " ms (-" in capsys.readouterr().out
    tables = read_tables(folder / "tables")
    assert (tables.kind, tables.strength, tables.selection, tables.num_endpoints) == (
        "camoe", 0.5, True, 4,
    )  # fmt: skip
    assert (tables.model_type, tables.layers, tables.num_experts) == (
        "qwen3_moe",
        (0, 1, 2, 3),
        8,
    )
    assert not np.array_equal(tables.placement, np.tile(contiguous(8, 4), (4, 1)))
    with router_bias(load_model(folder / "model"), tables):
        pass


def test_the_floor_of_the_deviation_reaches_the_tables_of_the_command(
    folder: Path,
) -> None:
    """At ten times the mean it is the deviation of every row: the bias falls as it rises."""
    pushed = []
    for options in (
        [],
        ["--sigma-floor", "0.05"],
        ["--sigma-floor", "10"],
        ["--sigma-floor", "20"],
    ):
        assert bias(folder, "--strength", "0.5", *options) == 0
        pushed.append(read_tables(folder / "tables").tables)
    np.testing.assert_array_equal(pushed[0], pushed[1])
    assert pushed[2].any() and not np.allclose(pushed[1], pushed[2])
    np.testing.assert_allclose(pushed[2], 2 * pushed[3], rtol=1e-6)


def test_windows_of_other_ranks_are_refused_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fcsd_steering.routing.tables.load_for_evaluation", None)
    assert (
        bias(
            folder, "--kind", "windows", "--windows", windows(folder, expert_parallel=2)
        )
        == 2
    )
    assert (
        "windows for expert-parallel ranks 2, but the links have 4; write them"
        in capsys.readouterr().err
    )


def test_windows_are_read_by_layer_with_the_dispatch_first(folder: Path) -> None:
    path, model = (
        windows(
            folder, dispatch_s=[1.0, 2.0, 3.0, 4.0], combine_s=[5.0, 6.0, 7.0, 8.0]
        ),
        tiny_model("qwen3_moe"),
    )
    rows = windows_by_layer(read_windows(path, model.config, 4), model)
    assert rows.tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]]


def windows(folder: Path, **changes: Any) -> str:
    facts = {
        "model_type": "qwen3_moe", "layers": [0, 1, 2, 3], "dispatch_s": [1.0] * 4, "combine_s": [1.0] * 4,
    }  # fmt: skip
    (folder / "windows.json").write_text(json.dumps(facts | changes))
    return str(folder / "windows.json")


def test_hidden_exchanges_get_no_bias(folder: Path) -> None:
    assert bias(folder, "--kind", "windows", "--windows", windows(folder)) == 0
    assert not read_tables(folder / "tables").tables.any()


def test_bad_input_of_the_command_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = windows(folder, layers=[0, 1], dispatch_s=[1.0] * 2, combine_s=[1.0] * 2)
    for options, message in (
        ([], "--strength: camoe needs one"),
        (
            ["--strength", "-0.1"],
            "--strength: Input should be greater than or equal to 0, got -0.1",
        ),
        (
            ["--strength", "0.1", "--text-examples", "0"],
            "--text-examples: Input should be greater than 0",
        ),
        (
            ["--kind", "windows"],
            "--windows FILE and --kind windows need each other; give both",
        ),
        (
            ["--kind", "windows", "--windows", wrong],
            (
                "--windows: for the MoE layers [0, 1], but the model has [0, 1, 2, 3];"
                " write them with `fcsd plan MODEL"
            ),
        ),
        (
            ["--kind", "windows", "--windows", wrong, "--sigma-floor", "0.05"],
            ("--sigma-floor: has no effect with --kind windows; leave it out"),
        ),
        (
            ["--strength", "0.1", "--sigma-floor", "-1"],
            "--sigma-floor: Input should be greater than or equal to 0",
        ),
        (
            ["--strength", "0.1", "--sigma-floor", "nan"],
            "--sigma-floor: Input should be a finite number",
        ),
        (["--strength", "0.1", "--endpoints", "2"], "endpoints"),
        (["--strength", "0.1", "--links", str(folder / "none.json")], "no such file"),
    ):
        assert bias(folder, *options) == 2
        error = (
            capsys.readouterr().err.rpartition("fcsd-steer bias: error: ")[2].strip()
        )
        assert message in error and "\n" not in error, error
        assert "the bias" not in error and not error.startswith("strength"), error
    config = tiny_model("qwen3_moe").config
    for changes, message in (
        (
            {"model_type": "mixtral"},
            (
                "windows for model type mixtral, but the model has qwen3_moe; write them"
                " with `fcsd"
            ),
        ),
        (
            {"num_layers": 5},
            (
                "windows for decoder layers 5, but the model has 4; write them with"
                " `fcsd plan MODEL --ep 4"
            ),
        ),
        (
            {"expert_parallel": 8},
            (
                "windows for expert-parallel ranks 8, but the links have 4; write them"
                " with `fcsd plan"
            ),
        ),
        (
            {"dispatch_s": [True, 1.0, 1.0, 1.0]},
            r"dispatch_s\.0: a number is needed, got True",
        ),
        (
            {"dispatch_s": [1.0] * 3},
            "dispatch_s and combine_s need one number per layer of `layers`",
        ),
        ({"combine_s": [1.0, 1.0, 1.0, -1.0]}, r"combine_s\.3: .* got -1"),
        ({"combine_s": [1.0, 1.0, 1.0, float("nan")]}, r"combine_s\.3: .* got nan"),
        ({"version": 2}, "version: .* got 2"),
    ):
        with pytest.raises(UserError, match=message):
            read_windows(windows(folder, **changes), config, 4)
    with pytest.raises(
        UserError,
        match=r"holds something else \(no dispatch_s or combine_s\); `fcsd plan",
    ):
        read_windows(folder / "links.json", config, 4)


def test_a_place_that_cannot_hold_the_tables_is_refused_before_the_model_is_looked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "rows.jsonl").read_bytes()
    for out, message in (
        (folder, "is a folder; name the file"),
        (
            folder / "none" / "tables",
            "is in a folder that does not exist; name the file",
        ),
        (
            folder / "rows.jsonl",
            "exists and is another kind of file; name another file, or remove it",
        ),
    ):
        assert bias(folder, "--strength", "0.1", model="nowhere", out=out) == 2
        assert (
            capsys.readouterr().err
            == f"fcsd-steer bias: error: {out}: {message}"
            + (" to write\n" if "name the file" in message else "\n")
        )
    assert (folder / "rows.jsonl").read_bytes() == before


def test_endpoints_that_do_not_divide_the_experts_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("qwen3_moe", vocab_size=512, num_experts=6).save_pretrained(
        folder / "six"
    )
    tiny_tokenizer().save_pretrained(folder / "six")
    assert bias(folder, "--strength", "0.1", model="six") == 2
    assert (
        "6 experts cannot be divided evenly among 4 endpoints"
        in capsys.readouterr().err
    )
