"""The layer study measures what its points say, continues after a kill, and its plan is
the sum of the measurements.
"""

import json
import random
import re
import shutil
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.axes import Axes

from fcsd.base.files import write_sealed
from fcsd.base.stats import ratio, standard_error
from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.data.chat import tokenize_examples
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset, heldout_rows
from fcsd.evaluation.config import EvaluationConfig
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    convert_model,
    load_model,
    parse_selection,
)
from fcsd.model.connectivity.selection import selection_text
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.model.load import load_tokenizer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.pipeline.tiny.tasks import write_tiny_data
from fcsd.planning.layers import study as study_module
from fcsd.planning.layers.first import special_layers
from fcsd.planning.layers.front import Prices
from fcsd.planning.layers.points import layers_with_mlp, overlapped_collectives
from fcsd.planning.layers.proposal import (
    layers_within,
    least_costly,
    parse_budget,
    plan_layers,
    plan_text,
    study_table,
    within_text,
)
from fcsd.planning.layers.settings import Study, read_study, selections
from fcsd.planning.layers.study import Measured, difference
from fcsd.report.study_plots import plot_layers
from fcsd.training.calibration.model import calibrate_model
from fcsd.training.losses.heldout_kl import mean_kl, read_original
from tests.planning.layers.test_kinds import without_kl
from tests.reference.tiny import tiny_model
from tests.support import (
    arithmetic,
    command_words,
    edited_json,
    evaluate,
    few,
    run_command,
    user_error,
    write_rows,
)

