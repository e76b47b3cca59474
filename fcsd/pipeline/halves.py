"""Choose the halves of a conversion by planned time, from a finished layer study and a
plan of its model on a cluster; measure the choice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.base.text import markdown, nats
from fcsd.model.connectivity import Connectivity
from fcsd.parallel.launch import Launch
from fcsd.pipeline.plan import (
    check_study_of,
    prepare_with_files,
    study_seconds,
)
from fcsd.planning.cost.plan import plan
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.layers.front import (
    Seconds,
    as_fast_as,
    choose,
    chosen_text,
    front,
    front_text,
    loss_cell,
    recipe_section,
    section_options,
)
from fcsd.planning.layers.points import (
    deciding_metric,
    layers_with_mlp,
    loss_text,
    moe_mask,
    number_text,
)
from fcsd.planning.layers.proposal import (
    better_by,
    check_calibrated,
    check_max_loss,
    measure_selections,
    parse_budget,
    single_points,
    verdict,
)
from fcsd.planning.layers.settings import KL, read_study
from fcsd.planning.layers.study import difference


@dataclass(frozen=True)
class Goal:
    """What to choose from a front.

    calibrated: as in `plan_layers`. budget: the last step with at most so many layers
    (`parse_budget`). max_loss: the fastest row that loses at most so much. Neither: as
    `choose` decides.
    """

    calibrated: bool = False
    budget: str | None = None
    max_loss: float | None = None


def choose_halves(
    settings: Mapping[str, Any],
    folder: Path,
    goal: Goal,
    *,
    links: Path | None = None,
    routing: Path | None = None,
    model: str | None = None,
    launch: Launch | None = None,
) -> dict[str, Any]:
    """Return the front of planned time against the losses of the study in `folder`, the
    row to convert to, and the last layers that are as fast, as JSON data.

    Args:
        settings: options of a plan (`PlanSettings`); the model is the study's.
        links, routing: files of a plan.
        model: the current path of the study's model.
        launch: measure the choice and the last layers that are as fast, paired.

    Raises:
        UserError: as `plan_layers` and `plan_from_files`.
    """
    study = read_study(folder)
    check_calibrated(folder, study, goal.calibrated)
    budget, max_loss = goal.budget, goal.max_loss
    num = None
    if max_loss is not None:
        check_max_loss(max_loss)
    if budget is not None:
        single_points(folder, study)  # without prices there are no steps to count
        num = parse_budget(budget, len(layers_with_mlp(study)))
    source = study["study"]["model"]
    if model is not None:
        source = {"path": model}
    plan_settings = PlanSettings.from_options(
        settings, model=source["path"], revision=source.get("revision")
    )
    planned = prepare_with_files(plan_settings, links, routing)
    check_study_of(planned, folder, study)
    seconds = study_seconds(planned, None, folder)
    metric = deciding_metric(study)["name"]
    facts = front(study, metric, goal.calibrated, seconds)
    chosen = choose(facts, num, max_loss)
    compared = [
        {"name": "proposal"}
        | {key: chosen[key] for key in ("connectivity", "step_s", "saved_s", "losses")},
        *_as_fast(study, facts, chosen, seconds),
    ]
    planned_facts = plan(planned, advise=False)
    result: dict[str, Any] = {
        "study": str(folder),
        "goal": {"budget": budget, "max_loss": max_loss},
        "gpu": planned.machine.gpu.name,
        "settings": {
            name: planned_facts["settings"][name]
            for name in ("phase", "num_gpus", "batch", "length")
        },
        "exact": _exact(planned_facts["times"]),
        **facts,
        "chosen": chosen,
        "compared": compared,
    }
    if launch is not None:
        _measure(folder, result, model, launch)
    return result


def _as_fast(
    study: dict[str, Any],
    facts: Mapping[str, Any],
    chosen: Mapping[str, Any],
    seconds: Seconds,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of last layers that is as fast as the chosen row, with
    the losses that the study measured, if it did.
    """
    mask, rows = moe_mask(study), facts["rows"]
    for name, spec in as_fast_as(study, chosen, seconds).items():
        section = recipe_section(spec, mask)
        step_s = seconds(spec)
        same = (
            row["losses"]
            for row in rows
            if row["connectivity"] == section and row["measured"]
        )
        yield {
            "name": name,
            "connectivity": section,
            "step_s": step_s,
            "saved_s": rows[0]["step_s"] - step_s,
            "losses": next(same, None),
        }


