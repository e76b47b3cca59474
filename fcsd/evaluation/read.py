"""Read results, by whichever program wrote them."""

from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.evaluation.lm_eval.read import read_lm_eval
from fcsd.evaluation.results import Samples, read_result
from fcsd.evaluation.scores import Result


def read_any_result(folder: Path, like: Result | None = None) -> tuple[Result, Samples]:
    """Read the results in a folder of `fcsd evaluate`, or of plain lm-eval; both in the
    format of fcsd.

    like: a result with which this one will be compared; its metrics are chosen where
    lm-eval has several.

    Raises:
        UserError: as `read_result` and `read_lm_eval`.
    """
    files = [*folder.glob("results_*.json"), *folder.glob("*/results_*.json")]
    # An unfinished evaluation of ours: `read_result` raises the error that says so.
    unfinished = not files and (folder / "stage.json").is_file()
    if (folder / "results.json").is_file() or not folder.is_dir() or unfinished:
        return read_result(folder)
    if not files:
        raise UserError(
            f"{folder}: holds no result of `fcsd evaluate` (results.json) or of lm_eval"
            " (results_*.json)"
        )
    return read_lm_eval(folder, files, like)