NUM_LAYERS = 4
ROWS = {"num_examples": 12, "max_length": 32, "packing": True, "loss_on": "response"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random qwen2_moe of four layers, the first of them dense."""
    folder = tmp_path_factory.mktemp("study") / "model"
    fields = {
        "num_hidden_layers": NUM_LAYERS, "vocab_size": 300, "num_experts": 4, "mlp_only_layers": [0],
    }  # fmt: skip
    tiny_model("qwen2_moe", **fields).save_pretrained(folder)
    tiny_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    write_rows(path, arithmetic(20))
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data root of the tiny suite."""
    folder = tmp_path_factory.mktemp("tasks") / "data"
    write_tiny_data(
        folder,
        num_train=40,
        num_distill=4,
        num_heldout=4,
        num_validation=4,
        num_test=8,
        vocab_size=400,
    )
    return folder / "data"


@pytest.fixture(scope="module")
def finished(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "study"
    assert main(command(model, text, folder)) == 0
    return folder


def command(model: Path, text: Path, folder: Path, *more: str) -> list[str]:
    usual = {
        "--text": text,
        "--text-examples": ROWS["num_examples"],
        "--max-length": ROWS["max_length"],
        "--output": folder,
    }
    words = [
        str(word)
        for name, value in usual.items()
        if name not in more
        for word in (name, value)
    ]
    return ["layers", str(model), *words, *more]


@pytest.fixture(scope="module")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the rows on which the maps are solved; the KL is measured on none of
    them.
    """
    path = tmp_path_factory.mktemp("other") / "rows.jsonl"
    chooser = random.Random(0)
    lines = (
        {"text": "".join(chooser.choices(string.ascii_letters, k=40))}
        for _ in range(13)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def calibrated(
    model: Path, text: Path, other_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("calibrated") / "study"
    assert main(calibrated_command(model, text, other_text, folder)) == 0
    return folder


def calibrated_command(
    model: Path, text: Path, other_text: Path, folder: Path
) -> list[str]:
    source = f"{{path: {other_text}, columns: {{text: text}}}}"
    selections = ("--every", "2", "--sides", "last,single")
    return command(model, text, folder, "--calibrated", source, *selections)


Refused = Callable[..., None]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    def check(words: list[str], message: str) -> None:
        capsys.readouterr()
        assert main(words) == 2
        captured = capsys.readouterr()
        error = captured.err.strip().splitlines()[-1]
        assert re.search(message, error), error
        assert captured.out == ""

    return check


# ---- the study


def test_every_point_is_the_kl_of_the_model_loaded_with_its_layers(
    model: Path, text: Path, finished: Path
) -> None:
    rows = heldout_rows(SourceConfig(path=str(text)), load_tokenizer(model), **ROWS)  # type: ignore[arg-type]
    original, wired = read_original(load_model(model), rows), load_model(model)
    study = read_study(finished)
    assert [(point["side"], point["layers"]) for point in study["points"]] == [
        *[("first", list(range(count))) for count in (1, 2, 3, 4)],
        *[("last", list(range(4 - count, 4))) for count in (1, 2, 3, 4)],
        *[("single", [layer]) for layer in range(4)],
    ]
    for point in study["points"]:
        convert_model(wired, Connectivity(point["layers"]))
        direct = mean_kl(original, wired, rows)
        measured = point["values"]["kl"]
        assert measured["value"] == pytest.approx(direct["kl"], rel=1e-5)
        assert direct["kl"] > 1e-3
        assert measured["stderr"] == pytest.approx(direct["stderr"], rel=1e-4)
        assert measured["num_items"] == direct["num_tokens"]
    assert study["moe_layers"] == [1, 2, 3]
    assert (finished / "layers.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_calibrated_points_are_those_of_a_model_calibrated_by_itself(
    model: Path, text: Path, other_text: Path, calibrated: Path, finished: Path
) -> None:
    tokenizer, study = load_tokenizer(model), read_study(calibrated)
    rows = heldout_rows(SourceConfig(path=str(text)), tokenizer, **ROWS)  # type: ignore[arg-type]
    source = SourceConfig(path=str(other_text), columns={"text": "text"})
    solved_on = [
        *build_dataset(
            [source], tokenizer, max_length=ROWS["max_length"], shuffle=False
        )
    ]
    assert 400 <= sum(len(row["input_ids"]) for row in solved_on) < 400 + 2 * 32
    copied = {
        tuple(point["layers"]): point["values"]
        for point in read_study(finished)["points"]
    }
    assert [point["layers"] for point in study["points"]] == [
        [2, 3], [1, 2, 3], [0, 1, 2, 3], [0], [1], [2], [3],
    ]  # fmt: skip
    # The weights are the original's again after each point, to the last bit.
    for point in study["points"]:
        assert point["values"] == copied[tuple(point["layers"])]
    original = load_model(model)
    outputs = read_original(original, rows)
    for point in study["points"][::3]:
        wired = load_model(model, connectivity=Connectivity(point["layers"]))
        calibrate_model(wired, original, solved_on, progress=False)
        direct = mean_kl(outputs, wired, rows)
        assert point["calibrated"]["kl"]["value"] == pytest.approx(
            direct["kl"], rel=1e-4
        )
        assert abs(direct["kl"] - point["values"]["kl"]["value"]) > 1e-3


@pytest.mark.breadth
def test_a_calibrated_study_that_was_cut_off_ends_with_the_same_bytes(
    model: Path,
    text: Path,
    other_text: Path,
    calibrated: Path,
    tmp_path: Path,
    refused: Refused,
) -> None:
    folder = tmp_path / "study"
    shutil.copytree(calibrated, folder)
    (folder / "manifest.json").unlink()
    with edited_json(folder / "layers.json") as begun:
        begun["points"] = begun["points"][:3]
        del begun["sha256"]
    assert main(calibrated_command(model, text, other_text, folder)) == 0
    assert (folder / "layers.json").read_bytes() == (
        calibrated / "layers.json"
    ).read_bytes()
    other_text_now = tmp_path / "now.jsonl"
    other_text_now.write_text(other_text.read_text() * 2)
    refused(calibrated_command(model, text, other_text_now, folder), r"calibrated: ")


@pytest.mark.breadth
def test_verify_measures_calibrated_weights(
    calibrated: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for more, which in (((), "values"), (("--calibrated",), "calibrated")):
        words = [
            "plan-layers", str(calibrated), "--budget", "2", "--verify", "--json", *more,
        ]  # fmt: skip
        assert main(words) == 0
        (last,) = (p for p in read_study(calibrated)["points"] if p["layers"] == [2, 3])
        selection = json.loads(capsys.readouterr().out)["selections"][1]
        assert selection["layers"] == [2, 3]
        assert selection["measured"]["value"] == pytest.approx(
            last[which]["kl"]["value"], rel=1e-4
        )


def test_one_side_of_the_connectivity_is_studied_alone(
    model: Path, text: Path, tmp_path: Path
) -> None:
    words = ("--mlp", "full", "--every", "2")
    assert main(command(model, text, tmp_path / "s", *words)) == 0
    rows = heldout_rows(SourceConfig(path=str(text)), load_tokenizer(model), **ROWS)  # type: ignore[arg-type]
    points = read_study(tmp_path / "s")["points"]
    assert [(point["side"], point["num_layers"]) for point in points] == [
        ("first", 2), ("first", 4), ("last", 2), ("last", 3), ("last", 4),
    ]  # fmt: skip
    wired = Connectivity({"last": 2}, mlp="full")
    direct = mean_kl(
        read_original(load_model(model), rows),
        load_model(model, connectivity=wired),
        rows,
    )
    assert points[2]["values"]["kl"]["value"] == pytest.approx(direct["kl"], rel=1e-5)


@pytest.mark.breadth
def test_the_mlp_side_is_studied_where_attention_is_partial_in_all_layers(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--mlp", "selected", "--every", "2", "--sides", "last,single")
    assert main(command(model, text, tmp_path / "s", *words)) == 0
    points = read_study(tmp_path / "s")["points"]
    assert [(point["side"], point["layers"]) for point in points] == [
        ("attention", []), ("last", [2, 3]), ("last", [0, 1, 2, 3]),
        *(("single", [layer]) for layer in range(4)),
    ]  # fmt: skip
    rows = heldout_rows(SourceConfig(path=str(text)), load_tokenizer(model), **ROWS)  # type: ignore[arg-type]
    original = read_original(load_model(model), rows)
    for point, mlp in ((points[0], "full"), (points[1], [2, 3]), (points[4], [1])):
        converted = load_model(model, connectivity=Connectivity("all", mlp=mlp))
        direct = mean_kl(original, converted, rows)
        assert point["values"]["kl"]["value"] == pytest.approx(direct["kl"], rel=1e-5)
    # A proposal is a list of outdated MLP sides, which a recipe accepts as it is.
    capsys.readouterr()
    budget = ("plan-layers", str(tmp_path / "s"), "--budget", "2")
    assert main([*budget, "--json"]) == 0
    proposal = json.loads(capsys.readouterr().out)
    assert proposal["connectivity"] == {
        "layers": "all", "attention": "partial", "mlp": proposal["layers"],
    }  # fmt: skip
    assert main([*budget]) == 0
    printed = capsys.readouterr().out
    assert f"--mlp {proposal['selection']}" in printed
    assert f"  mlp: {proposal['layers']}" in printed and "  layers: all" in printed
    config = ConnectivityConfig.model_validate(proposal["connectivity"])
    assert config.spec.field([True] * 4)["mlp"] == proposal["layers"]
    assert main([*budget[:2], "--max-loss", "100"]) == 0
    assert "--mlp" in capsys.readouterr().out


def test_task_points_are_what_evaluate_gives(tasks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fields = {"num_hidden_layers": 2, "vocab_size": 400, "max_position_embeddings": 512}
    tiny_model("qwen2_moe", **fields).save_pretrained(folder)
    load_tokenizer(tasks.parent / "tokenizer").save_pretrained(folder)
    words = command_words(
        "--task tiny_choice --data-root", tasks, "--sides last,single --limit 6"
    )
    assert main(["layers", str(folder), *words, "--output", str(tmp_path / "s")]) == 0
    study = read_study(tmp_path / "s")
    suite = load_suite("tiny")
    suite = suite.model_copy(
        update={"tasks": [row for row in suite.tasks if row.task == "tiny_choice"]}
    )
    sides = [
        ("none", []), ("last", [1]), ("last", [0, 1]), ("single", [0]), ("single", [1]),
    ]  # fmt: skip
    assert [(point["side"], point["layers"]) for point in study["points"]] == sides
    for point in study["points"]:
        wired = load_model(folder, connectivity=Connectivity(point["layers"] or "none"))
        result, _ = evaluate(
            wired,
            load_tokenizer(folder),
            suite,
            data_root=tasks,
            batch_size=16,
            limit=6,
            progress=False,
        )
        row = result["tasks"]["tiny_choice"]
        expected = {"value": row["value"], "stderr": row["stderr"], "num_items": 6}
        assert point["values"] == {"tiny_choice": expected}


def test_a_task_evaluated_again_draws_the_same_examples(tasks: Path) -> None:
    suite = load_suite("tiny")
    row = next(row for row in suite.tasks if row.task == "tiny_choice")
    suite = suite.model_copy(
        update={"tasks": [row.model_copy(update={"num_fewshot": 2})]}
    )
    wired = tiny_model(
        "qwen2_moe", num_hidden_layers=2, vocab_size=400, max_position_embeddings=512
    )
    tokenizer = load_tokenizer(tasks.parent / "tokenizer")
    plan = EvaluationConfig(data_root=str(tasks), batch_size=8)
    with prepare_evaluation(tokenizer, suite, plan, progress=False) as judge:
        _, one = judge(wired, "one")
        _, two = judge(wired, "two")
    assert one == two and len(one["tiny_choice"]) == 8


@pytest.mark.parametrize("num_kept", few([3, 0], 1))
def test_a_killed_study_continues_and_ends_with_the_same_bytes(
    model: Path,
    text: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_kept: int,
) -> None:
    folder = tmp_path / "study"
    measure, calls = study_module.kl_by_row, []

    def killed(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(study_module, "kl_by_row", killed)
    assert main(command(model, text, folder)) == 130
    assert len(json.loads((folder / "layers.json").read_text())["points"]) == 3
    with user_error("not finished; run the same `fcsd layers` command again"):
        plan_layers(folder, "50%")
    if num_kept == 0:  # those of another study
        points = json.loads((folder / "layers.json").read_text())
        del points["sha256"]
        write_sealed(folder / "layers.json", points, "another study")
    assert main(command(model, text, folder)) == 0
    # 12 points are 9 selections: all layers, the first layer and the last layer each
    # belong to two sides.
    assert len(calls) == 4 + 9 - num_kept
    assert (folder / "layers.json").read_bytes() == (
        finished / "layers.json"
    ).read_bytes()
    assert main(command(model, text, folder)) == 0
    assert len(calls) == 13 - num_kept


def test_a_changed_study_is_refused_with_the_difference(
    model: Path, text: Path, finished: Path, tmp_path: Path, refused: Refused
) -> None:
    before = (finished / "layers.json").read_bytes()
    again = command(model, text, finished)
    refused([*again, "--loss-on", "all"], r'loss_on: "response" -> "all"')
    refused([*again, "--every", "2"], r"every: 1 -> 2")
    refused([*again, "--attention", "full"], r'attention: "partial" -> "full"')
    other = tmp_path / "other.jsonl"
    other.write_text(text.read_text() * 2)
    refused(command(model, other, finished), r"data\.heldout: ")
    different = tmp_path / "model"
    tiny_model(
        "qwen2_moe", seed=5, num_hidden_layers=4, vocab_size=300
    ).save_pretrained(different)
    tiny_tokenizer(300).save_pretrained(different)
    refused(command(different, text, finished), r"original: .* -> ")
    assert (finished / "layers.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "tiny_choise"], r"task 'tiny_choise': not in suite tiny; did you mean 'tiny_choice'\?"),
        (["--task", "tiny_choice", "--suite", "tyni"], r"suite 'tyni': no such suite"),
        (["--every", "0"], r"every: .*greater than 0"),
        (["--sides", "first,middle"], r"sides.*'first', 'last', 'single' or 'attention'.*'middle'"),
        (["--mlp", "full", "--sides", "single"], r"'single' with mlp: full would measure nothing"),
        (["--mlp", "full", "--attention", "full"], r"is the regular model"),
        (["--mlp", "selected", "--attention", "full"], r"attention must be partial"),
        (["--max-length", "1"], r"--max-length: "),
        (["--calibrated", "{path: x, colums: {}}"], r"--calibrated: colums: unknown key"),
        (["--text", "{path: x, colums: {}}"], r"--text: colums: unknown key; did you mean 'columns'"),
        (["--text", "/absent/x.jsonl"], r"/absent/x\.jsonl: no such file"),
        (["--limit", "3"], r"--limit has no meaning without --task; add that option"),
        (["--data-root", "x"], r"--data-root has no meaning without --task"),
        (["--suite", "paper11"], r"--suite has no meaning without --task"),
        (["--sides", ""], r"--sides: .*'first', 'last', 'single' or 'attention'.*got ''"),
        (["--sides", "single", "--every", "2"], r"applies to the sides first and last"),
        (["--sides", "single,single"], r"sides: single is given twice"),
    ],
)  # fmt: skip
def test_a_study_that_cannot_be_is_refused(
    model: Path,
    text: Path,
    tmp_path: Path,
    refused: Refused,
    words: list[str],
    message: str,
) -> None:
    refused(command(model, text, tmp_path / "s", *words), message)
    assert not (tmp_path / "s" / "layers.json").exists()


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("nemotron_h", ["--sides", "single"], r"'single' measures nothing in nemotron_h"),
        ("cohere2_moe", ["--attention", "full"], r"attention: full changes nothing here"),
    ],
)  # fmt: skip
def test_a_study_of_what_changes_nothing_in_a_family_is_refused(
    family: str,
    text: Path,
    tmp_path: Path,
    refused: Refused,
    words: list[str],
    message: str,
) -> None:
    tiny_model(family, vocab_size=300).save_pretrained(tmp_path / "model")
    refused(command(tmp_path / "model", text, tmp_path / "s", *words), message)
    assert not (tmp_path / "s").exists()


def test_maps_are_not_fitted_on_the_text_that_is_measured(
    model: Path, text: Path, tmp_path: Path, refused: Refused
) -> None:
    refused(
        command(model, text, tmp_path / "s", "--calibrated", str(text)),
        r"--calibrated .*: is the text that is measured \(--text\); give another text",
    )
    assert not (tmp_path / "s").exists()


def test_a_study_of_nothing_or_of_a_converted_model_is_refused(
    model: Path, text: Path, tmp_path: Path, refused: Refused
) -> None:
    refused(
        ["layers", str(model), "--output", str(tmp_path / "s")],
        r"nothing to measure: give a task .* or a text",
    )
    convert_checkpoint(model, tmp_path / "converted", Connectivity({"last": 1}))
    refused(
        command(tmp_path / "converted", text, tmp_path / "s"),
        r"already converted; the study needs its original",
    )
    assert not (tmp_path / "s").exists()


def test_the_kl_of_a_multimodal_wrapper_is_refused(
    text: Path, tmp_path: Path, refused: Refused
) -> None:
    tiny_model("llama4", vocab_size=300).save_pretrained(tmp_path / "model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "model")
    refused(
        command(tmp_path / "model", text, tmp_path / "s"),
        r"Llama4ForConditionalGeneration has none of its own",
    )


def test_counts_are_every_nth_all_but_the_first_layer_and_all() -> None:
    study = validate(
        Study,
        {"model": {"path": "x"}, "text": {"path": "y"}, "every": 3, "sides": ["last"]},
        "study",
    )
    assert [len(layers) for _, layers in selections(study, 8)] == [3, 6, 7, 8]


def test_a_paired_difference_has_the_error_of_the_differences() -> None:
    one = Measured(
        {}, {"kl": [(2.0, 1), (6.0, 2), (7.0, 3)], "t": [1.0, 0.0, 1.0, 1.0]}
    )
    two = Measured(
        {}, {"kl": [(1.0, 1), (5.0, 2), (3.0, 3)], "t": [1.0, 1.0, 0.0, 1.0]}
    )
    kl = difference(one, two, "kl")
    assert kl["value"] == pytest.approx(1.0)  # (1 + 1 + 4) / 6
    assert kl["stderr"] == pytest.approx(ratio([1.0, 1.0, 4.0], [1, 2, 3]).stderr)
    task = difference(one, two, "t")
    assert (task["value"], task["stderr"]) == (
        0.0,
        pytest.approx(standard_error([0.0, -1.0, 1.0, 0.0])),
    )


@pytest.mark.parametrize(
    "sides", few([["first"], ["single"], ["first", "last", "single"]], 1)
)
def test_the_figure_is_drawn_for_what_was_measured(
    tmp_path: Path, sides: list[str]
) -> None:
    study = hand_made([0.5, 0.1, 0.2], tmp_path, task=True)
    study["points"] = [p for p in study["points"] if p["side"] in ("none", *sides)]
    plot_layers(study, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_the_figure_has_a_second_curve_for_calibrated_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = hand_made([0.5, 0.1, 0.2], tmp_path, calibrated=0.1)
    drawn: dict[str, list[float]] = {}

    def errorbar(
        axis: Axes,
        x: list[int],
        y: list[float],
        *,
        label: str,
        **_: Any,
    ) -> None:
        drawn[label] = y

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    monkeypatch.setattr(Axes, "legend", lambda *_, **__: None)
    plot_layers(study, tmp_path / "figure.png")
    assert drawn["first N layers, copied"] == pytest.approx([0.5, 0.6, 0.8])
    assert drawn["first N layers, calibrated"] == pytest.approx([0.05, 0.06, 0.08])
    assert drawn["MoE layer, calibrated"] == pytest.approx([0.01, 0.02])


def test_text_that_fits_into_one_row_has_the_standard_error_of_its_examples(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    words = command_words(
        "--max-length 512 --text-examples 6 --sides single,last --every 4"
    )
    assert main(command(model, text, folder, *words)) == 0
    assert "± –" not in capsys.readouterr().out
    tokenizer, original, wired = (
        load_tokenizer(model),
        load_model(model),
        load_model(model),
    )
    sums, counts = [], []
    convert_model(wired, Connectivity([2]))
    for line in text.read_text().splitlines()[:6]:
        (encoded,) = tokenize_examples(
            [json.loads(line)], {"messages": "messages"}, tokenizer
        )
        ids = torch.tensor([encoded["input_ids"]])
        with torch.no_grad():
            p, q = (
                one(ids).logits[0, :-1].double().log_softmax(-1)
                for one in (original, wired)
            )
        kl = (p.exp() * (p - q)).sum(-1)[torch.tensor(encoded["loss_mask"][1:])]
        sums.append(float(kl.sum()))
        counts.append(len(kl))
    mean = sum(sums) / sum(counts)
    squares = [
        (total - mean * count) ** 2 for total, count in zip(sums, counts, strict=True)
    ]
    (point,) = (
        p
        for p in read_study(folder)["points"]
        if p["side"] == "single" and p["layers"] == [2]
    )
    measured = point["values"]["kl"]
    assert measured["value"] == pytest.approx(mean, rel=1e-4)
    assert measured["num_items"] == sum(counts)
    assert measured["stderr"] == pytest.approx(
        (6 / 5 * sum(squares)) ** 0.5 / sum(counts), rel=1e-3
    )
    assert run_command("plan-layers", folder, "--budget 1 --verify --json") == 0
    assert json.loads(capsys.readouterr().out)["difference"]["stderr"] is not None


def test_a_single_example_has_no_standard_error_and_verify_is_refused(
    model: Path,
    text: Path,
    tmp_path: Path,
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "s"
    words = command_words(
        "--text-examples 1 --max-length 12 --sides single,last --every 4"
    )
    assert main(command(model, text, folder, *words)) == 0
    table, error = capsys.readouterr()
    assert (
        "--text: 1 example read: 1 cut, 0 without loss, 0 left out\n--text: warning: 1"
        " of 1" in error
    )
    # All layers, all but the first, which costs far more, and each one alone.
    assert len(re.findall(r"^\|.*\d ± – ", table, flags=re.M)) == 2 + NUM_LAYERS
    assert "± 0" not in table
    assert {p["values"]["kl"]["stderr"] for p in read_study(folder)["points"]} == {None}
    assert main(["plan-layers", str(folder), "--budget", "2"]) == 0
    assert "± –" in (plan := capsys.readouterr().out) and "± 0" not in plan
    assert main(["plan-layers", str(folder), "--max-loss", "100"]) == 0
    assert "± –" in capsys.readouterr().out
    refused(
        ["plan-layers", str(folder), "--budget", "2", "--verify"],
        r"--verify: the study measured kl on a single example, .*run `fcsd layers`"
        r" again into another folder with a"
        r" larger --text-examples, or a text with more examples than",
    )


def test_a_single_item_of_a_task_has_no_standard_error_and_verify_is_refused(
    tasks: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    tiny_model(
        "qwen2_moe", num_hidden_layers=2, vocab_size=400, max_position_embeddings=512
    ).save_pretrained(folder)
    load_tokenizer(tasks.parent / "tokenizer").save_pretrained(folder)
    words = command_words(
        "--task tiny_choice --data-root", tasks, "--sides single --limit 1"
    )
    assert main(["layers", str(folder), *words, "--output", str(tmp_path / "s")]) == 0
    assert "± 0" not in capsys.readouterr().out
    refused(
        ["plan-layers", str(tmp_path / "s"), "--budget", "1", "--verify"],
        r"measured tiny_choice on a single item, .*with a larger --limit",
    )


def test_a_difference_of_single_rows_has_no_standard_error(tmp_path: Path) -> None:
    one, two = (
        Measured({}, {"kl": [(value, 2)], "t": [value]}) for value in (3.0, 1.0)
    )
    assert difference(one, two, "kl") == {"value": 1.0, "stderr": None, "num_items": 2}
    assert difference(one, two, "t") == {"value": 2.0, "stderr": None, "num_items": 1}
    # rows without a token say nothing
    assert ratio([3.0, 0.0, 0.0], [2, 0, 0]).stderr is None
    hand_made([0.9, 0.1, 0.4], tmp_path)
    plan = plan_layers(tmp_path, "1") | {"difference": difference(one, two, "kl")}
    assert (
        "cannot be told from the last 1 layers (paired difference +1 ± –)"
        in plan_text(plan)
    )


# ---- the plan


def hand_made(
    sensitivities: list[float],
    folder: Path,
    *,
    task: bool = False,
    calibrated: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return a finished study with these KLs; their sums stand for runs from either
    end. Layer 0 is dense.

    calibrated: the share of a loss that remains with calibrated weights.
    """
    total = len(sensitivities)

    def point(side: str, layers: list[int]) -> dict[str, Any]:
        def values(share: float) -> dict[str, Any]:
            kl = share * sum(sensitivities[layer] for layer in layers)
            by_metric = {"kl": {"value": kl, "stderr": 0.01, "num_items": 100}}
            return by_metric | (
                {"quiz": {"value": 0.9 - kl, "stderr": 0.02, "num_items": 50}}
                if task
                else {}
            )

        facts = {
            "side": side, "num_layers": len(layers), "layers": layers, "values": values(1),
        }  # fmt: skip
        return facts | (
            {} if calibrated is None else {"calibrated": values(calibrated)}
        )

    study = {
        "schema_version": 1,
        "study": {
            "model": {"path": "x"}, "text": {"path": "y"}, "attention": "partial", "mlp": "outdated",
        },
        "num_hidden_layers": total,
        "moe_layers": list(range(1, total)),
        "metrics": (
            [{"name": "kl", "unit": "nats per token", "better": "lower"}]
            + ([{"name": "quiz", "unit": "acc", "better": "higher"}] if task else [])
        ),
        "points": [
            *([point("none", [])] if task else []),
            *[point("first", list(range(count))) for count in range(1, total + 1)],
            *[
                point("last", list(range(total - count, total)))
                for count in range(1, total + 1)
            ],
            *[point("single", [layer]) for layer in range(total)],
        ],
        **changes,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "layers.json").write_text(json.dumps(study))
    (folder / "manifest.json").write_text(json.dumps({"inputs": {}}))
    return study


def test_the_least_sensitive_layers_are_proposed(tmp_path: Path) -> None:
    hand_made([0.9, 0.1, 0.4, 0.2, 0.3], tmp_path)
    plan = plan_layers(tmp_path, "60%")
    assert (plan["layers"], plan["selection"], plan["num_layers"]) == (
        [1, 3, 4],
        "1,3-4",
        3,
    )
    proposal, last = plan["selections"]
    assert proposal["predicted"] == pytest.approx(0.6)
    assert last["layers"] == [2, 3, 4]
    assert last["predicted"] == pytest.approx(0.9)
    assert last["measured"]["value"] == pytest.approx(0.9)
    assert proposal["measured"] is None
    # With 4 MoE layers: three dispatches each; combines of 1 (alone) and 3 -> 4, and 2
    # -> 3, 3 -> 4.
    assert (proposal["overlapped_collectives"], last["overlapped_collectives"]) == (
        5,
        5,
    )
    assert proposal["collectives"] == 8
    assert [row["rewired"] for row in plan["sensitivities"]] == [
        False, True, False, True, True,
    ]  # fmt: skip
    assert json.loads(json.dumps(plan)) == plan


def test_the_printed_plan_can_be_used(tmp_path: Path) -> None:
    hand_made([0.9, 0.1, 0.4, 0.2, 0.3], tmp_path)
    text = plan_text(plan_layers(tmp_path, "3"))
    (option,) = re.findall(r"^--layers (.*)$", text, flags=re.M)
    assert parse_selection(option) == [1, 3, 4]
    section = yaml.safe_load(text[text.index("connectivity:") :])["connectivity"]
    assert validate(ConnectivityConfig, section, "recipe").layers == [1, 3, 4]
    assert "--verify measures the proposal" in text


def test_a_tasks_sensitivity_is_what_its_score_loses(tmp_path: Path) -> None:
    hand_made([0.5, 0.1, 0.2], tmp_path, task=True)
    assert plan_layers(tmp_path, "1")["metric"]["name"] == "kl"
    plan = plan_layers(without_kl(tmp_path), "1")
    assert plan["metric"]["name"] == "quiz"
    assert [row["value"] for row in plan["sensitivities"]] == pytest.approx(
        [0.5, 0.1, 0.2]
    )
    assert plan["layers"] == [1]


def test_a_plan_goes_by_sensitivities_after_calibration(tmp_path: Path) -> None:
    study = hand_made([0.9, 0.1, 0.4], tmp_path, calibrated=0.5)
    (point,) = (
        p for p in study["points"] if p["side"] == "single" and p["layers"] == [0]
    )
    # the layer that is worst with copied weights is best with calibrated ones
    point["calibrated"]["kl"]["value"] = 0.04
    (tmp_path / "layers.json").write_text(json.dumps(study))
    assert plan_layers(tmp_path, "1")["layers"] == [1]
    plan = plan_layers(tmp_path, "1", calibrated=True)
    assert plan["layers"] == [0]
    assert [row["value"] for row in plan["sensitivities"]] == pytest.approx(
        [0.04, 0.05, 0.2]
    )
    assert plan["selections"][1]["measured"]["value"] == pytest.approx(0.2)
    assert "KL, calibrated, measured" in plan_text(plan)


def test_the_number_of_layers_for_a_loss_is_the_largest_that_was_measured_within_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_made([0.5, 0.1, 0.2], tmp_path / "a", calibrated=0.25, task=True)
    assert run_command("plan-layers", tmp_path / "a", "--max-loss 0.31 --json") == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {(row["side"], row["calibrated"]): row for row in answer["within"]}
    assert {key: row["num_layers"] for key, row in rows.items()} == {
        ("first", False): 0, ("last", False): 2, ("first", True): 3, ("last", True): 3,
    }  # fmt: skip
    assert rows["last", False]["selection"] == "1-2"
    assert rows["last", False]["loss"]["value"] == pytest.approx(0.3)
    assert (
        rows["first", False]["selection"],
        rows["first", False]["loss"]["value"],
    ) == ("none", 0.0)
    # The loss of a task is the loss of its score: 0.5 for the first layer, not 0.9 -
    # 0.5.
    study = str(without_kl(tmp_path / "a"))
    assert main(["plan-layers", study, "--max-loss", "0.55"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"copied +\| +first 1 of 3 ", table)
    assert "most with quiz lost <= 0.55" in table
    hand_made([0.5, 0.1], tmp_path / "b")
    assert main(["plan-layers", str(tmp_path / "b"), "--max-loss", "1"]) == 0
    assert "calibrated" not in capsys.readouterr().out
    # The forgone gain is shown beside the loss: all of 2 MoE layers would overlap 3 of
    # 4.
    assert rows["last", False]["overlapped_collectives"] == 3
    assert rows["first", False]["overlapped_collectives"] == 0


# SmolLM2-135M as Mixtral, with each of the first 21 layers rewired alone.
SMOLLM2 = [
    1.86, 0.55, 0.050, 0.044, 0.072, 0.017, 0.014, 0.008, 0.013, 0.017, 0.028, 0.036, 0.035, 0.062, 0.051, 0.039,
    0.093, 0.096, 0.035, 0.108, 0.020,
]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "layers", "num_first", "name", "selection"),
    [
        (SMOLLM2, [0, 1], 2, "all but the first 2 layers", "last:19"),
        (SMOLLM2[1:], [0], 1, "all but the first layer", "last:19"),
        ([*SMOLLM2, 0.7], [0, 1, 21], 2, "all but the first 2 layers", "last:20"),
        ([*SMOLLM2[2:], 0.7], [19], 0, "all but layer 19", "0-18"),
        ([1.86, 0.02, 0.55, 0.02, 0.01, 0.03, 0.02], [0, 2], 1, "all but the first layer", "last:6"),
        ([0.03, 0.9, 0.02, 0.8, 0.01, 0.02, 0.02], [1, 3], 0, "all but layers 1,3", "0,2,4-6"),
        ([0.9, 0.02], [0], 1, "all but the first layer", "last:1"),
        # ten times what others cost is not far more than a typical one
        (SMOLLM2[2:], None, 0, "", ""),
        ([0.4, 0.3, 0.3], None, 0, "", ""),
        # within twice the standard error, 0.01
        ([0.02, 0.002, 0.001], None, 0, "", ""),
    ],
)  # fmt: skip
def test_the_layers_that_cost_far_more_than_a_typical_one_are_counted_and_all_but_them_priced(
    losses: list[float],
    layers: list[int] | None,
    num_first: int,
    name: str,
    selection: str,
    tmp_path: Path,
) -> None:
    """In toys one first layer is special, in a real network two; later layers may be
    special, too.
    """
    study = hand_made(losses, tmp_path)
    special = special_layers(study, "kl")
    if layers is None:
        assert special is None and "far more" not in study_table(study)
        return
    assert special is not None
    assert (special["layers"], special["num_first"]) == (layers, num_first)
    assert special["alone"] == [losses[k] for k in layers]
    assert special["typical"] == sorted(losses)[(len(losses) - 1) // 2]
    without = special["without"]
    assert (without["name"], without["selection"]) == (name, selection)
    left = range(num_first) if num_first else layers
    if selection != "0,2,4-6":  # neither the first nor the last N, which were measured
        rest = sum(loss for k, loss in enumerate(losses) if k not in left)
        assert without["measured"]["copied"]["value"] == pytest.approx(rest)
    compared = {
        row["name"]: row["layers"]
        for row in plan_layers(tmp_path, "100%")["selections"]
    }
    assert compared[name] == [k for k in range(len(losses)) if k not in left]


def test_a_study_measures_all_but_the_layers_that_cost_the_most(
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = [1.9, 0.6, 0.05, 0.04]
    measured: list[list[int]] = []

    def kl(
        original: Any, wired: Any, rows: Any, **_: Any
    ) -> tuple[list[float], list[int]]:
        layers = wired.config.farskip["layers"]
        measured.append(layers)
        return [sum(losses[k] for k in layers)] * len(rows), [1] * len(rows)

    monkeypatch.setattr(study_module, "kl_by_row", kl)
    assert main(command(model, text, tmp_path / "s", "--every", "4")) == 0
    said = capsys.readouterr().out
    singles = [("single", [layer]) for layer in range(4)]
    ends = [("first", [0, 1, 2, 3]), ("last", [2, 3]), ("last", [0, 1, 2, 3])]
    points = read_study(tmp_path / "s")["points"]
    assert [(point["side"], point["layers"]) for point in points] == [*ends, *singles]
    assert measured[-1] == [2, 3] and len(measured) == 6
    assert "All but the first 2 layers (--layers last:2): KL 0.09000 ± " in said
    # Continued after a kill before that last point, and after it: the same bytes, and
    # nothing is measured twice.
    whole = (tmp_path / "s" / "layers.json").read_bytes()
    for num_done in (6, 7):
        (tmp_path / "s" / "manifest.json").unlink()
        begun = json.loads(whole)
        del begun["sha256"]
        begun["points"] = [
            p for p in begun["points"] if num_done == 7 or p["layers"] != [2, 3]
        ]
        (tmp_path / "s" / "layers.json").write_text(
            json.dumps(begun) if num_done == 6 else whole.decode()
        )
        measured.clear()
        assert main(command(model, text, tmp_path / "s", "--every", "4")) == 0
        assert measured == ([[2, 3]] if num_done == 6 else [])
        assert (tmp_path / "s" / "layers.json").read_bytes() == whole
    # Single layers only, and a later one that the last N cannot leave out.
    losses[:] = [0.03, 0.9, 0.05, 0.04]
    capsys.readouterr()
    assert main(command(model, text, tmp_path / "t", "--sides", "single")) == 0
    assert read_study(tmp_path / "t")["points"][-1]["side"] == "without"
    assert measured[-1] == [0, 2, 3]
    said = capsys.readouterr().out
    assert re.search(r"^\| all but 1 +\| +0\.1200 ", said, flags=re.M)
    assert (
        "1 layer costs far more alone than a typical one (0.04000): layer 1 0.9000. All"
        " but layer 1 (--" in said
    )
    assert main(["plan-layers", str(tmp_path / "t"), "--budget", "4", "--json"]) == 0
    (row,) = (
        r
        for r in json.loads(capsys.readouterr().out)["selections"]
        if r["name"] == "all but layer 1"
    )
    assert row["measured"]["value"] == pytest.approx(0.12)


def test_a_study_names_the_layer_that_is_most_of_the_loss_and_prices_all_but_it(
    tmp_path: Path,
) -> None:
    study = hand_made([0.9, 0.02, 0.04], tmp_path, calibrated=0.1, moe_layers=[0, 1, 2])
    plan = plan_layers(tmp_path, "100%")
    assert plan["special_layers"]["layers"] == [0]
    assert plan["special_layers"]["without"]["layers"] == [1, 2]
    rows = {row["name"]: row for row in plan["selections"]}
    without = rows["all but the first layer"]
    assert without["measured"]["value"] == pytest.approx(0.06)
    # With 3 MoE layers: the regular one's two exchanges block, and the last combine.
    assert (without["overlapped_collectives"], without["collectives"]) == (3, 6)
    said = (
        "1 layer costs far more alone than a typical one (0.04000): layer 0 0.9000, and"
        " all layers 0.9600. All but the first layer (--layers last:2): KL 0.06000 ±"
        " 0.01 copied, 0.006000 ± 0.01 calibrated; 3 of 6 collectives overlapped, 5 by"
        " all layers."
    )
    texts = [
        plan_text(plan),
        study_table(study),
        within_text(layers_within(tmp_path, 1.0)),
    ]
    assert all(said in text for text in texts)
    assert "all but the first layer" not in {
        row["name"] for row in plan_layers(tmp_path, "2")["selections"]
    }
    hand_made([0.4, 0.3, 0.3], tmp_path / "even")
    even = plan_layers(tmp_path / "even", "100%")
    assert even["special_layers"] is None and "far more alone" not in plan_text(even)
    # A later layer, which the last N cannot leave out, was not measured.
    hand_made([0.1, 0.8, 0.1], tmp_path / "later")
    assert "All but layer 1 (--layers 0,2): not measured" in plan_text(
        plan_layers(tmp_path / "later", "100%")
    )


@pytest.mark.parametrize(
    ("model_type", "connectivity", "selection"),
    [
        ("qwen3_moe", Connectivity("all"), "last:3"),
        ("qwen3_moe", Connectivity([0, 2]), "2"),
        ("qwen3_moe", Connectivity({"last": 3}), None),
        ("qwen3_moe", Connectivity([0]), None),
        # Layer 0 then computes what a regular layer does.
        ("qwen3_moe", Connectivity("all", mlp="full"), None),
        ("cohere2_moe", Connectivity("all"), None),
    ],
)
def test_convert_says_when_the_first_layer_is_among_those_to_rewire(
    model_type: str,
    connectivity: Connectivity,
    selection: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_model(model_type).save_pretrained(tmp_path / "model")
    layers = parse_selection(connectivity.layers)
    text = (
        ",".join(map(str, layers))
        if isinstance(layers, list)
        else "last:3"
        if layers != "all"
        else "all"
    )
    out = str(tmp_path / "out")
    assert (
        main(
            [
                "convert", str(tmp_path / "model"), out, "--layers", text, "--mlp", str(connectivity.mlp),
            ]
        )
        == 0
    )  # fmt: skip
    said = capsys.readouterr().err
    if selection is None:
        assert "layer 0" not in said
    else:
        assert (
            "layer 0 costs the most. To find how many first layers to keep regular, run"
            in said
        )
        assert (
            f"`fcsd layers {tmp_path / 'model'}`; the selection {selection} leaves out"
            " layer 0" in said
        )


def test_of_equal_layers_the_later_is_rewired() -> None:
    assert least_costly(dict.fromkeys(range(4), 0.1), 2, {}) == [2, 3]
    assert least_costly({0: 0.0, 1: -0.1, 2: 0.3}, 2, {}) == [0, 1]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], "none"), ([3], "3"), ([3, *range(5, 28)], "3,5-27"), ([0, 1, 3, 4, 6], "0-1,3-4,6"),
    ],
)  # fmt: skip
def test_a_selection_is_written_as_it_is_read(layers: list[int], text: str) -> None:
    assert selection_text(layers) == text
    assert (parse_selection(text) if layers else []) == layers


