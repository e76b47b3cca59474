"""`fcsd evaluate --fetch ROOT`: fill a data root with the data sets of a suite, at their pinned revisions.

ROOT/openai/gsm8k has the repository's files, and `.fcsd-fetch` with the commit that was fetched. A data set is fetched
into a hidden folder beside its place and renamed when it is whole; what an interrupted fetch has left is used by the
next one.

Not covered: data sets that need the user to agree to terms on the Hub first, other than with the user's own token.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import make_folder, read_json, write_json, writing
from fcsd.evaluation.config import SuiteConfig, TaskConfig
from fcsd.evaluation.suites import first_line

MARK = ".fcsd-fetch"  # no suffix of data: it must not change what identifies the rows
# Loading scripts are dead since datasets 4, and one that lies in the folder makes the folder unreadable.
_IGNORED = ["*.py", ".gitattributes", "*.zip"]


def fetch_suite(suite: SuiteConfig, root: Path) -> list[str]:
    """Fetch every data set of `suite` that `root` does not hold yet; which were fetched.

    Raises:
        UserError: a data set cannot be fetched, or `root` holds another revision. What was fetched before stays.
    """
    rows: dict[str, TaskConfig] = {}
    for row in suite.tasks:
        if Path(row.dataset).is_absolute():
            continue
        first = rows.setdefault(row.dataset, row)
        if first.revision != row.revision:
            raise UserError(
                f"suite {suite.name}: tasks {first.task} and {row.task} want two revisions of {row.dataset};"
                " a data root holds one"
            )
    missing = [row for row in rows.values() if not _is_there(row, root)]
    for number, row in enumerate(missing, start=1):
        print(f"[{number}/{len(missing)}] {row.dataset}", file=sys.stderr, flush=True)
        _fetch(row, root)
    return [row.dataset for row in missing]


def fetched_revision(row: TaskConfig, data_root: Path) -> str | None:
    """Read the commit of a data set in a data root; None where it was not fetched by `fetch_suite`."""
    mark = data_root / row.dataset / MARK
    return str(read_json(mark)["revision"]) if mark.is_file() else None


def _is_there(row: TaskConfig, root: Path) -> bool:
    folder = root / row.dataset
    if not folder.exists():
        return False
    found = fetched_revision(row, root)
    if found is None:
        raise UserError(
            f"task {row.task}: {folder}: is there, but was not fetched by `fcsd evaluate --fetch`;"
            " remove it to fetch it, or use the data root as it is"
        )
    if row.revision is not None and found != row.revision:
        raise UserError(
            f"task {row.task}: {folder}: holds revision {found}, the suite wants {row.revision};"
            " remove the folder to fetch it again"
        )
    return True


def _fetch(row: TaskConfig, root: Path) -> None:
    folder = root / row.dataset
    beside = folder.with_name(f".{folder.name}.fetch")
    make_folder(beside)
    with writing(folder):
        try:
            commit = _download(row.dataset, row.revision, beside)
        except Exception as error:
            network = isinstance(error, ConnectionError | TimeoutError)
            if isinstance(error, OSError) and error.errno is not None and not network:
                raise  # a full disk
            raise _unreachable(row, error) from error
        shutil.rmtree(beside / ".cache", ignore_errors=True)  # huggingface_hub's notes on unfinished files
        write_json(beside / MARK, {"dataset": row.dataset, "revision": commit})
        os.replace(beside, folder)


def _download(dataset: str, revision: str | None, folder: Path) -> str:
    """Fetch the rest of a repository into `folder`; its commit. Nothing else here talks to the Hub."""
    from huggingface_hub import HfApi, snapshot_download

    commit = str(HfApi().dataset_info(dataset, revision=revision).sha)
    snapshot_download(
        dataset, repo_type="dataset", revision=commit, local_dir=folder, ignore_patterns=_IGNORED
    )
    return commit


def _unreachable(row: TaskConfig, error: BaseException) -> UserError:
    from huggingface_hub import errors

    name = f"{row.dataset}@{row.revision or 'main'}"
    advice: dict[Any, str] = {
        errors.GatedRepoError: "agree to its terms on the Hub and log in with `hf auth login`",
        errors.RepositoryNotFoundError: "check the name, or log in with `hf auth login` if it is private",
        errors.RevisionNotFoundError: "the revision does not exist; correct it in the suite",
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE is set; unset it on a machine with a network",
    }
    other = "check the network (HF_ENDPOINT names the Hub or a mirror), or fetch on another machine and copy the folder"
    what = next((text for kind, text in advice.items() if isinstance(error, kind)), other)
    return UserError(
        f"task {row.task}: data set {name} cannot be fetched ({first_line(error)}); {what};"
        " run the same command again to continue, what was fetched stays"
    )
