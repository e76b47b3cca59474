"""The two-stage sweep of the paper (5.1): batch size at one learning rate, then
learning rate at the best batch size.

Every candidate trains the same number of steps from the same weights on the same data
order, and the lowest mean training loss over the last steps wins, or the best score of
early stopping at the last step (`sweep.choose_by`). The learning rate of
the first stage was measured at the best batch size, too, so it counts in the choice. A
finished candidate is never trained again.

The readers of a finished training's logs are also here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import read_sealed, write_sealed
from fcsd.base.text import markdown, plus_minus
from fcsd.base.writing import write_json, write_text
from fcsd.parallel.launch import ALONE, Ranks
from fcsd.training.config import SweepConfig, TrainConfig
from fcsd.training.early_stopping import EarlyStopper
from fcsd.training.history import read_history


@dataclass(frozen=True)
class Candidate:
    """One run of the sweep; `folder` is its name within the sweep's folder."""

    stage: str  # the key that varies: "batch_size_tokens" or "learning_rate"
    batch_size_tokens: int
    learning_rate: float

    @property
    def folder(self) -> str:
        return f"batch_size_tokens={self.batch_size_tokens},learning_rate={self.learning_rate}"

    def train(self, base: TrainConfig, sweep: SweepConfig) -> TrainConfig:
        """Return the training section of this candidate: `base` with its batch size and
        rate, the sweep's steps, and every step logged.
        """
        changes = {
            "batch_size_tokens": self.batch_size_tokens,
            "learning_rate": self.learning_rate,
            "max_steps": sweep.steps_of(self.batch_size_tokens, base),
            "warmup_steps": sweep.steps_of(
                self.batch_size_tokens, base, sweep.warmup_steps
            ),
            "logging_steps": 1,
        }
        return TrainConfig.model_validate(base.model_dump() | changes)


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the best score, or the lowest loss where there are no scores,
    the first among equal ones; UserError where no row has a finite loss.
    """
    finite = [row for row in rows if row["loss"] is not None]
    if not finite:
        raise UserError(
            "sweep: no candidate ended with a finite loss; try smaller learning rates"
        )

    def order(row: dict[str, Any]) -> float:
        if "score" not in row:
            return float(row["loss"])
        return float(-row["score"] if row["higher_is_better"] else row["score"])

    return min(finite, key=order)


def last_score(stopper: EarlyStopper) -> dict[str, Any]:
    """Return the score of the weights with which a candidate ended."""
    point = stopper.points[-1]
    return {
        "score": point["score"],
        "stderr": point["stderr"],
        "higher_is_better": stopper.higher_is_better,
    }


def run_sweep(
    sweep: SweepConfig,
    base: TrainConfig,
    folder: Path,
    run_candidate: Callable[[Candidate, TrainConfig, Path], dict[str, Any] | None],
    *,
    remove_checkpoints: Callable[[Path], None],
    metric: str = "loss",
    identity: str = "",
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Run the missing candidates of both stages and write `sweep.json` and `sweep.md`
    to `folder`; all ranks call this.

    run_candidate(candidate, train, folder) trains, writes `history.jsonl` and returns
    `last_score`, or None where the loss decides; remove_checkpoints(folder) is called
    when its result is on the disk. metric: the name of the score. identity: of the
    stage, whose results are not read in any other. Returns
    `batch_size_tokens`, `learning_rate` and `loss` of the choice, and `candidates`.
    """

    def measured(
        stage: str, batch_size_tokens: int, learning_rate: float
    ) -> dict[str, Any]:
        candidate = Candidate(stage, batch_size_tokens, learning_rate)
        candidate_folder = folder / candidate.folder
        owner = [identity, candidate.folder]
        # Only the first rank looks at the disk, so that all ranks take the same branch.
        if not ranks.from_first(lambda: (candidate_folder / "result.json").is_file()):
            train, diverged = candidate.train(base, sweep), False
            scored: dict[str, Any] | None = None
            try:
                scored = run_candidate(candidate, train, candidate_folder)
            except UserError as error:
                if "not finite" not in str(error):
                    raise
                # A candidate that diverges loses; it does not end the sweep.
                diverged = True
            last_steps = sweep.steps_of(batch_size_tokens, base, sweep.last_steps)
            # Written when the run has ended, so a candidate without it is run again.
            ranks.from_first(
                lambda: _note_losses(
                    candidate_folder,
                    0 if diverged else train.max_steps,
                    last_steps,
                    scored or {},
                    owner,
                )
            )
        remove_checkpoints(candidate_folder)
        advice = f"remove {candidate_folder} to train this candidate again"
        found = ranks.from_first(
            lambda: read_sealed(candidate_folder / "result.json", advice, owner)
        )
        # a loss of null means that it diverged
        return asdict(candidate) | found | {"folder": candidate.folder}

    first = [
        measured("batch_size_tokens", size, base.learning_rate)
        for size in sweep.batch_size_tokens
    ]
    # The second stage repeats the best candidate of the first if its rate is listed;
    # its result is then on the disk already.
    batch_size_tokens = best(first)["batch_size_tokens"]
    second = [
        measured("learning_rate", batch_size_tokens, rate)
        for rate in sweep.learning_rate
    ]
    candidates = first + second
    # The first stage may have measured a better rate than all of the second.
    choice = best(
        [row for row in candidates if row["batch_size_tokens"] == batch_size_tokens]
    )
    result = {
        "batch_size_tokens": batch_size_tokens,
        "learning_rate": choice["learning_rate"],
        "loss": choice["loss"],
        "metric": metric,
        "steps": sweep.steps,
        "equal": sweep.equal,
        "last_steps": sweep.last_steps,
        "candidates": candidates,
    }

    def write() -> None:
        write_json(folder / "sweep.json", result)
        write_text(folder / "sweep.md", sweep_table(result))

    ranks.from_first(write)
    return result