@pytest.mark.parametrize(
    ("text", "count"), [("90%", 43), ("100%", 48), ("43", 43), (" 1 ", 1), ("2.1 %", 1)]
)
def test_budgets(text: str, count: int) -> None:
    assert parse_budget(text, 48) == count


@pytest.mark.parametrize(
    "text", ["0", "0%", "49", "101%", "-5%", "half", "", "1%", "0.9"]
)
def test_a_budget_out_of_range_is_refused(text: str) -> None:
    with user_error(r"budget .* a number from 1 to 48"):
        parse_budget(text, 48)


@pytest.mark.parametrize(
    ("layers", "sides", "overlapped"),
    [
        ([1, 2, 3], ("partial", "outdated"), 5),
        ([1, 3], ("partial", "outdated"), 4),  # alone: both beside its own attention
        ([0, 1], ("partial", "outdated"), 2),  # the dense layer 0 has no collective
        ([0, 1, 2, 3], ("full", "outdated"), 6),  # none waits for another's combine
        ([0, 1, 2, 3], ("partial", "full"), 2),
    ],
)
def test_collectives_that_no_longer_block(
    layers: list[int], sides: tuple[str, str], overlapped: int
) -> None:
    assert overlapped_collectives(layers, [1, 2, 3], *sides) == (overlapped, 6)


