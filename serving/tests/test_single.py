"""One rank: every family and connectivity gives the ids and log-probabilities of `load_model`, in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import orders
import pytest

from fcsd_vllm.families import FAMILIES

TEXT = [name for name, row in FAMILIES.items() if not row.text_config]
CASES = [
    *(f"{family}-{layers}" for family in TEXT for layers in ("all", "half", "gap")),
    # Shared experts with a gate; MLA, shared experts and a dense layer; neither.
    *(
        f"{family}-{side}_full"
        for family in ("qwen2_moe", "deepseek_v2", "gpt_oss")
        for side in ("attention", "mlp")
    ),
]


@pytest.fixture(scope="module", autouse=True)
def classes_at_hand() -> None:
    """All families but one, which takes the way of `vllm serve`."""
    engine.inspect_here(*(name for name in TEXT if name != "qwen3_moe"))


@pytest.fixture
def start() -> Iterator[Any]:
    """Start engines that are stopped when the test ends."""
    started: list[Any] = []

    def begin(folder: Path, **options: Any) -> Any:
        started.append(engine.start_engine(folder, **options))
        return started[-1]

    yield begin
    for llm in started or [None]:
        engine.stop_engine(llm)


@pytest.mark.parametrize("case", CASES)
def test_the_engine_computes_what_load_model_computes_and_not_the_original(
    case: str, models: Path, start: Any
) -> None:
    folder = models / case
    llm = start(folder)
    recorder = engine.record(llm)
    outputs = engine.generate(llm, folder)
    recorder.forget()
    equal, worst = engine.compare(outputs, folder)
    print(f"{case}: {equal} of 4 prompts, {worst:.1e}")
    assert equal == 4
    assert worst < engine.BOUND
    original, _ = engine.compare(outputs, folder.with_name(f"{case.partition('-')[0]}-original"))
    assert original == 0
    if case in orders.OF_CASE:
        step = orders.events(orders.OF_CASE[case], ranks=1)
        assert recorder.events == step * (len(recorder.events) // len(step))


@pytest.mark.parametrize("case", ["qwen3_moe-all", "qwen2_moe-all"])
def test_a_compiled_model_computes_the_same_in_the_same_order(case: str, models: Path, start: Any) -> None:
    folder = models / case
    llm = start(folder, enforce_eager=False)
    recorder = engine.record(llm)
    outputs = engine.generate(llm, folder)
    recorder.forget()
    equal, worst = engine.compare(outputs, folder)
    assert equal == 4
    assert worst < engine.BOUND
    step = orders.events(orders.OF_CASE[case], ranks=1)
    assert recorder.events == step * (len(recorder.events) // len(step))


@pytest.mark.parametrize("case", ["qwen2_moe-all", "glm4_moe-all"])
def test_prefixes_in_the_cache_and_chunks_of_sixteen_change_nothing(
    case: str, models: Path, start: Any
) -> None:
    folder = models / case
    llm = start(folder, enable_prefix_caching=True, max_num_batched_tokens=16, block_size=32, max_num_seqs=4)
    first, second = (engine.generate(llm, folder, prompt_logprobs=cold) for cold in (5, None))
    for outputs in (first, second):
        equal, worst = engine.compare(outputs, folder)
        assert equal == 4
        assert worst < engine.BOUND
    assert max(output.num_cached_tokens for output in second) >= 32  # of the prompt of 64 tokens
