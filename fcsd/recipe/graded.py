"""Never train on what a model is graded on: a recipe whose training data is a graded split is refused when it is read.

Not covered: the same items in another data set; those are found by their words (`data.decontaminate`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.data.config import DataConfig, SourceConfig
from fcsd.evaluation.config import load_suite
from fcsd.recipe.recipe import Recipe
from fcsd.recipe.stopping import TaskStoppingConfig


@dataclass(frozen=True)
class Graded:
    """One split that models are graded on; `name` or `split` None: lm-eval's task knows it."""

    by: str
    path: str
    name: str | None
    split: str | None


def refuse_graded(recipe: Recipe, where: str) -> None:
    """Check the training sources of a recipe, of its variants and of its pre-training.

    Raises:
        UserError: a source is a split that the recipe's suite, its early stopping, or its list of test items names; or
            there is no such suite.
    """
    root = Path(recipe.evaluation.data_root) if recipe.evaluation.data_root is not None else None
    for section, data in recipe.data_sections.items():
        for graded in graded_splits(recipe, data, where):
            for index, source in enumerate(data.train):
                if _is_graded(source, graded, root):
                    raise UserError(
                        f"{where}: {section}.train.{index}: {source.path}, split {source.split!r}, is what {graded.by}"
                        " is graded on; never train on a graded split, choose another one"
                    )


def graded_splits(recipe: Recipe, data: DataConfig, where: str) -> Iterator[Graded]:
    """Yield what the models of a recipe are graded on, and what is kept out of one of its `data` sections."""
    stopping = recipe.early_stopping
    if isinstance(stopping, TaskStoppingConfig):
        yield Graded("early_stopping", stopping.task.dataset, stopping.task.dataset_name, stopping.task.split)
    suites = [("evaluation.suite", recipe.evaluation.suite)]
    if data.decontaminate is not None:
        for test_set in data.decontaminate.against:
            yield Graded("data.decontaminate.against", test_set.path, test_set.name, test_set.split)
        if data.decontaminate.suite is not None:
            suites.append(("data.decontaminate.suite", data.decontaminate.suite))
    for key, name in suites:
        try:
            suite = load_suite(name)
        except UserError as error:
            raise UserError(f"{where}: {key}: {error}") from None
        for row in suite.tasks:
            yield Graded(f"task {row.task} of suite {suite.name}", row.dataset, row.dataset_name, row.split)


def _is_graded(source: SourceConfig, graded: Graded, data_root: Path | None) -> bool:
    names = {source.name, graded.name}
    if len(names) == 2 and not names & {None, "all"}:
        return False  # two configurations of one data set
    splits = split_names(source.split)
    if source.path.lower() != graded.path.lower():
        path = Path(source.path).expanduser().resolve()
        folder = (Path(graded.path) if data_root is None else data_root / graded.path).resolve()
        if path.is_file() and folder in path.parents:
            splits = [path.stem]  # `openai/gsm8k/main/test.jsonl`
        elif path != folder or not path.exists():
            return False
    if graded.split is None:
        return any("train" not in split for split in splits)
    return "all" in splits or any(graded.split in (split, split.split("-")[0]) for split in splits)


def split_names(split: str) -> list[str]:
    """Return the splits that a text such as `train[:5%]+test` names."""
    return [part.split("[")[0].strip() for part in split.split("+")]