def test_layers_that_keep_their_combine_free_both_exchanges_beside_their_own_attention():
    sides = ("partial", "outdated")
    assert overlapped_collectives([1, 2, 3], [1, 2, 3], *sides, "olmoe") == (5, 6)
    assert overlapped_collectives([1, 2, 3], [1, 2, 3], *sides, "flex_olmo") == (6, 6)


@pytest.mark.parametrize(
    ("layers", "sides", "overlapped"),
    [
        # Layers 1, 4 and 7 have experts. The combines of 1 and 4 are beside the mixers
        # behind them, the dispatches of all beside the mixers before them.
        (range(8), ("partial", "outdated"), 5),
        (range(8), ("partial", "full"), 2),
        (range(8), ("partial", [4]), 3),
        (range(8), ("full", "outdated"), 3),
        ([0, 1], ("partial", "outdated"), 1),
        ([1, 2], ("partial", "full"), 1),
        ([1], ("partial", "outdated"), 0),
    ],
)
def test_collectives_that_no_longer_block_where_a_layer_is_one_branch(
    layers: Sequence[int], sides: tuple[str, Any], overlapped: int
) -> None:
    counted = overlapped_collectives([*layers], [1, 4, 7], *sides, "nemotron_h")
    assert counted == (overlapped, 6)


