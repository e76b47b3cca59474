"""Run the layer study: the quality of the untrained model for each selection of rewired
layers (paper 3.1 and Fig. 3).

    OUT/layers.json     all points so far, written again after each of them; with the side
                        `attention`, also each layer whose attention alone is ahead
    OUT/layers.png      the figure, when the study is finished
    OUT/stage.json, manifest.json

The model is loaded once and rewired in place between the points. `first` and `last`
count layers from the start and from the end, `single` rewires one layer alone: its
sensitivity. When the single points show layers that cost far more than a typical one,
the selection of all other layers is measured as well. With a calibration text, every
point is measured a second time with calibrated weights (`fcsd.training.calibration`).

Each of several ranks has the whole model and its share of the rows and items.

Not covered: weights that are sharded over ranks; a proposal from the sensitivities
(`fcsd.planning.layers.proposal`).
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

from torch import Tensor, nn

from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.files import check_seal, write_sealed
from fcsd.base.stats import ratio, standard_error
from fcsd.base.text import progress_bar
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import build_dataset, heldout_fingerprint, heldout_rows
from fcsd.data.local import data_fingerprint
from fcsd.data.rendering import TEMPLATE_DATE
from fcsd.data.write_rows import BadRows
from fcsd.evaluation.config import EvaluationConfig
from fcsd.evaluation.datasets import test_set_fingerprints
from fcsd.evaluation.own_text.measure import Original
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.model.connectivity import convert_model, unconvert_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.connectivity.convert import farskip_layers
from fcsd.model.connectivity.load import load_config
from fcsd.model.connectivity.spec import CALIBRATED, Connectivity
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import family_of, moe_mask
from fcsd.model.load import ModelFolder, load_checkpoint, to_device
from fcsd.parallel.launch import Launch, Ranks, begin_stage, finish_stage
from fcsd.planning.layers.first import special_layers
from fcsd.planning.layers.pairs import (
    HiddenStates,
    pair_rows,
    second_moments,
)
from fcsd.planning.layers.points import deciding_metric
from fcsd.planning.layers.settings import (
    KL,
    SCHEMA_VERSION,
    Study,
    attention_ahead,
    attention_layers,
    has_pairs,
    metrics,
    read_layers_file,
    selections,
    suite_of,
)
from fcsd.training.calibration.checkpoint import take_rows
from fcsd.training.calibration.model import calibrate_model
from fcsd.training.losses.head import packing_of
from fcsd.training.losses.heldout_kl import kl_by_row, read_original

Value = dict[str, Any]
"""One metric of one selection: `value`, the KL in nats per token or the mean score of a
task; its `stderr`, None for a single row or item; and `num_items`, the tokens of the KL
or the items of a task.
"""


@dataclass(frozen=True)
class Measured:
    """The measurements of one selection.

    items: for each metric, what a paired comparison needs: (sum, tokens) of each row
    for the KL, the score of each item for a task.
    """

    values: dict[str, Value]
    items: dict[str, list[Any]]


Measure = Callable[[Connectivity | None, bool, list[Tensor] | None], Measured]
"""Rewires the model in place (None: the original) and measures it, with calibrated
weights or copied ones. The last argument is `hidden` of `kl_by_row`.
"""

Moments = Callable[[Sequence[Path]], Tensor]
"""Computes `second_moments` of the models whose hidden states are in these files."""


@contextlib.contextmanager
def _calibrated(
    model: Any, original: Any, rows: Sequence[Any], ranks: Ranks
) -> Iterator[None]:
    """Calibrate the rewired layers of the single model that is rewired in place, as
    `calibrate_model` does, until the block is left; do nothing without rewired layers.
    All ranks call this.

    A rewired layer gets copies of its own parameters while it is calibrated, so that
    only the rewired layers are held twice.

    original: the regular model, a second set of modules around the same parameters.
    rows: the text, as `calibrate_model` takes it, the same on all ranks.
    """
    layers = decoder_layers(model, family_of(model.config))
    indices = farskip_layers(model)
    shared = [
        (module, name, parameter)
        for index in indices
        for module in layers[index].modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    # Calibration writes into the layers' weights, which the original shares.
    try:
        for module, name, parameter in shared:
            copied_parameter = nn.Parameter(
                parameter.detach().clone(), requires_grad=parameter.requires_grad
            )
            module.register_parameter(name, copied_parameter)
        if indices:
            calibrate_model(model, original, rows, ranks=ranks, progress=False)
        yield
    finally:
        for module, name, parameter in shared:
            module.register_parameter(name, parameter)
        # The next selection starts from copied weights again, so its config must not
        # say that it is calibrated.
        vars(model.config).pop(CALIBRATED, None)


def study_layers(
    study: Study,
    model: ModelFolder,
    folder: Path,
    launch: Launch,
    draw: Callable[[dict[str, Any], Path], None],
) -> Stage:
    """Measure every point of `study`; a killed study continues where it stopped.

    model: the original checkpoint, as named by `study.model`. draw: draws the figure of
    the result (`fcsd.report.study_plots.plot_layers`).

    Raises:
        UserError: a launch that shards the weights; unknown task; no text; a count that
            the model does not have; a converted checkpoint; a folder whose study had
            other settings or another model.
    """
    if launch.engine.shards:
        raise UserError(
            "the layer study rewires whole copies of the model, but this launch shards"
            " the weights; launch copies (accelerate launch --multi_gpu,"
            " configs/cpu_2.yaml), or one process"
        )
    ranks = launch.ranks
    mask = layer_mask(model)
    points = _points(study, model, mask, ranks)
    stage = ranks.from_first(lambda: layers_stage(study, model, folder))
    if begin_stage(stage, launch) == "finished":
        return stage
    path = folder / "layers.json"
    # Only the first rank reads the points of a killed study, because all ranks must
    # skip the same ones.
    begun = ranks.from_first(
        lambda: _begun_study(path, stage.identity) if path.is_file() else {}
    )
    result = _without_points(study, model, mask)
    if "attention" in study.sides:
        result["attention"] = begun.get("attention", [])
    num_kept = (len(mask) + 1) * (1 if study.calibrated is None else 2)
    states = HiddenStates(folder / "hidden", ranks, num_kept)
    singles = [layers for side, layers in points if side == "single"]
    kept = states if has_pairs(study) and singles else None
    if "pairs" in begun:
        result["pairs"], kept = begun["pairs"], None

    def write() -> None:
        if ranks.first:
            write_sealed(path, result, stage.identity)

    with measuring(study, model, launch) as (measure, moments):
        points_done = begun.get("points", [])
        progress = _Progress(study, measure, kept, result, points_done, write)
        ahead = attention_layers(study, mask)[len(result.get("attention", [])) :]
        # Zero rewired layers have no KL, but tasks have a score.
        targets = [("none", []), *points] if study.tasks else points
        # The same layers may be a point of several sides, and are measured once.
        keys = {_selection_key(*point) for point in targets}
        num_new = len(keys - progress.measured.keys()) + len(ahead)
        with progress_bar(
            total=num_new, desc="layers", unit="point", smoothing=0.1, shown=ranks.first
        ) as bar:
            progress.bar = bar
            for index, (side_name, layers) in enumerate(targets):
                progress.add(side_name, layers, index)
            if (remaining := _all_but_special(study, result)) is not None:
                bar.total += 1
                progress.add(*remaining)
            for layer in ahead:
                progress.add_attention(layer)
        if kept is not None:
            with_base = study.mlp == "selected"
            measured = [[], *singles] if with_base else singles
            result["pairs"] = {}
            for weights in progress.weights:
                files = [kept.path(layers, weights) for layers in measured]
                rows = pair_rows(moments(files), with_base=with_base)
                result["pairs"][weights] = rows
            write()
    states.remove()
    if ranks.first:
        draw(result, folder / "layers.png")
    finish_stage(stage, launch, {})
    return stage


def _points(
    study: Study, model: ModelFolder, mask: Sequence[bool], ranks: Ranks
) -> list[tuple[str, list[int]]]:
    """Return the selections to measure, and say so where single layers are left out
    because they compute what regular ones do; UserError where nothing remains.
    """
    family = model.checkpoint.family
    assert family is not None
    study.connectivity(range(len(mask))).new_field(mask, family.layout)

    def differs(layers: list[int]) -> bool:
        with contextlib.suppress(UserError):
            spec = study.connectivity(layers)
            return bool(spec.new_field(mask, family.layout)["layers"])
        return False

    points = selections(study, len(mask))
    kept = [point for point in points if point[0] != "single" or differs(point[1])]
    if len(kept) < len(points):
        reason = (
            f"side 'single' measures nothing in {family.model_type}: a layer with regular"
            " neighbours computes what a regular layer does; --mlp selected measures"
            " MoE blocks one by one"
        )
        if not kept:
            raise UserError(f"{reason}; or use the sides first and last")
        if ranks.first:
            print(f"layers: {reason}", file=sys.stderr)
    return kept


class _Progress:
    """The points of a study: those of a killed one, and those measured since.

    kept: of what pairs are made of, the hidden states are kept there, too. result: the
    contents of `layers.json`, which grow. done: points that were measured before. write:
    writes the result.
    """

    def __init__(
        self,
        study: Study,
        measure: Measure,
        kept: HiddenStates | None,
        result: dict[str, Any],
        done: Sequence[Mapping[str, Any]],
        write: Callable[[], None],
    ) -> None:
        self.study, self.measure, self.kept = study, measure, kept
        self.result, self.write = result, write
        self.num_done = len(done)
        self.bar: Any = None
        self.weights = ["values"]
        if study.calibrated is not None:
            self.weights.append("calibrated")
        keys = [_selection_key(point["side"], point["layers"]) for point in done]
        # Points whose hidden states are lost are measured again.
        self.measured = {
            key: {kind: point[kind] for kind in self.weights}
            for key, point in zip(keys, done, strict=True)
            if kept is None
            or key is None
            or not self._is_kept(key)
            or kept.has(key, self.weights)
        }

    def _is_kept(self, key: tuple[int, ...] | None) -> bool:
        """Tell whether the hidden states of a selection are kept: those of no or of one
        MLP side.
        """
        return self.kept is not None and key is not None and len(key) <= 1

    def _values(
        self, spec: Connectivity | None, shown: str, key: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """Measure a connectivity with each kind of weights. key: of the selection, None
        where it is none.
        """
        self.bar.set_postfix_str(shown)
        values = {}
        for weights in self.weights:
            hidden: list[Tensor] | None = [] if self._is_kept(key) else None
            calibrated = weights == "calibrated"
            values[weights] = self.measure(spec, calibrated, hidden).values
            if self.kept is not None and key is not None and hidden is not None:
                self.kept.keep(key, weights, hidden)
        self.bar.update()
        return values

    def add(self, side: str, layers: Sequence[int], index: int) -> None:
        """Insert a point, which is measured unless its layers were."""
        key = _selection_key(side, layers)
        if key not in self.measured:
            self.measured[key] = self._values(
                None if key is None else self.study.connectivity(key),
                f"{side} {layers[0] if side == 'single' else len(layers)}",
                key,
            )
        # Ranks keep equal results, which the search for special layers reads; only the
        # first writes.
        point = {
            "side": side,
            "num_layers": len(layers),
            "layers": list(layers),
            **self.measured[key],
        }
        self.result["points"].insert(index, point)
        if len(self.result["points"]) > self.num_done:
            self.write()

    def add_attention(self, layer: int) -> None:
        """Measure attention ahead in one layer alone."""
        values = self._values(attention_ahead(layer), f"attention {layer}")
        self.result["attention"].append({"layer": layer, **values})
        self.write()


def _selection_key(side: str, layers: Sequence[int]) -> tuple[int, ...] | None:
    """Return the key that points with the same measurements share; None: the
    original.
    """
    return None if side == "none" else tuple(layers)


def _without_points(
    study: Study, model: ModelFolder, mask: Sequence[bool]
) -> dict[str, Any]:
    """Return the contents of `layers.json` before any point is measured."""
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
    """Return the side, the layers and the index of the point that remains to be
    measured: all layers but those that cost far more than a typical one. None where it
    was measured already.
    """
    points = result["points"]
    special = special_layers(result, deciding_metric(result)["name"])
    if special is None:
        return None
    layers, num_first = special["without"]["layers"], special["num_first"]
    if any(point["layers"] == layers for point in points):
        return None
    # Only layers left out from the start make a selection of the last N.
    if not num_first or "last" not in study.sides:
        return "without", layers, len(points)
    # The points of a side stay sorted by their number of layers; the last of these has
    # all of them.
    index = next(
        k
        for k, point in enumerate(points)
        if point["side"] == "last" and point["num_layers"] > len(layers)
    )
    return "last", layers, index


def layers_stage(study: Study, model: ModelFolder, folder: Path) -> Stage:
    """Return the stage of a study, with all settings and inputs that its points depend
    on.
    """
    suite = suite_of(study)
    excluded = {"model", "suite", "data_root", "allow_weak_sandbox"}
    # Absent settings keep the fingerprint of studies begun before calibration existed,
    # so that these continue.
    if study.calibrated is None:
        excluded |= {"calibrated", "calibration_tokens"}
    settings = study.model_dump(mode="json", exclude=excluded)
    tasks = suite.tasks if suite is not None else []
    settings |= {
        "model": {"dtype": study.model.dtype},
        "tasks": [row.model_dump(mode="json") for row in tasks],
    }
    data_root = Path(study.data_root) if study.data_root is not None else None
    inputs = {
        **model.fingerprints("original"),
        **test_set_fingerprints(suite, data_root),
        **heldout_fingerprint(study.text),
    }
    if study.calibrated is not None:
        inputs["calibrated"] = data_fingerprint(
            study.calibrated.path, study.calibrated.revision
        )
        _check_texts_differ(study, inputs)
    return Stage(folder, "layers", settings, inputs)


def _check_texts_differ(study: Study, inputs: Mapping[str, str]) -> None:
    """Refuse to measure on the text that the maps are fitted on: its KL is too low."""
    text, calibrated = study.text, study.calibrated
    if text is None or calibrated is None:
        return
    if inputs["data.heldout"] == inputs["calibrated"] and (text.name, text.split) == (
        calibrated.name,
        calibrated.split,
    ):
        raise UserError(
            f"--calibrated {calibrated.path}: is the text that is measured (--text);"
            " give another text, or another split of it"
        )


def layer_mask(model: ModelFolder) -> list[bool]:
    """Return one entry for each decoder layer of an original checkpoint, True for an
    MoE layer, without reading weights.
    """
    checkpoint = read_checkpoint(model.folder)
    if checkpoint.connectivity is not None:
        raise UserError(
            f"{model.folder}: this checkpoint is already converted; the study needs its"
            " original"
        )
    assert checkpoint.family is not None
    return list(moe_mask(load_config(checkpoint), checkpoint.family))


@contextlib.contextmanager
def measuring(
    study: Study, source: ModelFolder, launch: Launch
) -> Iterator[tuple[Measure, Moments]]:
    """Load the model and the data; yield the function that rewires the model in place
    and measures it, and the one that computes moments on the text.
    """
    ranks = launch.ranks
    suite = suite_of(study)
    tokenizer = source.load_tokenizer()
    model = to_device(load_checkpoint(source), study.model.path, launch.device)
    # In a family that leaks between packed examples, the KL would depend on the
    # packing.
    packing = study.packing and packing_of(model.config) != "leaks"
    # Before the first rewiring: a second set of modules around the same parameters, which
    # the memo makes deepcopy keep.
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    regular = copy.deepcopy(model, parameters)
    calibration_rows = []
    if study.calibrated is not None:
        calibration_rows = _calibration_rows(study, tokenizer, model, packing, ranks)
    rows: Any = None
    if study.text is not None:
        rows = _kl_rows(study, tokenizer, model, packing)
    if ranks.first:
        tell_examples(rows, "--text", always=False)
    with contextlib.ExitStack() as stack:
        # The suite is prepared once; each selection then only runs the model.
        evaluate = None
        if suite is not None:
            original = Original(lambda: contextlib.nullcontext(regular))
            plan = EvaluationConfig(
                data_root=study.data_root,
                batch_size=study.batch_size,
                limit=study.limit,
                allow_weak_sandbox=study.allow_weak_sandbox,
            )
            evaluate = stack.enter_context(
                prepare_evaluation(
                    tokenizer,
                    suite,
                    plan,
                    ranks=ranks,
                    progress=False,
                    original=original,
                )
            )
        original_outputs = None
        if rows is not None:
            original_outputs = read_original(model, rows, ranks=ranks, in_parts=True)

        def measure(
            spec: Connectivity | None, calibrated: bool, hidden: list[Tensor] | None
        ) -> Measured:
            if spec is None:
                unconvert_model(model)
            else:
                convert_model(model, spec, regular_ok=True)
            # Rewiring alone leaves the original weights, copied, in the new
            # connectivity.
            if not calibrated:
                return measure_current(spec, hidden)
            with _calibrated(model, regular, calibration_rows, ranks):
                return measure_current(spec, hidden)

        def measure_current(
            spec: Connectivity | None, hidden: list[Tensor] | None
        ) -> Measured:
            values: dict[str, Value] = {}
            items: dict[str, list[Any]] = {}
            if original_outputs is not None:
                sums, counts = kl_by_row(
                    original_outputs, model, rows, ranks=ranks, hidden=hidden
                )
                items[KL] = list(zip(sums, counts, strict=True))
                values[KL] = _kl(items[KL])
                if not math.isfinite(value := values[KL]["value"]):
                    raise UserError(
                        f"{study.model.path}: the KL to the original of {spec} is"
                        f" {value}"
                    )
            if evaluate is not None:
                result, samples = evaluate(model, study.model.path)
                for task, row in result["tasks"].items():
                    values[task] = _value(row["value"], row["stderr"], row["num_items"])
                    items[task] = [sample["score"] for sample in samples[task]]
            return Measured(values, items)

        def moments(files: Sequence[Path]) -> Tensor:
            assert original_outputs is not None
            return second_moments(
                original_outputs, files, device=launch.device, ranks=ranks
            )

        yield measure, moments


def _kl_rows(study: Study, tokenizer: Any, model: Any, packing: bool) -> Any:
    """Return the rows of the text for the KL; a row is the unit of its standard error.

    If all examples fit into one row, each gets its own row, no longer than the longest
    example.
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
    # One packed row would have no standard error.
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
    """Return the KL in nats per token from the (sum, tokens) of each row."""
    counts = [count for _, count in items]
    kl = ratio([total for total, _ in items], counts)
    return _value(math.nan if kl.value is None else kl.value, kl.stderr, sum(counts))


def difference(first: Measured, second: Measured, metric: str) -> Value:
    """Return first - second of a metric with its paired standard error; both were
    measured on the same rows or items.
    """
    pairs = list(zip(first.items[metric], second.items[metric], strict=True))
    if metric == KL:
        return _kl([(a[0] - b[0], a[1]) for a, b in pairs])
    # Paired: the difficulty of an item is in both scores and cancels.
    deltas = [a - b for a, b in pairs]
    return _value(math.fsum(deltas) / len(deltas), standard_error(deltas), len(deltas))


def _begun_study(path: Path, identity: str) -> dict[str, Any]:
    """Return what a killed study has measured; nothing if the file was changed since,
    or is that of another study.
    """
    study = read_layers_file(path)
    try:
        check_seal(path, study, "fcsd measures its points again", identity)
    except UserError as error:
        print(f"layers: {error}", file=sys.stderr)
        return {}
    return study
