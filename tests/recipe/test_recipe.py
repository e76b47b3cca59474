"""Recipes: strict, complete, and clear about what is wrong."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import ValidationError

from fcsd.base.errors import UserError
from fcsd.base.files import data_dir
from fcsd.base.strict import Strict, validate
from fcsd.evaluation.suites import load_suite
from fcsd.recipe.load_recipe import load_recipe
from fcsd.recipe.recipe import Recipe, to_yaml
from fcsd.training.config import TrainConfig
from fcsd.training.losses.objectives import OBJECTIVES, ObjectiveConfig
from tests.losses import EXAMPLES
from tests.support import ROOT, user_error

*_NAMES, _LAST_NAME = map(repr, OBJECTIVES)
OBJECTIVE_NAMES = f"{', '.join(_NAMES)} or {_LAST_NAME}"

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


REAL = sorted(
    {*(ROOT / "examples/real").glob("*.yaml")} - {ROOT / "examples/real/suite.yaml"}
)


@pytest.mark.parametrize("name", ["short", "rate-1.5"])
def test_set_changes_one_key_of_a_variant_and_leaves_the_others(
    tmp_path: Path, name: str
) -> None:
    path = write(
        tmp_path,
        MINIMAL
        | {
            "train": {"batch_size_tokens": 2048, "learning_rate": 3e-4, "warmup_steps": 0},
            "variants": {name: {"train.learning_rate": 1e-4}},
        },
    )  # fmt: skip
    recipe = load_recipe(path, [f"variants.{name}.train.max_steps=7"])
    train = recipe.variant(name).train
    assert (train.max_steps, train.learning_rate) == (7, 1e-4)
    assert train.batch_size_tokens == 2048
    # A variant that the file does not have is created.
    other = load_recipe(path, ["variants.new={train.max_steps: 7}"]).variant("new")
    assert (other.train.max_steps, other.train.learning_rate) == (7, 3e-4)
    other = load_recipe(path, ["variants.new.train.max_steps=7"]).variant("new")
    assert (other.train.max_steps, other.train.learning_rate) == (7, 3e-4)


def test_variants_of_a_recipe_that_only_pretrains_change_only_the_pretraining() -> None:
    recipe = load_recipe("studies/pretrain")
    assert recipe.only_pretrains and recipe.model_names == ["original", "farskip"]
    variant = recipe.variant("farskip")
    assert variant.only_pretrains and variant.pretrain is not None
    assert variant.pretrain.connectivity.layers == "all"
    for key, problem in {
        "objective.name": "a variant is another pre-training on the same text",
        "pretrain.data.max_length": "can change only pretrain.config, pretrain.conn",
        "pretrain.trian.max_steps": "did you mean 'pretrain.train'",
    }.items():
        with user_error(f"variants.v: {key}: .*{problem}"):
            load_recipe("studies/pretrain", [f"variants.v={{{key}: 1}}"])
    # Where a distillation follows, variants are distillations of one pre-trained model.
    with user_error("another distillation of the same model"):
        load_recipe("tiny/demo", ["variants.v={pretrain.connectivity.layers: all}"])


def test_a_path_of_a_checkout_names_the_shipped_recipe_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        load_recipe("recipes/tiny/demo.yaml")
        == load_recipe("tiny/demo")
        == load_recipe("recipes/tiny/demo")
    )
    message = (
        r"recipes/tiny/dmo\.yaml: no such file, and no recipe of this name ships .*did"
        r" you mean 'tiny/demo'\?"
    )
    with user_error(message):
        load_recipe("recipes/tiny/dmo.yaml")
    # a file of the user's own, which does not exist
    with user_error(r"^tiny/demo\.yaml: no such file.*; did you mean 'tiny/demo'\?$"):
        load_recipe("tiny/demo.yaml")
    (tmp_path / "recipes" / "tiny").mkdir(parents=True)
    write(tmp_path, MINIMAL).rename(tmp_path / "recipes" / "tiny" / "demo.yaml")
    assert load_recipe("recipes/tiny/demo.yaml").name == "x"


@pytest.mark.parametrize("key", ["repo_id", "base_model"])
def test_an_address_that_would_be_published_is_refused(
    tmp_path: Path, key: str
) -> None:
    recipe = write(tmp_path, MINIMAL)
    with user_error(f"publication.{key}: owner/name .*https://h/x"):
        load_recipe(recipe, [f"publication.{key}=https://h/x"])
    with user_error(f"publication.{key}: holds a name or password") as found:
        load_recipe(recipe, [f"publication.{key}=https://me:SECRET@h/x?token=SECRET"])
    assert "SECRET" not in str(found.value)


def test_the_printed_recipe_is_complete_and_reads_back_as_itself(
    tmp_path: Path,
) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    printed = to_yaml(recipe.dump())
    assert load_recipe(write(tmp_path, printed)) == recipe
    assert "warmup_steps: 1000" in printed  # a default that the file does not name
    assert "batch_size_tokens: 131072" in printed


def test_numbers_in_exponent_form_without_a_dot_are_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL) + "train: {learning_rate: 2e-5}\n"
    assert load_recipe(write(tmp_path, text)).train.learning_rate == 2e-5


def test_a_text_of_a_recipe_is_what_is_written_and_booleans_have_all_their_words(
    tmp_path: Path,
) -> None:
    text = yaml.safe_dump(MINIMAL) + (
        "publication: {language: [no, en, on, yes], license: off}\n"
        "evaluation: {layer_study: no}\n"
        "train: {bf16: yes, gradient_checkpointing: off, max_steps: 1_000}\n"
    )
    text = text.replace("path: m", "{path: m, revision: 2026-05-01}").replace(
        "model:\n  {", "model: {"
    )
    recipe = load_recipe(write(tmp_path, text), ["data.train.0.name=no"])
    assert recipe.publication.language == ["no", "en", "on", "yes"]
    assert recipe.publication.license == "off"
    assert recipe.model.revision == "2026-05-01"
    assert recipe.data is not None and recipe.data.train[0].name == "no"
    assert recipe.evaluation.layer_study is None
    assert (recipe.train.bf16, recipe.train.gradient_checkpointing) == (True, False)
    assert recipe.train.max_steps == 1000
    assert load_recipe(write(tmp_path, to_yaml(recipe.dump()))) == recipe
    for revision, read in (("0123456", "0123456"), ("12:30", "12:30")):
        recipe = load_recipe(write(tmp_path, text), [f"model.revision={revision}"])
        assert recipe.model.revision == read
    for number, shown in (("1.10", "1.1"), ("7", "7"), ("true", "True")):
        with pytest.raises(UserError) as error:
            load_recipe(write(tmp_path, text), [f"model.revision={number}"])
        assert str(error.value).endswith(
            "model.revision: a text is needed; put it in quotes, as in '1.10', got"
            f" {shown}"
        )
    quoted = load_recipe(write(tmp_path, text), ["model.revision='1.10'"])
    assert quoted.model.revision == "1.10"


def test_set_replaces_one_value_by_its_dotted_key(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe(
        path,
        [
            "train.learning_rate=4e-5",
            "connectivity.layers={last: 50%}",
            "data.train.0.split=dev",
        ],
    )
    assert recipe.train.learning_rate == 4e-5
    assert recipe.connectivity.layers == {"last": "50%"}
    assert recipe.data.train[0].split == "dev"
    assert (
        load_recipe(
            path,
            [
                "early_stopping={metric: heldout_kl}",
                "data.heldout.path=h",
                "early_stopping.patience=3",
            ],
        ).early_stopping.patience
        == 3
    )


def test_a_variant_replaces_only_its_keys(tmp_path: Path) -> None:
    value = MINIMAL | {
        "variants": {"sft": {"objective.name": "sft", "train.max_steps": 2500}},
        "seed": 3,
    }
    recipe = load_recipe(write(tmp_path, value))
    variant = recipe.variant("sft")
    assert variant.objective.name == "sft"
    assert variant.train.max_steps == 2500
    assert variant.seed == 3
    expected = recipe.dump() | {"variants": {}}
    expected["objective"] = {"name": "sft"}
    expected["train"]["max_steps"] = 2500
    expected["teacher"] = None
    assert variant == Recipe.model_validate(expected)


BASES = {
    "kl+l2": {"l2_coefficient": 0.1, "l2_relative": True, "l2_until": 0.5},
    "jsd": {"jsd_beta": 0.3, "temperature": 2.0},
    "kl": {"temperature": 2.0},
    "reverse_kl": {},
    "sft": {},
}  # fmt: skip


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "sft", "ce"])
def test_a_variant_of_another_objective_leaves_the_keys_of_the_base_objective_behind(
    tmp_path: Path, base: str, name: str
) -> None:
    value = MINIMAL | {
        "objective": {"name": base} | BASES[base],
        "variants": {"v": {"objective.name": name}},
    }
    variant = load_recipe(write(tmp_path, value)).variant("v")
    alone = {key: value for key, value in BASES[base].items() if key in KEYS_OF[name]}
    assert variant.objective == validate(
        ObjectiveConfig, {"name": name} | alone, "alone"
    )


KEYS_OF: dict[str, tuple[str, ...]] = {
    "kl": ("temperature",), "reverse_kl": ("temperature",), "jsd": ("temperature", "jsd_beta"), "sft": (), "ce": (),
}  # fmt: skip


def test_the_base_objective_may_be_set_while_a_variant_overrides_only_its_name(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, MINIMAL | {"variants": {"sft": {"objective.name": "sft"}}})
    recipe = load_recipe(path, ["objective.name=kl+l2", "objective.l2_coefficient=0.1"])
    assert recipe.objective.l2_coefficient == 0.1
    assert recipe.variant("sft").objective == validate(
        ObjectiveConfig, {"name": "sft"}, "alone"
    )


@pytest.mark.parametrize(
    ("name", "temperature", "jsd_beta"),
    [
        ("kl", 1.0, None), ("reverse_kl", 1.0, None), ("jsd", 1.0, 0.5), ("sft", None, None), ("ce", None, None),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_objective(
    name: str, temperature: float | None, jsd_beta: float | None
) -> None:
    objective = validate(ObjectiveConfig, {"name": name}, "alone")
    values = objective.model_dump()
    assert values.get("temperature") == temperature
    assert values.get("jsd_beta") == jsd_beta
    assert objective.has_teacher == (name not in ("sft", "ce"))
    assert validate(ObjectiveConfig, objective.model_dump(), "printed") == objective


CODE = {"kind": "code", "task": "mine", "dataset": "a/b"}
CHOICE = {
    "kind": "likelihood", "metric": "acc,none", "task": "piqa", "dataset": "baber/piqa",
}  # fmt: skip


LORA = {"lora": {"r": 8}}
WRONG = [
    ({"train": {"temprature": 1}}, r"x\.yaml: train\.temprature: unknown key"),
    ({"train": {"learnin_rate": 1}}, r"train\.learnin_rate: unknown key; did you mean 'learning_rate'\?"),
    ({"learning_rate": 1e-4}, r"learning_rate: unknown key; did you mean 'train\.learning_rate' or 'sweep\.le"),
    ({"lr": 1}, r"x\.yaml: lr: unknown key; did you mean 'train\.learning_rate'"),
    ({"train": {"lr": 1}}, r"train\.lr: unknown key; did you mean 'learning_rate'\?"),
    ({"temperature": 2}, r"temperature: unknown key; did you mean 'objective\.temperature'\?"),
    ({"train": {"seed": 3}}, r"train\.seed: unknown key; did you mean 'seed', outside 'train'\?"),
    ({"extend": "x"}, r"extend: unknown key; did you mean 'extends'\?"),
    ({"layers": "all"}, r"layers: unknown key; did you mean 'connectivity\.layers'\?"),
    ({"evaluation": {"tasks": ["a"]}},
     r"evaluation\.tasks: unknown key; did you mean 'evaluation\.layer_study\.tasks'"),
    ({"train.max_steps": 3}, r"train\.max_steps: unknown key; write it as a section: train: \{max_steps: …\}"),
    ({"foobar": 1}, r"x\.yaml: foobar: unknown key; allowed: calibration, connectivity"),
    ({"variants": {"v": {"learning_rate": 1}}},
     r"variants\.v: learning_rate: .*; did you mean 'train\.learning_rate'\?"),
    ({"data": {"train": [{"pth": "d"}]}},
     r"data\.train\.0\.pth: unknown key; did you mean 'path'\? \(and 1 more: data\.train\.0\.path: is required\)"),
    ({"train": {"max_steps": -1}}, r"train\.max_steps: .*greater than or equal to 0, got -1"),
    ({"train": {"max_steps": 10, "warmup_steps": 11}}, r"warmup_steps \(11\) is more than max_steps \(10\)"),
    ({"train": {"lr_scheduler_type": "cosine_with_min_lr"}}, r"train\.lr_scheduler_kwargs\.min_lr_rate: is required"),
    ({"objective": {"l2_coefficient": 0.1}},
     r"objective\.l2_coefficient: no meaning for objective 'kl', only for kl\+l2"),
    ({"objective": {"name": "kl+l2"}}, r"objective\.l2_coefficient: is required for objective 'kl\+l2'"),
    ({"objective": "sft"}, r"objective: a mapping of keys to values is needed, got 'sft'"),
    ({"variants": 3}, r"variants: a mapping of keys to values is needed, got 3"),
    ({"variants": {"a": None}}, r"variants\.a: a mapping of keys to values is needed, got None"),
    ({"data": {"train": None}}, r"data\.train: a list is needed, got None"),
    ({"objective": {"name": "sfd"}}, r"objective\.name: Input should be .*, got 'sfd'"),
    ({"objective": {"name": ["kl"]}}, r"objective\.name: Input should be .*, got \['kl'\]"),
    ({"objective": {"name": "kl", "l2_relative": True}},
     r"objective\.l2_relative: no meaning for objective 'kl', only for kl\+l2"),
    ({"objective": {"name": "jsd", "l2_until": 0.5}}, r"l2_until: no meaning for objective 'jsd'"),
    ({"objective": {"name": "kl+l2", "l2_coefficient": 1, "l2_until": 1.5}}, r"l2_until: .*less than or equal to 1"),
    ({"train": {"ema_decay": 1.0}}, r"ema_decay: .*less than 1"),
    ({"early_stopping": {}}, (r"early_stopping\.task: is required: a task of `suite` \(or set metric: heldout_kl\)")),
    ({"early_stopping": {"metric": "heldout_kl", "dataset": "a/b"}},
     r"early_stopping\.dataset: unknown key; allowed: every_steps, metric, min_delta, patience"),
    ({"early_stopping": {"metric": "heldout_kl", "task": "mbpp_plus"}},
     r"early_stopping\.task: no meaning for heldout_kl, only for a task"),
    ({"early_stopping": {"metric": "heldout_kl", "limit": 3}},
     r"early_stopping\.limit: no meaning for heldout_kl, only for a task"),
    (
        {"early_stopping": {"metric": "acc", "task": "mbpp_plus"}},
        (
            r"early_stopping\.metric: must be 'heldout_kl', got 'acc'; a task has the"
            r" metric of its suite: leave `metric` out, .*\{task: mbpp_plus, suite:"
        ),
    ),
    ({"early_stopping": {"metric": "accuracy"}},
     r"early_stopping\.metric: must be 'heldout_kl', got 'accuracy'; .*paper11\}$"),
    ({"early_stopping": {"task": CODE, "suite": "tiny"}},
     r"early_stopping\.task: the name of a task of `suite` is needed; put this row under `tasks:` of a suite file"),
    ({"early_stopping": {"task": "mbpp", "suite": "paper11"}},
     r"early_stopping: task 'mbpp': not in suite paper11; did you mean 'mbpp_plus'\?"),
    ({"early_stopping": {"task": "mbpp_plus", "suite": "paper12"}},
     r"early_stopping: suite 'paper12': no such suite; did you mean 'paper11'\?"),
    (
        {"early_stopping": {"dataset": "a/b", "split": "test", "patience": 3}},
        r"x\.yaml: early_stopping\.dataset: unknown key; .* \(and 3 more:"
        r" early_stopping\.split: unknown key; .*;"
        r" early_stopping\.task: is required: a task of `suite` \(or set metric:"
        r" heldout_kl\).*",
    ),
    ({"early_stopping": {"metric": "heldout_kl"}}, r"early_stopping\.metric 'heldout_kl' needs data\.heldout"),
    ({"objective": {"name": "rkl"}}, rf"objective\.name: .*{re.escape(OBJECTIVE_NAMES)}"),
    ({"objective": {"name": "kl", "jsd_beta": 0.5}}, r"jsd_beta: no meaning for objective 'kl', only for jsd"),
    ({"objective": {"name": "sft", "temperature": 2}},
     r"temperature: no meaning for objective 'sft', only for kl, reverse_kl, jsd, kl\+l2"),
    ({"objective": {"name": "jsd", "jsd_beta": 1}}, r"objective\.jsd_beta: .*less than 1, got 1"),
    ({"objective": {"temperature": 0}}, r"objective\.temperature: .*greater than 0, got 0"),
    ({"connectivity": {"layers": "some"}}, r"connectivity.*'some' is not a selection; allowed: all, moe, none"),
    ({"connectivity": {"layers": []}}, r"connectivity"),
    ({"data": {"train": [{"path": "d", "columns": {"prompt": "q"}}]}},
     r"columns must name 'messages', or 'text', or 'prompt' and"),
    ({"data": {"train": []}}, r"data\.train: .*at least 1 item"),
    ({"model": {}}, r"model\.path is required"),
    ({"name": "a/b"}, r"name: must have up to 100 letters .* digit; got 'a/b'$"),
    ({"variants": {"v": {"model.path": "other"}}},
     r"variants\.v: model\.path: a variant is another distillation of the same model"),
    ({"variants": {"v": {"train.lerning_rate": 1}}},
     r"variants\.v: train\.lerning_rate: unknown key; did you mean 'learning_rate'"),
    ({"pretrain": {"config": {}, "tokenizer": "t", "data": MINIMAL["data"], "train": {}}, "model": {}},
     r"model_type is required"),
    ({"sweep": {"steps": 40, "warmup_steps": 41}}, r"x\.yaml: sweep: warmup_steps \(41\) is more than steps \(40\)"),
    ({"sweep": {"steps": 40, "last_steps": 41}}, r"sweep: last_steps \(41\) is more than steps \(40\)"),
    ({"sweep": {"choose_by": "early_stopping"}},
     r"sweep\.choose_by: early_stopping is the score of the section early_stopping, which is null; add that section"),
    ({"sweep": {"batch_size_tokens": [1024, 65536], "train_tokens": 6_553_600}, "train": {"warmup_steps": 101}},
     r"sweep\.train_tokens \(6553600\) in batches of 65536 tokens is 100 steps, fewer than train\.warmup_steps"),
    ({"evaluation": {"layer_study": True}}, r"evaluation\.layer_study needs data\.heldout"),
    ({"variants": {"v": {"objective.l2_coefficient": 0.1, "objective.name": "sft"}}},
     r"variants\.v: objective\.l2_coefficient: no meaning for objective 'sft', only for kl\+l2"),
    *(({"variants": {name: {}}}, rf"variants: '{name}' is the name of a stage or its model")
      for name in ("original", "converted", "calibrated", "fcsd", "pretrain", "distill")),
    *(({"output_dir": path}, r"output_dir: .*(bytes, but at most|NUL)")
      for path in ("runs/" + "x" * 256, "x" * 201, "a\x00b")),
    ({"teacher": {"backend": "adapter_off"}}, "adapter_off needs a `lora` section"),
    ({"teacher": {"backend": "cache"}},
     "teacher.cache: is required for backend 'cache': the folder of the stage cache-teacher"),
    ({"teacher": {"cache": "c"}}, "teacher.cache: no meaning for backend 'sharded', only for cache"),
    ({"teacher": {"cach": "c"}}, "teacher.cach: unknown key; allowed: backend, path, revision"),
    ({"teacher": {"backend": "caches"}}, "teacher.backend: Input should be 'sharded', 'adapter_off' or 'cache'"),
    (LORA | {"teacher": {"backend": "adapter_off", "path": "b"}},
     "teacher.path: no meaning for backend 'adapter_off', only for sharded, cache"),
    ({"teacher": {"revision": "b"}}, "teacher: revision applies to `path`"),
    ({"teacher": {}, "objective": {"name": "sft"}}, "teacher: objective 'sft' has no teacher"),
    ({"teacher": {"backend": "cache", "cache": "c"}, "objective": {"name": "kl+l2", "l2_coefficient": 0.1}},
     r"holds final hidden states, but objective kl\+l2 compares those of every layer; use sharded"),
    (LORA | {"objective": {"freeze_embeddings_and_head": True}}, "has no meaning with lora, which freezes all"),
    ({"lora": {"rank": 4}}, "lora.rank: unknown key"),
    ({"lora": {"r": 0}}, "lora.r: Input should be greater than 0"),
    ({"lora": {"target_modules": None}}, "target_modules or target_parameters must name the weights to adapt"),
    ({"lora": {"target_parameters": ["mlp.experts.down_proj"], "lora_dropout": 0.1}},
     "lora_dropout must be 0 with target_parameters"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    WRONG,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line_that_names_the_key(
    tmp_path: Path, change: dict, message: str
) -> None:
    with user_error(message) as caught:
        load_recipe(write(tmp_path, MINIMAL | change))
    assert "\n" not in str(caught.value)


# Each in the spelling of some family's configuration in transformers, or of a published
# checkpoint.
ROUTER_LOSSES = {
    "router_aux_loss_coef": 1.0, "aux_loss_coef": 0.01, "aux_loss_alpha": 0.001, "moe_aux_loss_coeff": 0.01,
    "router_z_loss_coef": 0.001, "moe_z_loss_coeff": 0.001, "load_balance_coeff": 0.001, "seq_aux": True,
    "output_router_logits": True,
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ROUTER_LOSSES.items())
def test_a_pretraining_that_sets_the_models_own_balance_of_routers_is_refused_with_ours(
    tmp_path: Path, key: str, value: object
) -> None:
    def load(config: dict[str, object]) -> Recipe:
        plan = {
            "config": {"model_type": "qwen3_moe"} | config,
            "tokenizer": "t",
            "data": MINIMAL["data"],
        }
        return load_recipe(
            write(tmp_path, MINIMAL | {"model": {}, "pretrain": plan | {"train": {}}})
        )

    message = rf"x\.yaml: pretrain\.config: {key}: pre-training does not use the model.s own .* set pretrain"
    with user_error(message):
        load({key: value})
    with user_error(rf"pretrain\.config: text_config\.{key}: "):
        load({"text_config": {key: value}})
    load({key: False})
    load({"router_jitter_noise": 0.1, "num_experts": 4})


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(40, (20, 40)), (1, (0, 1)), (2000, (1000, 100)), (9000, (1000, 100))],
)
def test_the_defaults_of_a_sweep_fit_runs_of_any_length(
    tmp_path: Path, steps: int, expected: tuple[int, int]
) -> None:
    sweep = load_recipe(write(tmp_path, MINIMAL | {"sweep": {"steps": steps}})).sweep
    assert sweep is not None and (sweep.warmup_steps, sweep.last_steps) == expected


def test_a_suite_lies_beside_the_recipe_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "study"
    home.mkdir()
    (home / "own.yaml").write_text(
        (data_dir("eval") / "suites" / "tiny.yaml").read_text()
    )
    path = write(home, MINIMAL | {"evaluation": {"suite": "own.yaml"}})
    assert load_recipe(path).evaluation.suite == str(home / "own.yaml")
    (tmp_path / "own.yaml").write_text((home / "own.yaml").read_text())
    # where the command runs comes first
    assert load_recipe(path).evaluation.suite == "own.yaml"


def number_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield dotted keys of all fields that hold a float, those inside lists with index 0."""
    for name, field in kind.model_fields.items():
        leaves, is_list = set(), False
        annotations = [field.annotation]
        while annotations:
            annotation = annotations.pop()
            is_list |= get_origin(annotation) is list
            annotations += get_args(annotation)
            leaves.add(annotation)
        key = f"{prefix}{name}.0" if is_list else f"{prefix}{name}"
        for leaf in leaves:
            if isinstance(leaf, type) and issubclass(leaf, Strict):
                yield from number_keys(leaf, f"{key}.")
        if float in leaves:
            yield key


