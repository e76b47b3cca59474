"""An objective is defined in one place, from which all properties of a loss follow."""

import dataclasses

import pytest

from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.losses.objectives import MEASURES, OBJECTIVES
from tests.losses import FORMULAS, objective_of
from tests.support import ROOT


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_a_measure_and_keys_that_are_arguments_with_help(
    name: str,
) -> None:
    kind = OBJECTIVES[name]
    assert objective_of(name).logged in MEASURES
    assert FORMULAS.keys() == MEASURES.keys()
    # a model card knows how it was trained
    assert kind.has_teacher != (name in kind.trained)
    page = (ROOT / "docs" / "distil.md").read_text(encoding="utf-8")
    assert f"`{name}`" in page and f'"{name}"' in (FCSDConfig.__doc__ or "")
    arguments = {field.name: field.metadata for field in dataclasses.fields(FCSDConfig)}
    keys = kind.model_fields.keys() - {"name"}
    assert keys <= arguments.keys()
    assert all(len(arguments[key]["help"]) > 10 for key in keys)
