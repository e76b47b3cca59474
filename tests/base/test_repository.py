"""How the plugin for servers is installed: commands that are printed or published name
no package of an index.
"""

import json
import re
import subprocess
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from fcsd.base import repository
from fcsd.base.repository import plugin_install
from tests.support import ROOT

WORDS = "`pip install ./serving` in a checkout of fcsd's repository"


def checkout(folder: Path, remote: str | None = None) -> str:
    """Make a repository with the plugin's folder and one commit; return the commit."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        done = subprocess.run(
            ["git", "-C", folder, *who, *words],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    (folder / "serving").mkdir(parents=True)
    (folder / "serving" / "pyproject.toml").write_text(
        '[project]\nname = "fcsd-serving"\n'
    )
    git("init", "-q")
    git("add", "serving")
    git("commit", "-q", "-m", "x")
    if remote is not None:
        git("remote", "add", "origin", remote)
    return git("rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/me/fcsd.git", "https://github.com/me/fcsd.git"),
        ("https://me:secret@github.com/me/fcsd", "https://github.com/me/fcsd"),
        ("git@github.com:me/fcsd.git", "https://github.com/me/fcsd.git"),
        ("ssh://git:secret@git.example.org/me/fcsd", "ssh://git@git.example.org/me/fcsd"),
    ],
)  # fmt: skip
def test_a_checkout_gives_the_address_of_its_remote_and_its_commit(
    remote: str, address: str, tmp_path: Path
) -> None:
    commit = checkout(tmp_path / "fcsd", remote)
    command = (
        f"`pip install 'fcsd-serving @ git+{address}@{commit}#subdirectory=serving'`"
    )
    assert plugin_install(tmp_path / "fcsd") == command
    is_open = address.startswith("https://github.com/")
    published = plugin_install(tmp_path / "fcsd", published=True)
    assert published == (command if is_open else f"{WORDS} at commit {commit}")


@pytest.mark.parametrize(
    "remote",
    [None, "/home/me/fcsd", "file:///home/me/fcsd", "../fcsd", "https://x.org/a?b=c"],
)
def test_a_remote_that_nobody_else_reaches_is_not_named(
    remote: str | None, tmp_path: Path
) -> None:
    commit = checkout(tmp_path / "fcsd", remote)
    assert plugin_install(tmp_path / "fcsd") == f"{WORDS} at commit {commit}"


def test_a_copy_without_git_and_one_inside_another_repository_have_no_commit(
    tmp_path: Path,
) -> None:
    checkout(tmp_path, "https://github.com/me/other")
    (tmp_path / "copy" / "serving").mkdir(parents=True)
    (tmp_path / "copy" / "serving" / "pyproject.toml").write_text("")
    assert plugin_install(tmp_path / "copy") == WORDS


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {
                "url": "https://github.com/me/fcsd",
                "vcs_info": {"vcs": "git", "commit_id": "a" * 40},
            },
            (
                "`pip install 'fcsd-serving @"
                f" git+https://github.com/me/fcsd@{'a' * 40}#subdirectory=serving'`"
            ),
        ),
        ({"url": "file:///work/fcsd", "dir_info": {}}, WORDS),
        (None, WORDS),
    ],
)
def test_an_installed_fcsd_gives_what_pip_noted(
    record: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed(Distribution):
        def read_text(self, filename: str) -> str | None:
            return None if record is None else json.dumps(record)

        def locate_file(self, path: object) -> Path:
            return tmp_path

    monkeypatch.setattr(
        repository.importlib.metadata, "distribution", lambda name: Installed()
    )
    repository._of_package.cache_clear()
    try:
        assert plugin_install(tmp_path) == said
    finally:
        repository._of_package.cache_clear()


@pytest.mark.parametrize(
    ("named", "address"),
    [
        (["Repository, https://github.com/me/fcsd"], "https://github.com/me/fcsd"),
        (
            [
                "Issues, https://github.com/me/other",
                "repository,https://gitlab.com/me/x",
            ],
            "https://gitlab.com/me/x",
        ),
        (["Repository, /home/me/fcsd"], None),
        (["Homepage, https://github.com/me/fcsd"], None),
    ],
)
@pytest.mark.parametrize("remote", [None, "ssh://git@git.example.org/me/fcsd"])
def test_the_address_in_the_distributions_metadata_stands_in_for_one_nobody_reaches(
    named: list[str],
    address: str | None,
    remote: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = Message()
    for value in named:
        metadata["Project-URL"] = value
    monkeypatch.setattr(
        repository.importlib.metadata, "metadata", lambda name: metadata
    )
    commit = checkout(tmp_path, remote)
    said = f"{WORDS} at commit {commit}"
    if address is not None:
        said = f"`pip install 'fcsd-serving @ git+{address}@{commit}#subdirectory=serving'`"
    assert plugin_install(tmp_path, published=True) == said
    if remote is not None:  # who runs the command reaches it
        assert f"git+{remote}@{commit}" in plugin_install(tmp_path)


def test_nothing_that_is_printed_or_written_installs_the_plugin_by_its_name_alone():
    folders = (
        "fcsd", "serving", "docs", "recipes", "examples", "configs", "eval", "benchmarks",
    )  # fmt: skip
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.is_file()
    ]
    texts = {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
        for file in (*files, ROOT / "README.md")
        if file.suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh")
    }
    assert len(texts) > 300
    by_name = re.compile(r"pip3? install [^`\n]*\bfcsd-(serving|megatron)\b(?! @ )")
    assert [name for name, text in texts.items() if by_name.search(text)] == []
