"""`fcsd push`: a checkpoint with its card to the Hub, or the exact folder that would go there.

    push(Path("runs/x"), "me/x", private=True)          # publish folder of a run
    push(Path("OUT"), "me/x", dry_run=Path("x-hub"))    # a converted checkpoint; nothing is sent

Everything is checked, and the folder assembled from named kinds of files, before the Hub is asked anything.
`huggingface_hub.upload_folder` sends it: with hf_xet in a stream of commits, without it through LFS; either way what
arrived before an interruption is not sent again. It reads the token (HF_TOKEN, `hf auth login`); fcsd keeps none.

Not covered: pull requests, branches, data sets.
"""

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.artifact import new_folder, read_json, weights_fingerprint, write_text
from fcsd.connectivity.carried import CARRIED
from fcsd.connectivity.checkpoint import CONFIG, INDEX, Checkpoint, read_checkpoint
from fcsd.connectivity.export import link_or_copy
from fcsd.connectivity.load import check_tensors, config_and_class
from fcsd.errors import UserError
from fcsd.report.card import (
    HERE,
    RESULTS,
    Facts,
    front_matter,
    hub_id,
    licence_of,
    write_card,
)

_REPORT = ("report.md", "report.json", "comparison.md", "comparison.json", "*.png")
_OTHER = ("NOTICE*", "USE_POLICY*", f"{RESULTS}/*.yaml", *_REPORT)
_CARD = "README.md"
_STALE = ["*.safetensors", INDEX, f"{RESULTS}/*.yaml", "modeling_farskip.py"]
"""What an earlier push may have left in the repository and this one no longer has."""
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")


@dataclass(frozen=True)
class NewCard:
    """What a card says that the checkpoint does not know; for folders without `README.md`.

    base: hub id or folder of the original. licence: overrules the one inherited from `base`.
    results: folders of `fcsd evaluate` for the original and for this checkpoint.
    """

    base: str | None = None
    licence: str | None = None
    results: tuple[Path, Path] | None = None


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: Path | None = None,
    card: NewCard | None = None,
) -> str:
    """Upload `folder` to the model repository `owner/name`, which is created if there is none.

    Args:
        folder: a run (its `publish` is taken), a `publish` folder, a stage's folder, or a FarSkip checkpoint.
        dry_run: write the folder that would be uploaded to this new folder, and send nothing.

    Returns:
        The repository's address, or the folder of the dry run.

    Raises:
        UserError: before anything is sent: no repository id, no FarSkip checkpoint, weights that do not fit their
            index or config, remote code missing, a token in a text file; then what the Hub refuses.
    """
    _check_repo_id(repo_id)
    source = find_source(folder)
    checkpoint = _checked(source)
    if dry_run is not None:
        if dry_run.exists() and (not dry_run.is_dir() or any(dry_run.iterdir())):
            raise UserError(f"{dry_run}: exists already; choose a new folder for the dry run")
        with new_folder(dry_run) as new:
            _assemble(checkpoint, repo_id, new, card or NewCard(), link_or_copy)
            _say(checkpoint, new)
        return str(dry_run)
    with tempfile.TemporaryDirectory(prefix="fcsd-push-") as name:
        new = Path(name)
        # Links: nothing of the weights is written a second time, on whatever disk they are.
        _assemble(checkpoint, repo_id, new, card or NewCard(), lambda old, to: to.symlink_to(old.resolve()))
        _say(checkpoint, new)
        return _upload(new, repo_id, private)


