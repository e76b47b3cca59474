"""Choose the halves of a conversion by planned time saved per loss: the front of time
against quality.

    half     the MLP side (MoE block) of one layer ahead, or attention ahead: of one layer
             where the study measured that, else of all layers or with its layer
    price    the loss that it adds to the halves chosen before it: what it costs alone,
             measured by a layer study, and, of two MLP sides, what they cost together
             beside that (`fcsd.planning.layers.pairs`)
    worth    the planned seconds that it saves beside the halves chosen before it

Both depend on what is chosen: an exchange that is hidden already saves nothing, one half
may take the window of another, and damages add up or cancel. So halves are added one
after another, the largest worth per price first (greedy), as long as they save time.

Where a study has no pairs, as for the score of a task, prices are those of halves
alone, and their sum is not the loss of the selection (`fcsd.planning.layers.proposal`).
Losses that the study measured stand beside those that prices predict.

Not covered: the quality after distillation.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any, Literal

from fcsd.base.errors import UserError
from fcsd.base.text import markdown, nats
from fcsd.model.connectivity.selection import resolve_layers, selection_text
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import FAMILIES
from fcsd.planning.layers.first import special_layers
from fcsd.planning.layers.points import (
    attention_losses,
    base_loss,
    layers_with_mlp,
    loss_text,
    moe_mask,
    number_text,
    point_loss,
    point_text,
    selecting_option,
    study_connectivity,
)
from fcsd.planning.layers.settings import KL, attention_ahead

Seconds = Callable[[Connectivity], float]
"""Returns the planned seconds of a step with a connectivity."""

PRECISION = 1e-9
"""Share of a step below which a difference of times is rounding."""


@dataclass(frozen=True)
class Half:
    """What can be chosen. side: layer: both sides of a layer, where a study has no price
    of attention. layer: None: of all layers.
    """

    side: Literal["attention", "MLP", "layer"]
    layer: int | None

    @property
    def name(self) -> str:
        place = "in all layers" if self.layer is None else str(self.layer)
        return f"{self.side} {place}"


Halves = frozenset[Half]

Pairs = Mapping[int, Mapping[int, float]]
"""What the MLP sides of two layers cost together beside the price of each alone; {}
where a study has none.
"""


@dataclass(frozen=True)
class Prices:
    """What halves cost in a metric of a study.

    mlp: of the MLP side of each layer alone, or of the whole layer (`whole`). attention:
    of each layer, where the study measured that. everywhere: of attention in all layers,
    where it is part of all that the study measured. pairs: of MLP sides; {} where the
    study has none of the metric.
    """

    mlp: Mapping[int, float]
    attention: Mapping[int, float]
    everywhere: float | None
    whole: bool
    pairs: Pairs

    @classmethod
    def of(cls, study: dict[str, Any], metric: str, calibrated: bool) -> "Prices":
        base, _ = base_loss(study, metric, calibrated)
        with_mlp = layers_with_mlp(study)
        mlp = {
            p["layers"][0]: point_loss(study, p, metric, calibrated)[0] - base
            for p in study["points"]
            if p["side"] == "single" and p["layers"][0] in with_mlp
        }
        attention = attention_losses(study, metric, calibrated)
        selected = selecting_option(study) == "mlp"
        whole = (
            not selected and not attention and study["study"]["attention"] == "partial"
        )
        pairs = pairs_of(study, metric, calibrated)
        return cls(mlp, attention, base if selected else None, whole, pairs)

    def halves(self) -> list[Half]:
        """Return the halves that can be chosen one by one."""
        attention = [Half("attention", layer) for layer in self.attention]
        if self.everywhere is not None and not attention:
            attention = [Half("attention", None)]
        side: Literal["layer", "MLP"] = "layer" if self.whole else "MLP"
        return attention + [Half(side, layer) for layer in self.mlp]

    def total(self, spec: Connectivity, mask: Sequence[bool]) -> float:
        """Return the loss that prices and pairs of all halves ahead predict."""
        outdated = spec.outdated_layers(mask)
        cost = sum(self.mlp.get(k, 0.0) for k in outdated)
        if self.pairs:
            cost += sum(self.pairs[i][j] for i, j in combinations(outdated, 2))
        ahead = spec.attention_layers(mask)
        if self.attention:
            return cost + sum(self.attention[k] for k in ahead)
        return cost + (self.everywhere or 0.0) * bool(ahead)


def pairs_of(study: dict[str, Any], metric: str, calibrated: bool) -> Pairs:
    """Return the pairs of a study, which are those of its KL."""
    if metric != KL or "pairs" not in study:
        return {}
    rows = study["pairs"]["calibrated" if calibrated else "values"]
    pairs: dict[int, dict[int, float]] = {layer: {} for layer in range(len(rows))}
    for layer, row in enumerate(rows):
        for other, moment in enumerate(row):
            pairs[layer][other] = pairs[other][layer] = moment
    return pairs


def halves_connectivity(study: dict[str, Any], halves: Halves) -> Connectivity:
    """Return the connectivity in which these halves are ahead. Attention ahead needs the
    layer before it rewired, too; other attention between rewired layers is then ahead
    as well.
    """
    attention = {half.layer for half in halves if half.side == "attention"}
    mlp = sorted(
        half.layer
        for half in halves
        if half.side != "attention" and half.layer is not None
    )
    if by_layer := [layer for layer in attention if layer is not None]:
        layers = {*mlp, *by_layer} | {layer - 1 for layer in by_layer}
        return Connectivity(sorted(layers), "partial", mlp or "full")
    alone = selecting_option(study) == "mlp" or study.get("attention")
    if alone and not attention:
        return Connectivity(mlp or "none", "full", "outdated")
    return study_connectivity(study, mlp)


def greedy(
    halves: Sequence[Half],
    seconds: Callable[[Halves], float],
    loss: Callable[[Halves], float],
    chosen: Halves = frozenset(),
) -> Iterator[tuple[Half, ...]]:
    """Yield what to add next, one half at a time: the largest worth per price first,
    until nothing saves time any more.

    A half that costs nothing comes before all that cost; of equal halves the later
    layer comes first (paper Fig. 3). Where only several halves together save time, as
    in a pipeline whose stages take equally long, the cheapest of those come at once.

    seconds, loss: planned seconds and the predicted loss of a set of halves. What a half
    saves beside those chosen is planned again only where the last value, taken for an
    upper bound, would be the best, and near an added layer. chosen: what is ahead
    already.
    """
    left, worth = list(halves), dict[Half, float]()
    while left:
        now, lost, fresh = seconds(chosen), loss(chosen), set[Half]()
        price = {half: round(loss(chosen | {half}) - lost, 12) for half in left}
        while True:
            for half in left:
                if half not in worth:
                    # In whole units of the precision, equal halves are equal.
                    unit = PRECISION * now
                    saved = now - seconds(chosen | {half})
                    worth[half] = round(saved / unit) * unit
                    fresh.add(half)
            best = max(left, key=lambda half: _rank(half, worth[half], price[half]))
            if best in fresh:
                break
            for half in [best] if worth[best] > 0 else left:
                del worth[half]
        added: tuple[Half, ...] = (best,)
        if worth[best] <= 0:
            cheapest = sorted(left, key=lambda half: price[half])
            added = _halves_that_save_together(cheapest, chosen, seconds)
        if not added:
            return
        yield added
        chosen |= set(added)
        left = [half for half in left if half not in added]
        worth = {half: worth[half] for half in left if not _are_near(half, added)}


def _attention_first(
    halves: Sequence[Half],
    seconds: Callable[[Halves], float],
    loss: Callable[[Halves], float],
) -> Iterator[tuple[Half, ...]]:
    """Yield the steps of `greedy` through all attention, then through the other halves,
    whose prices were measured beside it.
    """
    attention = [half for half in halves if half.side == "attention"]
    left = [*attention]
    for added in greedy(attention, seconds, loss):
        left = [half for half in left if half not in added]
        yield added
    others = [half for half in halves if half.side != "attention"]
    for added in greedy(others, seconds, loss, Halves(attention)):
        yield *left, *added
        left = []


def _rank(
    half: Half, worth: float, price: float
) -> tuple[bool, bool, float, float, int]:
    layer = -1 if half.layer is None else half.layer
    if worth <= 0 or price <= 0:
        return worth > 0, True, worth, -price, layer
    return True, False, worth / price, worth, layer


def _are_near(half: Half, added: Sequence[Half]) -> bool:
    """Tell whether an added half may change what another one is worth: their layers are
    next to each other or have one layer between them.
    """
    return any(
        half.layer is None or other.layer is None or abs(half.layer - other.layer) <= 2
        for other in added
    )


def _halves_that_save_together(
    cheapest: Sequence[Half], chosen: Halves, seconds: Callable[[Halves], float]
) -> tuple[Half, ...]:
    """Return the first halves that save time together, where none does alone; none where
    even all of them do not.
    """
    enough = seconds(chosen) * (1 - PRECISION)
    added: list[Half] = []
    for half in cheapest:
        added.append(half)
        if seconds(chosen | {*added}) < enough:
            break
    else:
        return ()
    # Some of them may have no part in it; the most expensive goes first.
    for half in reversed(added[:-1]):
        others = [other for other in added if other is not half]
        if seconds(chosen | {*others}) < enough:
            added = others
    return tuple(added)


def front(
    study: dict[str, Any], metric: str, calibrated: bool, seconds: Seconds
) -> dict[str, Any]:
    """Return the front of planned time against loss, as JSON data.

    `rows`: the regular model, each step of `greedy`, MLP sides alone where no step is as
    good, and the selections that the study measured; `steps` is the number of rows of
    the first two kinds. A row has its connectivity, planned `step_s`, `saved_s` and `speed_up`, and its loss in every
    metric of the study (`losses`) with its standard error: where `measured` is false,
    the last measured one of the steps before it plus the prices added since, with those
    of pairs where `pairs` is true. `front`: no other row is as fast at less loss in
    `metric`.
    """
    mask, names = moe_mask(study), [row["name"] for row in study["metrics"]]
    points = _points(study, mask)
    regular_s = seconds(Connectivity("none"))

    def row(title: str, spec: Connectivity, losses: dict[str, Any]) -> dict[str, Any]:
        step_s = seconds(spec)
        return {
            "name": title,
            "connectivity": recipe_section(spec, mask),
            "mlp_layers": spec.outdated_layers(mask),
            "step_s": step_s,
            "saved_s": regular_s - step_s,
            "speed_up": regular_s / step_s,
            "losses": losses,
            "loss": losses[metric]["value"],
            "measured": losses[metric]["measured"],
        }

    prices = {name: Prices.of(study, name, calibrated) for name in names}

    def seconds_of(halves: Halves) -> float:
        spec = halves_connectivity(study, halves)
        return seconds(spec) if changes(study, spec) else regular_s

    def predicted(halves: Halves, name: str) -> float:
        return prices[name].total(halves_connectivity(study, halves), mask)

    def measured(point: dict[str, Any]) -> dict[str, Any]:
        losses = {name: point_loss(study, point, name, calibrated) for name in names}
        return {name: _loss(*loss, measured=True) for name, loss in losses.items()}

    nothing = {name: _loss(0.0, 0.0, measured=True) for name in names}

    beside_attention = prices[metric].everywhere is not None
    steps_of = _attention_first if beside_attention else greedy

    def path(
        halves: Sequence[Half],
    ) -> Iterator[tuple[str, Connectivity, dict[str, Any]]]:
        """Yield the steps: what is added, all that is ahead, its losses."""
        chosen, losses = Halves(), nothing
        for added in steps_of(halves, seconds_of, partial(predicted, name=metric)):
            before = {name: predicted(chosen, name) for name in names}
            chosen |= set(added)
            spec = halves_connectivity(study, chosen)
            losses = {
                name: _loss(loss["value"] + predicted(chosen, name) - before[name])
                | {"pairs": bool(prices[name].pairs)}
                for name, loss in losses.items()
            }
            if (key := _model_key(spec, mask)) in points:
                losses = measured(points[key])
            yield ", ".join(half.name for half in added), spec, losses

    halves = prices[metric].halves()
    rows = [row("regular", Connectivity("none"), nothing)]
    on_path = {_model_key(Connectivity("none"), mask)}
    for added, spec, losses in path(halves):
        on_path.add(_model_key(spec, mask))
        rows.append(row(f"+ {added}", spec, losses))
    steps = len(rows)
    # Attention comes first where it is cheap, and may take the window in which an MLP
    # side would have saved more. What those save alone stands beside the steps.
    mlp = [half for half in halves if half.side != "attention"]
    has_others = len(mlp) < len(halves) and not beside_attention
    for _, spec, losses in path(mlp) if has_others else ():
        if (key := _model_key(spec, mask)) not in on_path and key not in points:
            layers = selection_text(spec.outdated_layers(mask))
            alone = row(f"MLP {layers} alone", spec, losses)
            if not any(_dominates(other, alone) for other in rows[:steps]):
                rows.append(alone)
    for key, point in points.items():
        if key not in on_path and point["side"] != "single":
            spec = study_connectivity(study, point["layers"])
            rows.append(row(point_text(point, len(mask)), spec, measured(point)))
    for one in rows:
        one["front"] = not any(_dominates(other, one) for other in rows)
    (facts,) = (row for row in study["metrics"] if row["name"] == metric)
    special = special_layers(study, metric)
    return {
        "metric": facts,
        "special": [] if special is None else special["layers"],
        "metrics": study["metrics"],
        "calibrated": calibrated,
        "rows": rows,
        "steps": steps,
    }


def _points(study: dict[str, Any], mask: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """Return the points of a study by the key of what they rewire."""
    points: dict[str, dict[str, Any]] = {}
    # A layer alone may be the first or the last one, too, and is then shown as that.
    for point in sorted(study["points"], key=lambda point: point["side"] == "single"):
        spec = study_connectivity(study, point["layers"])
        if point["side"] != "none" and changes(study, spec):
            points.setdefault(_model_key(spec, mask), point)
    for entry in study.get("attention", []):
        key = _model_key(attention_ahead(entry["layer"]), mask)
        points.setdefault(key, {**entry, "side": "single"})
    return points


def _loss(
    value: float, stderr: float | None = None, *, measured: bool = False
) -> dict[str, Any]:
    return {"value": value, "stderr": stderr, "measured": measured}


def changes(study: dict[str, Any], spec: Connectivity) -> bool:
    """Tell whether a connectivity can be converted to: refused are those that compute
    the same as the regular model.
    """
    family = FAMILIES.get(study.get("model_type") or "")
    layout = "pre_norm" if family is None else family.layout
    try:
        return bool(spec.new_field(moe_mask(study), layout)["layers"])
    except UserError:
        return False


def recipe_section(spec: Connectivity, mask: Sequence[bool]) -> dict[str, Any]:
    """Return the section `connectivity` of a recipe, in one form for all selections that
    mean the same; without `attention` where it is the default.
    """
    field = spec.field(mask)
    if not field["layers"]:
        return {"layers": "none"}
    layers = field["layers"]
    section = {"layers": "all" if len(layers) == len(mask) else layers}
    if field["attention"] != Connectivity.attention:
        section |= {"attention": field["attention"]}
    return section | {"mlp": field["mlp"]}


def section_key(spec: Connectivity, mask: Sequence[bool]) -> str:
    """Return a key that connectivities with the same section share."""
    return json.dumps(recipe_section(spec, mask))


def _model_key(spec: Connectivity, mask: Sequence[bool]) -> str:
    """Return a key that connectivities of the same equations share: attention is ahead
    only behind a rewired MoE layer, whatever is said.
    """
    partial = replace(spec, attention="partial")
    return section_key(spec if partial.attention_layers(mask) else partial, mask)


def section_options(section: Mapping[str, Any]) -> str:
    """Format the section `connectivity` of a recipe as options, without defaults."""
    words = []
    for name, value in section.items():
        text = selection_text(value) if isinstance(value, list) else value
        if (name, text) != ("mlp", Connectivity.mlp):
            words.append(f"--{name} {text}")
    return " ".join(words)


def section_text(section: Mapping[str, Any]) -> list[str]:
    """Format the section `connectivity` of a recipe as lines of YAML."""
    return [
        "connectivity:",
        *[
            f"  {key}: {value if isinstance(value, str) else json.dumps(value)}"
            for key, value in section.items()
        ],
    ]


def _dominates(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Tell whether another row is as fast at less loss, or faster at no more."""
    rounding = PRECISION * row["step_s"]
    faster = row["step_s"] - other["step_s"]
    if faster < -rounding or other["loss"] > row["loss"]:
        return False
    return faster > rounding or bool(other["loss"] < row["loss"])


