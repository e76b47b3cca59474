"""Say how to install the plugin for servers: from fcsd's repository, by URL and commit.
It is on no package index.

Not covered: whether the commit has been pushed there.
"""

import functools
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
PLUGIN = "serving"
"""Folder of the distribution fcsd-serving in the repository."""
_HOSTS = ("github.com", "gitlab.com", "codeberg.org", "bitbucket.org", "huggingface.co")
_OPEN_HOSTS = tuple(f"https://{host}/" for host in _HOSTS)


def plugin_install(folder: Path = _CHECKOUT, *, published: bool = False) -> str:
    """Return the command that installs the fcsd-serving of this fcsd; where the URL is
    not known, a sentence instead.

    folder: the checkout that fcsd runs from; for an installed fcsd, pip's record has
    URL and commit. Without a URL that the readers reach, that of the distribution's
    metadata, if it names one. published: whether strangers will read the text, who can neither
    reach a private host nor should learn its name. The text never holds credentials or
    folders of this machine.
    """
    if (folder / PLUGIN / "pyproject.toml").is_file():
        url, commit = _of_checkout(folder)
    else:
        url, commit = _of_package()
    if not _is_known(url, published=published):
        url = _named_address()
    if not _is_known(url, published=published):
        at = f" at commit {commit}" if commit else ""
        return f"`pip install ./{PLUGIN}` in a checkout of fcsd's repository{at}"
    return (
        "`pip install 'fcsd-serving @ "
        f"git+{url}{f'@{commit}' if commit else ''}#subdirectory={PLUGIN}'`"
    )


def _is_known(url: str | None, *, published: bool) -> bool:
    return url is not None and (not published or url.startswith(_OPEN_HOSTS))


@functools.cache
def _of_checkout(folder: Path) -> tuple[str | None, str | None]:
    """Return URL and commit of a checkout; None for either that git does not know."""
    if not (folder / ".git").exists():  # a folder inside somebody else's repository
        return None, None
    remote = _git(folder, "config", "--get", "remote.origin.url")
    return _address(remote), _git(folder, "rev-parse", "HEAD")


@functools.cache
def _of_package() -> tuple[str | None, str | None]:
    """Return the URL and commit that pip recorded (PEP 610) for an fcsd that was
    installed from a repository.
    """
    try:
        text = importlib.metadata.distribution("fcsd").read_text("direct_url.json")
        record = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None, None
    vcs_info = record.get("vcs_info") or {}
    if vcs_info:
        return _address(record.get("url")), vcs_info.get("commit_id")
    return None, None


def _named_address() -> str | None:
    """Return the address that fcsd's own metadata name (`Project-URL: Repository`, from
    `[project.urls]` in pyproject.toml); None if there is none.
    """
    try:
        metadata = importlib.metadata.metadata("fcsd")
    except importlib.metadata.PackageNotFoundError:
        return None
    for named in metadata.get_all("Project-URL") or ():
        label, _, url = named.partition(",")
        if label.strip().lower() == "repository":
            return _address(url.strip())
    return None


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no such value
        return None
    return done.stdout.strip() or None


def _address(url: str | None) -> str | None:
    """Return the address of a remote in pip's form, without credentials; None for a
    folder of this machine.
    """
    if url is None:
        return None
    # The short form of ssh, git@host:owner/name, which pip does not read.
    if match := re.fullmatch(r"[\w.-]+@([\w.-]+):(?!/)(.+)", url):
        url = f"ssh://{match[1]}/{match[2]}"
    scheme, _, location = url.removeprefix("git+").partition("://")
    host, slash, path = location.partition("/")
    if (
        scheme not in ("https", "http", "ssh")
        or not path
        or re.search(r"[\s'`#?@]", path)
    ):
        return None
    host = host.rpartition("@")[2]
    # Public hosts serve the same path over https, which needs no key; others may not.
    if scheme == "ssh":
        if host in _HOSTS:
            return f"https://{host}{slash}{path}"
        return f"ssh://git@{host}{slash}{path}"
    return f"{scheme}://{host}{slash}{path}"
