"""Tell what a folder holds that is not a checkpoint: a run, the state of a training, an
adapter, GGUF files.
"""

from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.weights import CONFIG


def _models_inside(folder: Path) -> list[Path]:
    """Return the folders of models in the folder of a run or of a training; the one to
    publish comes first.
    """
    return [
        file.parent
        for pattern in ("model", "publish", "*/model")
        for file in sorted(folder.glob(f"{pattern}/{CONFIG}"))
    ]


def _first_inside(folder: Path) -> str:
    first, *others = map(str, _models_inside(folder))
    return f"{first} (or {', '.join(others[:3])})" if others else first


def _state_of_training(folder: Path) -> str | None:
    """Return what a folder holds of a training's states."""
    if below := sorted(folder.glob("checkpoint-*/trainer_state.json")):
        return f"holds states of a training ({below[-1].parent.name})"
    is_state = (folder / "trainer_state.json").is_file()
    return "is the state of a training" if is_state else None


def _base_of_adapter(folder: Path) -> str:
    adapter = read_json(folder / "adapter_config.json", keys=())
    base = adapter.get("base_model_name_or_path")
    return f" of {base}" if base else ""


def check_contents(folder: Path) -> None:
    """Raise UserError where a folder holds something else than a checkpoint."""
    has_config = (folder / CONFIG).is_file()
    # transformers' Trainer saves its state beside a model: any readable file counts.
    if not has_config and not (folder / "tokenizer.json").is_file():
        if _models_inside(folder):
            raise UserError(
                f"{folder}: is not a checkpoint, but contains one; give"
                f" {_first_inside(folder)}"
            )
        if state := _state_of_training(folder):
            raise UserError(
                f"{folder}: {state}, not a model;"
                " FCSDTrainer.train(resume_from_checkpoint=…), or the command that"
                " started it, continues the training; save_model, or the end of a"
                " recipe's stage, writes a model"
            )
    if not has_config and any(folder.glob("*.gguf")):
        raise UserError(
            f"{folder}: holds GGUF files ({min(folder.glob('*.gguf')).name}), not a"
            " checkpoint of transformers; give the checkpoint that they were made from"
        )
    if not has_config and (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder}: is a LoRA adapter{_base_of_adapter(folder)}, not a checkpoint;"
            " merge it into its model (peft: merge_and_unload, then save_pretrained) and"
            " give that folder"
        )