NUMBERS = sorted({key.removeprefix("pretrain.") for key in number_keys(Recipe)})


@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_may_be_infinite_or_not_a_number(tmp_path: Path, key: str) -> None:
    section = key.split(".")[0]
    whole: dict[str, Any] = {
        "early_stopping": {"task": "mbpp_plus", "suite": "paper11"},
        "sweep": {"learning_rate": [1e-5]},
    }
    if key.startswith("data.heldout"):
        whole["data"] = MINIMAL["data"] | {"heldout": {"path": "h.jsonl"}}
    if section == "objective":
        name = next(
            name
            for name, kind in OBJECTIVES.items()
            if key.removeprefix("objective.") in kind.model_fields
        )
        whole["objective"] = {"name": name} | EXAMPLES.get(name, {})
    path = write(
        tmp_path, MINIMAL | ({section: whole[section]} if section in whole else {})
    )
    for value in (".nan", ".inf", "-.inf", "nan", "1e999"):
        with user_error(
            rf"x\.yaml: {re.escape(key)}: .*(finite|valid) number"
        ) as caught:
            load_recipe(path, [f"{key}={value}"])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        *((f"{key}=true", key) for key in ("train.learning_rate", "train.max_steps")),
        ("objective.temperature=true", "objective.temperature"),
        ("early_stopping.patience=true", "early_stopping.patience"),
        ("sweep.learning_rate=[2e-5, true]", "sweep.learning_rate.1"),
        # a number above 0, or a word
        ("evaluation.batch_size=true", "evaluation.batch_size"),
    ],
)
def test_true_is_no_number(change: str, place: str, tmp_path: Path) -> None:
    sections = {"early_stopping": {"metric": "heldout_kl"}, "sweep": {}}
    path = write(tmp_path, MINIMAL | sections)
    with user_error(rf"x\.yaml: {re.escape(place)}: a number is needed, got True"):
        load_recipe(path, [change])


