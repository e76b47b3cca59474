"""Compare what `fcsd plan` says about the runs of the FarSkip paper with the paper's
measurements (docs/plan.md).

    python benchmarks/plan.py
    python benchmarks/plan.py --figure 6 --output FOLDER
    python benchmarks/plan.py --questions

Three columns: published peaks (every efficiency 1, links at their nominal rate, no
slow-down), the assumptions of `fcsd.planning.cost.assumptions`, which are not fitted,
and one of many settings that fit. A second table compares plans with exact schedules, a
third compares planned times between tokens with published ones. One network interface
per GPU is assumed; the paper says "400 Gbps between nodes" without saying for what.
DeepSeek-V3 has 6 layers, all of them MoE: the paper's 71B parameters match that (with
three dense layers first, as published, it would have 38B).

With --figure, for one of the paper's Figures 4 to 7, it prints a table and draws a plot
in FOLDER of the results of `fcsd plan --sweep` beside the paper's points. With
--questions, it prints the gain from FarSkip for three models on 2 to 8 nodes, beside a
roofline by hand (`tests/reference/roofline.py`).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib import pyplot as plt

from fcsd.base.files import read_json
from fcsd.base.text import markdown
from fcsd.model.inspect.shipped import CONFIGS
from fcsd.pipeline.plan import plan_from_files, sweep_plans
from fcsd.planning.cost.exact import compared
from fcsd.planning.cost.plan import kept_memory
from fcsd.planning.cost.planned import Planned, prepare
from fcsd.planning.cost.rivals import HALVES, PAIRS, SHARED
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.times import gain, plan_times
from fcsd.report.figure import GREY, SIZE, save_figure, set_title

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.reference.roofline import Answer, decoding, training

_SHARES = ("gemm", "grouped", "fp8_grouped", "core", "fused_core", "hbm", "link", "nic")
PEAKS = dict.fromkeys(_SHARES, 1.0) | {"slowdown": 0.0}
FITTED = {
    "gemm": 0.3,
    "grouped": 0.3,
    "core": 0.25,
    "score_passes": 8.0,
    "slowdown": 0.0,
}
V3 = {"num_hidden_layers": 6, "first_k_dense_replace": 0}
MEGATRON = {"sharding": "optimizer", "rows_once": False, "keep_activations": True}
ON_8: dict[str, Any] = {"gpu": "mi325x", "unfused_attention": True} | MEGATRON
ON_32: dict[str, Any] = ON_8 | {"nodes": 4, "global_batch": 64}

TRAINING: tuple[tuple[str, str, dict[str, Any], dict[str, Any], float, tuple[float, float] | None], ...] = (
    ("V2-Lite, EP 8", "DeepSeek-V2-Lite", {}, ON_8 | {"batch": 8, "global_batch": 128}, 1.11, (87.6, 89.0)),
    ("V3 (6 layers), EP 8", "DeepSeek-V3", V3, ON_8 | {"global_batch": 64}, 1.04, (92.9, 84.1)),
    ("V3 (6 layers), EP 32", "DeepSeek-V3", V3, ON_32, 1.22, None),
    ("V3, EP 32, one interface per node", "DeepSeek-V3", V3, ON_32 | {"network_gb_s": 6.25}, 1.22, None),
)  # fmt: skip
"""Name, config, changes to it, settings, the paper's speed-up, its overlap forward and
backward (Table 3, Figure 5).
"""

ON_300X: dict[str, Any] = {
    "gpu": "mi300x",
    "phase": "prefill",
    "batch": 16,
    "dtype": "fp8",
}
ON_VLLM = ON_300X | {"without_aiter": True}
"""The paper serves DeepSeek-V2 and Llama-4-Scout with vLLM and its "fused-MoE forward
kernel", and does not name AITER, which vLLM uses only if told to. For Figures 6 and 7
AMD's scripts set SGLANG_USE_AITER=1 (AMD-AGI/FarSkip-Collective, inference/scripts).
"""
V2 = {
    "num_hidden_layers": 60, "hidden_size": 5120, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "n_routed_experts": 160, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
}  # fmt: skip
"""Where DeepSeek-V2 differs from DeepSeek-V2-Lite: arXiv 2405.04434, section 3.1.2."""
FIGURE_7 = ON_300X | {"phase": "decode", "batch": 1024, "nodes": 2}
"""16 ranks, 1,024 requests, eight interfaces of 400 Gbit/s per node. The paper names no
GPUs for Figures 6 and 7.
"""
SERVING: tuple[tuple[str, str, dict[str, Any], dict[str, Any], str, str], ...] = (
    (
        "DeepSeek-V2, time to first token",
        "DeepSeek-V2-Lite",
        V2,
        ON_VLLM,
        "8.2-16.8 %",
        "8-15 % / 97.6 %",
    ),
    (
        "Llama-4-Scout, time to first token",
        "Llama-4-Scout-17B-16E",
        {},
        ON_VLLM,
        "12.2-18.5 %",
        "11-16 % / 95.3 %",
    ),
    (
        "DeepSeek-V3, time to first token (Fig. 6)",
        "DeepSeek-V3",
        {},
        ON_300X,
        "at most 34 %",
        "unknown",
    ),
    (
        "DeepSeek-V3, between tokens (Fig. 7)",
        "DeepSeek-V3",
        {},
        FIGURE_7,
        "a figure, no number",
        "unknown",
    ),
    (
        "the same, --dp 16, deepep_low_latency",
        "DeepSeek-V3",
        {},
        FIGURE_7 | {"data_parallel": 16, "all2all": "deepep_low_latency"},
        "not measured",
        "not measured",
    ),
)
"""Name, config, changes, settings, the paper's gain at 512 to 2048 tokens (5.2), and
the communication that this gain and its hidden share imply, 1 - 1 / (1 + gain) over the share,
if what is hidden slows nothing down.
"""


ON_4: dict[str, Any] = {"gpu": "h100", "nodes": 4}
DECODING: dict[str, Any] = {"phase": "decode", "length": 2048}
LOW_LATENCY = DECODING | {"all2all": "deepep_low_latency"}
EXACT: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("V2-Lite, EP 8 (below)", *TRAINING[0][1:4]),
    ("V3 (6 layers), EP 32", *TRAINING[2][1:4]),
    ("Qwen3-30B-A3B, 16 GPUs, `--batch 2 --keep-activations`", "Qwen3-30B-A3B", {},
     {"nodes": 2, "batch": 2, "keep_activations": True}),
    ("the same on 32 H100, 512 rows, layers recomputed", "Qwen3-30B-A3B", {}, ON_4 | {"global_batch": 512}),
    ("rows of 8,192 tokens (1F1B: no memory)", "Qwen3-30B-A3B", {}, ON_4 | {"global_batch": 512, "length": 8192}),
    ("one micro-batch of one row per step", "Qwen3-30B-A3B", {}, ON_4),
    ("decoding, 64 x 2,048", "Qwen3-30B-A3B", {}, DECODING | {"batch": 64}),
    ("32 x 2,048 (norms fused)", "Qwen3-30B-A3B", {}, DECODING | {"batch": 32}),
    ("DeepSeek-V3, prefill, 16 x 1,024 tokens", "DeepSeek-V3", {}, {"phase": "prefill", "batch": 16, "length": 1024}),
    ("decoding, 64 x 2,048", "DeepSeek-V3", {}, DECODING | {"batch": 64}),
    ("512 x 2,048, `--dp 8`, `deepep_low_latency`", "DeepSeek-V3", {},
     LOW_LATENCY | {"batch": 512, "data_parallel": 8}),
    ("64 x 2,048, `--dp 16`, `deepep_low_latency`", "DeepSeek-V3", {},
     LOW_LATENCY | {"batch": 64, "nodes": 2, "data_parallel": 16}),
)  # fmt: skip
"""Name, config, changes, settings of plans to compare with exact schedules; on H200
unless another GPU is named.
"""
NAMED = {
    "regular": "none",
    PAIRS: "1F1B",
    HALVES: "two half batches",
    SHARED: "shared expert",
}
"""Short names of schedules."""


OSS_120B = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
"""Where gpt-oss-120b differs from gpt-oss-20b: arXiv 2508.10925, table 1."""

STEPS: tuple[
    tuple[str, str, str, dict[str, Any], dict[str, Any], dict[int, float]], ...
] = (
    (
        "DeepSeek-V3, 8 H200",
        "SemiAnalysisAI/InferenceX issue 870",
        "DeepSeek-V3",
        {},
        {"gpu": "h200", "length": 1536},
        {8: 12.8, 16: 17.2, 32: 25.6, 64: 34.6},
    ),
    (
        "DeepSeek-V3, 8 MI300X",
        "ROCm/aiter pull 1930",
        "DeepSeek-V3",
        {},
        {"gpu": "mi300x", "length": 1536},
        {4: 22.1, 8: 25.6, 16: 30.8, 32: 34.3},
    ),
    (
        "DeepSeek-V3, 16 H100",
        "tenstorrent/tt-inference-server issue 356",
        "DeepSeek-V3",
        {},
        {"gpu": "h100", "nodes": 2, "length": 1024},
        {1: 23.1},
    ),
    (
        "gpt-oss-120b, 8 H100",
        "SemiAnalysisAI/InferenceX issue 828",
        "gpt-oss-20b",
        OSS_120B,
        {"gpu": "h100", "length": 1536},
        {4: 3.72, 8: 4.05, 16: 4.83, 32: 5.82, 64: 7.36},
    ),
    (
        "gpt-oss-120b, 8 MI300X",
        "SemiAnalysisAI/InferenceX pull 1092",
        "gpt-oss-20b",
        OSS_120B,
        {"gpu": "mi300x", "length": 1536},
        {1: 4.02, 4: 4.27},
    ),
    (
        "gpt-oss-120b, 1 MI300X",
        "SemiAnalysisAI/InferenceX pull 1061",
        "gpt-oss-20b",
        OSS_120B,
        {"gpu": "mi300x", "tensor_parallel": 1, "length": 1536},
        {64: 31.4, 96: 36.6, 128: 41.3, 256: 58.3},
    ),
)
"""Published times between tokens that are not the paper's: title, source, config,
changes, settings, requests -> ms.
"""


@dataclass(frozen=True)
class Panel:
    """One curve of a figure: what `fcsd plan --sweep SWEPT=VALUES` plans.

    measured: value -> smallest and largest gain that the paper measured. hidden: value
    -> share of the communication that FarSkip hides there; together with the gain, it
    implies the amount of communication.
    """

    title: str
    config: str
    changes: Mapping[str, Any]
    settings: Mapping[str, Any]
    swept: str
    values: tuple[int, ...]
    measured: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    hidden: Mapping[int, float] = field(default_factory=dict)

    def share(self, value: int) -> tuple[float, float] | None:
        """Return the shares of communication in the regular step that the paper's gains
        and hidden part imply, 1 - 1 / (1 + gain) over that part, if what is hidden slows
        nothing down.
        """
        if value not in self.hidden:
            return None
        least, most = (
            end / (1 + end) / self.hidden[value] for end in self.measured[value]
        )
        return least, most


_LENGTHS = (512, 1024, 2048)
FIGURES: dict[int, tuple[Panel, ...]] = {
    4: (
        Panel(
            "Llama-4-Scout, 8 MI300X, 16 requests",
            "Llama-4-Scout-17B-16E",
            {},
            ON_VLLM,
            "length",
            _LENGTHS,
            dict.fromkeys(_LENGTHS, (0.122, 0.185)),
            dict.fromkeys(_LENGTHS, 0.953),
        ),
        Panel(
            "DeepSeek-V2, 8 MI300X, 16 requests",
            "DeepSeek-V2-Lite",
            V2,
            ON_VLLM,
            "length",
            _LENGTHS,
            dict.fromkeys(_LENGTHS, (0.082, 0.168)),
            dict.fromkeys(_LENGTHS, 0.976),
        ),
    ),
    5: (
        Panel(
            "DeepSeek-V3 (6 layers), nodes of 8 MI325X, 64 rows per step",
            "DeepSeek-V3",
            V3,
            ON_8 | {"global_batch": 64},
            "nodes",
            (1, 2, 4),
            {1: (0.04, 0.04), 4: (0.22, 0.22)},
            {1: 0.889},
        ),
    ),
    6: (
        Panel(
            "DeepSeek-V3, 8 MI300X, 1,024 tokens",
            "DeepSeek-V3",
            {},
            ON_300X | {"length": 1024},
            "batch",
            (1, 4, 16, 64),
            dict.fromkeys((1, 4, 16, 64), (0.0, 0.34)),
        ),
        Panel(
            "DeepSeek-V3, 8 MI300X, 16 requests",
            "DeepSeek-V3",
            {},
            ON_300X,
            "length",
            (*_LENGTHS, 4096),
            dict.fromkeys((*_LENGTHS, 4096), (0.0, 0.34)),
        ),
    ),
    7: (
        Panel(
            "DeepSeek-V3, 16 MI300X, 1,024 requests",
            "DeepSeek-V3",
            {},
            FIGURE_7,
            "length",
            (*_LENGTHS, 4096),
        ),
    ),
}
"""The paper's Figures 4 to 7. Its text gives gains over all lengths (Figure 4), of one
and of four nodes (Figure 5), the largest gain (Figure 6), and none (Figure 7).
"""


@dataclass(frozen=True)
class Question:
    """The gain from FarSkip for a model on 2, 4 and 8 nodes, which `fcsd plan --sweep`
    answers.

    weights: bytes per element of the experts and of everything else, as a server stores
    them.
    """

    model: str
    config: str
    changes: Mapping[str, Any]
    phase: Literal["train", "decode"]
    gpu: str
    weights: tuple[float, float]
    fp8: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the plan except the swept one. On MI300X a server's ranks
        gather all tokens: DeepEP has no release for it.
        """
        if self.phase == "train":
            return {"gpu": self.gpu, "global_batch": 512}
        served = {"gpu": self.gpu, "phase": "decode", "nodes": 8, "batch": 1024}
        return served | (
            {"all2all": "deepep_low_latency"} if self.gpu == "h100" else {}
        )

    @property
    def swept(self) -> tuple[str, tuple[int, ...]]:
        """The swept setting, and its values on 2, 4 and 8 nodes."""
        if self.phase == "train":
            return "nodes", (2, 4, 8)
        return "data_parallel", (16, 32, 64)

    @property
    def command(self) -> str:
        """The command that answers it."""
        name, values = self.swept
        words = [
            f"--{key.replace('_', '-')} {value}" for key, value in self.settings.items()
        ]
        option = "dp" if name == "data_parallel" else name
        swept_values = ",".join(map(str, values))
        return (
            f"fcsd plan {self.model} {' '.join(words)} --sweep {option}={swept_values}"
        )

    def by_hand(self, value: int, keeps: bool = True) -> Answer:
        """Return the answer of the roofline by hand. keeps: the activations of a
        micro-batch fit, so that two may take turns.
        """
        config = read_json(CONFIGS / f"{self.config}.json") | dict(self.changes)
        if self.phase == "train":
            return training(config, self.gpu, 8 * value, 4096, 512, keeps=keeps)
        return decoding(
            config,
            self.gpu,
            value,
            4096,
            1024,
            weights=self.weights,
            fp8=self.fp8,
            gathers=self.gpu != "h100",
        )


