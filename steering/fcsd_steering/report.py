"""Report a study of steered models: CAMoE's tables 1 and 2, the cost of two kinds of
bias at equal time, a figure, and each steered model against the one without a bias.

Reads only the files that the study and its run left.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fcsd
from fcsd.base.artifact import read_manifest
from fcsd.base.text import markdown, nats
from fcsd.base.writing import new_folder, write_json, write_text
from fcsd.evaluation.results import read_result
from fcsd.recipe.layout import RunLayout
from fcsd.report.table import percent, with_error
from fcsd.report.verdict import quick_look
from fcsd_steering.config import SteeringStudy
from fcsd_steering.plots import plot_steering

SCHEMA_VERSION = 1
Points = list[dict[str, Any]]


def tables_folder(folder: Path, model: str) -> Path:
    """Return the folder of the tables that steer a model, in the folder of a study."""
    return folder / "tables" / model


def evaluation_folder(folder: Path, name: str) -> Path:
    """Return the folder of a steered model's results, in the folder of a study."""
    return folder / "evaluate" / name


def write_report(study: SteeringStudy, layout: RunLayout, folder: Path) -> str:
    """Write report/ with steering.md, steering.json and figures; return the tables of
    quality against time.
    """
    places = {model: layout.evaluate / model for model in study.models}
    places |= {name: evaluation_folder(folder, name) for name in study.names}
    models = {
        name: {"result": read_result(place)[0]}
        for name, place in places.items()
        if read_manifest(place)
    }
    points = steering_points(study, folder, models)
    note = quick_look(
        *(model["result"]["settings"]["limit"] for model in models.values())
    )
    comparisons = {
        name: fcsd.compare(places[steered.model], places[name])
        for name, steered in study.names.items()
        if name in models
    }
    with new_folder(folder / "report", "steering.json", "report") as new:
        figures = steering_figure(points, new, note)
        parts = [f"# Steered routers of {study.recipe}"]
        parts += [note] if note else []
        tables = steering_parts(points, models)
        parts += tables
        parts += [f"![{caption}]({name})" for name, caption in figures.items()]
        parts += ["## Against the model without a bias, item by item"]
        parts += [f"### `{name}`\n\n{text}" for name, text in comparisons.items()]
        write_text(new / "steering.md", "\n\n".join(parts) + "\n")
        write_json(
            new / "steering.json",
            {
                "schema_version": SCHEMA_VERSION,
                "study": study.model_dump(mode="json"),
                "points": points,
                "comparisons": comparisons,
            },
        )
    return "\n\n".join([*tables, f"report: {folder / 'report' / 'steering.md'}"])


def steering_points(
    study: SteeringStudy, folder: Path, models: Mapping[str, Mapping[str, Any]]
) -> Points:
    """Return a point for each steered model that has been evaluated, after a point for
    the same model without a bias; [] if there is none.

    models: name -> {"result": …}. A point has name, model (whose routers are steered),
    kind (None: no bias), strength, exchange, routing, kl (of the output to the
    original's, with stderr), mean and mean_stderr of the tasks.
    """
    points: Points = []
    for model in study.models:
        manifest = read_manifest(tables_folder(folder, model))
        if not manifest or model not in models:
            continue
        model_points = [
            _point(
                model,
                model,
                None,
                0.0,
                models[model]["result"] | manifest["results"]["unbiased"],
            )
        ]
        model_points += [
            _point(name, model, kind, strength, models[name]["result"])
            for name, (_, kind, strength) in study.names_of(model).items()
            if name in models
        ]
        # The point without a bias is of no use without a steered one.
        points += model_points if len(model_points) > 1 else []
    return points


def _point(
    name: str, model: str, kind: str | None, strength: float, result: Mapping[str, Any]
) -> dict[str, Any]:
    kl = {"kl": 0.0, "stderr": 0.0} if name == "original" else result["kl_to_original"]
    measured = {
        key: result[key] for key in ("exchange", "routing", "mean", "mean_stderr")
    }
    return {
        "name": name,
        "model": model,
        "kind": kind,
        "strength": strength,
        "kl": kl,
        **measured,
    }


def _by_model(points: Points) -> list[Points]:
    """Return the points of each model, the one without a bias first."""
    models = dict.fromkeys(point["model"] for point in points)
    return [[point for point in points if point["model"] == model] for model in models]