@pytest.mark.parametrize(
    "key",
    ["train.learning_rate", "sweep.learning_rate.0", "sweep.batch_size_tokens.0", "train.adam_epsilon",
     "train.max_grad_norm", "objective.temperature"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["0", "-1"])
def test_what_must_be_positive_is_not_zero_nor_below(
    tmp_path: Path, key: str, value: str
) -> None:
    path = write(
        tmp_path,
        MINIMAL | {"sweep": {"learning_rate": [1e-5], "batch_size_tokens": [1024]}},
    )
    with user_error(rf"x\.yaml: {re.escape(key)}: Input should be greater than 0, got"):
        load_recipe(path, [f"{key}={value}"])


@pytest.mark.parametrize(
    "name",
    [
        "../../../x", "a/b", "..", ".", "", ".x", "-x", "a b", "ä", "x\n", "\\ud800", "x" * 101,
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["name", "variants"])
def test_a_name_that_becomes_a_path_is_letters_digits_and_three_marks(
    tmp_path: Path, name: str, place: str
) -> None:
    change = {"name": name} if place == "name" else {"variants": {name: {}}}
    message = (
        rf"x\.yaml: {place}.*: must have up to 100 letters \(A to Z\), digits, '\.', '_' and"
        r" '-'.*; got "
    )
    with user_error(message) as caught:
        load_recipe(write(tmp_path, MINIMAL | change))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_names_of_suites_and_tasks_become_paths_too(tmp_path: Path) -> None:
    row = {
        "task": "piqa", "kind": "likelihood", "metric": "acc,none", "dataset": "baber/piqa",
    }  # fmt: skip
    for suite in (
        {"name": "../x", "tasks": [row]},
        {"name": "x", "tasks": [row | {"task": "../x"}]},
    ):
        with user_error(r"(name|task): must have up to 100 letters.*; got '\.\./x'"):
            load_suite(write(tmp_path, suite))


BOMB = "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: " + "[" * 5000 + "]" * 5000, "nested deeper than 100 levels"),
        ("x: " + "[" * 150 + "]" * 150, "nested deeper than 100 levels"),
        ("x: {" * 150 + "}" * 150, "nested deeper than 100 levels"),
        ("seed: " + "9" * 5000, "an integer of more than 64 bits"),
        ("seed: 0x" + "f" * 5000, "an integer of more than 64 bits"),
        ("seed: -9223372036854775809", "an integer of more than 64 bits"),
        ("a0: &a0 [1, 1]\n" + BOMB, "aliases stand for more than 100000 values"),
        ("a0: &a0 {b: 1}\n" + BOMB.replace("[", "{<<: [").replace("]", "]}"), "aliases stand for more than"),
        ("a: &a [*a]", "an alias holds itself"),
        ("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 150)),
         "nested deeper than 100 levels"),
        ("? [a]\n: b", "unhashable"),
        ("a: !!timestamp 2026-13-45", "month must be in"),
        ("a: !!int abc", "invalid literal"),
        ("a: !!bool abc", "abc"),
        ("a: !!timestamp abc", "a value does not fit its tag"),
        ('name: "\\ud800"', "holds an incomplete character"),
        ("name: a\x07b", "special characters are not allowed"),
    ],
)  # fmt: skip
def test_text_that_is_made_to_break_a_reader_is_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with user_error(rf"x\.yaml.*: not valid YAML: .*{message}") as caught:
        load_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    with user_error(r"--set pretrain=.*not valid YAML"):
        load_recipe(write(tmp_path, MINIMAL), [f"pretrain={text}"])


