"""`fcsd distill --expert-parallel 2` of Llama 4, for whose experts fcsd has its own
plan.
"""

import shutil

import pytest

from fcsd.base.files import read_json
from fcsd.cli.main import main
from tests.parallel.test_engines import EP, compare, launch
from tests.reference.tiny import tiny_model
from tests.support import Bench


@pytest.mark.breadth
def test_llama_4_trains_spread_over_ranks_what_one_process_trains(bench: Bench) -> None:
    folder = bench.folder / "llama4"
    vocabulary = read_json(bench.base / "config.json")["vocab_size"]
    tiny_model("llama4_text", vocab_size=vocabulary).save_pretrained(folder)
    for file in (*bench.base.glob("*token*"), *bench.base.glob("chat_template*")):
        shutil.copy(file, folder)
    train = {
        "max_steps": 4, "batch_size_tokens": 128, "learning_rate": 1e-3, "warmup_steps": 1, "logging_steps": 1,
    }  # fmt: skip
    changes = {"model": {"path": str(folder)}, "train": train}
    commands = [
        ["distill", str(bench.recipe(overlap, **changes)), *EP, "--overlap", overlap]
        for overlap in ("full", "forward")
    ]
    assert launch("cpu_2_ep", *commands) == [0, 0]
    assert main(["distill", str(bench.recipe("one", **changes))]) == 0
    compare(bench, "one", "full")
    compare(bench, "one", "forward")
