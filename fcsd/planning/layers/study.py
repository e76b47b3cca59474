"""The layer study: quality of the untrained model against which layers are rewired
(paper 3.1 and Fig. 3).

    OUT/layers.json     all points so far, written again after each of them
    OUT/layers.png      the figure, when the study is finished
    OUT/stage.json, manifest.json

The model is loaded once and rewired in place between the points. `first` and `last`
count layers from the start and from the end, `single` rewires one layer alone: its
sensitivity. Once it is known which layers cost far more alone than a typical one, the
selection of all the others is measured as well. With a text to calibrate on every point
is measured a second time, with calibrated weights (`fcsd.training.calibration`).

On several ranks each has the whole model, and its share of the rows and items.

Not covered: weights that are sharded over ranks; a proposal from the sensitivities,
that is `fcsd.planning.layers.proposal`.
"""

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fcsd.base.artifact import Stage, check_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.fingerprints import check_seal, write_sealed
from fcsd.base.stats import ratio, standard_error
from fcsd.base.text import progress_bar
from fcsd.data.bad_rows import BadRows
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import build_dataset, heldout_rows
from fcsd.data.dates import TEMPLATE_DATE
from fcsd.data.local import data_fingerprint
from fcsd.evaluation.config import EvaluationConfig
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.evaluation.stage import test_set_fingerprints
from fcsd.model.connectivity import Connectivity, convert_model, unconvert_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.connectivity.convert import farskip_layers
from fcsd.model.connectivity.load import load_config
from fcsd.model.connectivity.rewire import decoder_layers
from fcsd.model.connectivity.spec import CALIBRATED
from fcsd.model.families import family_of, moe_mask
from fcsd.model.families.structure import packing_of
from fcsd.model.load import ModelFolder, load_checkpoint, load_tokenizer, to_device
from fcsd.parallel.launch import Launch
from fcsd.parallel.ranks import Ranks
from fcsd.planning.layers.first import special_layers
from fcsd.planning.layers.settings import KL, Study, metrics, selections, suite_of
from fcsd.training.calibration.checkpoint import take_rows
from fcsd.training.calibration.model import calibrate_model
from fcsd.training.losses.kl import kl_by_row, read_original

SCHEMA_VERSION = 1


Value = dict[str, Any]
"""One metric of one selection: `value`, nats per token of the KL or the mean score of a
task, its `stderr`, None of a single row or item, and `num_items`: tokens of the KL,
items of a task."""


@dataclass(frozen=True)
class Measured:
    """Everything one selection was measured on.

    items: per metric, for the KL (sum, tokens) of each row, for a task the score of
        each item; what a paired comparison needs.
    """

    values: dict[str, Value]
    items: dict[str, list[Any]]


Measure = Callable[[Sequence[int], bool], Measured]
"""Rewires these layers of the model in place and measures it; True: with calibrated
weights, not with copied ones.
"""


