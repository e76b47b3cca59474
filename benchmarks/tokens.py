"""Measure how fast data are tokenized to disk, how much memory that takes, and how long
a training waits for a row far into them.

    python benchmarks/tokens.py [--tokens 100_000_000] [--kind text] [--workers 2]

The data are texts (or conversations of four turns) of random words from a seed, written
as JSON lines. The peer is the tokenizer alone, on batches of texts in memory in one
process. Speeds are given by wall time and, for machines with other work, by the
processor time of the workers.
"""

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from turns import load_average

from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset
from fcsd.data.rows import PackedRows
from fcsd.pipeline.tiny.models import tiny_tokenizer

LENGTH = 4096
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "row",
    "of",
    "words",
    "and",
    "says",
    "what",
    "comes",
    "after",
    "them",
]
ROLES = ("user", "assistant", "user", "assistant")


def texts(chooser: random.Random) -> Iterator[str]:
    while True:
        yield " ".join(chooser.choices(WORDS, k=chooser.randint(20, 400)))


def lines(kind: str) -> Iterator[str]:
    """Yield the rows of a file, endlessly."""
    said = texts(random.Random(0))
    while True:
        turns = (
            [{"role": role, "content": next(said)[:400]} for role in ROLES]
            if kind == "chat"
            else None
        )
        yield json.dumps({"messages": turns} if turns else {"text": next(said)}) + "\n"


def tokenizer_speed(tokenizer: Any) -> float:
    """Return the tokens per second of processor time for batches of texts in memory."""
    batch = list(islice(texts(random.Random(1)), 4000))
    number, begin = 0, time.process_time()
    for start in range(0, len(batch), 256):
        number += sum(map(len, tokenizer(batch[start : start + 256])["input_ids"]))
    return number / (time.process_time() - begin)


def write(path: Path, kind: str, tokens: int, tokenizer: Any) -> None:
    some = list(islice(lines(kind), 200))
    each = sum(len(tokenizer(line)["input_ids"]) for line in some) / len(some)
    with path.open("w") as file:
        file.writelines(islice(lines(kind), int(tokens / each)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--kind", choices=["text", "chat"], default="text")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "rows.jsonl", options.kind, options.tokens, tokenizer)
        peer = tokenizer_speed(tokenizer)
        columns: Any = (
            {"text": "text"} if options.kind == "text" else {"messages": "messages"}
        )
        source = SourceConfig(path=str(folder / "rows.jsonl"), columns=columns)
        begin, own = time.perf_counter(), time.process_time()
        rows = build_dataset(
            [source],
            tokenizer,
            max_length=LENGTH,
            num_proc=options.workers,
            place=(folder, ["tokens"]),
        )
        wall, own = time.perf_counter() - begin, time.process_time() - own
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        # a single piece is tokenized here
        helped = usage.ru_utime + usage.ru_stime or own
        number = (
            sum(int(path.stat().st_size) for path in (folder / "tokens").glob("0*"))
            // 5
        )
        print(
            f"load {load_average():.1f}; {number:,} tokens, {len(rows):,} rows of"
            f" {LENGTH}; {options.kind}"
        )
        print(f"the tokenizer alone   {peer:10,.0f} tokens/s of a processor")
        print(
            f"{options.workers} workers             {number / wall:10,.0f} tokens/s by"
            f" the wall, {number / helped:,.0f} of a worker's processor"
            f" ({number / helped / peer:.2f} of the tokenizer alone); the process that"
            f" reads took {own:.1f} of {wall:.1f} s"
        )
        most = [
            resource.getrusage(who).ru_maxrss / 1024
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        print(
            f"memory                {most[0]:,.0f} MiB where it is read, {most[1]:,.0f}"
            " MiB in a worker at most"
        )
        begin = time.perf_counter()
        again = PackedRows(rows.path)
        again[len(again) * 2 // 3]
        print(f"a row at two thirds   {time.perf_counter() - begin:.3f} s")


if __name__ == "__main__":
    main()
