"""`fcsd push`: upload a checkpoint with its card to the Hub, or write the exact folder
that would be uploaded.

Everything is checked, and the folder assembled from named kinds of files, before the
Hub is contacted. `huggingface_hub.upload_folder` sends it: with hf_xet in a stream of
commits, without it through LFS. Either way, data that arrived before an interruption is
not sent again, except what hf_xet had not yet recorded (the last 20 s of a process that
is killed). It reads the token (HF_TOKEN, `hf auth login`); fcsd stores none.

Not covered: pull requests, branches, data sets.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from fcsd.base.artifact import LEFT, changed_files, read_manifest
from fcsd.base.errors import UserError
from fcsd.base.files import file_sha256, read_json, read_sealed
from fcsd.base.strict import Rule, refuse
from fcsd.base.weights import check_finite, weight_files, weights_fingerprint
from fcsd.base.writing import is_empty, new_folder, scratch_folder, write_text
from fcsd.evaluation.read import read_any_result
from fcsd.evaluation.scores import compare
from fcsd.model.connectivity.checkpoint import (
    CARRIED,
    CONFIG,
    Checkpoint,
    files_like,
    read_checkpoint,
)
from fcsd.model.connectivity.export import code_files, write_code
from fcsd.model.connectivity.load import check_tensors, config_and_class
from fcsd.model.connectivity.modeling import MODELING_FILE
from fcsd.model.connectivity.spec import is_converted
from fcsd.report.publish.card import RESULTS, place, write_card
from fcsd.report.publish.hub import upload
from fcsd.report.publish.public import PLACE, public_text, refuse_secrets
from fcsd.training.card.facts import (
    CARD,
    HERE,
    Facts,
    front_matter,
    has_chat_template,
    has_results,
    hub_id,
    inherited_by,
    licence_of,
    origin_of,
)

_NO_TRAINING = ("convert", "quantize", "dequantize")
_REPORT = ("report.md", "report.json", "comparison.md", "comparison.json", "*.png")
_OTHER = ("NOTICE*", "USE_POLICY*", f"{RESULTS}/*.yaml", *_REPORT)


@dataclass(frozen=True)
class NewCard:
    """Facts for a new card that the checkpoint itself does not record; only for folders
    without `README.md`.

    base: hub id or folder of the original. licence: overrides the one inherited from
    `base`. results: folders of `fcsd evaluate` for the original and for this
    checkpoint.
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
    """Upload `folder` to the model repository `owner/name`, which is created if needed,
    and return its address, or dry_run.

    folder: a run (its `publish` is used), a `publish` folder, a stage's folder, or a
    FarSkip checkpoint. dry_run: write the files that would be uploaded to this new
    folder, and send nothing.

    Raises:
        UserError: before anything is sent: the repository id is invalid, there is no
            FarSkip checkpoint, weights do not fit their index or config, remote code is
            missing, or a file contains a token; later: the Hub refuses.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(
            f"'{repo_id}' is not a repository id: {str(error).splitlines()[0]}"
        ) from None
    if repo_id.count("/") != 1:
        raise UserError(
            f"'{repo_id}' is not a repository id: owner/name is needed, for example"
            " me/my-model-farskip"
        )
    checkpoint = _complete(read_checkpoint(find_checkpoint(folder)))
    card = card or NewCard()
    refuse(
        (
            card.base and not (hub_id(card.base) or Path(card.base).is_dir()),
            f"--base-model {card.base}: is neither a folder nor owner/name on the Hub",
        ),
        (
            dry_run
            and dry_run.exists()
            and not (dry_run.is_dir() and is_empty(dry_run)),
            f"{dry_run}: exists already; choose a new folder for the dry run",
        ),
    )
    if dry_run is not None:
        with new_folder(dry_run) as new:
            _assemble(checkpoint, repo_id, new, card, place)
        return str(dry_run)
    with scratch_folder("fcsd-push") as new:
        # Symbolic links work across disks, so that weights are not written a second
        # time.
        _assemble(
            checkpoint, repo_id, new, card, lambda old, to: to.symlink_to(old.resolve())
        )
        return upload(new, repo_id, private)


def find_checkpoint(folder: Path) -> Path:
    """Find the checkpoint in a run, a stage, or `folder` itself."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give a run, its publish folder, or a FarSkip"
            " checkpoint"
        )
    # The publish folder comes before the model: it has the card and the results.
    for candidate in (folder, folder / "publish", folder / "model"):
        if (candidate / CONFIG).is_file():
            return candidate
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder}: holds adapters, not a model; give the folder of the stage,"
            " which has a model with them merged into the weights (`fcsd distill`"
            " writes it), or upload the adapters with `hf upload`"
        )
    stages = [
        name
        for name in ("distill", "convert")
        if (folder / name / "model" / CONFIG).is_file()
    ]
    if stages or (folder / "stage.json").is_file() or any(folder.glob("*/stage.json")):
        has = ""
        if stages:
            has = f"; you can also push {folder / stages[0]} without a report"
        raise UserError(
            f"{folder}: the run has no publish folder yet; continue it with `fcsd run"
            f" RECIPE`{has}"
        )
    raise UserError(
        f"{folder}: holds neither a checkpoint ({CONFIG}) nor a run of `fcsd run`; give"
        " the folder that `fcsd convert`, `fcsd distill` or `fcsd run` wrote"
    )


