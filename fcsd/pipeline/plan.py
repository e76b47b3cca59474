"""Make a plan from files (cluster, links, measured times, a layer study), and plot
which conversions are worth their cost.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fcsd.base.artifact import check_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.strict import refuse
from fcsd.base.text import progress_bar
from fcsd.model.connectivity import Connectivity
from fcsd.model.connectivity.selection import ranges
from fcsd.planning.cost.measured import Times, measured_times, read_times
from fcsd.planning.cost.plan import plan, reach
from fcsd.planning.cost.planned import Planned, prepare
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.times import plan_times
from fcsd.planning.layers.front import (
    Seconds,
    choose,
    front,
    recipe_section,
    section_key,
    section_options,
)
from fcsd.planning.layers.points import (
    deciding_metric,
    loss_text,
    point_loss,
    selection_facts,
    study_connectivity,
    weights_of,
)
from fcsd.planning.layers.settings import read_study
from fcsd.planning.network.links import read_links
from fcsd.planning.network.simulate import rank_imbalance
from fcsd.report.study_plots import plot_worth


def plan_from_files(
    settings: PlanSettings,
    *,
    links: Path | None = None,
    measured: Path | None = None,
    routing: Path | None = None,
    study: Path | None = None,
    figure: Path | None = None,
    advise: bool = True,
) -> dict[str, Any]:
    """Return the result of `fcsd.planning.cost.plan.plan`, with measured times instead
    of the roofline's, and with the points of a study. advise: as in `plan`.

    Raises:
        UserError: `prepare`, `plan` or a reader of these files refuses its input; a
            figure was requested without a study, or the study has another number of
            layers.
    """
    # Options that would have no effect, or contradict each other, are refused.
    refuse(
        (
            figure is not None and study is None,
            "--figure: plots speed-up against quality, so it needs --study (a folder of"
            " `fcsd layers`)",
        ),
        (
            links is not None and measured is not None,
            "--links and --measured are both given; measured times already include the"
            " exchanges",
        ),
        (
            routing is not None and measured is not None,
            "--routing and --measured are both given; measured times already include"
            " the routing",
        ),
    )
    times = None if measured is None else read_times(measured)
    # What is wrong with it is said before the planning.
    content = None if study is None else read_study(study)
    planned = prepare_with_files(settings, links, routing)
    if times is None:
        facts = plan(planned, advise=advise)
    else:
        facts = _measured(times, planned)
    if study is not None and content is not None:
        check_study_of(planned, study, content)
        facts["study"] = _against_quality(planned, times, study, content)
        seconds = study_seconds(planned, times, study)
        metric = deciding_metric(content)["name"]
        fronts = (
            front(content, metric, calibrated, seconds)
            for calibrated in weights_of(content)
        )
        facts["fronts"] = [one | {"chosen": choose(one)} for one in fronts]
        if figure is not None:
            plot_worth(facts["study"], figure, facts["fronts"])
    rates = _rates(facts, planned)
    hours = {name: 1e9 / rate / 3600 for name, rate in rates.items()}
    return facts | {
        "tokens_per_second_per_gpu": rates,
        "gpu_hours_per_billion_tokens": hours,
        "mfu": _mfu(rates, planned),
    }


def prepare_with_files(
    settings: PlanSettings, links: Path | None, routing: Path | None
) -> Planned:
    """Prepare a plan with the links and the imbalance of these files."""
    if routing is not None and "imbalance" in settings.assumptions:
        raise UserError(
            "--routing and assumptions.imbalance of the cluster file are both given;"
            " leave one out"
        )
    planned = prepare(settings, None if links is None else read_links(links))
    if routing is None:
        return planned
    return planned.assuming(imbalance=_imbalance(routing, planned))


def sweep_plans(
    values: Mapping[str, PlanSettings | UserError], **files: Any
) -> list[dict[str, Any]]:
    """Plan once for each value of a swept option, and return a row for each.

    values: value -> its settings, or why they are refused. files: as in
    `plan_from_files`. A row has the `value` and either the plan or the `refused` reason.
    """
    rows = []
    for value, settings in values.items():
        try:
            if isinstance(settings, UserError):
                raise settings
            facts = plan_from_files(settings, advise=False, **files)
            rows.append({"value": value, **facts})
        except UserError as error:
            # A value that the model or the machine does not allow is a gap in the
            # sweep, not its end.
            rows.append({"value": value, "refused": str(error)})
    if all("refused" in row for row in rows):
        raise UserError(f"--sweep: no value can be planned: {rows[0]['refused']}")
    return rows


def _rates(facts: Mapping[str, Any], planned: Planned) -> dict[str, float]:
    """Return the tokens per second per GPU: in training those of a step, before the
    first token those of the prompts, after it those of the answers.
    """
    settings = planned.settings
    if settings.phase == "train":
        # Every copy of the model has micro-batches of its own.
        tokens = planned.micro_batches * settings.batch * settings.length
        gpus = planned.tensor_parallel * settings.pipeline_parallel
    else:
        length = settings.length if settings.phase == "prefill" else 1
        tokens, gpus = settings.batch * length, planned.num_gpus
    return {
        name: tokens / gpus / facts["times"][f"{name}_s"]
        for name in ("regular", "overlapped")
    }


def _mfu(rates: Mapping[str, float], planned: Planned) -> dict[str, float] | None:
    """Return the model FLOPs utilisation of a training (PaLM, appendix B): FLOPs per
    second that the model needs, without recomputation, over the peak of a GPU; None in
    serving.
    """
    if planned.settings.phase != "train":
        return None
    # A backward pass needs twice the FLOPs of the forward pass.
    token_flops = 3 * planned.work.flops / planned.work.tokens
    peak = planned.machine.gpu.bf16_tflops
    if planned.settings.dtype == "fp8":
        peak = planned.machine.gpu.fp8_tflops or peak
    return {name: rate * token_flops / (peak * 1e12) for name, rate in rates.items()}


def _imbalance(folder: Path, planned: Planned) -> float:
    """Return the imbalance of a plan's ranks under the loads of a routing study
    (`fcsd-steer routing`). Raises UserError if there is none, or it belongs to another
    model.
    """
    check_outputs(folder, "routing.json")
    study = read_json(folder / "routing.json", hint="`fcsd-steer routing` writes one")
    try:
        facts = study["models"][0]
        # A file with other content raises one of the errors below.
        layers, num_experts = facts["layers"], facts["num_experts"]
        top_k = facts["top_k"]
        # [L, N, E], summed over the locations of the tokens
        loads = np.asarray(facts["counts"]).sum(1)
    except (LookupError, TypeError, ValueError):
        raise UserError(
            f"{folder}: holds no routing study; `fcsd-steer routing` writes one"
        ) from None
    work = planned.work
    expected = (
        [k for k, moe in enumerate(work.moe) if moe],
        work.num_experts,
        work.experts_per_token,
    )
    if (layers, num_experts, top_k) != expected:
        raise UserError(
            f"{folder}: a routing study of {len(layers)} MoE layers, top {top_k} of"
            f" {num_experts} experts, but the model has {len(expected[0])}, top"
            f" {expected[2]} of {expected[1]}"
        )
    return rank_imbalance(loads, planned.expert_parallel)


def _measured(times: Times, planned: Planned) -> dict[str, Any]:
    summary = measured_times(times, planned)
    facts = plan(planned)
    rows = []
    # With measured times only the slowdown is open, unless it was measured, too.
    for row in facts["sensitivity"]:
        if row["name"] == "slowdown" and times.slowdown is None:
            ends = [
                measured_times(times, planned.assuming(slowdown=end))
                for end in row["range"]
            ]
            gains = reach(summary["speed_up"], (end["speed_up"] for end in ends))
            rows = [row | {"speed_up": gains}]
            del rows[0]["over_exact"]  # exact schedules were not measured
    return facts | {
        "times": summary,
        "sensitivity": rows,
        "upper_bound": False,
        "over_prediction": None,
        "step_ratio": None,
        "expected_gain": None,
        "expected_over_exact": None,
        "measured": True,
    }


def check_study_of(planned: Planned, folder: Path, study: dict[str, Any]) -> None:
    """Refuse the study in a folder if it is of another model."""
    if study["num_hidden_layers"] != len(planned.work.layers):
        raise UserError(
            f"{folder}: a study of {study['num_hidden_layers']} layers, but the model"
            f" has {len(planned.work.layers)}"
        )
    moe_layers = [k for k, moe in enumerate(planned.work.moe) if moe]
    if study["moe_layers"] != moe_layers:
        raise UserError(
            f"{folder}: the study's MoE layers are {ranges(study['moe_layers'])}, those"
            f" of the model {ranges(moe_layers)}; plan the study's model"
        )


def study_seconds(planned: Planned, times: Times | None, folder: Path) -> Seconds:
    """Return the function that plans the seconds of a step with a connectivity, for the
    study in a folder. It plans each connectivity once, and draws a bar where that takes
    long.
    """
    known: dict[str, float] = {}
    bar = progress_bar(desc="planning", unit="selection", delay=2, leave=False)

    def seconds(spec: Connectivity) -> float:
        key = section_key(spec, planned.work.moe)
        if key not in known:
            one = replace(planned, connectivity=spec)
            try:
                facts = plan_times(one) if times is None else measured_times(times, one)
            except UserError as refusal:
                options = section_options(recipe_section(spec, planned.work.moe))
                raise UserError(f"{folder}: with {options}: {refusal}") from None
            known[key] = float(facts["overlapped_s"])
            bar.update()
        return known[key]

    return seconds


def _against_quality(
    planned: Planned, times: Times | None, folder: Path, study: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return, for each selection of the study in a folder, its loss of quality and the
    speed-up of the connectivity that was measured, whatever the plan's own is.
    """
    metric, rows = deciding_metric(study), []
    # A study may have scored each selection with copied and with calibrated weights.
    for calibrated in weights_of(study):
        for point in study["points"]:
            # Nobody would convert a single layer, and nothing is converted in `none`.
            if point["side"] in ("single", "none"):
                continue
            loss, error = point_loss(study, point, metric["name"], calibrated)
            facts = selection_facts(study, point["layers"])
            try:
                speed_up = _speed_up(
                    planned, times, study_connectivity(study, point["layers"])
                )
            except UserError as refusal:
                raise UserError(
                    f"{folder}: measured with {facts['options']}: {refusal}"
                ) from None
            rows.append(
                {
                    "side": point["side"],
                    **{name: facts[name] for name in ("selection", "options")},
                    "num_layers": point["num_layers"],
                    "weights": "calibrated" if calibrated else "copied",
                    "metric": loss_text(metric),
                    "loss": loss,
                    "stderr": error,
                    "speed_up": speed_up,
                }
            )
    return rows


def _speed_up(
    planned: Planned, times: Times | None, connectivity: Connectivity
) -> float:
    planned = replace(planned, connectivity=connectivity)
    seconds: Mapping[str, Any] = (
        plan_times(planned) if times is None else measured_times(times, planned)
    )
    return float(seconds["speed_up"])
