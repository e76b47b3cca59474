"""The context that the stages of a run share: recipe, launch, and everything that is
looked up only once.

    run = Run(recipe, join_launch())
    run.original.folder, run.original.weights, run.tokenizer, run.layout.report
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fcsd.base.errors import UserError
from fcsd.base.text import Progress
from fcsd.base.writing import check_folder_place
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.load import ModelFolder, find_model
from fcsd.parallel.launch import Launch
from fcsd.recipe.layout import RunLayout
from fcsd.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Found = TypeVar("Found")


@dataclass(frozen=True)
class Run:
    """A recipe in a launch. Values that were looked up are kept, even if `recipe` is
    replaced by one of its variants.
    """

    recipe: Recipe
    launch: Launch
    progress: Progress | None = None  # of `fcsd run`, on the first rank
    # the recipe as written, if this one is a variant or has the choice of its sweep
    before: Recipe | None = None
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        folder = self.recipe.output_dir
        self.once(("folder", folder), lambda: check_folder_place(Path(folder)))

    def once(self, key: Any, look_up: Callable[[], Found]) -> Found:
        """Return the result of `look_up`, which is called only once for each `key`."""
        # The dictionary is shared by variants, because `replace` copies the reference.
        if key not in self._known:
            self._known[key] = look_up()
        value: Found = self._known[key]
        return value

    def begin(self, stage: str) -> None:
        """Print the heading of a stage, if `progress` lists it."""
        if self.progress is not None and stage in self.progress.tasks:
            self.progress.start(stage)

    @property
    def remaining(self) -> Callable[[float], str] | None:
        """Maps the share of the present stage that is done to the time that the whole
        run still takes; None outside of `fcsd run`.
        """
        return self.progress.left if self.progress is not None else None

    def variant(self, name: str | None) -> Run:
        """Return the run of one of the recipe's variants (UserError if there is none of
        this name); None: this run.
        """
        if name is None:
            return self
        # `whole` stays the recipe with all trainings, which decides how many rows are
        # made.
        return replace(self, recipe=self.recipe.chosen(name), before=self.whole)

    @property
    def whole(self) -> Recipe:
        """The recipe as written, with all its trainings."""
        return self.before or self.recipe

    @cached_property
    def layout(self) -> RunLayout:
        return RunLayout(Path(self.recipe.output_dir))

    @property
    def data_root(self) -> Path | None:
        """The folder in hub layout from which test sets are read; None: the Hub."""
        root = self.recipe.evaluation.data_root
        return Path(root) if root is not None else None

    @property
    def suite(self) -> SuiteConfig:
        """The suite on which every model of the run is evaluated."""
        name = self.recipe.evaluation.suite
        return self.once(("suite", name), lambda: load_suite(name))

    @cached_property
    def original(self) -> ModelFolder:
        """The original checkpoint: `model.path`, or the result of the pre-training
        (UserError until that has finished).
        """
        path = self.recipe.model_path
        if self.recipe.pretrain is not None and not Path(path).is_dir():
            raise UserError(
                f"{Path(path)}: the pre-training has not finished; run `fcsd pretrain` first,"
                " with the same recipe and options, or `fcsd run`, which runs all"
                " stages"
            )
        return self._model(path, self.recipe.model)

    @cached_property
    def teacher(self) -> ModelFolder:
        """The checkpoint that teaches the student: the original, or `teacher.path`."""
        return self._model(*self.recipe.teacher_model)

    def _model(self, path: str, config: ModelConfig) -> ModelFolder:
        moved = config.model_copy(update={"path": path})
        return self.once(("model", path, config.revision), lambda: find_model(moved))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the original."""
        return self.once("tokenizer", self.original.load_tokenizer)

    @property
    def studies_layers(self) -> bool:
        """Whether the recipe has a layer study that can run in this launch; the study
        rewires whole copies of the model.
        """
        return (
            self.recipe.evaluation.layer_study is not None
            and not self.launch.engine.shards
        )

    def models(self) -> dict[str, Path]:
        """Return every model of the run that exists, by its name in the report."""
        original, *names = self.recipe.model_names
        # Stages that have not run yet have left no folder.
        folders = {
            original: self.original.folder,
            **{name: self.layout.model(name) for name in names},
        }
        return {name: path for name, path in folders.items() if path.is_dir()}

    def model(self, name: str) -> ModelFolder:
        """Return a model of the run by its name in the report; it is loaded like the
        original.
        """
        if name == "original":
            return self.original
        folder = self.layout.model(name)
        return ModelFolder(
            self.original.config.model_copy(update={"path": str(folder)}), folder
        )
