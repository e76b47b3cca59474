"""Real exchanges of what a study's steered model sends, beside what is simulated; needs
root.

    fcsd run steering/recipes/small.yaml
    fcsd-steer study steering/recipes/small-study.yaml
    python steering/benchmarks/steered_exchanges.py steering/recipes/small-study.yaml
                                           [--names camoe-0.25,bottleneck-0.25]

The model runs on the recipe's held-out text under each of the study's bias tables. The
rows that its tokens make are sent by four gloo ranks in network namespaces
(steering/tests/namespaces.py: CAMoE's appendix A.3, a tenth of its rates, five
times its delays), and simulated from links that the same ranks have measured. The
machine should be idle otherwise.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from namespaces import appendix_a3, in_namespaces
from testbed import exchange_counts

from fcsd.base.text import markdown
from fcsd.data.batches import Collator, real_tokens
from fcsd.model.families import row_width
from fcsd.model.load import load_checkpoint
from fcsd.parallel.launch import join_launch
from fcsd.pipeline.context import Run
from fcsd.pipeline.reference import heldout_of
from fcsd.planning.network.simulate import Payload, simulate
from fcsd.recipe.load_recipe import load_recipe
from fcsd_steering.network.exchange import GroupExchange
from fcsd_steering.network.profile import profile
from fcsd_steering.report import tables_folder
from fcsd_steering.routing.bias import read_tables
from fcsd_steering.routing.exchanges import endpoint_counts
from fcsd_steering.routing.tables import Calibration
from fcsd_steering.study import load_study

EXCHANGES = 4
"""Rows of the text, one for each endpoint's batch; the first ones."""


def traffic(path: str, names: list[str]) -> tuple[dict[str, np.ndarray], Payload]:
    """Return the pairs [exchanges, layers, source, endpoint] without a bias and under each."""
    study = load_study(path)
    loaded = load_recipe(study.recipe)
    run = Run(loaded, join_launch())
    rows = heldout_of(loaded.data, run.tokenizer, run.original)
    size = loaded.evaluation.batch_size
    assert isinstance(size, int)
    batches = []
    for start in range(0, EXCHANGES * 4 * size, size):
        batch = Collator()([rows[k] for k in range(start, start + size)])
        batches.append(
            {
                "input_ids": batch["input_ids"],
                "attention_mask": real_tokens(batch).long(),
            }
        )
    calibration = Calibration(load_checkpoint(run.original).eval(), batches, 4)
    folder = Path(study.output_dir or run.layout.root / "steering")
    places = tables_folder(folder, "original")
    tables = {name: read_tables(places / f"{name}.safetensors") for name in names}
    counts = {"none": calibration.counts} | {
        name: calibration.respond(each) for name, each in tables.items()
    }
    placement = next(iter(tables.values())).placement
    payload = Payload(row_width(calibration.model.config), placement.shape[1])
    return {
        name: endpoint_counts(pairs, placement) for name, pairs in counts.items()
    }, payload


def exchanged(
    rank: int, sent: dict[str, np.ndarray], payload: Payload
) -> dict[str, tuple[float, float]]:
    """Return mean seconds of a layer's exchanges, measured and simulated."""
    torch.set_num_threads(1)
    exchange = GroupExchange(None, "p2p", torch.device("cpu"))
    facts: dict[str, Any] = {
        "endpoints": list("abcd"), "collective": "p2p", "backend": "gloo", "libraries": {},
    }  # fmt: skip
    links = profile(exchange, facts, largest_bytes=1 << 22)
    return {
        name: (
            float(exchange_counts(exchange, pairs, payload).total.mean()),
            float(simulate(links, pairs, payload).total.mean()),
        )
        for name, pairs in sent.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study")
    parser.add_argument("--names", default="camoe-0.1,camoe-0.25,bottleneck-0.25")
    arguments = parser.parse_args()
    sent, payload = traffic(arguments.study, arguments.names.split(","))
    seconds = in_namespaces(exchanged, appendix_a3(), sent, payload)[0]
    rows = [
        [
            name,
            *(
                f"{1e3 * each:.2f} ms ({100 * (each / base - 1):+.1f} %)"
                for each, base in zip(times, seconds["none"], strict=True)
            ),
        ]
        for name, times in seconds.items()
    ]
    print(markdown(["bias", "measured", "simulated"], rows))


if __name__ == "__main__":
    main()
