from pathlib import Path
from typing import Any, get_args

from fcsd.base.writing import write_json
from fcsd.evaluation import grade_file
from fcsd.evaluation.config import GROUPS, KINDS, TaskConfig
from fcsd.evaluation.results import NUMBERS, read_result
from fcsd.evaluation.runner import STEPS
from fcsd.pipeline.tiny import rehearse
from tests.evaluation.test_scores import result
from tests.support import user_error


def test_every_kind_of_row_is_in_the_tables_of_kinds() -> None:
    rows = get_args(get_args(TaskConfig)[0])
    kinds = [get_args(row.model_fields["kind"].annotation)[0] for row in rows]
    assert sorted(kinds) == sorted(KINDS) == sorted(STEPS) == sorted(NUMBERS)
    in_files = {**grade_file._GRADED, **grade_file._NOT_IN_A_FILE}
    assert sorted(kinds) == sorted(in_files) == sorted(rehearse._ROW_MAKERS)
    assert {kind.group for kind in KINDS.values()} == set(GROUPS)


def test_a_result_with_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    of_task: dict[str, Any] = {
        "kind": "ranking", "value": 0.5, "stderr": None, "num_items": 1, "dataset": "mine",
    }  # fmt: skip
    whole = result({"mine": [0.5]}, **of_task)["result"] | {"schema_version": 1}
    write_json(tmp_path / "results.json", whole)
    with user_error(
        r"tasks\.mine\.kind: no kind of task; allowed: likelihood, generation, code, "
        "own_text, got 'ranking'; evaluate again"
    ):
        read_result(tmp_path)