def find_source(folder: Path) -> Path:
    """The checkpoint in a run, a stage, or `folder` itself."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a run, its publish folder, or a FarSkip checkpoint")
    for place in (folder, folder / "publish", folder / "model"):
        if (place / CONFIG).is_file():
            return place
    stages = [
        name for name in ("distill", "convert", "pretrain") if (folder / name / "model" / CONFIG).is_file()
    ]
    if stages or (folder / "stage.json").is_file() or any(folder.glob("*/stage.json")):
        has = f"; {folder / stages[0]} can be pushed as it is, without a report" if stages else ""
        raise UserError(
            f"{folder}: the run has not come to its publish folder yet; `fcsd run RECIPE` goes on with it{has}"
        )
    raise UserError(
        f"{folder}: holds neither a checkpoint ({CONFIG}) nor a run of `fcsd run`; give the folder that"
        " `fcsd convert`, `fcsd distill` or `fcsd run` left"
    )


def _check_repo_id(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"'{repo_id}' is no repository id: {str(error).splitlines()[0]}") from None
    if repo_id.count("/") != 1:
        raise UserError(
            f"'{repo_id}' is no repository id: owner/name is needed, for example me/my-model-farskip"
        )


def _checked(source: Path) -> Checkpoint:
    """Config, index, shards, tensor shapes and remote code belong together."""
    checkpoint = read_checkpoint(source)
    if checkpoint.connectivity is None or checkpoint.foreign:
        raise UserError(
            f"{source}: is not a FarSkip checkpoint of fcsd; convert it first (`fcsd convert`), or upload it as it is"
            " with `hf upload`"
        )
    config, cls = config_and_class(checkpoint, None, original=False)
    check_tensors(checkpoint, config, cls)
    for name in _modules(checkpoint.config):
        if not (source / name).is_file():
            raise UserError(
                f"{source / name}: no such file, though auto_map in {CONFIG} names it; without it nobody can load the"
                " model; convert the original again, or copy the file from the folder it was converted to"
            )
    if (source / _CARD).is_file():
        front_matter(source / _CARD)
    return checkpoint


def _modules(config: dict[str, Any]) -> list[str]:
    names = [name for value in (config.get("auto_map") or {}).values() for name in _listed(value)]
    return sorted({f"{name.split('.')[0]}.py" for name in names if name and "--" not in name})


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


# ---- the folder


def _assemble(checkpoint: Checkpoint, repo_id: str, new: Path, card: NewCard, link: Any) -> None:
    """Fill `new` with what goes to the Hub; kinds of files that are not named here stay behind."""
    source = checkpoint.folder
    for file in _files(checkpoint):
        target = new / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        link(file, target)
    if not (source / _CARD).is_file():
        write_card(_facts(checkpoint, repo_id, card), new)
    else:
        if card != NewCard():
            raise UserError(
                f"{source / _CARD}: exists; --base-model, --license and --results are for a new card: leave them out"
                " and edit this one, or remove it"
            )
        text = (source / _CARD).read_text(encoding="utf-8").replace(HERE, repo_id)
        if (other := _other_repo(source)) not in (None, repo_id):
            text = text.replace(f'"{other}"', f'"{repo_id}"')
        write_text(new / _CARD, text)
    for file in sorted(new.rglob("*")):
        if file.suffix in (".md", ".json", ".yaml", ".html", ".py") and file.stat().st_size < 2**24:
            _refuse_token(file, source / file.relative_to(new))


def _files(checkpoint: Checkpoint) -> list[Path]:
    source = checkpoint.folder
    names = {CONFIG, *checkpoint.weight_files, *_modules(checkpoint.config)}
    if (source / INDEX).is_file():
        names.add(INDEX)
    for name in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        if (source / name).is_file():
            names |= {module for module in _modules(read_json(source / name)) if (source / module).is_file()}
    from transformers.dynamic_module_utils import get_relative_import_files

    for name in [name for name in names if name.endswith(".py")]:
        names |= {Path(file).name for file in get_relative_import_files(source / name)}
    found = {source / name for name in names}
    for pattern in (*CARRIED, *_OTHER):
        found |= {file for file in source.glob(pattern) if file.is_file()}
    return sorted(found)


def _other_repo(source: Path) -> str | None:
    """The repository id that the recipe of a publish folder wrote into its card."""
    if not (source / "report.json").is_file():
        return None
    publication = (read_json(source / "report.json").get("recipe") or {}).get("publication") or {}
    name: str | None = publication.get("repo_id")
    return name


def _refuse_token(file: Path, shown: Path) -> None:
    from huggingface_hub import get_token

    text = file.read_text(encoding="utf-8", errors="replace")
    token = get_token()
    if _TOKEN.search(text) or (token and token in text):
        raise UserError(
            f"{shown}: contains what looks like an access token of the Hub; remove it, and revoke it"
        )


def _facts(checkpoint: Checkpoint, repo_id: str, card: NewCard) -> Facts:
    """What is known about a checkpoint without a card: its config, its stage's manifest, what the user says."""
    source = checkpoint.folder
    manifest = source.parent / "manifest.json" if source.name == "model" else source / "manifest.json"
    training = read_json(manifest) if manifest.is_file() else None
    base = card.base
    if base is None and training is not None:
        base = (training["settings"].get("model") or {}).get("path")
    licence = _licence(base) if base is not None and card.licence is None else {}
    if card.licence is not None:
        licence = {"license": card.licence}
    result = comparison = None
    if card.results is not None:
        result, comparison = _results(source, *card.results)
    return Facts(
        name=repo_id.split("/")[1],
        where=repo_id,
        config=checkpoint.config,
        base=hub_id(base) if base is not None else None,
        licence=licence,
        training=training,
        result=result,
        comparison=comparison,
    )


def _licence(base: str) -> dict[str, Any]:
    """The licence of the original: from the card in its folder, or in its repository."""
    if Path(base).is_dir():
        return licence_of(Path(base))
    if hub_id(base) is None:
        return {}
    from huggingface_hub import hf_hub_download

    try:
        return licence_of(Path(hf_hub_download(base, _CARD)).parent)
    except UserError:
        raise
    except Exception as error:  # offline, no such repository, no card: said below, with what to do
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"fcsd push: note: the card of {base} cannot be read: {reason}", file=sys.stderr)
        return {}


