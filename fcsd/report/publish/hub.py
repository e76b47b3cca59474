"""Send a folder to a model repository of the Hub; its refusals become one line."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from fcsd.base.artifact import LEFT
from fcsd.base.errors import UserError, without_credentials
from fcsd.base.files import read_json
from fcsd.base.strict import Rule, refuse
from fcsd.base.writing import scratch_folder
from fcsd.model.connectivity.checkpoint import CONFIG, INDEX
from fcsd.report.publish.card import RESULTS
from fcsd.training.card.facts import CARD

_STALE = [
    "*.safetensors",
    INDEX,
    f"{RESULTS}/*.yaml",
    "modeling_farskip.py",
    LEFT,
    "report.*",
    "comparison.*",
]
"""Files of an earlier push that are deleted where this one no longer has them."""


def upload(new: Path, repo_id: str, private: bool) -> str:
    """Bring the repository to the content of the folder, keep the owner's other files,
    and return its address.
    """
    if get_token() is None:
        raise UserError(
            "no access token for the Hub; `hf auth login` stores one, or set HF_TOKEN"
            " (a write token)"
        )
    api = HfApi()
    with _refusals(repo_id, api.endpoint):
        repository = None
        with contextlib.suppress(RepositoryNotFoundError):
            repository = api.model_info(repo_id)
        if repository is not None:
            model_type = read_json(new / CONFIG)["model_type"]
            refuse(*_EXISTING, of=(repo_id, repository, model_type, private))
            _tell_of_another_card(api, repo_id, repository, new)
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=new,
            commit_message="Upload FarSkip checkpoint with fcsd",
            delete_patterns=_STALE,
        )
    return without_credentials(f"{api.endpoint}/{repo_id}")


_EXISTING: tuple[Rule, ...] = (
    (
        lambda repo_id, repository, model_type, _: (
            (repository.config or {}).get("model_type") not in (None, model_type)
        ),
        "{0}: exists and holds a model of type '{1.config[model_type]}', not '{2}';"
        " choose another name",
    ),
    (
        lambda repo_id, repository, _, private: private and not repository.private,
        "{0}: exists and is public; --private makes only new repositories private:"
        " change it in its settings, or choose another name",
    ),
)
"""Of a repository's name, what the Hub says of it, the type of the model to push, and
whether the user believes it private.
"""


def _tell_of_another_card(api: Any, repo_id: str, repository: Any, new: Path) -> None:
    """Print a note if the card will be replaced by a different text, since its owner
    may have edited it on the page.
    """
    if not any(file.rfilename == CARD for file in repository.siblings or []):
        return
    with scratch_folder("fcsd-push") as folder:
        old = Path(api.hf_hub_download(repo_id, CARD, local_dir=folder)).read_bytes()
    if old != (new / CARD).read_bytes():
        print(
            f"fcsd push: note: replaces the {CARD} of {repo_id}, whose text differs;"
            " the old one stays in the repository's history",
            file=sys.stderr,
        )


_REASONS = {
    401: "the Hub does not accept the access token; `hf auth login` stores a new one",
    402: "the Hub requires a paid plan for this",
    403: "the access token may not write there; use a write token of the owner",
    404: "the Hub has no such repository, or the access token may not see it",
    429: "the Hub asks for a pause; run the same command again later",
}
"""Status of HTTP -> what it means for a push."""


@contextlib.contextmanager
def _refusals(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turn the client's errors into one line with a remedy, and without the token."""
    try:
        yield
    except UserError:
        raise
    except OfflineModeIsEnabled:
        raise UserError(
            "HF_HUB_OFFLINE is set, so fcsd cannot push; unset it, or use --dry-run"
        ) from None
    except Exception as error:  # HTTP, network, disk and xet errors have no common base
        raise UserError(f"{repo_id}: {_reason(error, endpoint)}") from None


def _excerpt(text: object) -> str:
    """Return one line of at most 200 characters, without the token."""
    return " ".join(str(text).split()).replace(get_token() or "\0", "…")[:200]


def _reason(error: Exception, endpoint: str) -> str:
    """Return what an error of the client means, and a remedy."""
    if isinstance(error, ValueError) and "Invalid metadata in README.md" in str(error):
        metadata = _excerpt(str(error).partition("\n")[2])
        return (
            f"the Hub refuses the metadata of README.md: {metadata}; fcsd sent nothing:"
            " correct"
            " the lines between the ---, or the values of --license, --base-model or the"
            " recipe's publication"
        )
    status, server = None, ""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        server = _excerpt(error.server_message or "")
    if status in _REASONS:
        return f"{_REASONS[status]} ({status}{server and f': {server}'})"
    # Timeouts and conflicts (408, 409, 412) pass with time, so they count as a broken
    # upload.
    if status is not None and 400 <= status < 500 and status not in (408, 409, 412):
        return f"the Hub refuses this ({status}: {server or 'no reason given'})"
    cause = error.__cause__ or error
    # Connection errors have this in their name in any HTTP library of the client.
    if "Connect" in type(cause).__name__:
        return (
            f"the Hub at {endpoint} cannot be reached ({_excerpt(cause)}); check the"
            " network, proxy and HF_ENDPOINT, and run the same command again"
        )
    return (
        f"the upload broke off ({type(cause).__name__}: {_excerpt(server or cause)}); run"
        " the same command again to continue the upload"
    )