def test_an_alias_that_is_used_a_few_times_is_read(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL | {"data": None}).replace(
        "data: null", "data: &d {train: [{path: d}]}"
    )
    text += "seed: &s 3\nvariants: {a: {data: *d, seed: *s}, b: {data: *d}}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.variant("b").data == recipe.data and recipe.variant("a").seed == 3


def test_set_of_a_key_does_not_change_its_alias(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL | {"data": None}).replace(
        "data: null", "data: {train: [&s {path: d}, *s], heldout: *s}"
    )
    data = load_recipe(write(tmp_path, text), ["data.train.1.path=e"]).data
    assert [source.path for source in data.train] == ["d", "e"]
    assert data.heldout is not None and data.heldout.path == "d"


def test_a_recipe_whose_name_is_too_long_for_a_file_is_one_line(tmp_path: Path) -> None:
    for name in ("x" * 300, "x" * 300 + ".yaml"):
        with user_error(r"xxx.*(no such file|cannot be read)"):
            load_recipe(tmp_path / name)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with user_error(r"nowhere\.yaml: no such file"):
        load_recipe(tmp_path / "nowhere.yaml")
    with user_error(r"is a folder"):
        load_recipe(tmp_path)
    with user_error(r"x\.yaml, line 2: not valid YAML"):
        load_recipe(write(tmp_path, "name: x\n  output_dir: [\n"))
    with user_error(r"key 'name' is given twice"):
        load_recipe(write(tmp_path, "name: x\nname: y\n"))
    with user_error(r"a recipe is a mapping"):
        load_recipe(write(tmp_path, "- a\n"))
    with user_error(r"--set train: must have the form"):
        load_recipe(write(tmp_path, MINIMAL), ["train"])
    with user_error(r"'7' is not an item of this list; allowed: 0 to 0"):
        load_recipe(write(tmp_path, MINIMAL), ["data.train.7.path=x"])
    with user_error(r"name is a single value"):
        load_recipe(write(tmp_path, MINIMAL), ["name.x=1"])