def _results(source: Path, original: Path, converted: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result of this checkpoint and its comparison; a result of other weights is refused."""
    from fcsd.evaluate.lm_eval_results import read_results
    from fcsd.evaluate.scores import compare

    manifest = converted / "manifest.json"
    if manifest.is_file():
        measured = read_json(manifest)["inputs"].get("model")
        if measured is not None and measured != weights_fingerprint(source):
            raise UserError(
                f"{converted}: was measured on other weights than those in {source}; evaluate them again"
            )
    else:
        print(
            f"fcsd push: note: {converted}: says nothing of its weights (lm_eval's results do not); make sure that"
            f" it was measured on {source}",
            file=sys.stderr,
        )
    result, samples = read_results(converted)
    before, old = read_results(original, like=result)
    return result, compare({"result": before, "samples": old}, {"result": result, "samples": samples})


def _say(checkpoint: Checkpoint, new: Path) -> None:
    """What goes, what stays behind, and what a reader of the page would miss."""
    source, notes = checkpoint.folder, []
    sent = {
        str(file.relative_to(new)): file.stat().st_size for file in sorted(new.rglob("*")) if file.is_file()
    }
    for name, size in sent.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(sent.values()):>15,}  bytes in {len(sent)} files")
    left = [file.name for file in sorted(source.iterdir()) if file.is_file() and file.name not in sent]
    if left := [name for name in left if name not in ("stage.json", "manifest.json")]:
        notes.append(f"left out, no part of a published checkpoint: {', '.join(left)}")
    card = front_matter(new / _CARD)
    if not any(name.startswith("tokenizer") or name.endswith(".model") for name in sent):
        notes.append("no tokenizer; copy the original's tokenizer files beside the weights")
    if "generation_config.json" not in sent:
        notes.append("no generation_config.json: generation uses transformers' defaults")
    if not card.get("license"):
        notes.append(
            "no licence on the card: --license, publication.license, or a base model whose card has one"
        )
    if not card.get("base_model"):
        notes.append(
            "no base model on the card: --base-model or publication.base_model, the original's hub id"
        )
    if not card.get("model-index"):
        notes.append(
            "no results on the card: --results ORIGINAL MODEL (folders of `fcsd evaluate`, without --limit)"
        )
    place = str(Path.home())
    texts = [name for name in sent if Path(name).suffix in (".md", ".json", ".html") and "token" not in name]
    if found := [
        name for name in texts if len(place) > 1 and f"{place}/" in (new / name).read_text("utf-8", "replace")
    ]:
        notes.append(f"{', '.join(found)}: names folders below {place}")
    for note in notes:
        print(f"fcsd push: note: {note}", file=sys.stderr)


# ---- the Hub


def _upload(new: Path, repo_id: str, private: bool) -> str:
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError(
            "no access token for the Hub; `hf auth login` stores one, or set HF_TOKEN (a write token)"
        )
    api = HfApi()
    with _refusals(repo_id):
        _check_existing(api, repo_id, read_json(new / CONFIG)["model_type"], private)
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=new,
            commit_message="Upload FarSkip checkpoint with fcsd",
            delete_patterns=_STALE,
        )
    return f"{api.endpoint}/{repo_id}"


def _check_existing(api: Any, repo_id: str, model_type: str, private: bool) -> None:
    """A repository that exists may be updated, but not one that holds another kind of model, or a public one that the
    user believes private."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return
    other = (found.config or {}).get("model_type")
    if other not in (None, model_type):
        raise UserError(
            f"{repo_id}: exists and holds a model of type '{other}', not '{model_type}'; choose another name"
        )
    if private and not found.private:
        raise UserError(
            f"{repo_id}: exists and is public; --private makes only new repositories private: change it in its"
            " settings, or choose another name"
        )


@contextlib.contextmanager
def _refusals(repo_id: str) -> Iterator[None]:
    """Turn what the client raises into one line that says what to do; the token is in none."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    reasons = {
        401: "the Hub does not accept the access token; `hf auth login` stores a new one",
        402: "the Hub wants a paid plan for this",
        403: "the access token may not write there; use a write token of the owner",
        404: "the Hub knows no such place, or the access token may not see it",
    }
    try:
        yield
    except UserError:
        raise
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set: nothing can be pushed; unset it, or use --dry-run") from None
    except Exception as error:  # HTTP, network, disk and xet errors have no common base
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in reasons:
            raise UserError(f"{repo_id}: {reasons[status]} ({status})") from None
        cause = error.__cause__ or error
        text = (str(cause).strip().splitlines() or [""])[0][:200].replace(get_token() or "\0", "…")
        raise UserError(
            f"{repo_id}: the upload broke off ({type(cause).__name__}: {text}); run the same command again, what has"
            " arrived is not sent again"
        ) from None


__all__ = ["NewCard", "find_source", "push"]
