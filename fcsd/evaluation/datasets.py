"""Find the data set of a suite's row; and `fcsd evaluate --fetch ROOT`, which fills a
data root with the data sets of a suite, at their pinned revisions.

ROOT/openai/gsm8k has the repository's files, and `.fcsd-fetch` with the commit that was
fetched. A data set is fetched into a hidden folder beside its destination and renamed
when complete; the next fetch continues an interrupted one.

Not covered: data sets that need the user to agree to terms on the Hub first, other than
with the user's own token.
"""

import contextlib
import glob
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fcsd.base.errors import UserError
from fcsd.base.files import check_fetched, data_dir, file_fingerprint, read_json
from fcsd.base.strict import refuse
from fcsd.base.writing import inside, make_folder, write_json, writing
from fcsd.data.local import data_files, data_fingerprint, is_path, making_of
from fcsd.evaluation.config import LMEvalTaskConfig, SuiteConfig, TaskBase, TaskConfig

MARK = ".fcsd-fetch"  # not a data suffix: it must not change the identity of the rows
# Loading scripts are dead since datasets 4, and one that lies in the folder makes the
# folder unreadable.
_IGNORED = ["*.py", ".gitattributes", "*.zip"]

_FORMATS = {"arrow", "csv", "json", "parquet", "text", "xml"}
"""Names with which lm-eval's definitions give `datasets` the format of files, and these in
`dataset_kwargs.data_files`.
"""

DEFINITION = ", its definition"
"""Ends the name of a fingerprint of the files that define a task's prompts."""


def local_place(name: str, data_root: Path | None) -> Path:
    """Return where the data set of this name is on this machine, if it is there: below
    the data root or, where that has none of this name, in the current folder.
    """
    path = Path(os.path.expanduser(name))
    if data_root is None or path.is_absolute():
        return path
    below = data_root / path
    return path if path.exists() and not below.exists() else below


def dataset_location(row: TaskBase, data_root: Path | None) -> str:
    """Find where the row's data set is: below `data_root` or, where that has none of
    its name, in the current folder; without either, it is the id itself.

    UserError where the data root has no such folder, or the name of a file is that of
    none.
    """
    name, path = row.dataset, Path(os.path.expanduser(row.dataset))
    if path.is_absolute():
        return str(path)
    folder = local_place(name, data_root)
    root_exists = data_root is None or data_root.is_dir()
    if root_exists and folder.exists():
        in_root = data_root is not None and folder != path
        return str(folder.resolve()) if in_root else name
    making = making_of(name, None if data_root is None else str(data_root))
    if not root_exists:
        raise UserError(f"{data_root}: no such folder (data root){making}")
    if is_path(name):
        places = f", neither in the current folder nor below {data_root} (data root)"
        raise UserError(
            f"task {row.task}: {name}: no such file or folder"
            f"{'' if data_root is None else places}{making}"
        )
    if data_root is None or _has_files(row):
        return name
    # The root is often taken for the folder around it, and the tiny data are made in
    # that one: making them again would end here again.
    if (data_root / "data" / row.dataset).exists():
        raise UserError(
            f"task {row.task}: {folder}: no such folder; the data sets are in"
            f" {data_root / 'data'}; give that folder as the data root"
        )
    raise UserError(
        f"task {row.task}: {folder}: no such folder; the data root must hold the data"
        f" set {row.dataset} in the layout of its hub repository"
        + (making or "; `fcsd evaluate --fetch ROOT --suite SUITE` fetches it")
    )


def _has_files(row: TaskBase) -> bool:
    """Whether a task's definition names files instead of a data set."""
    return isinstance(row, LMEvalTaskConfig) and row.dataset in _FORMATS


def definition_folder(row: LMEvalTaskConfig, suite: SuiteConfig) -> Path | None:
    """Find the row's task YAML, beside the suite or in eval/tasks; None: in
    lm-eval's own tasks, if at all.
    """
    name = row.lm_eval_include or row.task
    roots = [Path(suite.folder)] if suite.folder else []
    folders = [root / name for root in (*roots, data_dir("eval") / "tasks")]
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


