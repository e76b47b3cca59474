"""Peak memory of a whole training step: no part of it is as large as tokens times
vocabulary.
"""

from dataclasses import replace

import pytest

from tests.losses import objective_of
from tests.memory import PLAIN, measured_by, peak_of_two_steps, selected
from tests.support import few

TOKENS = {"few": 2, "many": 16}  # rows of 128
VOCABULARIES = {"small": 4096, "large": 16384}
DIM = 64
SHAPE = {"hidden_size": DIM, "moe_intermediate_size": 32, "num_hidden_layers": 2}
OBJECTIVES = ("kl", "sft")


def measure(name: str) -> int:
    objective, tokens, vocabulary = name.split()
    setting = replace(
        PLAIN,
        objective=objective_of(objective),
        num_rows=TOKENS[tokens],
        accumulates=False,
    )
    return peak_of_two_steps(setting, vocab_size=VOCABULARIES[vocabulary], **SHAPE)


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, int]:
    objectives = selected(request, "objective")
    names = [f"{o} {t} {v}" for o in objectives for t in TOKENS for v in VOCABULARIES]
    return measured_by("tests.training.test_memory", names)


@pytest.mark.breadth
@pytest.mark.parametrize("objective", few(OBJECTIVES, 1))
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary(
    objective: str, measured: dict[str, int]
) -> None:
    growth = {
        tokens: measured[f"{objective} {tokens} large"]
        - measured[f"{objective} {tokens} small"]
        for tokens in TOKENS
    }
    more_entries = VOCABULARIES["large"] - VOCABULARIES["small"]
    more_tokens = 128 * (TOKENS["many"] - TOKENS["few"])
    # One float32 matrix of the additional tokens and entries would be 84 MiB; logits
    # would take several.
    assert growth["many"] - growth["few"] < 0.1 * 4 * more_tokens * more_entries
    # Embedding and head, each with gradient and two moments; those of the teacher; the
    # head's gradient while it accumulates; and the tiles of the loss, 32 MiB or 128
    # tokens each, three with a teacher and two without.
    has_teacher = objective == "kl"
    matrices = 2 * 4 + 2 * has_teacher + 1
    tiles = max(32 << 20, 128 * (2 + has_teacher) * VOCABULARIES["large"] * 4)
    for number in growth.values():
        assert number < 1.1 * matrices * more_entries * DIM * 4 + tiles
