"""The command line and the keys of recipes and suites are frozen: what users have
written keeps its meaning.
"""

import difflib

import pytest

from tests.reference.surface import FILES, written


@pytest.mark.parametrize("name", FILES)
def test_the_surface_changes_only_on_purpose(name: str) -> None:
    before, now = FILES[name].read_text(), written(name)
    change = "\n".join(
        difflib.unified_diff(
            before.splitlines(), now.splitlines(), "committed", "now", n=0, lineterm=""
        )
    )
    assert before == now, (
        f"what users type has changed:\n{change}\nIf that is meant: `python -m"
        f" tests.reference.surface` writes {FILES[name].name}, and CHANGELOG.md tells"
        " them; where a key that was there before changes, SCHEMA_VERSION in"
        " fcsd/base/artifact.py is raised"
    )


def test_types_bounds_choices_and_defaults_are_part_of_it() -> None:
    text = {name: path.read_text() for name, path in FILES.items()}
    for line in (
        '"train.learning_rate": "float > 0 = 2e-05"',
        '"objective[kl+l2].l2_coefficient": "float > 0, required"',
        '"objective[sft].freeze_routers": "bool = false"',
        '"early_stopping[a task].suite": "str, required"',
        '"tasks.0[likelihood].num_fewshot": "int >= 0 = 0"',
        '"evaluation.batch_size": "int > 0 | \'auto\' = 16"',
        '"data.train.0.columns": ',
    ):
        assert line in text["recipe_keys"], line
    for line in (
        '"--batch-size": "type ',
        "default 16",
        "choices ['response', 'all'], default response",
    ):
        assert line in text["command_line"], line