QUESTIONS = tuple(
    Question(*model[:3], phase, gpu, *model[3:])
    for model in (
        ("Qwen/Qwen3-235B-A22B", "Qwen3-235B-A22B", {}, (2, 2)),
        ("openai/gpt-oss-120b", "gpt-oss-20b", OSS_120B, (4.25 / 8, 2)),
        ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3", {}, (1, 1), True),
    )
    for phase in ("train", "decode")
    for gpu in ("h100", "mi300x")
)


def question_rows() -> Iterator[list[str]]:
    """Yield the answers on 2, 4 and 8 nodes, their largest distance from those by hand,
    and the GPUs on which the plan fits.
    """
    for question in QUESTIONS:
        print(question.command, file=sys.stderr)
        name, values = question.swept
        panel = Panel(
            "", question.config, question.changes, question.settings, name, values
        )
        rows = swept(panel)
        names = [{exact["name"] for exact in row["times"]["exact"]} for row in rows]
        hands = [
            question.by_hand(value, PAIRS in exact)
            for value, exact in zip(values, names, strict=True)
        ]
        answers = [
            [row["times"]["over_exact"] for row in rows],
            [row["times"]["speed_up"] for row in rows],
            [row["tokens_per_second_per_gpu"]["overlapped"] for row in rows],
        ]
        expected_answers = [
            [hand.exact_s / hand.overlapped_s for hand in hands],
            [hand.regular_s / hand.overlapped_s for hand in hands],
            [hand.rate for hand in hands],
        ]
        off = max(
            abs(ours / theirs - 1)
            for each in zip(answers, expected_answers, strict=True)
            for ours, theirs in zip(*each, strict=True)
        )
        fits = [8 * 2**k for k, row in enumerate(rows, 1) if row["memory"]["fits"]]
        yield [
            f"{question.model.partition('/')[2]}, {question.phase}, {question.gpu}",
            *(", ".join(f"{each:.2f}" for each in values) for values in answers[:2]),
            ", ".join(f"{rate:.0f}" for rate in answers[2]),
            f"{off:.0%}",
            str(fits[0] if fits else _needed_gpus(question)),
        ]


