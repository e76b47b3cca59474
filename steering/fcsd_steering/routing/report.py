"""Format the routing study as a page of Markdown that also reads well in a terminal."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fcsd.base.text import markdown, nats

_PLACEMENTS = {
    "contiguous": "in order",
    "balanced": "by load",
    "topology_aware": "by traffic and links",
}


def report(result: Mapping[str, Any]) -> str:
    """Return the page for the contents of `routing.json`."""
    first = result["models"][0]
    where = ", ".join(result["endpoints"] or []) or "no links given, so no times"
    parts = [
        f"# Routing of {first['name']}",
        (
            f"{first['num_tokens']} tokens in {result['num_batches']} batches;"
            f" {len(first['layers'])} MoE layers, top {first['top_k']} of"
            f" {first['num_experts']} experts; {result['num_endpoints']} endpoints"
            f" ({where}). Batch j is at endpoint j mod {result['num_endpoints']};"
            " experts are placed in order unless a table says otherwise."
        ),
        "## Loads\n\n" + _loads(result["models"]),
        "![share of each expert](loads.png)",
    ]
    # Only a study with --against compares two models.
    if (shift := result["comparison"]) is not None:
        parts += [_shift(result, shift), "![what changed by layer](shift.png)"]
    parts += [
        "## Traffic\n\n"
        + "\n\n".join(
            _traffic(facts, result["num_endpoints"]) for facts in result["models"]
        ),
        "![traffic matrix](traffic.png)",
        "## Capacity\n\nAn expert accepts factor × K × tokens / experts pairs of a"
        " batch; pairs beyond that are dropped and contribute zero. Times are those"
        " of the remaining pairs.\n\n"
        + "\n\n".join(_capacity(facts) for facts in result["models"]),
    ]
    # Without links there are no times to compare placements by.
    if first["placements"]:
        parts.append(
            "## Placement\n\nDecided on the first half of the batches, timed on the"
            " second: T_A2A of one MoE layer (dispatch, combine and counts), mean and"
            " 95th percentile.\n\n" + _placement(result["models"])
        )
    return "\n\n".join(parts) + "\n"


def _loads(models: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            facts["name"],
            f"{facts['cv']:.3f}",
            f"{facts['avg_layer_cv']:.3f}",
            f"{fmean(facts['switch_balance_loss']):.3f}",
            *_times(facts),
        ]
        for facts in models
    ]
    head = ["model", "cv", "avg_layer_cv", "Switch balance loss"]
    text = markdown([*head, *_time_heads(models[0])], rows)
    return f"{text}\n\nThe Switch loss is 1 for an even routing."


def _shift(result: Mapping[str, Any], shift: Mapping[str, Any]) -> str:
    # The first model is the one studied, the second the one it is compared with.
    model, base = (facts["name"] for facts in result["models"])
    rows = [
        [str(layer), f"{moved:.2%}", nats(kl), f"{cv_before:.3f}", f"{cv_now:.3f}"]
        for layer, moved, kl, cv_before, cv_now in zip(
            result["models"][0]["layers"],
            shift["layer_moved"],
            shift["layer_kl"],
            result["models"][1]["layer_cv"],
            result["models"][0]["layer_cv"],
            strict=True,
        )
    ]
    return (
        f"## What changed against {base}\n\n{shift['routes_moved']:.2%} of the (token,"
        f" expert) pairs of {base} are not among those of {model}, on the same tokens."
        f" KL of the experts' loads {nats(shift['kl'])}, by layer and averaged"
        f" {nats(shift['avg_layer_kl'])} nats (epsilon {result['epsilon']:g}"
        " pairs).\n\n"
        + markdown(["layer", "routes moved", "KL", "cv before", "cv"], rows)
        + "\n\nAfter drops:\n\n"
        + markdown(
            ["capacity factor", "KL", "avg_layer_kl"],
            [
                [f"{r['factor']:g}", nats(r["kl"]), nats(r["avg_layer_kl"])]
                for r in shift["capacity"]
            ],
        )
    )


def _traffic(facts: Mapping[str, Any], num_endpoints: int) -> str:
    # Shares of all pairs, with those that stay at their endpoint on the diagonal.
    total = sum(map(sum, facts["traffic"]))
    rows = [
        [f"from {u}", *[f"{pairs / total:.2%}" for pairs in row]]
        for u, row in enumerate(facts["traffic"])
    ]
    table = markdown(
        ["share of all pairs", *[f"to {v}" for v in range(num_endpoints)]], rows
    )
    return f"{facts['name']}:\n\n{table}"


def _capacity(facts: Mapping[str, Any]) -> str:
    # The first row is without a limit, to compare with.
    rows = [
        [
            "none",
            "0.0%",
            "0.0%",
            "",
            f"{facts['cv']:.3f}",
            f"{facts['avg_layer_cv']:.3f}",
            *_times(facts),
        ]
    ]
    rows += [
        [
            f"{row['factor']:g}",
            *[f"{row[name]:.1%}" for name in ("dropped", "without_expert", "padding")],
            f"{row['cv']:.3f}",
            f"{row['avg_layer_cv']:.3f}",
            *_times(row),
        ]
        for row in facts["capacity"]
    ]
    head = [
        "capacity factor",
        "pairs dropped",
        "tokens without expert",
        "padding",
        "cv",
        "avg_layer_cv",
    ]
    return f"{facts['name']}:\n\n{markdown([*head, *_time_heads(facts)], rows)}"


def _placement(models: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for facts in models:
        in_order_ms = facts["placements"]["contiguous"]["mean_ms"]
        for name, words in _PLACEMENTS.items():
            placement = facts["placements"][name]
            rows.append(
                [
                    facts["name"],
                    words,
                    *_times(placement),
                    f"{placement['mean_ms'] / in_order_ms - 1:+.1%}",
                ]
            )
    return markdown(
        ["model", "experts placed", *_time_heads(models[0]), "mean against in order"],
        rows,
        left=2,
    )


def _times(row: Mapping[str, Any]) -> list[str]:
    return [f"{row[name]:.3f}" for name in ("mean_ms", "p95_ms") if name in row]


def _time_heads(row: Mapping[str, Any]) -> list[str]:
    return ["T_A2A (ms)", "p95 (ms)"] if "mean_ms" in row else []