def choose(
    facts: Mapping[str, Any], num: int | None = None, max_loss: float | None = None
) -> dict[str, Any]:
    """Return the row of a front to convert to.

    num: the last step with at most so many MLP sides ahead. max_loss: the fastest row
    that loses at most so much. Neither: the row whose share of the time that can be
    saved exceeds its share of the loss most; the shares are those of the fastest row
    without a layer that costs far more than a typical one (`special_layers`).
    """
    rows = facts["rows"]
    if num is not None:
        steps = rows[: facts["steps"]]
        return next(row for row in reversed(steps) if len(row["mlp_layers"]) <= num)
    if max_loss is not None:
        rows = [row for row in rows if row["loss"] <= max_loss]
        return min(rows, key=lambda row: (row["step_s"], row["loss"]))
    special = {*facts["special"]}
    rows = [
        row for row in rows if row["front"] and special.isdisjoint(row["mlp_layers"])
    ]
    end = max(rows, key=lambda row: row["saved_s"])
    if end["saved_s"] <= 0 or end["loss"] <= 0:
        return end

    def exceeds(row: Mapping[str, Any]) -> tuple[float, float]:
        margin = row["saved_s"] / end["saved_s"] - row["loss"] / end["loss"]
        return round(margin, 9), row["saved_s"]

    return max(rows, key=exceeds)


