"""Checkpoints in the oldest transformers in which they claim to load; `make
test-transformers` installs it.
"""

from pathlib import Path

import pytest
import torch

from fcsd.model.connectivity import Connectivity, convert_checkpoint, convert_model
from fcsd.model.connectivity.modeling import supported_transformers
from fcsd.model.families import FAMILIES
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.model.connectivity.test_export import run_without_fcsd
from tests.reference.tiny import X, tiny_model
from tests.support import ROOT

OLDEST = ROOT / ".transformers-5.5"

CODE = """
import transformers
from transformers import AutoTokenizer
assert transformers.__version__.startswith("5.5."), transformers.__version__
x, expected, refused = torch.load(sys.argv[2])
with torch.no_grad():
    for family, logits in expected.items():
        folder = sys.argv[3] + "/" + family
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        found = (model(x, use_cache=False).logits - logits).abs().max().item()
        assert found < 1e-4, (family, found)
        assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("add 1")["input_ids"]
for family, versions in refused.items():
    try:
        AutoConfig.from_pretrained(sys.argv[3] + "/" + family, trust_remote_code=True)
    except ImportError as error:
        assert f"needs transformers {versions}; 5.5." in str(error), error
    else:
        raise SystemExit(f"{family}: loaded")
print("DONE", len(expected), len(refused))
"""


@pytest.mark.skipif(
    not OLDEST.is_dir(),
    reason="make test-transformers installs the oldest transformers",
)
def test_a_checkpoint_computes_the_same_in_the_oldest_transformers_that_it_names_or_is_refused(
    tmp_path: Path,
) -> None:
    expected, refused = {}, {}
    for name, family in FAMILIES.items():
        if family.multimodal:
            continue
        model = tiny_model(name)
        model.save_pretrained(tmp_path / "base")
        tiny_tokenizer(99).save_pretrained(tmp_path / "base")
        convert_checkpoint(
            tmp_path / "base", tmp_path / "far" / name, Connectivity("last:75%")
        )
        if family.since == "5.5":
            convert_model(model, Connectivity("last:75%"))
            with torch.no_grad():
                expected[name] = model(X, use_cache=False).logits
        else:
            refused[name] = supported_transformers(family)
    torch.save((X, expected, refused), tmp_path / "expected.pt")
    done = run_without_fcsd(
        CODE, tmp_path, tmp_path / "expected.pt", tmp_path / "far", path=OLDEST
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"DONE {len(expected)} {len(refused)}" in done.stdout and len(expected) > 20