def steering_parts(
    points: Points, models: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return the tables as parts of a Markdown page."""
    if not points:
        return []
    exchange = points[0]["exchange"]
    text = (
        "Simulated time of one MoE layer's exchange (counts, dispatch, combine): mean"
        f" and 95th percentile over {exchange['num_exchanges']} exchanges of"
        f" {exchange['tokens']:,.0f} tokens at each endpoint. Output KL is KL(original"
        " || steered) in nats per token; KL and avg_layer_kl compare the experts'"
        " loads; `routes moved` is the share of (token, expert) pairs that differ from"
        " the same model's without a bias."
    )
    parts = [text]
    for model_points in _by_model(points):
        parts += [
            f"## `{model_points[0]['model']}`",
            _table1(model_points, models),
            _table2(model_points),
            *_equal_time(model_points),
        ]
    return parts


def _equal_time(points: Points) -> list[str]:
    """Return the table of both kinds at equal time; [] if it cannot be computed."""
    parts = []
    if rows := at_equal_time(points):
        header = [
            "at the time of",
            "time",
            "camoe, output KL",
            "bottleneck, output KL",
            "ratio",
        ]
        cells = [
            [row["name"], _change(row["time"]), *(nats(row[kind]) for kind in ("camoe", "bottleneck")),
             f"{row['ratio']:.2f}"]
            for row in rows
        ]  # fmt: skip
        parts.append(
            f"{markdown(header, cells)}\n\nThe KL of `bottleneck` is interpolated to"
            " that time between its strengths, by the square root."
        )
    return parts


def _table1(points: Points, models: Mapping[str, Mapping[str, Any]]) -> str:
    """Format CAMoE's table 1: times and scores."""
    base = points[0]["exchange"]
    results = {
        point["name"]: models[point["name"]]["result"]["tasks"] for point in points
    }

    def time(point: Mapping[str, Any], key: str) -> str:
        seconds = point["exchange"][key]
        change = f" ({_change(seconds / base[key])})" if point["kind"] else ""
        return f"{1e3 * seconds:.3f}{change}"

    header = [
        "kind",
        "strength",
        "mean (ms)",
        "p95 (ms)",
        *results[points[0]["name"]],
        "mean of tasks",
    ]
    rows = [
        [
            point["kind"] or "none",
            f"{point['strength']:g}",
            *(time(point, key) for key in ("mean_s", "p95_s")),
            *(
                with_error(percent(row["value"]), row["stderr"])
                for row in results[point["name"]].values()
            ),
            percent(point["mean"]),
        ]
        for point in points
    ]
    return markdown(header, rows)


def _table2(points: Points) -> str:
    """Format CAMoE's table 2: how evenly experts are used, and how much that differs
    from the model without a bias.
    """
    header = [
        "kind",
        "strength",
        "cv",
        "avg_layer_cv",
        "KL",
        "avg_layer_kl",
        "routes moved",
        "output KL",
    ]
    rows = []
    for point in points:
        routing = {"kl": 0.0, "avg_layer_kl": 0.0, "routes_moved": 0.0} | point[
            "routing"
        ]
        cells = [f"{routing[key]:.4f}" for key in ("cv", "avg_layer_cv")]
        cells += [nats(routing[key]) for key in ("kl", "avg_layer_kl")]
        moved, kl = f"{percent(routing['routes_moved'])} %", nats(point["kl"]["kl"])
        rows.append(
            [point["kind"] or "none", f"{point['strength']:g}", *cells, moved, kl]
        )
    return markdown(header, rows)


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def at_equal_time(points: Points) -> list[dict[str, Any]]:
    """Compare the output KL of `bottleneck` with CAMoE's at the mean time of each of
    CAMoE's strengths.

    Only the original is compared: the KL of any other model is mostly the cost of its
    conversion. Between two strengths the square root of the KL is interpolated linearly
    in the time. A time outside the range of `bottleneck` has no row.
    """
    if points[0]["name"] != "original":
        return []
    base = points[0]["exchange"]["mean_s"]
    # The curve of `bottleneck` begins at the model without a bias, whose time is 1.
    curve = sorted(
        (point["exchange"]["mean_s"] / base, math.sqrt(max(0.0, point["kl"]["kl"])))
        for point in points
        if point["kind"] in (None, "bottleneck")
    )
    rows = []
    for point in points:
        time, kl = point["exchange"]["mean_s"] / base, point["kl"]["kl"]
        if (
            point["kind"] == "camoe"
            and kl > 0
            and curve[0][0] <= time <= curve[-1][0]
            and len(curve) > 1
        ):
            times, roots = zip(*curve, strict=True)
            bottleneck_kl = float(np.interp(time, times, roots)) ** 2
            rows.append(
                {
                    "name": point["name"],
                    "time": time,
                    "camoe": kl,
                    "bottleneck": bottleneck_kl,
                    "ratio": bottleneck_kl / kl,
                }
            )
    return rows


def steering_figure(points: Points, folder: Path, note: str = "") -> dict[str, str]:
    """Draw quality against time; file name -> caption."""
    figures = {}
    for model_points in _by_model(points):
        model = model_points[0]["model"]
        name = "steering.png" if model == "original" else f"steering-{model}.png"
        plot_steering(model_points, folder / name, note=note)
        figures[name] = (
            f"Quality of `{model}`, steered, against the mean time of an exchange, in"
            " per cent of that without a bias: KL of the output, and the mean of the"
            " tasks with one standard error. A point is a strength."
        )
    return figures