def test_a_teacher_is_there_where_the_objective_has_one_and_a_variant_without_drops_it(
    tmp_path: Path,
) -> None:
    teacher = {"backend": "cache", "cache": "c", "path": "big", "revision": "r1"}
    variants = {
        "sft": {"objective.name": "sft"},
        "l2": {"objective.name": "kl+l2", "objective.l2_coefficient": 0.1, "teacher.backend": "sharded"},
        "lora": {"lora": {"r": 4}, "teacher": {"backend": "adapter_off"}},
    }  # fmt: skip
    recipe = load_recipe(
        write(tmp_path, MINIMAL | {"teacher": teacher, "variants": variants})
    )
    assert recipe.variant("sft").teacher is None
    assert recipe.variant("l2").teacher.backend == "sharded"
    assert recipe.variant("lora").lora.target_modules == "all-linear"
    path, model = recipe.teacher_model
    assert (path, model.path, model.revision, model.dtype) == (
        "big", "big", "r1", "auto",
    )  # fmt: skip
    plain = load_recipe(write(tmp_path, MINIMAL))
    assert plain.teacher.backend == "sharded"
    assert plain.teacher_model == ("m", plain.model)
    with user_error("objective 'sft' has no teacher"):
        bad: dict[str, Any] = {
            "v": {"objective.name": "sft", "teacher.backend": "sharded"}
        }
        load_recipe(write(tmp_path, MINIMAL | {"variants": bad}))