_NOT_OURS: tuple[Rule, ...] = (
    (
        lambda checkpoint: checkpoint.connectivity is None or checkpoint.foreign,
        "{0.folder}: is not a FarSkip checkpoint of fcsd; convert it first (`fcsd"
        " convert`), or upload it as it is with `hf upload`",
    ),
)
_CODE: tuple[Rule, ...] = (
    (
        lambda checkpoint: _modules(checkpoint.config) != [MODELING_FILE],
        lambda checkpoint: (
            f"{checkpoint.folder / CONFIG}: auto_map names"
            f" {', '.join(_modules(checkpoint.config)) or 'no code'}; in a FarSkip"
            f" checkpoint it names only {MODELING_FILE}, which fcsd writes; convert the"
            " original again"
        ),
    ),
    (
        lambda checkpoint: not (checkpoint.folder / MODELING_FILE).is_file(),
        lambda checkpoint: (
            f"{checkpoint.folder / MODELING_FILE}: no such file, though auto_map in"
            f" {CONFIG} names it; without it nobody can load the model; convert the"
            " original again, or copy the file from the folder it was converted to"
        ),
    ),
)
"""Of a checkpoint."""


def _complete(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose config, index, shards, tensor shapes and remote code fit
    together, and whose values are all finite.
    """
    refuse(*_NOT_OURS, of=(checkpoint,))
    check_tensors(checkpoint, *config_and_class(checkpoint))
    check_finite(checkpoint.folder)
    refuse(*_CODE, of=(checkpoint,))
    if (checkpoint.folder / CARD).is_file():
        front_matter(checkpoint.folder / CARD)
    return checkpoint


def _change_rules(source: Path) -> Iterator[Rule]:
    """Yield what a checkpoint may not be: other weights or files than the stage and the
    publication recorded; the code, which is written anew, may differ.
    """
    manifest = (source.parent if source.name == "model" else source) / "manifest.json"
    recorded = read_manifest(manifest.parent).get("outputs", {})
    model = {name: of for name, of in recorded.items() if name.split("/")[0] == "model"}
    records = {manifest: model}
    if (source / LEFT).is_file():
        again = "`fcsd run` makes this folder again"
        records[source / LEFT] = read_sealed(source / LEFT, again)
    for file, record in records.items():
        outputs = {n: of for n, of in record.items() if not n.endswith(".py")}
        weights = outputs.pop("model", None)
        yield (
            weights is not None and weights != weights_fingerprint(source),
            f"{file}: describes other weights ({(weights or '')[:12]}…) than those in"
            f" {source}: the weights are damaged or were changed; run `fcsd run` of the"
            " recipe to write them again, or copy the changed ones to a separate folder"
            " and push that",
        )
        changes = changed_files(source, outputs)
        yield (
            changes,
            f"{source}: is not what {file} describes ({'; '.join(changes[:3])}); restore"
            " it, or copy the checkpoint to a separate folder and push that",
        )


def _modules(config: dict[str, Any]) -> list[str]:
    auto_map = config.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    names = [
        str(name)
        for value in values
        for name in (value if isinstance(value, list) else [value])
        if name
    ]
    return sorted({f"{name.split('.')[0]}.py" for name in names if "--" not in name})


def _assemble(
    checkpoint: Checkpoint, repo_id: str, new: Path, card: NewCard, link: Any
) -> None:
    """Fill `new` with the files for the Hub and print them; files of a kind that is not
    listed are left out.
    """
    source = checkpoint.folder
    refuse(*_change_rules(source))
    for file in _files(checkpoint):
        target = new / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The modeling code is written anew, so that an old checkpoint gets the current
        # code.
        if file == source / MODELING_FILE:
            assert checkpoint.family is not None
            write_code(source, checkpoint.family, new)
        elif file.parent == source and file.name.startswith(("report.", "comparison.")):
            write_text(target, public_text(file.name, file.read_text(encoding="utf-8")))
        else:
            link(file, target)
    if not (source / CARD).is_file():
        write_card(_facts(checkpoint, repo_id, card), new)
    else:
        if card != NewCard():
            raise UserError(
                f"{source / CARD}: exists; --base-model, --license and --results apply"
                " to a new card: leave them out and edit this card, or remove it"
            )
        text = (source / CARD).read_text(encoding="utf-8").replace(HERE, repo_id)
        if (source / "report.json").is_file():
            # The card of a publish folder names the repository of its recipe, which may
            # not be the one that is pushed to.
            publication = (read_json(source / "report.json").get("recipe") or {}).get(
                "publication"
            ) or {}
            if recipe_id := publication.get("repo_id"):
                name = rf"(?<![\w./-]){re.escape(recipe_id)}(?![\w/-]|\.\w)"
                text = re.sub(name, repo_id, text)
        write_text(new / CARD, text)
    for file in sorted(new.rglob("*")):
        # Every file is searched, whoever wrote it: what has been published cannot be
        # recalled.
        if file.is_file():
            refuse_secrets(file, source / file.relative_to(new))
    _say(checkpoint, new, repo_id)


def _files(checkpoint: Checkpoint) -> list[Path]:
    source = checkpoint.folder
    index = [checkpoint.index] if checkpoint.index is not None else []
    names = [CONFIG, MODELING_FILE, *index, *checkpoint.weight_files]
    files = set(files_like(source, [*names, *CARRIED, *_OTHER]))
    for name in (
        "tokenizer_config.json",
        "processor_config.json",
        "preprocessor_config.json",
    ):
        if (source / name).is_file():
            for module in _modules(read_json(source / name)):
                if os.path.lexists(source / module):
                    files.update(code_files(source, module))
    return sorted(files)


def _facts(checkpoint: Checkpoint, repo_id: str, card: NewCard) -> Facts:
    """Collect the facts about a checkpoint without a card, from its config, its stage's
    manifest and the user's options.
    """
    source = checkpoint.folder
    stage = source.name == "model"
    record = read_manifest(source.parent if stage else source)
    origin = origin_of(record)
    # The user's base and the recorded one may be the same model on the Hub and on this
    # machine; the local one needs no network, so it comes first.
    named = [(card.base, None), (origin.get("path"), origin.get("revision"))]
    bases: list[tuple[str, str | None]] = [
        (path, revision) for path, revision in named if path is not None
    ]
    bases.sort(key=lambda candidate: not Path(candidate[0]).is_dir())
    base = card.base or origin.get("path")
    # `fcsd convert` writes its record among the weights, which may have been trained in
    # that folder since; a copy in another format is no training either.
    training = (
        record if record and (stage or record["stage"] not in _NO_TRAINING) else None
    )
    inherited: dict[str, Any] = next(
        (terms for candidate in bases if (terms := inherited_by(*candidate))), {}
    )
    result = comparison = None
    if card.results is not None:
        result, comparison = _results(source, *card.results)
    return Facts(
        name=repo_id.split("/")[1],
        where=repo_id,
        config=checkpoint.config,
        base=hub_id(base) if base is not None else None,
        licence=licence_of(inherited, card.licence),
        language=tuple(inherited.get("language", [])),
        training=training,
        untrained=training is None
        and any(_same_weights(source, *candidate) for candidate in bases),
        chat=has_chat_template(source),
        result=result,
        comparison=comparison,
    )


def _same_weights(source: Path, base: str, revision: str | None) -> bool:
    """Tell whether the weight files are those of the original, if that is on this
    machine. Those of a converted checkpoint are links and need no reading; others are
    hashed.
    """
    folder = Path(base)
    if not folder.is_dir() and hub_id(base) is not None:
        with contextlib.suppress(LocalEntryNotFoundError):  # not in the cache
            folder = Path(
                snapshot_download(base, revision=revision, local_files_only=True)
            )
    if not (folder / CONFIG).is_file() or "farskip" in read_json(folder / CONFIG):
        return False
    try:
        converted, original = (
            {file.name: file for file in weight_files(checkpoint)}
            for checkpoint in (source, folder)
        )
    except UserError:  # the cache holds only some shards of the original
        return False
    # Names and sizes come first: they tell most models apart without reading a byte.
    sizes = [
        {name: file.stat().st_size for name, file in files.items()}
        for files in (converted, original)
    ]
    if not converted or sizes[0] != sizes[1]:
        return False
    return all(
        file.samefile(original[name])
        or file_sha256(file) == file_sha256(original[name])
        for name, file in sorted(converted.items())
    )


def _results(
    source: Path, original: Path, converted: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the result of this checkpoint and compare it with the original's; refuse a
    result of other weights.
    """
    result, samples = read_any_result(converted)
    if manifest := read_manifest(converted):
        measured = manifest["inputs"].get("model")
        if measured is not None and measured != weights_fingerprint(source):
            raise UserError(
                f"{converted}: was measured on other weights than those in {source};"
                " evaluate them again"
            )
        # Other connectivities of an original may have the same weights.
        config = manifest["inputs"].get("model/config.json")
        own = read_json(source / "config.json").get("farskip")
        if isinstance(config, dict) and config.get("farskip") != own:
            raise UserError(
                f"{converted}: was measured with another connectivity than that of"
                f" {source}; evaluate it again (--results ORIGINAL MODEL, in this order)"
            )
    else:
        print(
            f"fcsd push: note: {converted}: does not identify its weights (lm_eval's"
            f" results never do); make sure that it was measured on {source}",
            file=sys.stderr,
        )
    of_original = read_manifest(original) or {"inputs": {}}
    config = of_original["inputs"].get("model/config.json")
    if isinstance(config, dict) and is_converted(config):
        raise UserError(
            f"{original}: was measured on a converted model; --results takes the"
            " original's first"
        )
    original_result, original_samples = read_any_result(original, like=result)
    # A card has all tasks of its model, so the way out that `compare` names is none here.
    tasks = result["tasks"]
    if other := sorted(original_result["tasks"].keys() ^ tasks.keys()):
        raise UserError(
            f"--results: {original} and {converted} have different tasks"
            f" ({', '.join(other)} in one only); evaluate both models on the same suite"
        )
    return result, compare(
        {"result": original_result, "samples": original_samples},
        {"result": result, "samples": samples},
    )


def _say(checkpoint: Checkpoint, new: Path, repo_id: str) -> None:
    """Print the files that are sent, the files that are not, and what a reader of the
    page would miss.
    """
    source, notes = checkpoint.folder, []
    sent = {
        str(file.relative_to(new)): file.stat().st_size
        for file in sorted(new.rglob("*"))
        if file.is_file()
    }
    for name, size in sent.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(sent.values()):>15,}  bytes in {len(sent)} files")
    expected = {Path(name).parts[0] for name in sent} | {
        "stage.json",
        "manifest.json",
        LEFT,
    }
    left_out = [
        file.name + "/" * file.is_dir()
        for file in sorted(source.iterdir())
        if file.name not in expected
        and not new.resolve().is_relative_to(file.resolve())
    ]
    if left_out:
        notes.append(
            "left out, because it does not belong to a published checkpoint:"
            f" {', '.join(left_out)}"
        )
    card = front_matter(new / CARD)
    if not any(
        name.startswith("tokenizer") or name.endswith(".model") for name in sent
    ):
        notes.append(
            "no tokenizer; copy the original's tokenizer files next to the weights"
        )
    if "generation_config.json" not in sent:
        notes.append(
            "no generation_config.json: generation uses transformers' defaults"
        )
    # An existing card is the user's to edit; a new one is made from options.
    has_card = (source / CARD).is_file()
    where = f"edit {source / CARD}"
    if has_card and (source / "report.json").is_file():
        where += ", or publication in the recipe and `fcsd run` it again"
    if not card.get("license"):
        notes.append(
            "no licence on the card:"
            f" {where if has_card else '--license, or a base model whose card has one'}"
        )
    if not card.get("base_model"):
        notes.append(
            "no base model on the card, the original's hub id:"
            f" {where if has_card else '--base-model'}"
        )
    text = (new / CARD).read_text(encoding="utf-8")
    if not card.get("model-index") and not any(
        name.startswith(f"{RESULTS}/") for name in sent
    ):
        commands = "`fcsd evaluate` without --limit, for the original and for this one"
        if has_results(text):
            notes.append(
                "the results on the card are in its text only: the metadata by which"
                " the Hub lists results takes complete ones (without --limit), on data"
                " sets that are on the Hub"
            )
        else:
            notes.append(
                "no results on the card:"
                f" {commands}{'' if has_card else ', then --results ORIGINAL MODEL'}"
            )
    # A card copied from another repository may still load the model of that one.
    loaded = set(re.findall(r'from_pretrained\("([\w.-]+/[\w.-]+)"', text))
    bases = card.get("base_model") or []
    bases = bases if isinstance(bases, list) else [bases]
    if other_models := sorted(loaded - {repo_id, *map(str, bases)}):
        notes.append(f"{CARD} loads {', '.join(other_models)}, not {repo_id}")
    for name in sent:
        if Path(name).suffix in (".md", ".json", ".yaml") and not name.startswith(
            "tokenizer"
        ):
            words = set(PLACE.findall((new / name).read_text("utf-8", "replace")))
            if local_paths := [word for word in sorted(words) if Path(word).exists()]:
                notes.append(
                    f"{name}: contains paths of this machine:"
                    f" {local_paths[0]}{', …' if local_paths[1:] else ''}"
                )
    for note in notes:
        print(f"fcsd push: note: {note}", file=sys.stderr)
