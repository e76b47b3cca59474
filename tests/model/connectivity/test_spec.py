"""Selections of layers and the connectivity's two sides."""

import subprocess
import sys

import pytest

from fcsd.base.errors import UserError
from fcsd.model.connectivity import Connectivity, parse_selection, resolve_layers
from tests.support import user_error

MASK = [False, True, True, False, True, True, True, True]  # 8 layers, 0 and 3 dense


@pytest.mark.parametrize(
    ("given", "normal", "layers"),
    [
        ("all", "all", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("moe", "moe", [1, 2, 4, 5, 6, 7]),
        ("none", "none", []),
        ("first:3", {"first": 3}, [0, 1, 2]),
        ("last: 2", {"last": 2}, [6, 7]),
        ("last:75%", {"last": "75%"}, [2, 3, 4, 5, 6, 7]),
        ("first:12.5%", {"first": "12.5%"}, [0]),
        ("first:100%", {"first": "100%"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"first": 8}, {"first": 8}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"last": "50 %"}, {"last": "50%"}, [4, 5, 6, 7]),
        ("5,0,2", [0, 2, 5], [0, 2, 5]),
        ("1-5", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        ("0, 2-4", [0, 2, 3, 4], [0, 2, 3, 4]),
        ([7, 0], [0, 7], [0, 7]),
        ((3,), [3], [3]),
    ],
)
def test_a_selection_has_a_normal_form_and_names_layers(given, normal, layers):
    assert parse_selection(given) == normal
    assert parse_selection(normal) == normal
    assert resolve_layers(given, MASK) == layers


@pytest.mark.parametrize(
    ("percent", "layers", "expected"),
    [("50%", 7, 4), ("50%", 5, 3), ("10%", 26, 3), ("75%", 26, 20)],
)
def test_a_percentage_rounds_to_the_nearest_layer_and_halves_up(
    percent, layers, expected
):
    assert len(resolve_layers({"first": percent}, [True] * layers)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "'' is not a selection; allowed: all, moe, none"),
        ("half", "'half' is not a selection"),
        ("last:", "'last:' is not a selection"),
        ("0,,2", "'0,,2' is not a selection"),
        ("-1", "'-1' is not a selection"),
        ("5-1", "'5-1' runs backwards; write 1-5"),
        ("1-99999", "more than 10000 layers"),
        ("first:0", "must be at least 1, got 0; for no layers use none"),
        ("last:-2", "must be at least 1, got -2"),
        ("last:0%", "above 0% and at most 100%, got 0%"),
        ("last:101%", "at most 100%, got 101%"),
        ("first:x", "must be a number of layers or a percentage"),
        ({"first": 2.5}, "must be a number of layers or a percentage"),
        ({"first": True}, "must be a number of layers or a percentage"),
        ({"middle": 2}, "exactly one key, first or last"),
        ({"first": 1, "last": 1}, "exactly one key, first or last"),
        ([], "the list of indices is empty; for no layers use none"),
        ([0, 0], "index 0 is given twice"),
        ("1,0-2", "index 1 is given twice"),
        ([-1], "index -1 is negative; for the last layers use last:N"),
        ([1.0], "indices must be whole numbers"),
        ([True], "indices must be whole numbers"),
        (3, "3 is ambiguous; write first:3, last:3 or the list [3]"),
        (None, "None is not a selection"),
    ],
)
def test_a_wrong_selection_says_what_is_allowed(given, message):
    with pytest.raises(UserError) as caught:
        parse_selection(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([8], "index 8 is out of range: the model has 8 decoder layers, 0 to 7"),
        ({"last": 9}, "last:9: the model has only 8 decoder layers"),
        ({"first": "5%"}, "first:5% of 8 layers selects no layer"),
    ],
)
def test_a_selection_beyond_the_model_is_refused(given, message):
    with pytest.raises(UserError) as caught:
        resolve_layers(given, MASK)
    assert message in str(caught.value)


def test_the_sides_are_checked_and_the_regular_connectivity_is_not_a_conversion():
    with user_error(r"^attention: must be 'partial' or 'full', got 'Partial'"):
        Connectivity("all", attention="Partial")  # type: ignore[arg-type]
    with user_error(r"^mlp: 'late' is not a selection; allowed: .*outdated \(all"):
        Connectivity("all", mlp="late")
    with user_error("with attention: full a layer whose MLP side"):
        Connectivity("all", "full", "last:2")
    with user_error("is the regular connectivity"):
        Connectivity("all", "full", "full")
    assert Connectivity("none", "full", "full").field(MASK)["layers"] == []


def test_a_connectivity_survives_its_config_field():
    for connectivity in (
        Connectivity("moe"),
        Connectivity("none"),
        Connectivity({"last": 2}, mlp="full"),
        Connectivity("all", mlp=[0, 2]),
    ):
        field = connectivity.field(MASK)
        read = Connectivity.from_field(field)
        assert read.field(MASK) == field
        assert (read.attention, read.mlp) == (connectivity.attention, connectivity.mlp)


@pytest.mark.parametrize(
    ("layers", "mlp", "written"),
    [
        ("all", "last:2", [len(MASK) - 2, len(MASK) - 1]),
        ("last:2", "all", "outdated"),
        ("last:2", f"0-{len(MASK) - 1}", None),
        ("all", "none", "full"),
        ("first:3", "first:2", [0, 1]),
        ("first:3", "1,2", [1, 2]),
        ("none", "last:2", "outdated"),
        ("none", "0", None),
    ],
)
def test_a_selection_of_outdated_mlp_sides_is_written_as_indices_or_as_a_word(
    layers, mlp, written
):
    connectivity = Connectivity(layers, mlp=mlp)
    if written is None:
        with user_error("mlp: layer 0 is not rewired; select it"):
            connectivity.field(MASK)
        return
    assert connectivity.field(MASK)["mlp"] == written


def test_a_rule_of_mlp_sides_that_no_rewired_layer_meets_is_refused():
    with user_error("mlp: layer 0 is not rewired; select it with `layers`, too"):
        Connectivity("last:2", mlp="first:2").field(MASK)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"version": 2, "layers": [], "attention": "partial", "mlp": "outdated"}, "reads version 1, got 2"),
        (None, "reads version 1, got None"),
        ({"version": 1, "layers": [0]}, "needs exactly the keys version, layers"),
        ({"version": 1, "layers": "all", "attention": "partial", "mlp": "outdated"}, "layers (a list)"),
        ({"version": 1, "layers": [-1], "attention": "partial", "mlp": "outdated"}, "index -1 is negative"),
    ],
)  # fmt: skip
def test_a_malformed_config_field_is_refused(field, message):
    with pytest.raises(UserError) as caught:
        Connectivity.from_field(field, "x/config.json")
    assert message in str(caught.value)


def test_specs_and_families_are_read_without_torch():
    code = (
        "import sys, fcsd.model.connectivity, fcsd.model.families\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
