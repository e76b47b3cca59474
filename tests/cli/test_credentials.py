"""No command prints or records a password or a token that a user gave by mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

import fcsd
from fcsd.base.errors import UserError, holds_credentials, without_credentials
from fcsd.base.files import read_text
from fcsd.base.strict import validate
from fcsd.base.writing import check_path
from fcsd.cli.main import COMMANDS, main
from fcsd.evaluation.config import EvaluationConfig
from fcsd.model.config import ModelConfig
from fcsd.recipe.recipe import Recipe
from tests.support import few, user_error

ADDRESSES = [
    "https://user:SECRET@h/r.yaml", "https:/user:SECRET@h/r.yaml", "HTTPS://SECRET@h", "https://:SECRET@h",
    "https://user:SE/SECRET@h/x", "https://user:SE'SECRET@h/x", "https://user:p%40SECRET@h/x",
    "https://user:p@SECRET@h/x", "https%3A%2F%2Fuser%3ASECRET%40h%2Fr.yaml", r"https:\\user:SECRET@h\r.yaml",
    "s3://key:SECRET@bucket/x", "user:SECRET@h/r.yaml", "//user:SECRET@h/r.yaml", "user:SECRET@h.org",
    "user:SECRET@localhost", "https://h/r.yaml?token=SECRET", "https://h/r.yaml?a=b&X-Amz-Signature=SECRET&c=d",
    "h/r.yaml?access_token=SECRET", "https://h/r.yaml?auth=SECRET", "hf_" + "SECRET" * 6,
    "github_pat_" + "SECRET" * 7,
]  # fmt: skip
"""Every secret in them is spelt so."""


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_shown_without_its_password_also_where_a_path_was_made_of_it(
    address: str,
) -> None:
    for text in (address, str(Path(address)), str(Path("/a/b") / address)):
        assert "SECRET" not in without_credentials(f"x {text}: no such file")
        with pytest.raises(UserError) as error:
            read_text(Path(text))
        assert "SECRET" not in str(error.value)
    assert holds_credentials(address)
    assert holds_credentials(f"evaluation.data_root={address}")


@pytest.mark.parametrize(
    "word",
    [
        "runs/me@x", "runs//me@x", "me/x@main", "hf://datasets/me/x@main", "http://localhost:8000", "http://h:8000/v1",
        "http://[::1]:8000/v1", "https://github.com/a/b@abc", "C:/Users/me@x/y", "train.learning_rate=4e-5",
        "{path: a/b, columns: {text: body}}", "first:8", "git@github.com:me/x",
        r"C:\Users\me@work\x", "a:b@c", "output_dir=step:100@best", "2026-11-28T10:00@x", "mailto:me@example.org",
    ],
)  # fmt: skip
def test_ordinary_words_are_not_taken_for_secrets(word: str) -> None:
    assert not holds_credentials(word)
    assert without_credentials(word) == word.replace("//me", "//…")


@pytest.mark.parametrize("command", few(sorted(COMMANDS), 8))
def test_no_command_prints_or_uses_an_address_with_a_password(
    command: str, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ADDRESSES:
        for words in (
            [address],
            ["x", address],
            ["--data-root", address],
            [f"--output={address}"],
            ["--set", f"evaluation.data_root={address}"],
        ):
            assert main([command, *words]) == 2
            out, err = capfd.readouterr()
            assert err.startswith(f"fcsd {command}: error: ") and err.count("\n") == 1
            assert "holds a name or password" in err and "SECRET" not in out + err
    assert not list(tmp_path.iterdir())


def test_an_address_is_no_path_even_without_a_password(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["tiny-data", "s3://bucket/x"])
    assert (
        "path of this machine is needed, got the address s3://bucket/x"
        in capsys.readouterr().err
    )
    for path in ("https:/h/x", "s3:/bucket"):
        with user_error("is an address; give a path of this mach"):
            check_path(Path(path))
    check_path(Path("x") / "a:b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_record_takes_a_password_and_the_key_is_named(address: str) -> None:
    for record, value, key in (
        (ModelConfig, {"path": address}, "path"),
        (EvaluationConfig, {"data_root": address}, "data_root"),
        (EvaluationConfig, {"suite": address}, "suite"),
    ):
        with user_error(f"^x: {key}: holds a name or pass") as wrong:
            validate(record, value, "x")
        assert "SECRET" not in str(wrong.value)
    for name in ("output_dir", "run_name", "hub_model_id"):
        with user_error(f"^FCSDConfig: {name}: holds a name") as wrong:
            fcsd.FCSDConfig(**{"output_dir": "x", name: address})
        assert "SECRET" not in str(wrong.value)
    for door in (fcsd.load, fcsd.evaluate_model):
        with user_error(r"^fcsd\.load: path: holds a name") as wrong:
            door(address)  # type: ignore[operator]
        assert "SECRET" not in str(wrong.value)


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HF_HOME", "TMPDIR"])
def test_a_variable_that_a_library_would_print_with_its_password_is_refused(
    name: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv(name, "https://user:SECRET@mirror")
    assert main(["families", "--json"]) == 2
    out, err = capsys.readouterr()
    assert f"{name}=https://…@mirror: holds a name" in err and "SECRET" not in err + out


def test_a_proxy_may_have_its_password(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:SECRET@proxy:3128")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "SECRET" * 6)
    assert main(["families", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("address", ADDRESSES[:3])
def test_a_password_is_found_at_any_depth_of_a_record(address: str) -> None:
    original = {"config": {"model_type": "a", "parts": [{"path": address}]}}
    raw = {"name": "x", "output_dir": "x", "pretrain": original}
    with user_error(r"^x: pretrain\.config\.parts\.0\.path: holds a name") as wrong:
        validate(Recipe, raw, "x")
    assert "SECRET" not in str(wrong.value)
    prose = {"model_type": "a", "parts": f"see {address} for more"}
    with user_error("is required") as wrong:
        validate(Recipe, raw | {"pretrain": {"config": prose}}, "x")
    assert "holds a name" not in str(wrong.value)
