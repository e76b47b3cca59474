"""How fast a stream is tokenized and packed, and how long a resumed run waits for its first row.

    python benchmarks/stream.py [--examples 30000] [--sources 2]

Conversations of four turns, written by a seed into JSON lines. Beside fcsd with 0, 1 and 2 worker processes stands the
same pipeline of `datasets` (shuffle, interleave_datasets, map), which fcsd used before. Times are of the wall, and of
the processor in the process that trains: what a step has to wait for at least. Then the time to the first row at a
third and at two thirds of the stream, with the place that a checkpoint holds and without it.
"""

import argparse
import functools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from turns import load_average

from fcsd.config.data import SourceConfig
from fcsd.data.chat import tokenize_example
from fcsd.data.dataset import build_dataset
from fcsd.data.packing import pack
from fcsd.data.sources import load_source
from fcsd.distill.endless_rows import EndlessRows
from fcsd.tiny.models import tiny_tokenizer

LENGTH = 4096
WORDS = ["the", "model", "reads", "a", "row", "of", "words", "and", "says", "what", "comes", "after", "them"]


def conversation(chooser: random.Random) -> dict[str, Any]:
    def text() -> str:
        return " ".join(chooser.choices(WORDS, k=chooser.randint(10, 120)))

    roles = ("user", "assistant", "user", "assistant")
    return {"messages": [{"role": role, "content": text()} for role in roles]}


def write(folder: Path, examples: int, sources: int) -> list[SourceConfig]:
    chooser = random.Random(0)
    found = []
    for number in range(sources):
        path = folder / f"{number}.jsonl"
        with path.open("w") as file:
            for _ in range(examples // sources):
                file.write(json.dumps(conversation(chooser)) + "\n")
        found.append(SourceConfig(path=str(path), streaming=True))
    return found


def by_datasets(sources: list[SourceConfig], tokenizer: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of `datasets`' own operations."""
    parts = [load_source(source).shuffle(seed=0, buffer_size=10_000) for source in sources]
    mixed = parts[0]
    if len(parts) > 1:
        share = [1 / len(parts)] * len(parts)
        mixed = datasets.interleave_datasets(parts, share, seed=0, stopping_strategy="all_exhausted")
    columns = {"messages": "messages"}
    tokenized = mixed.map(lambda row: tokenize_example(row, columns, tokenizer), remove_columns=["messages"])
    batches = tokenized.iter(batch_size=1000)
    for batch in batches:
        examples = (
            {"input_ids": ids, "loss_mask": mask}
            for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)
        )
        yield from pack(examples, LENGTH, pad_token_id=tokenizer.pad_token_id)


def timed(rows: Iterator[Any], number: int) -> tuple[float, float]:
    """Seconds of the wall, and of this process's processor time, until so many rows are there."""
    begin = time.perf_counter(), time.process_time()
    found = sum(1 for _ in islice(rows, number))
    assert found == number, f"{found} of {number} rows"
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def line(name: str, taken: tuple[float, float], tokens: int, peer: tuple[float, float]) -> str:
    wall, own = taken
    return (
        f"{name:18} {wall:6.1f} s  {tokens / wall:9,.0f} tokens/s  {own:6.1f} s of the training process"
        f"   {wall / peer[0]:.2f} and {own / peer[1]:.2f} of datasets"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=30_000)
    parser.add_argument("--sources", type=int, default=2)
    options = parser.parse_args()
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = write(folder, options.examples, options.sources)
        build = functools.partial(build_dataset, sources, tokenizer, max_length=LENGTH)
        number = sum(1 for _ in build(num_proc=0)) * 9 // 10
        print(f"load {load_average():.1f}; {number} rows of {LENGTH} tokens, {options.sources} sources")
        tokens = number * LENGTH
        peer = timed(by_datasets(sources, tokenizer), number)
        print(line("datasets", peer, tokens, peer), flush=True)
        for workers in (0, 1, 2):
            taken = timed(iter(build(num_proc=workers)), number)
            print(line(f"fcsd, {workers} processes", taken, tokens, peer), flush=True)
        writer = EndlessRows(build(num_proc=0), 16, LENGTH, "rows")
        places = {number // 3: folder / "one", number * 2 // 3: folder / "two"}
        for row, _ in enumerate(islice(writer, max(places)), 1):
            if row in places:
                places[row].mkdir()
                writer.save(places[row], row)
        for row, place in places.items():
            waited = []
            for checkpoint in (None, place):
                rows = EndlessRows(build(num_proc=0), 16, LENGTH, "rows")
                rows.seek(row, checkpoint)
                waited.append(timed(iter(rows), 1)[0])
            size = sum(file.stat().st_size for file in place.iterdir()) / 2**20
            print(
                f"first row behind {row:6}: {waited[0]:6.1f} s without a place, {waited[1]:.1f} s with it",
                end="",
            )
            print(f" ({size:.1f} MiB in the checkpoint)")


if __name__ == "__main__":
    main()
