"""Score models for early stopping: turn a recipe's section into a stopper and a
function that scores a model in training.

A task is scored as in `fcsd evaluate` (`fcsd.evaluation.runner.prepare_evaluation`),
with a sandbox that is started once. A score leaves model and random generators
unchanged.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel

from fcsd.data.counts import tell_examples
from fcsd.evaluation.config import KINDS
from fcsd.evaluation.own_text.measure import Original
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.model.load import load_checkpoint
from fcsd.parallel.launch import Launch
from fcsd.pipeline.context import Run
from fcsd.pipeline.reference import heldout_of
from fcsd.recipe.recipe import HeldoutKLStoppingConfig
from fcsd.training.arguments import Scorer
from fcsd.training.early_stopping import EarlyStopper, Score
from fcsd.training.heldout import ComparingScore, HeldoutKL


@contextlib.contextmanager
def early_stopping(run: Run) -> Iterator[tuple[EarlyStopper, Scorer]]:
    """Yield the stopper and the score function of a recipe that has such a section.

    Data, templates and sandbox are checked on entry. For a code task the canonical
    solutions are run first, since a scorer that fails them would stop every run. Raises
    as `fcsd.evaluation.runner.prepare_evaluation`.
    """
    recipe, rule = run.recipe, run.recipe.early_stopping
    assert rule is not None
    stopper = EarlyStopper(
        every_steps=rule.every_steps,
        patience=rule.patience,
        min_delta=rule.min_delta,
        metric=rule.metric,
    )
    if isinstance(rule, HeldoutKLStoppingConfig):
        with stopper.time.scoring():
            # The recipe has checked that it has some.
            rows = heldout_of(recipe.data, run.tokenizer, run.original)
        if run.launch.first:
            tell_examples(rows, "held-out text", always=False)
        yield stopper, HeldoutKL(rows, lambda: load_checkpoint(run.teacher), run.launch)
        return
    row, overrides = rule.row, {"batch_size": rule.batch_size, "limit": rule.limit}
    own_text = OwnTextScore(lambda: load_checkpoint(run.teacher), run.launch)
    # Scoring during training drops no tokens.
    overrides |= {"capacity_factor": None, "capacity_drop": None}
    # The evaluation, with its sandbox, stays open for the whole training.
    with contextlib.ExitStack() as stack:
        with stopper.time.scoring():
            evaluate = stack.enter_context(
                prepare_evaluation(
                    run.tokenizer,
                    rule.scored,
                    recipe.evaluation.model_copy(update=overrides),
                    ranks=run.launch.ranks,
                    # A second progress bar would break up that of the training.
                    progress=False,
                    any_direction=True,
                    original=own_text.compared,
                )
            )

        def score(model: PreTrainedModel) -> Score:
            result, samples = evaluate(model, "early stopping")
            task = result["tasks"][row.task]
            return Score(
                [sample["score"] for sample in samples[row.task]],
                num_items_total=task["num_items_total"],
                higher_is_better=task["higher_is_better"],
            )

        own_text.score = score
        yield stopper, own_text if KINDS[row.kind].distance else score


class OwnTextScore(ComparingScore):
    """The score of a task of own text, whose original is the teacher of the run.

    score: evaluates a student by the task, with `compared` as the original. A call finds
    the teacher that this student is compared with, then scores; the evaluation enters
    `compared.loaded`, which is `_loaded` here, and so gets this teacher.
    """

    named = "task: own text"
    score: Scorer

    def __init__(self, original: Callable[[], PreTrainedModel], launch: Launch):
        super().__init__(original, launch)
        self.compared = Original(self._loaded)

    def __call__(self, student: PreTrainedModel) -> Score:
        # A copy is needed again at every score.
        self.teacher = self.compared_with(student)
        return self.score(student)

    @contextlib.contextmanager
    def _loaded(self) -> Iterator[Any]:
        assert self.teacher is not None
        with self.teacher.as_teacher(), self.teacher.arithmetic():
            yield self.teacher.model