def as_fast_as(
    study: dict[str, Any], row: Mapping[str, Any], seconds: Seconds
) -> dict[str, Connectivity]:
    """Return the fewest last layers whose step is planned to be at least as fast as a
    row's, by name: with the sides of the study and, where attention is ahead in all
    layers there, also with both sides in these layers alone. Left out where all layers
    are slower.
    """
    total, mask = study["num_hidden_layers"], moe_mask(study)
    kinds = {"last {}": lambda layers: study_connectivity(study, layers)}
    if selecting_option(study) == "mlp":
        kinds = {"MoE blocks of the last {}": kinds["last {}"], "last {}": Connectivity}
    found: dict[str, Connectivity] = {}
    for name, connect in kinds.items():
        for count in range(1, total + 1):
            spec = connect(resolve_layers({"last": count}, mask))
            enough = seconds(spec) <= row["step_s"] * (1 + PRECISION)
            if enough and changes(study, spec):
                # Of all layers, both kinds are the same.
                keys = [section_key(other, mask) for other in found.values()]
                if section_key(spec, mask) not in keys:
                    found[name.format(count)] = spec
                break
    return found


def _front_tables(facts: Mapping[str, Any]) -> list[str]:
    """Format the two tables of a front: its steps, and the selections beside them."""
    metric, rows, steps = facts["metric"], facts["rows"], facts["steps"]
    others = [row for row in facts["metrics"] if row["name"] != metric["name"]]
    unit = metric["unit"].split()[0].removesuffix("s")
    loss = loss_text(metric)

    def cells(row: Mapping[str, Any]) -> list[str]:
        losses = [row["losses"][one["name"]] for one in (metric, *others)]
        saved = f"{1e6 * row['saved_s']:,.1f}"
        return [
            row["name"], saved, f"{row['speed_up']:.3f}", *map(loss_cell, losses)
        ]  # fmt: skip

    header = ["saves, µs", "times as fast", loss, *map(loss_text, others)]
    tables = []
    if steps > 1:
        path = [[*cells(rows[0]), ""]]
        for previous, row in pairwise(rows[:steps]):
            saved, lost = (row[key] - previous[key] for key in ("saved_s", "loss"))
            path.append(
                [*cells(row), f"{1000000.0 * saved / lost:,.0f}" if lost > 0 else ""]
            )
        tables.append(markdown(["ahead", *header, f"µs per {unit}"], path))
    beside = []
    for row in rows[steps:]:
        better = (other for other in rows if _dominates(other, row))
        best = min(better, key=lambda other: float(other["loss"]), default=None)
        least = "on the front"
        if best is not None:
            least = f"{loss_cell(best['losses'][metric['name']])} ({best['name']})"
        beside.append([*cells(row), least])
    if beside:
        tables.append(
            markdown(
                ["beside them", *header, f"least {loss} with as much time saved"],
                beside,
            )
        )
    return tables