def damaged_file(location: str) -> str:
    """Name a parquet file in a folder that cannot be read completely, or a file that
    was not fetched, and the reason; "" if there is none.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    folder = Path(location)
    for file in data_files(folder) if folder.is_dir() else ():
        try:
            check_fetched(file)
            if file.suffix == ".parquet":
                # Damage may lie anywhere in the file, so all of it is read.
                for _ in ParquetFile(file).iter_batches():
                    pass
        except UserError as error:
            return str(error)
        except (OSError, pyarrow.ArrowException) as error:
            return f"{file}: is damaged ({first_line(error)}); fetch it again"
    return ""


def hub_advice(row: TaskBase, data_root: Path | None) -> str:
    """Say what to do if a row's data set cannot be read from the Hub."""
    if data_root is not None or is_path(row.dataset):
        return ""
    if making_of(row.dataset):
        return "; `fcsd tiny-data OUT` makes it; give OUT/data as --data-root"
    return (
        "; without a network, fill a folder on a machine that has one (`fcsd evaluate"
        " --fetch ROOT --suite SUITE`) and give it as --data-root"
    )


@contextlib.contextmanager
def reading(row: TaskBase, data_root: Path | None, location: str) -> Iterator[None]:
    """Begin the error of a row's data set that cannot be read with the task, and end it
    with advice.
    """
    try:
        yield
    except UserError as error:
        advice = "" if Path(location).exists() else hub_advice(row, data_root)
        raise UserError(f"task {row.task}: {error}{advice}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its name, without the text
    that `datasets` puts around it.
    """
    if error.__cause__ is not None and str(error).startswith(
        "An error occurred while generating the dataset"
    ):
        return first_line(error.__cause__)
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return text.partition(" with any supported extension")[0]


def fetch_suite(suite: SuiteConfig, root: Path) -> list[str]:
    """Fetch every data set of `suite` that `root` does not hold yet, and return which.

    Raises:
        UserError: a data set cannot be fetched, or `root` holds another revision. What
            was fetched before stays.
    """
    rows: dict[str, TaskConfig] = {}
    for row in suite.tasks:
        if Path(os.path.expanduser(row.dataset)).is_absolute() or _has_files(row):
            continue
        inside(root, row.dataset)
        if is_path(row.dataset):
            continue
        # A folder holds one revision, so tasks that share a data set must agree on it.
        first = rows.setdefault(row.dataset, row)
        if first.revision != row.revision:
            raise UserError(
                f"suite {suite.name}: tasks {first.task} and {row.task} need two"
                f" revisions of {row.dataset}, but a data root holds one"
            )
    missing = [row for row in rows.values() if not _is_there(row, root)]
    for number, row in enumerate(missing, start=1):
        print(f"[{number}/{len(missing)}] {row.dataset}", file=sys.stderr, flush=True)
        _fetch(row, root)
    return [row.dataset for row in missing]


def fetched_revision(row: TaskConfig, data_root: Path) -> str | None:
    """Read the commit of a data set in a data root; None where it was not fetched by
    `fetch_suite`.
    """
    mark = data_root / row.dataset / MARK
    return str(read_json(mark)["revision"]) if mark.is_file() else None


def _is_there(row: TaskConfig, root: Path) -> bool:
    folder = root / row.dataset
    if not folder.exists():
        return False
    revision = fetched_revision(row, root)
    refuse(
        (
            revision is None,
            f"task {row.task}: {folder}: exists, but not from `fcsd evaluate --fetch`;"
            " remove it to fetch it, or use the data root as it is",
        ),
        (
            row.revision is not None and revision != row.revision,
            f"task {row.task}: {folder}: holds revision {revision}, but the suite needs"
            f" {row.revision}; remove the folder to fetch it again",
        ),
    )
    return True


def _fetch(row: TaskConfig, root: Path) -> None:
    folder = root / row.dataset
    staging = folder.with_name(f".{folder.name}.fetch")
    make_folder(staging)
    with writing(folder):
        try:
            commit = _download(row.dataset, row.revision, staging)
        except Exception as error:
            network = isinstance(error, ConnectionError | TimeoutError)
            # Disk errors are raised unchanged; others get advice on the Hub.
            if isinstance(error, OSError) and error.errno is not None and not network:
                raise  # a full disk
            raise _unreachable(row, error) from error
        # huggingface_hub's notes on unfinished files
        shutil.rmtree(staging / ".cache", ignore_errors=True)
        write_json(staging / MARK, {"dataset": row.dataset, "revision": commit})
        # The folder appears complete or not at all.
        os.replace(staging, folder)


def _download(dataset: str, revision: str | None, folder: Path) -> str:
    """Fetch the rest of a repository into `folder`, and return its commit. Nothing else
    here talks to the Hub.
    """
    from huggingface_hub import HfApi, snapshot_download

    commit = str(HfApi().dataset_info(dataset, revision=revision).sha)
    snapshot_download(
        dataset,
        repo_type="dataset",
        revision=commit,
        local_dir=folder,
        ignore_patterns=_IGNORED,
    )
    return commit


def _unreachable(row: TaskConfig, error: BaseException) -> UserError:
    from huggingface_hub import errors

    name = f"{row.dataset}@{row.revision or 'main'}"
    # The order matters: a gated repository's error is a subclass of a missing
    # repository's.
    advice: dict[Any, str] = {
        errors.GatedRepoError: (
            "agree to its terms on the Hub and log in with `hf auth login`"
        ),
        errors.RepositoryNotFoundError: (
            "check the name, or log in with `hf auth login` if it is private"
        ),
        errors.RevisionNotFoundError: (
            "the revision does not exist; correct it in the suite"
        ),
        errors.OfflineModeIsEnabled: (
            "HF_HUB_OFFLINE is set; unset it on a machine with a network"
        ),
        BaseException: (
            "check the network (HF_ENDPOINT names the Hub or a mirror), or fetch on"
            " another machine and copy the folder"
        ),
    }
    suggestion = next(text for kind, text in advice.items() if isinstance(error, kind))
    continuing = (
        f"; {suggestion}; run the same command again to continue after the files"
        " fetched so far"
    )
    if making_of(row.dataset):  # is not on the Hub
        continuing = hub_advice(row, None)
    return UserError(
        f"task {row.task}: data set {name} cannot be fetched"
        f" ({first_line(error)}){continuing}"
    )


def test_set_fingerprints(
    suite: SuiteConfig | None, data_root: Path | None
) -> dict[str, str]:
    """Return fingerprints of the test sets' items and of the lm-eval files that define
    their prompts: a score is never reused for others.
    """
    fingerprints: dict[str, str] = {}
    if suite is None:
        return fingerprints
    for row in suite.tasks:
        location = dataset_location(row, data_root)
        fingerprints[f"task {row.task}"] = data_fingerprint(location, row.revision)
        if isinstance(row, LMEvalTaskConfig) and (
            folder := definition_folder(row, suite)
        ):
            fingerprints[f"task {row.task}{DEFINITION}"] = data_fingerprint(str(folder))
            if _has_files(row):
                fingerprints[f"task {row.task}"] += _files_fingerprint(folder)
    return fingerprints


class _AnyTag(yaml.SafeLoader):
    """Reads a definition whose `!function` need not be found."""


_AnyTag.add_multi_constructor("!", lambda *_: None)


def _files_fingerprint(folder: Path) -> str:
    """Hash the local files that the definitions in a folder name; not covered: addresses."""
    from fcsd.data.messages import all_texts

    digest = hashlib.sha256()
    for definition in sorted(folder.rglob("*yaml")):
        try:
            read = yaml.load(definition.read_text("utf-8"), _AnyTag)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # lm-eval says so when it is asked for the task
        settings = read.get("dataset_kwargs") if isinstance(read, dict) else None
        if not isinstance(settings, dict):
            continue
        base = os.path.expanduser(str(settings.get("data_dir") or ""))
        for pattern in all_texts(settings.get("data_files")):
            place = os.path.join(base, os.path.expanduser(pattern))
            for file in sorted(glob.glob(place, recursive=True)):
                if os.path.isfile(file):
                    digest.update(file_fingerprint(Path(file)).encode())
    return digest.hexdigest()
