"""Name the folders of a run: where each stage of a recipe writes its output.

pretrain/            model from scratch (only with a `pretrain` section)
convert/             the original, rewired, untrained
calibrate/NAME/      the same with calibrated weights, for the main distillation or a variant
written/             text that the original writes for the trainings
tokens/              tokens of the training data, and which of them share a row
sweep/               batch size and learning rate
distill/             the main distillation
variants/NAME/       further distillations
teacher-cache/       hidden states of the teacher (`fcsd run RECIPE --only cache-teacher`)
evaluate/NAME/       results of every model, on the same items
layers/              untrained KL against the rewired layers
report/              report.md, the same as report.html, report.json, figures
publish/             the folder that goes to the Hub
"""

from pathlib import Path

STAGES = (
    "write",
    "tokenize",
    "pretrain",
    "convert",
    "calibrate",
    "cache-teacher",
    "sweep",
    "distill",
    "evaluate",
    "layers",
    "report",
    "publish",
)
"""The stages that can be run alone (`fcsd run RECIPE --only STAGE`), in their order."""
VARIANT_STAGES = ("pretrain", "cache-teacher", "distill")  # variants have these, too

MAIN = "fcsd"  # name of the main distillation in results and report
_TRAINED_IN = {
    "original": "pretrain",
    "converted": "convert",
    "calibrated": f"calibrate/{MAIN}",
    MAIN: "distill",
}
_FOLDERS = (
    "pretrain",
    "convert",
    "calibrate",
    "written",
    "tokens",
    "sweep",
    "distill",
    "variants",
    "evaluate",
    "layers",
    "report",
    "publish",
)
RESERVED = frozenset([*_TRAINED_IN, *_FOLDERS])
"""Names that no variant may have: those of models and stages that every run has."""


class RunLayout:
    """The folders below `root`, the `output_dir` of a recipe."""

    def __init__(self, root: Path):
        self.root = root
        self.pretrain = root / "pretrain"
        self.convert = root / "convert"
        # one folder for each distillation that may start from calibrated weights
        self.calibrate = root / "calibrate"
        self.written = root / "written"
        self.tokens = root / "tokens"
        self.sweep = root / "sweep"
        self.teacher_cache = root / "teacher-cache"
        self.evaluate = root / "evaluate"  # one folder for each model
        self.layers = root / "layers"
        self.report = root / "report"
        self.publish = root / "publish"

    def stage(self, name: str) -> Path:
        """Return the folder of the stage that produces a model: original, converted,
        calibrated, fcsd, or a variant.
        """
        return self.root / _TRAINED_IN.get(name, f"variants/{name}")

    def model(self, name: str) -> Path:
        return self.stage(name) / "model"