def _needed_gpus(question: Question) -> int:
    """Return the number of GPUs on which a plan fits that does not fit on 8 nodes."""
    name, values = question.swept
    with tempfile.TemporaryDirectory() as folder:
        settings = {**question.settings, name: values[-1]}
        plan = plan_from_files(
            settings_of(Path(folder), question.config, question.changes, settings)
        )
    return int(plan["memory"]["needs_gpus"])


def settings_of(
    folder: Path,
    name: str,
    changes: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> PlanSettings:
    """Write a published configuration with changes to a folder, and plan it."""
    config = read_json(CONFIGS / f"{name}.json") | dict(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return PlanSettings(model=str(folder), **settings)


def planned(name: str, changes: dict[str, Any], settings: dict[str, Any]) -> Planned:
    """Prepare a published configuration with changes."""
    with tempfile.TemporaryDirectory() as folder:
        return prepare(settings_of(Path(folder), name, changes, settings))


def swept(panel: Panel) -> list[dict[str, Any]]:
    """Return the rows of `fcsd plan --sweep` for a panel."""
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = {
            str(value): settings_of(
                Path(folder),
                panel.config,
                panel.changes,
                {**panel.settings, panel.swept: value},
            )
            for value in panel.values
        }
        return sweep_plans(values)


def expected(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the smallest and the largest gain that a plan prints: a server's expected
    gain, or that of a training at either end of any assumption.
    """
    if row["expected_gain"] is not None:
        least, most = row["expected_gain"]
        return least, most
    ends = [end for each in row["sensitivity"] for end in each["speed_up"]]
    return min(ends) - 1, max(ends) - 1


def misses(row: Mapping[str, Any], panel: Panel) -> str:
    """State by how much the planned gain misses the paper's, and which of its terms
    causes it: the share of communication, or the hidden part.
    """
    value, times = int(row["value"]), row["times"]
    if value not in panel.measured:
        return "-"
    least, most = panel.measured[value]
    planned_gain = times["speed_up"] - 1
    off = 100 * (max(0.0, planned_gain - most) - max(0.0, least - planned_gain))
    if abs(off) < 0.5:
        return "no"
    share, hidden = panel.share(value), times["overlap"]["forward"]
    if share is None:
        return f"{off:+.0f}"
    # Combine each term of the plan with the other term of the paper: the worse one is
    # the cause.
    middle = (least + most) / 2
    by_term = {
        "hidden part": gain(sum(share) / 2, hidden),
        "communication or its slow-down": gain(
            times["communication_share"], panel.hidden[value]
        ),
    }
    worse = max(by_term, key=lambda term: abs(by_term[term] - middle))
    return f"{off:+.0f}, by the {worse}"


def figure_rows(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the table of a panel, in per cent."""
    for row in rows:
        value, times = int(row["value"]), row["times"]
        measured, share = panel.measured.get(value), panel.share(value)
        hidden = panel.hidden.get(value)
        yield [
            row["value"],
            f"{100 * (times['speed_up'] - 1):.1f}",
            _ends(expected(row)),
            "-" if measured is None else _ends(measured),
            f"{100 * times['communication_share']:.0f}",
            "-" if share is None else _ends(share),
            " / ".join(f"{100 * part:.0f}" for part in times["overlap"].values()),
            "-" if hidden is None else f"{100 * hidden:.1f}",
            misses(row, panel),
        ]


def _ends(values: Sequence[float]) -> str:
    least, most = (f"{100 * value:.1f}" for value in values)
    return least if least == most else f"{least} to {most}"


def figure_table(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a panel of a figure."""
    header = [
        panel.swept, "gain, %", "printed range", "paper", "communication, %", "paper",
        "hidden, %", "paper", "misses by",
    ]  # fmt: skip
    return f"{panel.title}\n\n{markdown(header, list(figure_rows(panel, rows)))}\n"


def plot_figure(
    panels: Sequence[tuple[Panel, Sequence[Mapping[str, Any]]]], path: Path
) -> None:
    """Draw the planned gains with their printed ranges beside those of the paper."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(len(panels) * SIZE[0], SIZE[1]), squeeze=False
    )
    for axis, (panel, rows) in zip(axes[0], panels, strict=True):
        ticks = range(len(rows))
        gains = [100 * (row["times"]["speed_up"] - 1) for row in rows]
        least, most = zip(*(expected(row) for row in rows), strict=True)
        axis.fill_between(
            ticks,
            [100 * end for end in least],
            [100 * end for end in most],
            color=GREY,
            alpha=0.3,
            label="printed range",
        )
        axis.plot(ticks, gains, color="black", marker="o", label="planned")
        for index, value in enumerate(panel.values):
            if value in panel.measured:
                low, high = (100 * end for end in panel.measured[value])
                axis.errorbar(
                    index + 0.06,
                    (low + high) / 2,
                    yerr=(high - low) / 2,
                    color="tab:red",
                    marker="s" if low == high else "",
                    capsize=4,
                    label="paper",
                )
        axis.set_xticks(ticks, [str(value) for value in panel.values])
        axis.set(xlabel=panel.swept, ylabel="gain, per cent", ylim=(0, None))
        axis.grid(alpha=0.3)
        set_title(axis, panel.title)
        handles, labels = axis.get_legend_handles_labels()
        shown = dict(zip(labels, handles, strict=True))
        axis.legend(shown.values(), shown.keys())
    save_figure(figure, path)


def step_rows() -> Iterator[list[str]]:
    """Yield published and planned times between tokens."""
    for title, source, name, changes, settings, published in STEPS:
        times = {
            batch: 1e3
            * plan_times(
                planned(name, changes, settings | {"phase": "decode", "batch": batch})
            )["regular_s"]
            for batch in published
        }
        ratios = [published[batch] / times[batch] for batch in published]
        yield [
            f"{title}, {source}",
            ", ".join(f"{ms:g} ({batch})" for batch, ms in published.items()),
            ", ".join(f"{ms:.1f}" for ms in times.values()),
            f"{min(ratios):.2f}-{max(ratios):.2f}",
        ]


def at(one: Planned, column: str) -> dict[str, Any]:
    """Return the times under one of the three columns."""
    if column == "assumed":
        return plan_times(one)
    machine = one.machine.assuming(PEAKS if column == "peaks" else FITTED)
    if column == "peaks":
        machine = replace(machine, gpu=replace(machine.gpu, payload=1.0))
    return plan_times(replace(one, machine=machine))


def training_rows() -> Iterator[list[str]]:
    """Yield speed-ups, and hidden communication forward and backward."""
    for title, name, changes, settings, speed_up, overlap in TRAINING:
        one = planned(name, changes, settings)
        times = {column: at(one, column) for column in ("peaks", "assumed", "fitted")}
        yield [
            title,
            f"{speed_up:.2f}",
            *(f"{each['speed_up']:.3f}" for each in times.values()),
        ]
        if overlap is not None:
            shares = [
                " / ".join(
                    f"{100 * each['overlap'][name]:.1f}"
                    for name in ("forward", "backward")
                )
                for each in times.values()
            ]
            yield [
                "hidden, % forward / backward",
                " / ".join(map(str, overlap)),
                *shares,
            ]
        once = replace(
            one, settings=one.settings.model_copy(update={"rows_once": True})
        )
        ratios = (at(once, column)["speed_up"] for column in times)
        yield [
            "the same, one row per rank",
            "not measured",
            *(f"{each:.3f}" for each in ratios),
        ]


def serving_rows() -> Iterator[list[str]]:
    """Yield the gain in the time to the first token, or between tokens: the smallest
    and the largest for three lengths.
    """
    for title, name, changes, settings, measured, implied in SERVING:
        cells = []
        each = [
            planned(name, changes, settings | {"length": length})
            for length in (512, 1024, 2048)
        ]
        shares = []
        for column in ("peaks", "assumed", "fitted"):
            times = [at(one, column) for one in each]
            cells.append(_span(100 * (one["speed_up"] - 1) for one in times))
            sent = _span(100 * one["communication_share"] for one in times)
            hidden = _span(100 * one["overlap"]["forward"] for one in times)
            shares.append(f"{sent} / {hidden}")
        yield [title, measured, *cells]
        yield ["communication / hidden of it", implied, *shares]


def _span(values: Iterable[float]) -> str:
    every = list(values)
    return f"{min(every):.0f}-{max(every):.0f} %"


def exact_rows() -> Iterator[list[str]]:
    """Yield the gain over the best exact schedule, its name, and the gain over regular
    blocks.
    """
    for title, name, changes, settings in EXACT:
        one = planned(name, changes, settings)
        times = compared(one, kept_memory(one))
        gains = [f"{times[key]:.3f}" for key in ("over_exact", "speed_up")]
        best = NAMED.get(times["best_exact"], times["best_exact"])
        yield [title, best, *gains]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", type=int, choices=FIGURES, help="of the paper")
    parser.add_argument("--questions", action="store_true", help="on 2 to 8 nodes")
    parser.add_argument(
        "--output", type=Path, default=Path(), help="folder of table and plot"
    )
    options = parser.parse_args(arguments)
    if options.questions:
        header = [
            "on 16, 32, 64 GPUs", "over the best exact", "over regular",
            "tokens/s per GPU", "by hand, off by", "fits on",
        ]  # fmt: skip
        print(markdown(header, list(question_rows())))
        return
    if options.figure is not None:
        panels = [(panel, swept(panel)) for panel in FIGURES[options.figure]]
        table = "\n".join(figure_table(panel, rows) for panel, rows in panels)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"figure-{options.figure}"
        path.with_suffix(".md").write_text(table)
        plot_figure(panels, path.with_suffix(".png"))
        print(table)
        return
    header = ["", "paper", "published peaks", "assumed (not fitted)", "fitted"]
    print(markdown(header, [*training_rows(), *serving_rows()]))
    header = ["", "best exact schedule", "over it", "over regular blocks"]
    print(markdown(header, list(exact_rows()), left=2))
    header = ["between tokens, ms", "published (requests)", "planned", "ratio"]
    print(markdown(header, list(step_rows())))


if __name__ == "__main__":
    main()