def test_only_experts_behind_a_mixer_are_chosen_where_a_layer_is_one_branch() -> None:
    costs = {1: 0.1, 4: 0.2, 7: 3.0}

    def point(side: str, layers: list[int], value: float) -> dict[str, Any]:
        kl = {"value": value, "stderr": 0.001}
        return {"side": side, "layers": layers, "values": {"kl": kl}}

    study = {
        "study": {"attention": "partial", "mlp": "selected"}, "model_type": "nemotron_h",
        "num_hidden_layers": 8, "moe_layers": [1, 4, 7],
        "metrics": [{"name": "kl", "unit": "nats per token", "better": "lower"}],
        "points": [
            point("attention", [], 0.4),
            *(point("single", [k], 0.4 + costs.get(k, 0)) for k in range(8)),
        ],
    }  # fmt: skip
    assert layers_with_mlp(study) == [1, 4, 7]
    assert [*Prices.of(study, "kl", False).mlp] == [1, 4, 7]
    special = special_layers(study, "kl")
    assert special is not None
    assert special["typical"] == pytest.approx(0.2)
    assert special["layers"] == [7]


def test_plans_that_cannot_be_made_are_refused(
    tmp_path: Path, refused: Refused
) -> None:
    study = hand_made([0.5, 0.1, 0.2], tmp_path / "a")
    refused(
        ["plan-layers", str(tmp_path / "a"), "--budget", "120%"],
        r"budget '120%': must be a share .* or a number from 1 to 3",
    )
    refused(
        ["plan-layers", str(tmp_path / "none"), "--budget", "2"],
        r"not a folder that `fcsd layers` wrote",
    )
    without = [point for point in study["points"] if point["side"] != "single"]
    hand_made([0.5, 0.1, 0.2], tmp_path / "b", points=without)
    refused(
        ["plan-layers", str(tmp_path / "b"), "--budget", "2"],
        r"no sensitivities; run `fcsd layers` with --sides single",
    )
    # A single layer of these computes what a regular one does.
    for name, facts in {
        "branches": {"model_type": "nemotron_h"},
        "attention": {"study": {"attention": "partial", "mlp": "full"}},
    }.items():
        hand_made([0.0, 0.5, 0.5], tmp_path / name, **facts)
        refused(
            ["plan-layers", str(tmp_path / name), "--budget", "1"],
            r"what a regular one does; use --max-loss, or .* --mlp selected",
        )
        # The first layer costs nothing, and cannot be converted to.
        (row, *_) = layers_within(tmp_path / name, 0.0)["within"]
        assert row["selection"] == "none"
    here = ["plan-layers", str(tmp_path / "a")]
    refused(
        [*here, "--budget", "1", "--calibrated"],
        r"copied weights only; run `fcsd layers` with --calibrated TEXT",
    )
    refused([*here, "--max-loss", "-1"], r"--max-loss -1: needs a number from 0")
    refused(
        [*here, "--max-loss", "1", "--calibrated"],
        r"--calibrated and --model belong to --budget",
    )
    refused(
        [*here, "--budget", "1", "--model", "m"],
        r"--model has no meaning without --verify",
    )
    alone = [point for point in study["points"] if point["side"] == "single"]
    hand_made([0.5, 0.1, 0.2], tmp_path / "d", points=alone)
    refused(
        ["plan-layers", str(tmp_path / "d"), "--max-loss", "1"],
        r"single layers only; run .* --sides first,last",
    )
    hand_made([0.5], tmp_path / "c", schema_version=0)
    refused(
        ["plan-layers", str(tmp_path / "c"), "--budget", "1"],
        r"schema_version is 0, this fcsd reads 1",
    )


