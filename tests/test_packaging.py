"""What a user gets from the wheel, and a packager from the source distribution."""

import email
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import fcsd

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of the text that the Apache Software Foundation publishes."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the source distribution of this checkout."""
    return build(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")


@pytest.fixture(scope="module")
def wheel(built: Path) -> dict[str, bytes]:
    """Return the files of the wheel."""
    return read_wheel(built)


@pytest.fixture(scope="module")
def sdist(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked source distribution."""
    (archive,) = built.glob("*.tar.gz")
    place = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    (folder,) = place.iterdir()
    return folder


def build(source: Path, place: Path, *targets: str) -> Path:
    """Build with the backend that pyproject.toml names, in this environment; nothing is
    fetched.
    """
    if find_spec("hatchling") is None:
        pytest.skip(
            "the build backend hatchling is not installed; pip install -e '.[dev]' brings it"
        )
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(place)]
    for target in targets:
        command += ["--target", target]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place


def read_wheel(place: Path) -> dict[str, bytes]:
    (path,) = place.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: dict[str, bytes]) -> email.message.Message:
    (name,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel[name])


def files_below(folder: Path, pattern: str = "*") -> set[str]:
    paths = (
        path
        for path in folder.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    )
    return {str(path.relative_to(ROOT)) for path in paths}


def test_the_licence_is_the_whole_apache_licence_and_is_in_both_distributions(
    wheel: dict[str, bytes], sdist: Path
) -> None:
    (name,) = (name for name in wheel if name.endswith(".dist-info/licenses/LICENSE"))
    for text in (
        (ROOT / "LICENSE").read_bytes(),
        wheel[name],
        (sdist / "LICENSE").read_bytes(),
    ):
        assert hashlib.sha256(text).hexdigest() == APACHE_2
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"
    assert metadata(wheel)["License-File"] == "LICENSE"


def test_the_wheel_has_every_module_and_says_that_it_is_typed(
    wheel: dict[str, bytes],
) -> None:
    modules = files_below(ROOT / "fcsd", "*.py")
    assert len(modules) > 50
    assert {name for name in wheel if name.endswith(".py")} == modules
    assert "fcsd/py.typed" in wheel


def test_the_wheel_has_every_recipe_suite_task_and_configuration(
    wheel: dict[str, bytes],
) -> None:
    for folder in ("recipes", "eval", "configs"):
        shipped = files_below(ROOT / folder)
        assert shipped
        prefix = f"fcsd/_data/{folder}/"
        assert {name for name in wheel if name.startswith(prefix)} == {
            f"fcsd/_data/{name}" for name in shipped
        }


def test_the_wheel_has_no_tests_and_nothing_beside_the_package(
    wheel: dict[str, bytes],
) -> None:
    assert {
        re.sub(r"^fcsd-.*\.dist-info$", "dist-info", name.split("/")[0])
        for name in wheel
    } == {
        "fcsd",
        "dist-info",
    }
    tests = [
        name
        for name in wheel
        if re.search(r"(^|/)(tests?/|test_[^/]*\.py$|conftest\.py$)", name)
    ]
    assert not tests


def test_the_metadata_says_who_and_for_what(wheel: dict[str, bytes]) -> None:
    facts = metadata(wheel)
    assert facts["Author"] == "The fcsd authors"
    assert facts["Version"] == fcsd.__version__
    assert facts["Requires-Python"] == ">=3.11"
    assert "mixture of experts" in facts["Keywords"]
    assert "Typing :: Typed" in facts.get_all("Classifier", [])
    # PEP 639
    assert not [
        line
        for line in facts.get_all("Classifier", [])
        if line.startswith("License ::")
    ]


def test_the_source_distribution_builds_the_same_wheel(
    wheel: dict[str, bytes], sdist: Path, tmp_path: Path
) -> None:
    assert read_wheel(build(sdist, tmp_path, "wheel")) == wheel


def test_an_installed_wheel_finds_shipped_recipes_suites_and_first_steps_outside_the_checkout(
    built: Path, tmp_path: Path
) -> None:
    """Uses the wheel with the libraries of this environment in an empty folder,
    following `fcsd --help`.
    """
    place, folder = tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(place)
    environment = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "200"}

    def fcsd_says(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fcsd", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first_steps = re.search(
        r"`fcsd (tiny-data \S+) && fcsd run (\S+)`", fcsd_says("--help")
    )
    assert first_steps is not None
    assert fcsd_says(*first_steps[1].split()).strip() == "runs/tiny-data"
    recipe = yaml.safe_load(fcsd_says("run", first_steps[2], "--show"))
    assert all(
        (folder / source["path"]).is_file()
        for source in recipe["pretrain"]["data"]["train"]
    )


def packed_files(sdist: Path) -> set[str]:
    return {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}


def test_the_source_distribution_has_what_its_makefile_needs(sdist: Path) -> None:
    packed = packed_files(sdist)
    assert {"Makefile", "mkdocs.yml", "docs/index.md", "benchmarks/loss.py"} <= packed
    assert files_below(ROOT / "tests") <= packed


def test_the_source_distribution_has_nothing_that_git_does_not_know(
    sdist: Path,
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip(
            "no git checkout to compare with: these tests run from a source distribution"
        )
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert packed_files(sdist) - set(known) == {"PKG-INFO"}


def test_the_workflow_tests_the_versions_that_the_metadata_promises() -> None:
    workflow = yaml.safe_load(
        (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    )
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    promised = [
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c)
        for c in PROJECT["classifiers"]
    ]
    assert matrix["python"] == [match[1] for match in promised if match]
    (transformers,) = (
        line for line in PROJECT["dependencies"] if line.startswith("transformers")
    )
    lowest, *left_out, below = transformers.removeprefix("transformers>=").split(",")
    assert all(one.startswith("!=") for one in left_out)
    assert matrix["transformers"] == [f"=={lowest}.0", ",".join([*left_out, below])]


def test_the_citation_file_and_the_readme_name_the_same_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == PROJECT["license"]
    assert citation["version"] == PROJECT["version"]
    paper = citation["preferred-citation"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert paper["title"] in readme
    for author in paper["authors"]:
        assert f"{author['given-names']} {author['family-names']}" in readme
