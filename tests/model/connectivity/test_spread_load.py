"""On two gloo ranks, weights that transformers assembles from several tensors while it
shards, against an unsharded load.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.model.connectivity import load as load_module
from fcsd.model.connectivity import load_model
from fcsd.model.families import FAMILIES
from fcsd.parallel.shard import shard_teacher
from tests.parallel.test_engines import on_rank
from tests.reference.ranks import in_turn, run_ranks
from tests.reference.tiny import tiny_model
from tests.support import UNLIKE, few, few_and_others, user_error

FAMILY_NAMES = [
    name
    for name, family in FAMILIES.items()
    if not family.multimodal or family.fuses_rows
]
WRONG = sorted(name for name, family in FAMILIES.items() if family.fuses_rows)


def spread_on_rank(
    rank: int, folder: Path, states: dict[str, dict[str, Any]]
) -> dict[str, list[str]]:
    """Return family -> tensors that differ from the saved ones."""
    from transformers.distributed import DistributedConfig

    wrong = {}
    for name, state in in_turn(states.items()):
        try:
            spread = load_model(
                folder / name, distributed_config=DistributedConfig(fsdp_size=2)
            )
        # a rank's rows of a tensor cannot be split as the whole is
        except RuntimeError:
            wrong[name] = [str(FAMILIES[name].fuses_rows)]
            continue
        whole = {key: full(tensor) for key, tensor in spread.state_dict().items()}
        wrong[name] = [
            key for key, tensor in whole.items() if not torch.equal(tensor, state[key])
        ]
    return wrong


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("families", few_and_others(FAMILY_NAMES, kinds=UNLIKE))
def test_every_tensor_of_every_family_is_whole_after_a_spread_load_or_the_family_is_refused(
    families: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {}
    for name in families:
        model = tiny_model(name)
        model.save_pretrained(tmp_path / name)
        states[name] = model.state_dict()
    monkeypatch.setattr(load_module, "_check_sharded_loading", lambda *_: None)
    differences = run_ranks(spread_on_rank, 2, tmp_path, states, timeout_s=300)[0]
    wrong = [name for name in WRONG if name in families]
    # a new transformers may mend them
    assert sorted(name for name, keys in differences.items() if keys) == wrong
    for name in wrong:
        assert all(
            key.endswith(str(FAMILIES[name].fuses_rows)) for key in differences[name]
        )


def own_on_rank(rank: int, folder: Path, state: dict[str, Any]) -> list[str]:
    launch = on_rank("fsdp2", torch.nn.Module)[1]
    model = load_model(folder, weights=launch.loads_weights)
    shard_teacher(model, launch)
    assert any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return [
        key
        for key, tensor in model.state_dict().items()
        if not torch.equal(full(tensor), state[key])
    ]


@pytest.mark.parametrize("name", few(WRONG, 3))
def test_fcsds_own_fsdp2_spreads_such_a_family_rightly(
    name: str, tmp_path: Path
) -> None:
    """It loads the whole weights on the first rank."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    assert run_ranks(own_on_rank, 2, tmp_path, model.state_dict()) == [[], []]


@pytest.mark.parametrize("name", WRONG)
def test_a_family_that_is_put_together_wrongly_is_refused_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with user_error(
        rf"transformers loads {FAMILIES[name].fuses_rows} of {name} wrongly when it shards"
    ):
        load_model(tmp_path, distributed_config=object())
