"""CAMoE's bias and ours (`bottleneck`) at equal simulated time, on random routers.

    python steering/benchmarks/at_equal_time.py [--seeds 3] [--strengths 0.1,0.25,0.5]        70 s

Three layers of 128 experts, 8 a token, on 4 endpoints; logits normal (2.4) around a
popularity of the experts (1.0). Tables are made on calibration tokens, and everything
is measured on others; ours gets the goal at which it is at least as fast as CAMoE
there. Links: CAMoE's appendix A.3, and four equal ones of 10 Gb/s. Means over seeds;
the ratio to CAMoE's is in brackets.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from simulated import EQUAL, UNEQUAL, at_equal_time

from fcsd.base.text import markdown


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strengths", default="0.1,0.25,0.5")
    arguments = parser.parse_args()
    rows = []
    for name, links in (("A.3", UNEQUAL), ("equal", EQUAL)):
        for strength in map(float, arguments.strengths.split(",")):
            both = [
                at_equal_time(links, seed, strength) for seed in range(arguments.seeds)
            ]
            theirs, ours = (
                {key: np.mean([each[k][key] for each in both]) for key in both[0][k]}
                for k in (0, 1)
            )
            for kind, figures in (("camoe", theirs), ("bottleneck", ours)):
                ratio = {
                    key: f" ({figures[key] / theirs[key]:.2f})"
                    if kind != "camoe"
                    else ""
                    for key in figures
                }
                rows.append(
                    [
                        name,
                        f"{strength:g}",
                        kind,
                        f"{100 * (figures['time'] - 1):+.1f} %",
                        f"{figures['layer_kl']:.5f}{ratio['layer_kl']}",
                        f"{100 * figures['moved']:.2f} %{ratio['moved']}",
                        f"{100 * figures['lost']:.3f} %{ratio['lost']}",
                    ]
                )
    head = [
        "links",
        "strength",
        "kind",
        "time",
        "layer KL",
        "routes moved",
        "routing mass lost",
    ]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
