"""Write one HTML file that shows the answers of the original and the converted models
to any item side by side.

The file needs no network and no other file: it holds the data gzipped by task, so that
a browser unpacks only the tasks that are opened. Text of models and data sets reaches
the page through `textContent` only, and the page's policy allows no script but its own.

It opens on the distilled model, with one line for each task, and marks the words in
which two written answers differ.
"""

import base64
import gzip
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fcsd.base.writing import write_text
from fcsd.evaluation.scores import Comparison, Row, Sample
from fcsd.recipe.layout import MAIN
from fcsd.report.verdict import SIDES, mark, p_text, quick_look, unit_of


def write_items(
    evaluated: Mapping[str, Mapping[str, Any]],
    comparisons: Mapping[str, Comparison],
    path: Path,
) -> None:
    """Write the page of evaluated models and their comparisons.

    evaluated: name -> {"result": …, "samples": …}, the original first.
    """
    names = list(evaluated)
    tasks = list(comparisons[names[1]]["tasks"])
    index = {
        "models": names,
        "first": MAIN if MAIN in names[1:] else names[1],
        "note": quick_look(
            *(comparison["limit"] for comparison in comparisons.values())
        ),
        "tasks": [
            {
                "name": task,
                "metric": evaluated[names[0]]["result"]["tasks"][task]["metric"],
                "facts": [
                    "",
                    *(_facts(comparisons[name]["tasks"][task]) for name in names[1:]),
                ],
                "overview": [
                    [],
                    *(
                        _overview(comparisons[name]["tasks"][task])
                        for name in names[1:]
                    ),
                ],
            }
            for task in tasks
        ],
    }
    blocks = [f'<script type="application/json" id="index">{_json(index)}</script>']
    for position, task in enumerate(tasks):
        rows = _items([evaluated[name]["samples"][task] for name in names])
        # A fixed time stamp gives the same bytes for the same results.
        packed = gzip.compress(_valid(rows), 6, mtime=0)
        text = base64.b64encode(packed).decode("ascii")
        blocks.append(f'<script type="text/plain" id="task-{position}">{text}</script>')
    folder = files("fcsd.report")
    style, script = (
        folder.joinpath(f"items.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    policy = (
        f"default-src 'none'; script-src '{_sha(script)}'; style-src '{_sha(style)}';"
        " base-uri 'none'; form-action 'none'"
    )
    page = folder.joinpath("items.html").read_text(encoding="utf-8")
    parts = {
        "@POLICY@": html.escape(policy),
        "@STYLE@": style,
        "@SCRIPT@": script,
        "@DATA@": "\n".join(blocks),
    }
    # The data comes last, so that no key is replaced in the text of models or data
    # sets.
    for key, value in parts.items():
        page = page.replace(key, value)
    write_text(path, page)


def _sha(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(value: Any) -> str:
    """Format JSON that cannot end the script element that contains it."""
    text = _valid(value).decode("utf-8")
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _valid(value: Any) -> bytes:
    """Encode JSON as UTF-8; lone surrogates, which models do produce, become question
    marks.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "replace"
    )


def _facts(row: Row) -> str:
    unit = unit_of(row)
    return (
        f"{row['metric'].removesuffix(',none')}, {row['num_fewshot']}-shot,"
        f" {row['num_items']} items:"
        f" {unit.value(row['original'])}{mark(row, 'original')} →"
        f" {unit.value(row['converted'])}{mark(row, 'converted')}, delta"
        f" {unit.with_error(unit.signed(row['delta']), row['delta_stderr'])}, gained"
        f" {row['gained']}, lost {row['lost']}, p {p_text(row['p_value'])}:"
        f" {row['verdict']}"
    )


def _overview(row: Row) -> list[str]:
    """Return the cells of a task: both scores, delta, gained, lost and verdict."""
    unit = unit_of(row)
    scores = [
        *(f"{unit.value(row[side])}{mark(row, side)}" for side in SIDES),
        unit.signed(row["delta"]),
    ]
    return [*scores, str(row["gained"]), str(row["lost"]), row["verdict"]]


def _items(models: Sequence[Sequence[Sample]]) -> list[dict[str, Any]]:
    """Build one row for each item, in the order of the original, with all answers."""
    answers_by_id = [
        {sample["doc_id"]: sample for sample in samples} for samples in models
    ]
    rows = []
    for sample in models[0]:
        row = {
            "id": sample["doc_id"],
            "answers": [
                _answer(answers[sample["doc_id"]]) for answers in answers_by_id
            ],
        }
        rows.append(
            row
            | {
                key: sample[key]
                for key in ("prompt", "choices", "target")
                if sample.get(key)
            }
        )
    return rows


def _answer(sample: Sample) -> dict[str, Any]:
    texts = sample.get("completions") or (
        [sample["completion"]] if "completion" in sample else []
    )
    note = ", ".join(sample.get("outcomes") or [sample.get("outcome") or ""])
    score = sample["score"]
    shown = {}
    if "greedy" in sample:
        # Own text: the score is a divergence, of which less is better.
        texts = [*texts, sample["greedy"]]
        note = "a sample, then the likeliest text"
        shown, score = {"shown": f"{score:.3f} nats a token"}, 0.0 - score
    answer = {
        **shown,
        "score": score,
        "texts": list(texts),
        "note": ": ".join(word for word in (note, sample.get("message")) if word),
    }
    if "loglikelihoods" in sample:
        values = sample["loglikelihoods"]
        answer["loglikelihoods"] = [
            # JSON has no infinity and no NaN.
            value if math.isfinite(value) else None
            for value in values
        ]
    return answer