def _note_losses(
    folder: Path,
    num_steps: int,
    last_steps: int,
    scored: dict[str, Any],
    owner: list[str],
) -> None:
    """Write `result.json` of a candidate that was trained for num_steps; 0: diverged."""
    points = read_history(folder) if num_steps else []
    # A skipped step has no point, so a run whose last step has none was diverging.
    losses = [point["loss"] for point in points if points[-1]["step"] == num_steps]
    # NaN if any of them is, so that a diverged run never wins.
    loss = fmean(losses[-last_steps:]) if losses else math.nan
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(
        folder / "result.json",
        {"loss": loss if math.isfinite(loss) else None} | scored,
        owner,
    )


def figure_text(result: Mapping[str, Any]) -> str:
    """Name what the candidates are compared by: `mean training loss over the last 100
    steps`, `own_text_kl after the last step`.
    """
    metric = result.get("metric", "loss").partition(",")[0]
    if metric != "loss":
        return f"{metric} after the last step"
    of_batch = " of train.batch_size_tokens"
    if result.get("equal", "steps") == "steps":
        of_batch = ""
    return f"mean training loss over the last {result['last_steps']} steps{of_batch}"


def figure_of(row: Mapping[str, Any]) -> float | None:
    """Return what a candidate is compared by; None where it diverged."""
    if row["loss"] is None:
        return None
    return float(row.get("score", row["loss"]))


def choice_text(result: Mapping[str, Any]) -> str:
    """Describe a sweep's choice: `chosen: 131072 tokens, learning rate 4e-05`."""
    return (
        f"chosen: {result['batch_size_tokens']} tokens, learning rate"
        f" {result['learning_rate']:g}"
    )


def tried(result: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the candidates that were compared for the choice of one value: all batch
    sizes of the first stage, or all learning rates at the best batch size; smallest
    first.
    """
    rows = {}
    for row in result["candidates"]:
        if key == "batch_size_tokens":
            is_compared = row["stage"] == key
        else:
            is_compared = row["batch_size_tokens"] == result["batch_size_tokens"]
        if is_compared:
            rows[row[key]] = row
    return [rows[value] for value in sorted(rows)]


def edges(result: Mapping[str, Any]) -> list[str]:
    """Return a warning for each of the two values that is best at an end of those
    tried: a better one may lie beyond.
    """
    # Candidates that diverged count as tried, and thus as an end.
    warnings = []
    for key, label in (
        ("batch_size_tokens", "batch size"),
        ("learning_rate", "learning rate"),
    ):
        values = [row[key] for row in tried(result, key)]
        value = result[key]
        if len(values) < 2 or value not in (values[0], values[-1]):
            continue
        if value == values[0]:
            superlative, comparative = "smallest", "smaller"
        else:
            superlative, comparative = "largest", "larger"
        value_text = value if isinstance(value, int) else f"{value:g}"
        warnings.append(
            f"warning: the best {label}, {value_text}, is the {superlative} of those"
            f" tried; a {comparative} one may be better: add one to sweep.{key} (with"
            " another output_dir) before the long training."
        )
    return warnings


def sweep_table(result: dict[str, Any]) -> str:
    """Format all candidates as a Markdown table, with the choice marked."""
    figure, name = figure_text(result), result["metric"].partition(",")[0]
    rows = []
    for row in result["candidates"]:
        mark = ""
        if row["batch_size_tokens"] == result["batch_size_tokens"]:
            if row["learning_rate"] == result["learning_rate"]:
                mark = "chosen"
            elif row["stage"] == "batch_size_tokens":
                mark = "best batch size"
        loss = "diverged"
        if "score" in row and row["loss"] is not None:
            loss = plus_minus(row["score"], row["stderr"])
        elif row["loss"] is not None:
            loss = f"{row['loss']:.5f}"
        batch_size, rate = str(row["batch_size_tokens"]), f"{row['learning_rate']:g}"
        rows.append([row["stage"], batch_size, rate, loss, mark])
    header = ["stage", "batch size (tokens)", "learning rate", name, ""]
    lines = [
        f"{figure[0].upper()}{figure[1:]}, {result['steps']} in all.",
        "",
        markdown(header, rows),
        *(f"\n{warning}" for warning in edges(result)),
    ]
    return "\n".join(lines) + "\n"
