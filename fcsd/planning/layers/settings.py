"""Settings of a layer study (its measurements and its selections of layers), and the
file that it leaves.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from fcsd.base.artifact import check_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.strict import Rule, like
from fcsd.data.config import DataConfig, SourceConfig, source_option
from fcsd.evaluation.config import (
    KINDS,
    EvaluationConfig,
    LayerStudyConfig,
    Side,
    SuiteConfig,
)
from fcsd.evaluation.study import ModelStudy
from fcsd.evaluation.suites import named_tasks
from fcsd.model.connectivity.selection import resolve_layers
from fcsd.model.connectivity.spec import Connectivity, ConnectivityConfig
from fcsd.recipe.recipe import Recipe
from fcsd.training.config import CalibrationConfig

SCHEMA_VERSION = 1  # of layers.json
KL = "kl"  # the metric that is not a task; lower is better


def _twice(study: "Study", name: str) -> list[str]:
    """Return the values of a list that are given twice."""
    values = getattr(study, name) or []
    return sorted({str(value) for value in values if values.count(value) > 1})


class Study(ModelStudy):
    """The measurements and the selections of a study: the KL to the original on the
    text, and the scores of the tasks.
    """

    attention: Literal["partial", "full"] = like(ConnectivityConfig, "attention")
    mlp: Literal["outdated", "full", "selected"] = Field(
        "outdated",
        description=(
            "input of MoE and MLP blocks in the rewired layers; selected: attention is"
            " partial in all layers, and the study measures in which of them the MLP side"
            " can be outdated"
        ),
    )
    sides: list[Side] = Field(["first", "last", "single"], min_length=1)
    # Of an option that no longer exists; finished studies have it in their fingerprint.
    counts: list[int] | None = None
    every: int = like(LayerStudyConfig, "every")
    packing: bool = DataConfig.model_fields["packing"].default  # has no option
    loss_on: Literal["response", "all"] = like(DataConfig, "loss_on")
    # Also measure every selection with weights calibrated on this text.
    calibrated: SourceConfig | None = None
    calibration_tokens: int = CalibrationConfig.model_fields["tokens"].default
    batch_size: int = Field(EvaluationConfig.model_fields["batch_size"].default, gt=0)
    allow_weak_sandbox: bool = like(EvaluationConfig, "allow_weak_sandbox")

    needed: ClassVar[dict[str, str]] = ModelStudy.needed | {
        "batch_size": "task",
        "allow_weak_sandbox": "task",
    }

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda study: study.text is None and not study.tasks,
            "there is nothing to measure: give a task of the suite (--task), or a text"
            " for the KL to the original (--text)",
        ),
        (
            lambda study: KL in study.tasks,
            f"a task cannot be called {KL!r} here; that is the KL to the original on"
            " the text",
        ),
        (
            lambda study: study.mlp == "selected" and study.attention != "partial",
            "mlp: selected: attention must be partial; with attention: full a layer"
            " whose MLP side is regular is a regular layer",
        ),
        (
            lambda study: study.attention == study.mlp == "full",
            "attention: full with mlp: full is the regular model; nothing would be"
            " rewired",
        ),
        # In a single layer only the MLP input can be outdated; attention input differs
        # from the second layer of a run on.
        (
            lambda study: study.mlp == "full" and "single" in study.sides,
            "side 'single' with mlp: full would measure nothing: a layer with regular"
            " neighbours computes what a regular layer does; use the sides first, last"
            " and attention",
        ),
        # It is measured for `plan-layers`, beside what else a study shows.
        (
            lambda study: "attention" in study.sides and study.attention == "full",
            "side 'attention' with attention: full would measure nothing: attention is"
            " ahead in no layer",
        ),
        (
            lambda study: study.sides == ["attention"],
            "side 'attention' is measured beside others; add first, last or single",
        ),
        # A selection or task that is given twice would be measured twice, or its names
        # would collide.
        *(
            (
                lambda study, name=name: _twice(study, name),
                lambda study, name=name: (
                    f"{name}: {', '.join(_twice(study, name))} is given twice"
                ),
            )
            for name in ("sides", "tasks")
        ),
        (
            lambda study: not {"first", "last"} & {*study.sides} and study.every != 1,
            "every: applies to the sides first and last only; leave it out, or add a"
            " side",
        ),
    )

    def connectivity(self, layers: Sequence[int]) -> Connectivity:
        """Return the connectivity that is measured for a selection of layers."""
        return measured_connectivity(self.attention, self.mlp, layers)


def measured_connectivity(
    attention: Any, mlp: Any, layers: Sequence[int]
) -> Connectivity:
    """Return the connectivity that a study of these sides measures for a selection:
    where `mlp` is `selected`, attention is rewired in all layers.
    """
    if mlp == "selected":
        return Connectivity("all", attention, list(layers) or "full")
    return Connectivity(list(layers) or "none", attention, mlp)


def study_from_options(options: Mapping[str, Any]) -> Study:
    """Return the study that the options of `fcsd layers` describe, or raise UserError."""
    text = options["sides"]
    sides = sides_of(options["mlp"]) if text is None else text.split(",")
    calibrated = source_option(options["calibrated"], "--calibrated")
    return Study.from_options(options, sides=sides, calibrated=calibrated)


def study_from_recipe(recipe: Recipe) -> Study:
    """Return the layer study of a recipe, which has one; UserError for sides that
    measure nothing.
    """
    data, config, connectivity = recipe.data, recipe.evaluation, recipe.connectivity
    layer_study = config.layer_study
    # The recipe has checked it.
    assert data.heldout is not None and layer_study is not None
    scored = {}
    if layer_study.tasks:
        # The study scores as the evaluation does.
        names = ("suite", "data_root", "limit", "batch_size", "allow_weak_sandbox")
        scored = {name: getattr(config, name) for name in names}
        if scored["batch_size"] == "auto":  # not supported by a study
            del scored["batch_size"]
        scored["tasks"] = layer_study.tasks
    mlp = connectivity.mlp
    return Study.from_plain(
        {
            "model": recipe.model.model_copy(update={"path": recipe.model_path}),
            "attention": connectivity.attention,
            "mlp": mlp if mlp in ("outdated", "full") else "selected",
            "sides": layer_study.sides or sides_of(mlp),
            "every": layer_study.every,
            **scored,
            "text": SourceConfig(**data.heldout.model_dump()),
            "text_examples": data.heldout_examples,
            "max_length": data.max_length,
            "packing": data.packing,
            "loss_on": data.loss_on,
        },
        "evaluation.layer_study",
    )


def sides_of(mlp: Any) -> list[Side]:
    """Return the sides that a study measures unless told: all that differ."""
    # Single layers with `mlp: full` are refused.
    return ["first", "last"] if mlp == "full" else ["first", "last", "single"]


def suite_of(study: Study) -> SuiteConfig | None:
    """Return the chosen tasks of the study's suite, in their given order; None without
    tasks.
    """
    return named_tasks(study.suite, study.tasks) if study.tasks else None


def metrics(study: Study) -> list[dict[str, str]]:
    """Return a row for each metric: its name, its unit, and whether `higher` or `lower`
    is better.
    """

    def divergence(name: str) -> dict[str, str]:
        return {"name": name, "unit": "nats per token", "better": "lower"}

    rows = [divergence(KL)] if study.text is not None else []
    suite = suite_of(study)
    for row in suite.tasks if suite is not None else []:
        if KINDS[row.kind].distance:
            rows.append(divergence(row.task))
        else:
            unit = row.metric.split(",")[0]
            rows.append({"name": row.task, "unit": unit, "better": "higher"})
    return rows


def selections(study: Study, num_layers: int) -> list[tuple[str, list[int]]]:
    """Return the study's points as (side, selected layers), in the order of measurement.

    Single layers would show how many first layers cost the most. Without them, the
    selection of all but the first layer is always among the last ones, whatever `every`
    is.
    """
    counts = {*range(study.every, num_layers + 1, study.every), num_layers}
    points: list[tuple[str, list[int]]] = []
    if study.mlp == "selected":
        points.append(("attention", []))
    for side_name in study.sides:
        if side_name == "attention":
            continue  # attention_layers
        if side_name == "single":
            points += [(side_name, [layer]) for layer in range(num_layers)]
        else:
            # See above: without single layers, all but the first layer is the candidate
            # worth a point.
            unknown = side_name == "last" and "single" not in study.sides
            all_but_first = {num_layers - 1} - {0} if unknown else set()
            points += [
                (side_name, resolve_layers({side_name: count}, [True] * num_layers))
                for count in sorted(counts | all_but_first)
            ]
    return points


def attention_layers(study: Study, moe_mask: Sequence[bool]) -> list[int]:
    """Return the layers whose attention a study measures ahead alone: those that follow
    an MoE layer.
    """
    if "attention" not in study.sides:
        return []
    return [k for k in range(1, len(moe_mask)) if moe_mask[k - 1]]


def attention_ahead(layer: int) -> Connectivity:
    """Return the connectivity in which only the attention of one layer is ahead."""
    return Connectivity([layer - 1, layer], "partial", "full")


def has_pairs(study: Study) -> bool:
    """Tell whether a study measures pairs of layers: it has the KL, and each layer alone
    in one state of attention.
    """
    fixed = study.mlp == "selected" or study.attention == "full"
    return study.text is not None and "single" in study.sides and fixed


def read_study(folder: Path) -> dict[str, Any]:
    """Return the contents of a finished study's `layers.json`; raise UserError for a
    folder that is not a finished study, or another version.
    """
    if not (folder / "layers.json").is_file():
        raise UserError(
            f"{folder}: no layers.json; this is not a folder that `fcsd layers` wrote"
        )
    check_outputs(folder, "layers.json")
    study = read_layers_file(folder / "layers.json")
    if not (folder / "manifest.json").is_file():
        raise UserError(
            f"{folder}: the study is not finished; run the same `fcsd layers` command"
            " again to continue it"
        )
    study.pop("sha256", None)
    return study


def read_layers_file(path: Path) -> dict[str, Any]:
    """Return the contents of a `layers.json`; raise UserError for another version."""
    study = read_json(path)
    version = study.get("schema_version") if isinstance(study, Mapping) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version is {version}, this fcsd reads {SCHEMA_VERSION};"
            " remove the folder and run `fcsd layers` again"
        )
    return dict(study)
