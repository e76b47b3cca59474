"""`fcsd distill --expert-parallel 2` of Llama 4, for whose experts the plan is fcsd's own."""

import shutil

import pytest

from fcsd.cli.main import main
from fcsd.files import read_json
from fcsd.tiny.models import tiny_model
from tests.distributed.test_engines import EP, compare, launch
from tests.support import Bench


@pytest.mark.slow
def test_llama_4_trains_spread_over_ranks_what_one_process_trains(bench: Bench) -> None:
    folder = bench.folder / "llama4"
    vocabulary = read_json(bench.base / "config.json")["vocab_size"]
    tiny_model("llama4_text", vocab_size=vocabulary).save_pretrained(folder)
    for file in (*bench.base.glob("*token*"), *bench.base.glob("chat_template*")):
        shutil.copy(file, folder)
    for name, overlap in (("full", "full"), ("forward", "forward")):
        recipe = bench.recipe(name, model={"path": str(folder)})
        assert launch("cpu_2_ep", ["distill", str(recipe), *EP, "--overlap", overlap]) == [0]
    assert main(["distill", str(bench.recipe("one", model={"path": str(folder)}))]) == 0
    compare(bench, "one", "full")
    compare(bench, "one", "forward")