def _exact(times: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fastest schedule that changes no equation; None where it is the
    regular one.
    """
    names = ("name", "step_s", "speed_up")
    rows = (row for row in times["exact"] if row["name"] == times["best_exact"])
    return next(({name: row[name] for name in names} for row in rows), None)


def _measure(
    folder: Path, result: dict[str, Any], model: str | None, launch: Launch
) -> None:
    """Measure the compared connectivities on the study's data, and add what was
    measured, the paired difference of the proposal from each other, and, as `instead`,
    the best of those that are as fast and measured better.
    """
    metric, rows = result["metric"]["name"], result["compared"]
    specs = [Connectivity(**row["connectivity"]) for row in rows]
    calibrated = result["calibrated"]
    first, *others = measure_selections(
        folder, specs, metric, calibrated, model, launch
    )
    for row, measured in zip(rows, [first, *others], strict=True):
        row["losses"] = None
        row["measured"] = measured.values[metric]
        if measured is not first:
            row["difference"] = difference(first, measured, metric)
    better = [
        row for row in rows[1:] if better_by(row["difference"], result["metric"]) < 0
    ]
    sign = 1 if result["metric"]["better"] == "lower" else -1
    result["instead"] = min(
        better, key=lambda row: sign * row["measured"]["value"], default=None
    )


def halves_text(result: Mapping[str, Any]) -> str:
    """Format what `choose_halves` returns: front, comparison, options, recipe."""
    settings, chosen = result["settings"], result["chosen"]
    head = (
        f"{settings['phase']} on {settings['num_gpus']} {result['gpu']}, batch"
        f" {settings['batch']}, length {settings['length']}: planned time against losses"
        f" before training, {'calibrated' if result['calibrated'] else 'copied'} weights"
    )
    parts = [head, "", *front_text(result)]
    if (exact := result["exact"]) is not None:
        saved = f"{1e6 * (result['rows'][0]['step_s'] - exact['step_s']):,.1f}"
        parts += [
            f"The best exact schedule, {exact['name']}, saves {saved} µs and loses"
            " nothing: what saves less is not worth its loss."
        ]
    parts += ["", *_compared_text(result)]
    taken, limit = result["compared"][0], result["goal"]["max_loss"]
    if (instead := result.get("instead")) is not None:
        parts += [f"Take {instead['name']} instead: as fast, and measured better.", ""]
        taken = instead
    if (
        limit is not None
        and result["metric"]["name"] == KL
        and "measured" in taken
        and taken["measured"]["value"] > limit
    ):
        lost = nats(taken["measured"]["value"])
        parts += [f"Measured, it loses {lost}, more than --max-loss {limit:g}.", ""]
    return "\n".join([*parts, *chosen_text(instead or chosen)])


def _compared_text(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the comparison with the last layers that are as fast; nothing where none
    are, or the choice is the regular model.
    """
    if not result["chosen"]["saved_s"] > 0:
        return
    metric, (proposal, *others) = result["metric"], result["compared"]
    if not others:
        yield "No selection of last layers is as fast.\n"
        return
    is_measured = "measured" in proposal
    cells = []
    for row in result["compared"]:
        value = "not measured"
        if is_measured:
            value = number_text(row["measured"])
        elif row["losses"] is not None:
            value = loss_cell(row["losses"][metric["name"]])
        saved = f"{1e6 * row['saved_s']:,.1f}"
        cells.append([row["name"], section_options(row["connectivity"]), saved, value])
    name = metric["name"] if is_measured and metric["name"] != KL else loss_text(metric)
    yield markdown(["as fast", "options", "saves, µs", name], cells, left=2)
    yield ""
    for row in others:
        if row["connectivity"] == proposal["connectivity"]:
            yield f"The proposal is {row['name']}."
        elif is_measured:
            yield verdict(row["difference"], metric, row["name"])
    if not is_measured:
        yield "--verify measures these on the study's data."
    yield ""