def test_verify_measures_both_selections_paired(
    finished: Path, model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_command("plan-layers", finished, "--budget 50% --verify --json") == 0
    plan = json.loads(capsys.readouterr().out)
    rows = heldout_rows(SourceConfig(path=str(text)), load_tokenizer(model), **ROWS)  # type: ignore[arg-type]
    original, values = load_model(model), []
    for row in plan["selections"]:
        direct = mean_kl(
            read_original(original, rows),
            load_model(model, connectivity=Connectivity(row["layers"])),
            rows,
        )
        assert row["measured"]["value"] == pytest.approx(direct["kl"], rel=1e-5)
        values.append(direct["kl"])
    assert plan["difference"]["value"] == pytest.approx(values[0] - values[1], abs=1e-6)


@pytest.mark.parametrize(
    ("value", "stderr", "word"),
    [
        (-0.3, 0.1, "is better than"),
        (0.3, 0.1, "is WORSE than"),
        (0.1, 0.1, "cannot be told from"),
    ],
)
def test_the_verdict_is_honest(
    tmp_path: Path, value: float, stderr: float, word: str
) -> None:
    hand_made([0.9, 0.1, 0.4, 0.2, 0.3], tmp_path)
    plan = plan_layers(tmp_path, "3") | {
        "difference": {"value": value, "stderr": stderr, "num_items": 9}
    }
    assert f"the proposal {word} the last 3 layers" in plan_text(plan)


def test_verify_refuses_another_model(
    finished: Path, text: Path, tmp_path: Path, refused: Refused
) -> None:
    different = tmp_path / "model"
    tiny_model(
        "qwen2_moe", seed=5, num_hidden_layers=4, vocab_size=300
    ).save_pretrained(different)
    tiny_tokenizer(300).save_pretrained(different)
    words = command_words(
        "plan-layers", finished, "--budget 50% --verify --model", different
    )
    refused(words, r"is not the model of the study in .*its weights differ")
