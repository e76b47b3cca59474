"""Write a position in a stream to files, and read it again: `stream.json`, and the examples it holds as parquet.

Not covered: what a position means (`fcsd.data.stream`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fcsd.data.reading import Item
from fcsd.files import read_json, write_json, writing

_POSITION = "stream.json"
_EXAMPLES = "stream.parquet"  # those in the shuffling buffers


def write_position(folder: Path, position: Mapping[str, Any]) -> None:
    """Write a position, whose `state` is that of `RowStream.state`; {"state": None}: of a stream that has none."""
    state, kept = position["state"], []
    mixture = state["mixture"]
    sources = []
    for source in mixture["sources"]:
        sources.append(source | {"kept": len(source["kept"])})
        kept += source["kept"]
    table = pa.table(
        {
            "source": pa.array([item.source for item in kept], pa.int32()),
            "shard": pa.array([item.shard for item in kept], pa.int32()),
            "row": pa.array([item.row for item in kept], pa.int64()),
            # As bytes: text may hold half a surrogate pair, and be longer than 2 GiB in all.
            "json": pa.array(
                [item.json.encode("utf-8", "surrogatepass") for item in kept], pa.large_binary()
            ),
        }
    )
    with writing(folder / _EXAMPLES):
        pq.write_table(table, folder / _EXAMPLES, compression="zstd")
    write_json(folder / _POSITION, {**position, "state": state | {"mixture": mixture | {"sources": sources}}})


def read_head(folder: Path) -> dict[str, Any] | None:
    """Read a position without its examples; None where there is none."""
    if not (folder / _POSITION).is_file():
        return None
    head: dict[str, Any] = read_json(folder / _POSITION)
    return head


def read_position(folder: Path) -> dict[str, Any]:
    """Read a position that is there."""
    position: dict[str, Any] = read_json(folder / _POSITION)
    table = pq.read_table(folder / _EXAMPLES)
    columns = zip(
        *(table.column(name).to_pylist() for name in ("source", "shard", "row", "json")), strict=True
    )
    items = [
        Item(source, shard, row, text.decode("utf-8", "surrogatepass"))
        for source, shard, row, text in columns
    ]
    begin = 0
    for source in position["state"]["mixture"]["sources"]:
        end = begin + source["kept"]
        source["kept"], begin = items[begin:end], end
    return position


def as_json(value: Any) -> Any:
    """Return a value as it is when it has been written and read."""
    return json.loads(json.dumps(value))