class Calibrations:
    """Calibrate selections, one after another, in the one model that is rewired in
    place.

    The original is a second set of modules around the same parameters; a rewired layer
    gets copies of its own while it is calibrated. So beside the model only the rewired
    layers are held twice.

    model: while it is regular. rows: the text, as of `calibrate_model`, the same on all
    ranks.
    """

    def __init__(self, model: Any, rows: Sequence[Any], ranks: Ranks) -> None:
        self.model, self.rows, self.ranks = model, rows, ranks
        self.original = copy.deepcopy(
            model, {id(parameter): parameter for parameter in model.parameters()}
        )

    @contextlib.contextmanager
    def folded(self) -> Iterator[None]:
        """Have the rewired layers calibrated, as `calibrate_model`; without any,
        nothing is. All ranks call this.
        """
        layers, indices = (
            decoder_layers(self.model, family_of(self.model.config)),
            farskip_layers(self.model),
        )
        shared = [
            (module, name, parameter)
            for index in indices
            for module in layers[index].modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        try:
            for module, name, parameter in shared:
                own = nn.Parameter(
                    parameter.detach().clone(), requires_grad=parameter.requires_grad
                )
                module.register_parameter(name, own)
            if indices:
                calibrate_model(
                    self.model,
                    self.original,
                    self.rows,
                    ranks=self.ranks,
                    progress=False,
                )
            yield
        finally:
            for module, name, parameter in shared:
                module.register_parameter(name, parameter)
            vars(self.model.config).pop(CALIBRATED, None)


def study_layers(
    study: Study,
    model: ModelFolder,
    folder: Path,
    launch: Launch,
    draw: Callable[[dict[str, Any], Path], None],
) -> Stage:
    """Measure every point of `study`; a killed study continues where it was.

    model: the original checkpoint that `study.model` names.
    draw: makes the figure of the result (`fcsd.report.study_plots.plot_layers`).

    Raises:
        UserError: a launch that shards the weights; unknown task; no text; a count that
            the model does not have; a converted checkpoint; a folder whose study had
            other settings or another model.
    """
    if launch.engine.shards:
        raise UserError(
            "the layer study rewires whole copies of the model, and this launch shards"
            " the weights; launch copies (accelerate launch --multi_gpu,"
            " configs/cpu_2.yaml), or one process"
        )
    ranks = launch.ranks
    mask = layer_mask(model)
    points = selections(study, len(mask))
    stage = ranks.from_first(lambda: layers_stage(study, model, folder))
    if launch.begin(stage) == "finished":
        return stage
    path = folder / "layers.json"
    done = ranks.from_first(lambda: _points_so_far(path) if path.is_file() else [])
    with measuring(study, model, launch) as measure:
        weights = (
            ["values", "calibrated"] if study.calibrated is not None else ["values"]
        )
        known = {
            tuple(point["layers"]): {key: point[key] for key in weights}
            for point in done
        }
        result = _without_points(study, model, mask)
        # Zero rewired layers have no KL, but tasks have a score.
        wanted = [("none", []), *points] if study.tasks else points
        num_new = len({tuple(layers) for _, layers in wanted} - known.keys())
        with progress_bar(
            total=num_new, desc="layers", unit="point", smoothing=0.1, shown=ranks.first
        ) as bar:

            def add(side: str, layers: Sequence[int], place: int) -> None:
                if (key := tuple(layers)) not in known:
                    bar.set_postfix_str(
                        f"{side} {layers[0] if side == 'single' else len(layers)}"
                    )
                    known[key] = {
                        which: measure(layers, which == "calibrated").values
                        for which in weights
                    }
                    bar.update()
                point = {
                    "side": side,
                    "num_layers": len(layers),
                    "layers": list(layers),
                    **known[key],
                }
                result["points"].insert(place, point)
                if len(result["points"]) > len(done) and ranks.first:
                    write_sealed(path, result)

            for place, (side, layers) in enumerate(wanted):
                add(side, layers, place)
            if (rest := _all_but_special(study, result)) is not None:
                bar.total += 1
                add(*rest)
    if ranks.first:
        draw(result, folder / "layers.png")
    launch.finish(stage, {})
    return stage


def _without_points(
    study: Study, model: ModelFolder, mask: Sequence[bool]
) -> dict[str, Any]:
    """Return what `layers.json` says beside the points that are measured."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.model_dump(mode="json"),
        "model_type": model.load_config().model_type,
        "num_hidden_layers": len(mask),
        "moe_layers": [index for index, is_moe in enumerate(mask) if is_moe],
        "metrics": metrics(study),
        "points": [],
    }


def _all_but_special(
    study: Study, result: dict[str, Any]
) -> tuple[str, list[int], int] | None:
    """Return the side, the layers and the place of the point that is still missing: all
    layers but those that the measured ones say cost far more than a typical one. None
    where it was measured, or counts were asked for.
    """
    points = result["points"]
    special = special_layers(result, result["metrics"][0]["name"])
    if special is None or study.counts is not None:
        return None
    layers, num_first = special["without"]["layers"], special["num_first"]
    if any(point["layers"] == layers for point in points):
        return None
    if not num_first or "last" not in study.sides:
        return "without", layers, len(points)
    fewer = [
        k
        for k, p in enumerate(points)
        if p["side"] == "last" and p["num_layers"] < len(layers)
    ]
    before = next(k for k, point in enumerate(points) if point["side"] == "last")
    return "last", layers, max(fewer, default=before - 1) + 1


def layers_stage(study: Study, model: ModelFolder, folder: Path) -> Stage:
    """Return the folder of a study, with everything that its points depend on."""
    suite = suite_of(study)
    excluded = {"model", "suite", "data_root", "allow_weak_sandbox"}
    # a study that was begun before there was a choice goes on
    if study.calibrated is None:
        excluded |= {"calibrated", "calibration_tokens"}
    settings = study.model_dump(mode="json", exclude=excluded)
    settings |= {
        "model": {"dtype": study.model.dtype},
        "tasks": (
            [row.model_dump(mode="json") for row in suite.tasks]
            if suite is not None
            else []
        ),
    }
    data_root = Path(study.data_root) if study.data_root is not None else None
    inputs = {
        **model.fingerprints("original"),
        **test_set_fingerprints(suite, data_root, study.text),
    }
    if study.calibrated is not None:
        inputs["calibrated"] = data_fingerprint(
            study.calibrated.path, study.calibrated.revision
        )
    return Stage(folder, "layers", settings, inputs)


def layer_mask(model: ModelFolder) -> list[bool]:
    """Return one entry a decoder layer of an original checkpoint, True for an MoE
    layer; weights are not read.
    """
    checkpoint = read_checkpoint(model.folder)
    if checkpoint.connectivity is not None:
        raise UserError(
            f"{model.folder}: this checkpoint is already converted; the study needs the"
            " original that it was made from"
        )
    assert checkpoint.family is not None
    return list(moe_mask(load_config(checkpoint), checkpoint.family))


@contextlib.contextmanager
def measuring(study: Study, source: ModelFolder, launch: Launch) -> Iterator[Measure]:
    """Load the model and the data; gives the function that rewires the model in place
    and measures it.
    """
    ranks = launch.ranks
    suite = suite_of(study)
    tokenizer = load_tokenizer(
        source.folder, trust_remote_code=source.config.trust_remote_code
    )
    model = to_device(load_checkpoint(source), study.model.path, launch.device)
    packing = study.packing and packing_of(model.config) != "leaks"
    calibrations = None
    if study.calibrated is not None:
        calibrations = Calibrations(
            model, _calibration_rows(study, tokenizer, model, packing, ranks), ranks
        )
    rows = (
        _kl_rows(study, tokenizer, model, packing) if study.text is not None else None
    )
    if ranks.first:
        tell_examples(rows, "--text", always=False)
    with contextlib.ExitStack() as stack:
        evaluate = None
        if suite is not None:
            plan = EvaluationConfig(
                data_root=study.data_root,
                batch_size=study.batch_size,
                limit=study.limit,
                allow_weak_sandbox=study.allow_weak_sandbox,
            )
            evaluate = stack.enter_context(
                prepare_evaluation(tokenizer, suite, plan, ranks=ranks, progress=False)
            )
        known = (
            read_original(model, rows, ranks=ranks, in_parts=True)
            if rows is not None
            else None
        )

        def measure(layers: Sequence[int], calibrated: bool) -> Measured:
            if layers:
                wired = Connectivity(list(layers), study.attention, study.mlp)
                convert_model(model, wired, regular_ok=True)
            else:
                unconvert_model(model)
            if not calibrated:
                return as_it_is(layers)
            assert calibrations is not None
            with calibrations.folded():
                return as_it_is(layers)

        def as_it_is(layers: Sequence[int]) -> Measured:
            values: dict[str, Value] = {}
            items: dict[str, list[Any]] = {}
            if rows is not None and known is not None:
                sums, counts = kl_by_row(known, model, rows, ranks=ranks)
                items[KL] = list(zip(sums, counts, strict=True))
                values[KL] = _kl(items[KL])
                if not math.isfinite(value := values[KL]["value"]):
                    raise UserError(
                        f"{study.model.path}: the KL to the original with layers"
                        f" {list(layers)} rewired is {value}"
                    )
            if evaluate is not None:
                result, samples = evaluate(model, study.model.path)
                for task, row in result["tasks"].items():
                    values[task] = _value(row["value"], row["stderr"], row["num_items"])
                    items[task] = [sample["score"] for sample in samples[task]]
            return Measured(values, items)

        yield measure


def _kl_rows(study: Study, tokenizer: Any, model: Any, packing: bool) -> Any:
    """Return the rows of the text that the KL is measured on, the units of its standard
    error.

    Where all examples fit into one row, each gets a row of its own, no longer than the
    longest.
    """
    if not hasattr(model, "lm_head"):
        raise UserError(
            f"{study.model.path}: the KL needs a text model with its lm_head,"
            f" {type(model).__name__} has none of its own; study the text model of this"
            " family"
        )
    assert study.text is not None
    build = partial(
        heldout_rows,
        study.text,
        tokenizer,
        num_examples=study.text_examples,
        loss_on=study.loss_on,
        vocab_size=model.config.get_text_config().vocab_size,
    )
    rows = build(max_length=study.max_length, packing=packing)
    if len(rows) > 1 or rows.num_examples() == 1:
        return rows
    return build(
        max_length=max(len(ids) for ids, _ in rows.examples_of(0)), packing=False
    )


def _calibration_rows(
    study: Study, tokenizer: Any, model: Any, packing: bool, ranks: Ranks
) -> list[Any]:
    """Return the rows of the text that selections are calibrated on."""
    assert study.calibrated is not None
    rows = build_dataset(
        [study.calibrated], tokenizer, max_length=study.max_length, packing=packing, shuffle=False,
        loss_on=study.loss_on, bad_rows=BadRows(setting=None), date=TEMPLATE_DATE,
        vocab_size=model.config.get_text_config().vocab_size,
        # rows of one example are not full
        num_rows=4 * study.calibration_tokens // study.max_length + 1,
    )  # fmt: skip
    if ranks.first:
        tell_examples(rows, "--calibrated", always=False)
    return take_rows(rows, study.calibration_tokens)


def _value(value: float, stderr: float | None, num_items: int) -> Value:
    return {"value": value, "stderr": stderr, "num_items": num_items}


def _kl(items: Sequence[tuple[float, int]]) -> Value:
    """Return nats per token of (sum, tokens) per row."""
    score = ratio([total for total, _ in items], [count for _, count in items])
    value = math.nan if score["kl"] is None else score["kl"]
    return _value(value, score["stderr"], int(score["num_tokens"] or 0))


def difference(one: Measured, other: Measured, metric: str) -> Value:
    """Return one - other of a metric with its paired standard error: both were measured
    on the same rows or items.
    """
    pairs = list(zip(one.items[metric], other.items[metric], strict=True))
    if metric == KL:
        return _kl([(a[0] - b[0], a[1]) for a, b in pairs])
    deltas = [a - b for a, b in pairs]
    return _value(math.fsum(deltas) / len(deltas), standard_error(deltas), len(deltas))


def read_study(folder: Path) -> dict[str, Any]:
    """Return what `layers.json` holds of a finished study; raises UserError for another
    folder, or another version.
    """
    if not (folder / "layers.json").is_file():
        raise UserError(
            f"{folder}: no layers.json; this is not a folder that `fcsd layers` wrote"
        )
    check_outputs(folder, "layers.json")
    study = _read(folder / "layers.json")
    if not (folder / "manifest.json").is_file():
        raise UserError(
            f"{folder}: the study is not finished; run the same `fcsd layers` command"
            " again, it goes on"
        )
    study.pop("sha256", None)
    return study


def _points_so_far(path: Path) -> list[dict[str, Any]]:
    """Return the points that a killed study has measured; none where they are not what it wrote."""
    study = _read(path)
    try:
        check_seal(path, study, "its points are measured again")
    except UserError as error:
        print(f"layers: {error}", file=sys.stderr)
        return []
    return list(study["points"])


def _read(path: Path) -> dict[str, Any]:
    study = read_json(path)
    version = study.get("schema_version") if isinstance(study, Mapping) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version is {version}, this fcsd reads {SCHEMA_VERSION};"
            " remove the folder and run `fcsd layers` again"
        )
    return dict(study)