def loss_cell(loss: Mapping[str, Any]) -> str:
    """Format a loss; one that was not measured begins with what predicts it: a `sum` of
    prices, or prices with those of `pairs`.
    """
    if not loss["measured"]:
        return f"{'pairs' if loss['pairs'] else 'sum'} {nats(loss['value'])}"
    return "0" if loss["value"] == loss["stderr"] == 0 else number_text({**loss})


def front_text(facts: Mapping[str, Any]) -> list[str]:
    """Format a front as lines: its two tables, and the sentence that chooses."""
    lines: list[str] = []
    for table in _front_tables(facts):
        lines += [table, ""]
    chosen, end = facts["chosen"], max(facts["rows"], key=lambda row: row["saved_s"])
    if not end["saved_s"] > 0:
        return [*lines, "Nothing here saves time: the regular model is chosen."]
    if not chosen["saved_s"] > 0:
        return [*lines, "Chosen: the regular model: what saves time loses more."]
    share = chosen["saved_s"] / end["saved_s"]
    loss = loss_cell(chosen["losses"][facts["metric"]["name"]])
    name = chosen["name"]
    if chosen in facts["rows"][: facts["steps"]]:
        name = f"the rows down to {name}"
    return [
        *lines,
        f"Chosen: {name}: {share:.0%} of the time that can be saved, at"
        f" {loss_text(facts['metric'])} {loss}.",
    ]


def chosen_text(row: Mapping[str, Any]) -> list[str]:
    """Format the connectivity of a chosen row: as options, and as lines of a recipe."""
    return [
        section_options(row["connectivity"]),
        "",
        *section_text(row["connectivity"]),
    ]