def test_a_stopping_task_is_a_row_of_a_suite(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"name": "own", "tasks": [CODE, CHOICE]}))
    for task in (CODE, CHOICE):
        # A suite file may lie beside the recipe.
        stopping = {"suite": "suite.yaml", "task": task["task"], "limit": 7}
        recipe = load_recipe(write(tmp_path, MINIMAL | {"early_stopping": stopping}))
        row = {row.task: row for row in load_suite(suite).tasks}[task["task"]]
        assert recipe.early_stopping.row == row
        assert (recipe.early_stopping.limit, recipe.early_stopping.batch_size) == (
            7,
            32,
        )
        assert recipe.early_stopping.metric == task.get("metric", "pass@1")
        assert recipe.early_stopping.settings == {
            "every_steps": 1000, "patience": 20, "min_delta": 0.02, "limit": 7,
            "task": row.model_dump(mode="json"),
        }  # fmt: skip
        assert load_recipe(write(tmp_path, recipe.dump())) == recipe


def test_a_variant_stops_by_another_score_without_the_keys_of_the_former_one(
    tmp_path: Path,
) -> None:
    data = MINIMAL["data"] | {"heldout": {"path": "h.jsonl"}}
    variants: dict[str, Any] = {
        "kl": {"early_stopping.metric": "heldout_kl"},
        "choice": {"early_stopping.task": "hellaswag"},
        "none": {"early_stopping": None},
    }
    stopping = {
        "suite": "paper11", "task": "mbpp_plus", "limit": 7, "every_steps": 5,
    }  # fmt: skip
    value = MINIMAL | {"data": data, "early_stopping": stopping, "variants": variants}
    recipe = load_recipe(write(tmp_path, value))
    assert recipe.variant("kl").early_stopping.model_dump() == {
        "metric": "heldout_kl", "every_steps": 5, "patience": 20, "min_delta": 0.02,
    }  # fmt: skip
    choice = recipe.variant("choice").early_stopping
    assert (choice.row.task, choice.row.kind) == ("hellaswag", "likelihood")
    assert choice.limit == 7 and recipe.variant("none").early_stopping is None
    variants["kl"]["early_stopping.limit"] = 3
    with user_error(r"variants\.kl: early_stopping\.limit: no meaning for heldout_kl"):
        load_recipe(write(tmp_path, value))


