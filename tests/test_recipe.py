"""Recipes: strict, complete, and clear about what is wrong."""

from pathlib import Path

import pytest
import yaml

from fcsd.errors import UserError
from fcsd.paths import data_dir
from fcsd.recipe import Recipe, load_recipe, to_yaml

MINIMAL = {
    "name": "x",
    "output_dir": "runs/x",
    "model": {"path": "m"},
    "data": {"train": [{"path": "d.jsonl"}]},
}


def write(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return path


@pytest.mark.parametrize("path", sorted(data_dir("recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    for name in recipe.variants:
        recipe.variant(name)


def test_the_printed_recipe_is_complete_and_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    printed = to_yaml(recipe.dump())
    assert load_recipe(write(tmp_path, printed)) == recipe
    assert "warmup_steps: 1000" in printed  # a default that the file does not name
    assert "batch_size_tokens: 131072" in printed


def test_numbers_in_exponent_form_without_a_dot_are_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL) + "train: {learning_rate: 2e-5}\n"
    assert load_recipe(write(tmp_path, text)).train.learning_rate == 2e-5


def test_set_replaces_one_value_by_its_dotted_key(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe(
        path, ["train.learning_rate=4e-5", "connectivity.layers={last: 50%}", "data.train.0.split=dev"]
    )
    assert recipe.train.learning_rate == 4e-5
    assert recipe.connectivity.layers == {"last": "50%"}
    assert recipe.data.train[0].split == "dev"
    assert (
        load_recipe(
            path, ["early_stopping={dataset: a/b}", "early_stopping.patience=3"]
        ).early_stopping.patience
        == 3
    )


def test_a_variant_replaces_only_its_keys(tmp_path: Path) -> None:
    value = MINIMAL | {"variants": {"sft": {"objective.name": "sft", "train.max_steps": 2500}}, "seed": 3}
    recipe = load_recipe(write(tmp_path, value))
    variant = recipe.variant("sft")
    assert variant.objective.name == "sft" and variant.train.max_steps == 2500 and variant.seed == 3
    expected = recipe.dump() | {"variants": {}}
    expected["objective"]["name"], expected["train"]["max_steps"] = "sft", 2500
    assert variant == Recipe.model_validate(expected)


WRONG = [
    ({"train": {"temprature": 1}}, r"x\.yaml: train\.temprature: unknown key"),
    ({"train": {"learnin_rate": 1}}, r"train\.learnin_rate: unknown key; did you mean 'learning_rate'\?"),
    (
        {"data": {"train": [{"pth": "d"}]}},
        r"data\.train\.0\.(pth: unknown key; did you mean 'path'|path: is required)",
    ),
    ({"train": {"max_steps": 0}}, r"train\.max_steps: .*greater than 0, got 0"),
    ({"train": {"max_steps": 10, "warmup_steps": 11}}, r"warmup_steps \(11\) is more than max_steps \(10\)"),
    ({"train": {"lr_scheduler_type": "cosine_with_min_lr"}}, r"min_lr_rate is needed"),
    (
        {"objective": {"name": "kl", "l2_coefficient": 0.1}},
        r"l2_coefficient is needed for objective 'kl\+l2' and for no other",
    ),
    ({"objective": {"name": "kl+l2"}}, r"l2_coefficient is needed"),
    (
        {"connectivity": {"layers": "some"}},
        r"connectivity.*'some' is not a selection; allowed: all, moe, none",
    ),
    ({"connectivity": {"layers": []}}, r"connectivity"),
    (
        {"data": {"train": [{"path": "d", "columns": {"prompt": "q"}}]}},
        r"columns must name 'messages', or 'text', or 'prompt' and",
    ),
    ({"data": {"train": []}}, r"data\.train: .*at least 1 item"),
    ({"model": {}}, r"model\.path is required"),
    ({"name": "a/b"}, r"name: .*pattern"),
    (
        {"variants": {"v": {"model.path": "other"}}},
        r"variants\.v: model\.path: a variant is another distillation of the same model",
    ),
    (
        {"variants": {"v": {"train.lerning_rate": 1}}},
        r"variants\.v: train\.lerning_rate: unknown key; did you mean 'learning_rate'",
    ),
    (
        {"pretrain": {"config": {}, "tokenizer": "t", "data": MINIMAL["data"], "train": {}}, "model": {}},
        r"model_type is required",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(write(tmp_path, MINIMAL | change))
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such file"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match=r"is a folder"):
        load_recipe(tmp_path)
    with pytest.raises(UserError, match=r"x\.yaml, line 2: not valid YAML"):
        load_recipe(write(tmp_path, "name: x\n  output_dir: [\n"))
    with pytest.raises(UserError, match=r"key 'name' is given twice"):
        load_recipe(write(tmp_path, "name: x\nname: y\n"))
    with pytest.raises(UserError, match=r"a recipe is a mapping"):
        load_recipe(write(tmp_path, "- a\n"))
    with pytest.raises(UserError, match=r"--set train: must look like"):
        load_recipe(write(tmp_path, MINIMAL), ["train"])
    with pytest.raises(UserError, match=r"'7' is not an item of this list; allowed: 0 to 0"):
        load_recipe(write(tmp_path, MINIMAL), ["data.train.7.path=x"])
    with pytest.raises(UserError, match=r"name is a single value"):
        load_recipe(write(tmp_path, MINIMAL), ["name.x=1"])
