"""Find the data set of a suite's row, and what its task needs of the tokenizer."""

from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.config import making_of
from fcsd.evaluation.config import TaskBase


def dataset_location(row: TaskBase, data_root: Path | None) -> str:
    """Find where the row's data set is: the folder of its hub id below `data_root`; without a root the id itself.

    An absolute path is used as it is. UserError where the data root has no such folder.
    """
    if Path(row.dataset).is_absolute() or data_root is None:
        return row.dataset
    making = making_of(row.dataset, str(data_root))
    if not data_root.is_dir():
        raise UserError(f"{data_root}: no such folder (data root){making}")
    folder = data_root / row.dataset
    if not folder.exists():
        raise UserError(
            f"task {row.task}: {folder}: no such folder; the data root must hold the data set {row.dataset}"
            " in the layout of its hub repository"
            + (making or "; `fcsd evaluate --fetch ROOT --suite SUITE` fetches it")
        )
    return str(folder.resolve())


def damaged_file(location: str) -> str:
    """Name the parquet file in a folder that cannot be read to its end, and why; "" where there is none."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    for file in sorted(Path(location).rglob("*.parquet")) if Path(location).is_dir() else ():
        try:
            for _ in ParquetFile(file).iter_batches():
                pass
        except (OSError, pyarrow.ArrowException) as error:
            return f"{file}: is damaged ({first_line(error)}); fetch it again"
    return ""


def hub_advice(data_root: Path | None) -> str:
    """Say what to do where a data set cannot be read from the Hub."""
    if data_root is not None:
        return ""
    return (
        "; without a network, fill a folder where there is one (`fcsd evaluate --fetch ROOT --suite SUITE`)"
        " and give it as --data-root"
    )


def require_chat_template(tokenizer: Any, row: TaskBase) -> None:
    """Refuse a task that wants a chat template where the tokenizer has none."""
    if row.chat_template and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"task {row.task}: chat_template: true, but the tokenizer has no chat template;"
            " set chat_template: false for this task or add a chat template to the tokenizer"
        )


def chat_text(
    tokenizer: Any, thinking: bool, turns: list[dict[str, str]], add_generation_prompt: bool = True
) -> str:
    """Write turns as lm-eval's own model in memory does; without a generation prompt the last turn is begun only.

    thinking: what a hybrid is asked; templates without that switch pass over it.
    """
    options = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": not add_generation_prompt,
    }
    return str(tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=thinking, **options))


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or its name, without what `datasets` says around it."""
    if error.__cause__ is not None and str(error).startswith(
        "An error occurred while generating the dataset"
    ):
        return first_line(error.__cause__)
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return text.partition(" with any supported extension")[0]
