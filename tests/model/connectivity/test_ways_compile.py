"""torch.compile and torch.export of rewired models: one graph, the same numbers."""

import pytest
import torch

from fcsd.model.connectivity import Connectivity, convert_model
from tests.reference.tiny import X, converted, gradients_of, logits, tiny_model
from tests.support import few

FAMILY_NAMES = (
    "qwen3_moe", "qwen2_moe", "deepseek_v2", "instella_moe", "gpt_oss", "llama4_text",
)  # fmt: skip
TOLERANCE = 5e-5


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.mark.breadth
@pytest.mark.parametrize("family", few(FAMILY_NAMES, 1))
def test_inference_compiles_to_one_graph(family):
    model = converted(family, num_hidden_layers=3)
    expected = logits(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert (logits(compiled) - expected).abs().max() < TOLERANCE
    assert (
        logits(compiled) - logits(tiny_model(family, num_hidden_layers=3))
    ).abs().max() > 1


@pytest.mark.parametrize(
    ("family", "checkpointing"), few([("deepseek_v2", False), ("qwen3_moe", True)], 1)
)
def test_training_compiles_to_one_graph_with_the_same_gradients(family, checkpointing):
    model = converted(family, num_hidden_layers=3).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})

    def step(called):
        model.zero_grad()
        called(X, labels=X, use_cache=False).loss.backward()
        return gradients_of(model)

    plain = step(model)
    compiled = step(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert compiled.keys() == plain.keys()
    for name, gradient in plain.items():
        assert (compiled[name] - gradient).abs().max() < 1e-5 * max(
            1.0, float(gradient.abs().max())
        ), name


def exported(model, length):
    shapes = {"input_ids": {1: length}, "use_cache": None}
    return torch.export.export(model, (X,), {"use_cache": False}, dynamic_shapes=shapes)


@pytest.mark.breadth
@pytest.mark.parametrize("family", few(FAMILY_NAMES, 1))
def test_an_exported_program_takes_rows_of_other_lengths(family, tmp_path):
    model = converted(family, num_hidden_layers=3)
    x = torch.cat([X, X.flip(1)], dim=1)
    length = torch.export.Dim("length", min=2, max=64)
    if family == "llama4_text":
        for one in (tiny_model(family, num_hidden_layers=3), model):
            with pytest.raises(Exception, match=r"Constraints violated \(length\)"):
                exported(one, length)
        length, x = None, X  # as in the original, a program for one length
    torch.export.save(exported(model, length), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert (
        loaded(x, use_cache=False).logits - logits(model, x)
    ).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "region"), few([("deepseek_v2", "layers"), ("qwen2_moe", "model")], 1)
)
def test_compiled_code_notices_that_the_connectivity_changes(family, region):
    model = tiny_model(family, num_hidden_layers=3)
    if region == "model":
        called = torch.compile(model, backend="eager")
    else:
        called = model
        for layer in model.model.layers:
            layer.compile(backend="eager")
    seen = [logits(called)]
    for connectivity in (Connectivity("all"), Connectivity([0]), Connectivity("none")):
        convert_model(model, connectivity)
        plain = tiny_model(family, num_hidden_layers=3)
        convert_model(plain, connectivity)
        seen.append(logits(called))
        assert (seen[-1] - logits(plain)).abs().max() < TOLERANCE, connectivity
        assert (seen[-1] - seen[-2]).abs().max() > 0.5
    assert torch.equal(seen[-1], seen[0])
