"""`fcsd mtp`: train the MTP layers of a converted checkpoint on its own hidden states, and
measure how often its drafts are accepted, before and after.

    OUT/            the checkpoint; of its tensors only those of `MtpLayers.tensors` differ
    OUT/mtp.json    settings, training and acceptance
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fcsd.base.errors import UserError
from fcsd.base.writing import new_folder, write_json
from fcsd.data.batches import in_batches
from fcsd.data.config import RowsConfig, SourceConfig
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import build_dataset
from fcsd.data.rendering import TEMPLATE_DATE
from fcsd.data.write_rows import BadRows
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.connectivity.export import link_or_copy
from fcsd.model.load import ModelFolder, find_model, load_tokenizer
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_evaluation
from fcsd.training.calibration.checkpoint import split_rows
from fcsd.training.config import MtpConfig
from fcsd.training.mtp import Acceptance, MtpLayers, stored_layers, train_mtp

RESULT = "mtp.json"
_RECORDS = {"manifest.json", "stage.json", RESULT}  # of how MODEL came to be


def align_mtp(
    model: ModelConfig,
    out: Path,
    text: SourceConfig,
    rows_of: RowsConfig,
    settings: MtpConfig,
    launch: Launch,
    *,
    original: ModelConfig | None = None,
    device_map: str | None = None,
) -> dict[str, Any]:
    """Write `model` with trained MTP layers to `out`, and return what mtp.json holds.

    original: its drafts are measured on the same text, as the aim.

    Raises:
        UserError: several processes; `MtpLayers` refuses the model; too little text;
            the drafts did not become better, in which case nothing is written.
    """
    if launch.ranks.size > 1:
        raise UserError(
            "fcsd mtp runs as one process; --device-map auto spreads the model over"
            " several GPUs"
        )
    folder = find_model(model)
    tokenizer = load_tokenizer(folder.folder, trust_remote_code=model.trust_remote_code)
    config: Any = folder.load_config().get_text_config()
    # A mistake shows before the text is read.
    stored_layers(config, folder.folder, read_checkpoint(folder.folder).weight_files)
    with new_folder(out, replaces=False) as new:
        rows = build_dataset(
            [text],
            tokenizer,
            max_length=rows_of.max_length,
            packing=False,
            shuffle=False,
            loss_on=rows_of.loss_on,
            bad_rows=BadRows(setting=None),
            date=TEMPLATE_DATE,
            vocab_size=config.vocab_size,
        )
        tell_examples(rows, "--text")
        trained, left_out = split_rows(rows, settings.tokens, config.hidden_size)
        if not left_out:
            raise UserError(
                "--text: too little to leave an eighth out, on which drafts are measured"
            )
        held_out = in_batches(left_out, settings.batch_size)
        result: dict[str, Any] = {
            "model": model.model_dump(mode="json"),
            "text": text.model_dump(mode="json"),
            "settings": rows_of.model_dump(
                mode="json", include={"max_length", "loss_on"}
            )
            | settings.model_dump(mode="json"),
            "acceptance": {},
        }
        acceptance = result["acceptance"]

        def measured(name: str, layers: MtpLayers) -> Acceptance:
            found = layers.acceptance(held_out)
            acceptance[name] = asdict(found)
            print(f"{name}: {acceptance_text(found)}", file=sys.stderr)
            return found

        if original is not None:
            measured("original", _layers(find_model(original), launch, device_map))
        layers = _layers(folder, launch, device_map)
        before = measured("before", layers)
        result["training"] = train_mtp(
            layers,
            trained,
            batch_rows=settings.batch_size,
            learning_rate=settings.learning_rate,
        )
        after = measured("after", layers)
        if sum(after.sampled) <= sum(before.sampled):
            raise UserError(
                f"the drafts did not become better ({acceptance_text(before)} before,"
                f" {acceptance_text(after)} after), so nothing was written; give more"
                " text, or a lower --learning-rate"
            )
        _write(folder.folder, new, layers.tensors())
        write_json(new / RESULT, result)
    return result


def acceptance_text(found: Acceptance) -> str:
    """Say what share of drafts is accepted, for each MTP layer."""
    greedy, sampled = (
        ", ".join(f"{100 * rate:.1f} %" for rate in rates)
        for rates in (found.greedy, found.sampled)
    )
    return (
        f"{sampled} of drafts accepted at temperature 1, {greedy} greedily,"
        f" {found.length:.2f} tokens a step (greedy; {found.tokens:,} tokens)"
    )


def _layers(folder: ModelFolder, launch: Launch, device_map: str | None) -> MtpLayers:
    model = load_for_evaluation(folder, launch, device_map=device_map)
    files = read_checkpoint(folder.folder).weight_files
    return MtpLayers(model, folder.folder, files)


def _write(source: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Copy a checkpoint with other values of some tensors, in the dtypes of its files."""
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name in _RECORDS:
            continue
        target = folder / file.name
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target)
        elif changed := _names(file, tensors):
            _rewrite(file, target, {name: tensors[name] for name in changed})
        else:
            link_or_copy(file, target)


def _names(file: Path, tensors: dict[str, torch.Tensor]) -> Sequence[str]:
    with safe_open(file, framework="pt") as opened:
        return [name for name in opened.keys() if name in tensors]  # noqa: SIM118


def _rewrite(file: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(file, framework="pt") as opened:
        values = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    for name, tensor in tensors.items():
        values[name] = tensor.to(values[name].dtype).contiguous()
    save_file(values, target, metadata)
