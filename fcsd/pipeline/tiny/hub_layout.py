"""Write rows to files, and data sets in the layout of a hub repository, which `datasets.load_dataset(folder)` reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Rows = Sequence[Mapping[str, Any]]


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows to a new file in the format that its name says: .parquet, .json, else a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import datasets

        datasets.Dataset.from_list(list(rows)).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_data_set(folder: Path, files: Mapping[tuple[str, str], Rows], note: str = "") -> None:
    """Write a file for each configuration and split, and the README that names them and ends with a note."""
    configs: dict[str, list[dict[str, str]]] = {}
    for (config, split), rows in files.items():
        path = f"{split}.jsonl" if config == "default" else f"{config}/{split}.jsonl"
        write_rows(folder / path, rows)
        configs.setdefault(config, []).append({"split": split, "path": path})
    listed = [{"config_name": name, "data_files": splits} for name, splits in configs.items()]
    card = f"---\n{yaml.safe_dump({'configs': listed}, sort_keys=False)}---\n{note}"
    (folder / "README.md").write_text(card, encoding="utf-8")
