"""Options that mirror a key of a recipe: type, choices and default are those of its field."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.cli.main import build_parser, main
from fcsd.evaluation.config import EvaluationConfig
from fcsd.planning.layers.settings import Study
from fcsd.recipe.recipe import Recipe


def parsed(*words: str) -> Any:
    return build_parser().parse_args(words)


def test_a_changed_field_changes_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        parsed("evaluate", "m").batch_size,
        parsed("layers", "m", "--output", "o").batch_size,
    ) == (16, 16)
    monkeypatch.setattr(EvaluationConfig.model_fields["batch_size"], "default", 7)
    assert (
        parsed("evaluate", "m").batch_size,
        parsed("layers", "m", "--output", "o").batch_size,
    ) == (7, 7)


def test_values_have_the_type_of_the_field() -> None:
    options = parsed(
        "evaluate",
        "m",
        "--batch-size",
        "8",
        "--limit",
        "3",
        "--allow-weak-sandbox",
        "--cache",
        "c",
    )
    assert (
        options.batch_size, options.limit, options.allow_weak_sandbox, options.cache,
    ) == (
        8, 3, True, Path("c"),
    )  # fmt: skip
    assert parsed("evaluate", "m", "--batch-size", "auto").batch_size == "auto"
    assert (
        parsed("evaluate", "m").suite,
        parsed("layers", "m", "--output", "o").suite,
    ) == (
        "paper11",
        "tiny",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "m", "--batch-size", "many"], "argument --batch-size: a number or auto is needed, got 'many'"),
        (["evaluate", "m", "--limit", "few"], "argument --limit: invalid int value: 'few'"),
        (["layers", "m", "--output", "o", "--loss-on", "prompt"], "argument --loss-on: invalid choice: 'prompt'"),
        (["run", "r", "--only", "distil"], "argument --only: invalid choice: 'distil'; did you mean 'distill'?\n"),
        (["run", "r", "--only", "eval"], "argument --only: invalid choice: 'eval'; did you mean 'evaluate'?\n"),
        (["run", "r", "--only", "all"], "argument --only: invalid choice: 'all' (choose from 'write', "),
        (["layers", "m", "--output", "o", "--loss-on", "al"], "invalid choice: 'al'; did you mean 'all'?"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_of_commands_that_are_not_asked_for_no_option_is_looked_up() -> None:
    commands = build_parser("convert").commands
    assert [name for name, parser in commands.items() if len(parser._actions) > 1] == [
        "convert"
    ]


@pytest.mark.parametrize(
    ("field", "key"),
    {
        "attention": "connectivity.attention", "text_examples": "data.heldout_examples",
        "max_length": "data.max_length", "packing": "data.packing", "loss_on": "data.loss_on",
        "suite": "evaluation.suite", "data_root": "evaluation.data_root", "limit": "evaluation.limit",
        "allow_weak_sandbox": "evaluation.allow_weak_sandbox",
    }.items(),
)  # fmt: skip
def test_a_layer_study_takes_what_the_key_of_a_recipe_takes(
    field: str, key: str
) -> None:
    section, name = key.split(".")
    ours, theirs = (
        Study.model_fields[field],
        Recipe.model_fields[section].annotation.model_fields[name],
    )
    assert (ours.annotation, ours.default, ours.metadata) == (
        theirs.annotation,
        theirs.default,
        theirs.metadata,
    )


def test_a_tilde_means_the_home_folder_in_options_and_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "~/configs"]) == 0
    assert (tmp_path / "home/configs/fsdp2_8.yaml").is_file()
    recipe = {"name": "r", "output_dir": "~/runs", "data": {"train": [{"path": "x"}]}}
    recipe |= {"model": {"path": "m"}, "evaluation": {"data_root": "~/data"}}
    Path("r.yaml").write_text(json.dumps(recipe))
    assert main(["run", "r.yaml", "--show"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out.partition("\n")[2])
    assert shown["output_dir"] == str(tmp_path / "home/runs")
    assert shown["evaluation"]["data_root"] == str(tmp_path / "home/data")
    # A user that the machine does not know is an ordinary name.
    assert main(["inspect", "~nobody-of-this-name/model"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "r.yaml"]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["two", ""])
def test_a_launchers_variable_that_is_no_number_is_refused(
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "nowhere"])
    assert ended.value.code == 2
    assert f"environment variable {name} is {value!r}" in capsys.readouterr().err