def test_a_null_teacher_is_the_one_that_the_objective_needs(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL | {"teacher": None}))
    assert recipe == load_recipe(write(tmp_path, MINIMAL))
    assert recipe.teacher.backend == "sharded"
    sft = load_recipe(
        write(tmp_path, MINIMAL | {"teacher": None, "objective": {"name": "sft"}})
    )
    assert sft.teacher is None


@pytest.mark.parametrize(
    "path",
    [*sorted(data_dir("recipes").rglob("*.yaml")), *REAL],
    ids=lambda path: path.stem,
)
def test_a_shipped_recipe_is_what_it_prints(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    for one in (recipe, *map(recipe.variant, recipe.variants)):
        assert load_recipe(write(tmp_path, to_yaml(one.dump()))) == one


def test_no_value_of_a_schema_can_be_changed(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    for record, key in (
        (recipe, "teacher"),
        (recipe.objective, "temperature"),
        (recipe.teacher, "path"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(record, key, None)


@pytest.mark.parametrize(
    ("given", "read"), [("tensorboard", ["tensorboard"]), ("none", []), (["wandb", "trackio"], ["wandb", "trackio"])]
)  # fmt: skip
def test_one_tracker_needs_no_list(given: Any, read: list[str]) -> None:
    assert validate(TrainConfig, {"report_to": given}, "train").report_to == read
    with user_error(
        r"report_to\.0: .*'wandb', 'trackio' or 'tensorboard', got 'mlflow'"
    ):
        validate(TrainConfig, {"report_to": "mlflow"}, "train")
