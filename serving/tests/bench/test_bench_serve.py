"""Servers of a fake `vllm` are measured in turns; nothing of them is left, and nothing
is measured twice.
"""

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from fcsd.base.files import read_json
from fcsd.base.text import fit
from fcsd.base.writing import write_json
from fcsd.cli.main import main as fcsd
from fcsd_bench import times
from fcsd_bench.__main__ import main
from fcsd_bench.rows import RowName, make_rows
from fcsd_bench.server import reason_of
from fcsd_bench.summary import summarise, table
from tests.reference.tiny import tiny_config
from tests.support import ROOT, few
from tests.terminal import assert_readable

FIGURES = {
    "stock": {"ttft": 120.0, "itl": 12.0, "exposed": {"1": 0.0, "8": 0.0}},
    "blocking": {"ttft": 150.0, "itl": 12.0, "exposed": {"1": 2.0, "8": 2.0}},
    "overlapped": {"ttft": 100.0, "itl": 8.0, "exposed": {"1": 0.25, "8": 1.0}},
}
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 64, "max_position_embeddings": 4096, "eos_token_id": 1,
}  # fmt: skip
FIELD = {"version": 1, "layers": [0], "attention": "partial", "mlp": "outdated"}
CONVERTED = {"model_type": "farskip_qwen3_moe", "farskip": FIELD, "eos_token_id": 2}


class Place:
    """Two models, an environment with the fake `vllm` or `sglang`, and a folder for results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.out = folder, folder / "env/bin", folder / "out"
        self.engine = "vllm"
        self.bin.mkdir(parents=True)
        self.program(
            "vllm",
            f"#!{sys.executable}\n"
            + Path(__file__).with_name("fake_vllm.py").read_text(),
        )
        site = folder / "env/site"
        # -B, no bytecode: Python compares its source's size and time in seconds alone,
        # and `gpus` may write two files of one size within a second.
        self.program(
            "python",
            f"#!/bin/sh\nPYTHONPATH={site}:{ROOT / 'serving'} exec {sys.executable} -B"
            ' "$@"\n',
        )
        self.distribution("vllm", "0.32.0+cpu")
        self.distribution(
            "fcsd_serving",
            "0.1.0",
            "[vllm.general_plugins]\nfcsd = fcsd_vllm:register\n",
        )
        self.gpus(0)
        (self.bin / "figures.json").write_text(json.dumps(FIGURES))
        self.config("original")
        self.config("model", **CONVERTED)

    def with_sglang(self) -> "Place":
        """Put SGLang in place of vLLM."""
        self.engine = "sglang"
        self.program("sglang", (self.bin / "vllm").read_text())
        self.distribution("sglang", "0.5.23")
        self.distribution(
            "fcsd_serving",
            "0.1.0",
            "[sglang.srt.plugins]\nfcsd = fcsd_sglang:register\n",
        )
        client = self.folder / "env/site/sglang/benchmark"
        client.mkdir(parents=True)
        (client / "serving.py").write_text(
            "import runpy, sys\nsys.argv = ['sglang', 'bench', 'serve',"
            f" *sys.argv[1:]]\nrunpy.run_path({str(self.bin / 'sglang')!r},"
            " run_name='__main__')\n"
        )
        return self

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def distribution(self, name: str, version: str, entry_points: str = "") -> None:
        info = self.folder / f"env/site/{name}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(entry_points)

    def gpus(self, count: int) -> None:
        (self.folder / "env/site/torch.py").write_text(
            f"class cuda:\n    device_count = staticmethod(lambda: {count})\n"
            "    get_device_name = staticmethod(lambda index: 'some GPU')\n"
        )

    def config(self, name: str, **changes: Any) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "config.json").write_text(json.dumps(CONFIG | changes))

    def without_weights(self) -> "Place":
        """Make of the model what `fcsd convert --config-only` leaves."""
        (self.folder / "model/manifest.json").write_text('{"config_only": true}')
        (self.folder / "model/tokenizer.json").write_text("{}")
        return self

    def words(self, *more: str) -> list[str]:
        settings = {"against": self.folder / "original", "output": self.out}
        settings |= {self.engine: self.bin / self.engine}
        settings |= {
            "prompt-tokens": 512,
            "requests": 4,
            "output-tokens": 8,
            "tensor-parallel": 2,
        }
        changed = {word.partition("=")[0] for word in more}
        options = [
            f"--{name}={value}"
            for name, value in settings.items()
            if f"--{name}" not in changed
        ]
        return ["serve", str(self.folder / "model"), *options, *more]

    def calls(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.bin / "calls.jsonl").read_text().splitlines()
        ]

    def result(self) -> Any:
        return json.loads((self.out / "serving.json").read_text())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(times, "_SETTLE_S", 0.01)
    return Place(tmp_path)


def gone(pids: list[int]) -> bool:
    """Return whether no process of these lives; a zombie of a container without an init
    does not.
    """
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    return not any(
        state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
        for state in states
    )


def pids(place: Place) -> list[int]:
    return [pid for call in place.calls() for pid in call.get("pids", ())]


ROWS = "--rows=stock,dbo_prefill,farskip_blocking,farskip_overlapped"
TIMED = '--comm={"comm": "timed"}'


def test_rows_take_turns_and_the_table_has_the_medians_over_the_rounds(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.words(ROWS, TIMED, "--rounds=3", "--serve-args=--dtype float32")
    assert main(words) == 0
    calls = place.calls()
    assert [call["row"] for call in calls if "serve" in call] == [
        *("stock", "dbo", "blocking", "overlapped"),  # it is asked for once
        *("blocking", "overlapped", "stock"),
        *("blocking", "overlapped", "stock"),
    ]
    measured = [
        (call["row"], call["seed"], call["tokens"]) for call in calls if "bench" in call
    ]
    assert len(measured) == 18 and {
        (row, seed, tokens)
        for row in ("stock", "blocking", "overlapped")
        for seed in (1000, 2000, 3000)
        for tokens in (1, 8)
    } == set(measured)
    model, original = str(place.folder / "model"), str(place.folder / "original")
    assert [call["serve"][0] for call in calls[:1]] == [original]
    overlapped = next(
        call["serve"]
        for call in calls
        if call["row"] == "overlapped" and "serve" in call
    )
    assert overlapped[:4] == [model, "--no-enable-prefix-caching", "--dtype", "float32"]
    assert json.loads(overlapped[overlapped.index("--additional-config") + 1]) == {
        "fcsd": {"comm": "timed"}
    }
    blocking = next(call["serve"] for call in calls if call["row"] == "blocking")
    assert (
        json.loads(blocking[blocking.index("--additional-config") + 1])["fcsd"][
            "min_overlap_bytes"
        ]
        > 2**40
    )

    stock, dbo, blocked, ours = place.result()["rows"]
    (point,) = ours["points"]
    # Round r takes r times as long: 100, 200, 300 ms; stock 120, 240, 360; tokens/s
    # 1000/8, 1000/16, 1000/24.
    ttft = {
        "median": 200.0, "lowest": 100.0, "highest": 300.0, "rounds": [100.0, 200.0, 300.0],
    }  # fmt: skip
    assert {name: point["ttft_ms"][name] for name in ttft} == ttft
    assert point["ttft_ms"]["speedup"]["rounds"] == pytest.approx([1.2] * 3)
    assert point["tbt_ms"]["median"] == 16.0 and point["tbt_ms"]["speedup"][
        "median"
    ] == pytest.approx(1.5)
    assert point["output_tokens_per_s"]["median"] == pytest.approx(62.5)
    assert point["output_tokens_per_s"]["speedup"]["median"] == pytest.approx(1.5)
    # 0.25 s and 1 s of the 2 s of a measurement are waited for; of the blocking ones
    # all.
    assert point["overlap_prefill"]["median"] == pytest.approx(0.875)
    assert point["overlap_decode"]["median"] == pytest.approx(0.5)
    assert blocked["points"][0]["overlap_prefill"]["median"] == pytest.approx(0.0)
    assert stock["points"][0]["overlap_prefill"] is None
    assert (
        dbo["missing"] == "Dual-Batch Overlap is not supported on CPU, disabled."
        and dbo["points"] == []
    )

    printed = capsys.readouterr().out
    assert printed == (place.out / "serving.md").read_text()
    line = next(
        line
        for line in printed.splitlines()
        if line.startswith("| FarSkip, overlapped")
    )
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("FarSkip, overlapped", "512", "4", "200 (100 to 300)", "1.20", "16 (8 to 24)", "1.50"),
        *("62.5 (41.7 to 125)", "1.50", "87.5 %", "50.0 %"),
    ]  # fmt: skip
    assert (
        "- stock, dual batch overlap, DeepEP for prefill: Dual-Batch Overlap is not"
        " supported" in printed
    )
    assert (
        "- FarSkip, overlapped, 512 tokens, 4 requests: TTFT x 1.20 (stock), TBT x 1.50"
        " (stock)" in printed
    )
    assert (place.out / "serving.png").stat().st_size > 5000
    assert gone(pids(place))

    assert main(words) == 0  # a finished one is not run again
    assert place.calls() == calls


def test_a_benchmark_whose_server_fails_says_why_and_continues_where_it_was(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.words("--rows=stock,farskip_overlapped", "--rounds=2")
    # in round 2 the second measurement of the first server
    (place.bin / "fail").write_text("6")
    assert main(words) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert (
        "the server of row farskip_overlapped failed: ended during the measurement: torch.OutOfMemoryError"
        in said
    )
    assert "the last lines of" in said and "See root cause above" in said
    assert gone(pids(place))
    kept = {
        file.name: file.stat().st_mtime_ns for file in (place.out / "rounds").iterdir()
    }
    assert sorted(kept) == ["1-farskip_overlapped.json", "1-stock.json"]
    before = len(place.calls())
    assert main(words) == 0
    assert [call["row"] for call in place.calls()[before:] if "serve" in call] == [
        "overlapped",
        "stock",
    ]
    assert kept == {
        name: (place.out / "rounds" / name).stat().st_mtime_ns for name in kept
    }
    assert main(place.words("--rows=stock,farskip_overlapped", "--rounds=3")) == 2
    assert "was made with other settings (rounds: 2 -> 3)" in capsys.readouterr().err


def test_a_trace_tells_what_gpus_overlap_and_shows_one_layer(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.words("--rows=farskip_overlapped", "--rounds=1", "--trace")
    assert (
        main(words) == 2
        and "this machine has none; on a CPU, use --comm timed"
        in capsys.readouterr().err
    )
    place.gpus(2)
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)"
    kernels = [("gemm", 0, 100), (nccl, 50, 150), ("gemm", 150, 250), (nccl, 200, 260)]
    figures = {"overlapped": FIGURES["overlapped"] | {"trace": kernels}}
    (place.bin / "figures.json").write_text(json.dumps(figures))
    assert main(words) == 0
    (ours,) = place.result()["rows"]
    # 50 of 100 us and 50 of 60 us are beside a gemm.
    assert ours["trace"]["overlap"] == pytest.approx(100 / 160)
    assert ours["trace"]["total_s"] == pytest.approx(160e-6)
    # One layer from the first all-reduce on, at 50 us.
    assert ours["trace"]["layer"]["all-reduce"] == [
        pytest.approx([0, 0.1]),
        pytest.approx([0.15, 0.21]),
    ]
    assert ours["trace"]["layer"]["computation"] == [
        pytest.approx([0, 0.05]),
        pytest.approx([0.1, 0.2]),
    ]
    assert "- FarSkip, overlapped: 62.5 % of 0.2 ms" in capsys.readouterr().out
    assert "2 x some GPU" in (place.out / "serving.md").read_text()
    assert (place.out / "layer.png").stat().st_size > 5000 and gone(pids(place))


@pytest.mark.parametrize(
    ("kind", "title", "file"),
    few([("farskip", "FarSkip", ""), ("wide", "wide, FarSkip", "wide-")], 1),
)
def test_a_plan_from_the_times_that_are_left_gives_the_ratio_that_was_measured(
    kind: str,
    title: str,
    file: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Four prompts, two at a time: two steps of 100 ms, 20 of them communication, so
    # that first tokens are there after 100, 100, 200 and 200 ms; then seven steps of 50
    # ms, 20 of them communication. Overlapped, 15 of 20 ms are hidden in prefill, 10 of
    # 20 in decoding: steps of 85 and 40 ms. A rank communicates as much in the warm-up.
    figures = {
        "stock": FIGURES["stock"],
        "blocking": {
            "ttft": 150.0, "itl": 50.0, "duration": {"1": 0.200, "8": 0.550},
            "total": {"1": 2 * 0.040, "8": 2 * 0.180},
            "exposed": {"1": 2 * 0.040, "8": 2 * 0.180},
        },
        "overlapped": {
            "ttft": 127.5, "itl": 40.0, "duration": {"1": 0.170, "8": 0.450},
            "total": {"1": 2 * 0.040, "8": 2 * 0.180},
            "exposed": {"1": 2 * 0.010, "8": 2 * 0.080},
        },
    }  # fmt: skip
    (place.bin / "figures.json").write_text(json.dumps(figures))
    tiny = tiny_config("qwen3_moe").to_dict()
    place.config("original", **tiny)
    place.config("model", **(tiny | CONVERTED))
    words = [
        f"--rows=stock,{kind}_blocking,{kind}_overlapped",
        "--rounds=1",
        "--prompt-tokens=64",
    ]
    assert main(place.words('--comm={"comm": "timed", "latency_ms": 1}', *words)) == 0
    printed = capsys.readouterr()
    assert f"times for `fcsd plan --measured`: {place.out}/times-*.json" in printed.err
    page = printed.out.splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page
        if ".json |" in line
    ]
    assert cells == [
        [
            "prefill", "64", "4",
            *(f"{title}, blocking", "150", "20.0 %", "75.0 %", "1.18", "1.18", f"times-{file}prefill-64.json"),
        ],
        [
            "decode", "64", "4",
            *(f"{title}, blocking", "50", "40.0 %", "50.0 %", "1.25", "1.25", f"times-{file}decode-68.json"),
        ],
    ]  # fmt: skip
    assert (
        sorted(file.name for file in place.out.glob("times*"))
        == [line[-1] for line in cells][::-1]
    )

    (command,) = [line for line in page if line.startswith("    fcsd plan ")]
    assert ("--dp 2" in command) == (kind == "wide") == ("--tp 2" not in command)
    monkeypatch.chdir(place.out)

    def planned(command: str) -> Any:
        assert fcsd([*shlex.split(command)[1:], "--json"]) == 0
        return json.loads(capsys.readouterr().out)["times"]

    changes = {
        "--phase decode": "--phase prefill",
        "--length 68": "--length 64",
        "decode-68": "prefill-64",
    }
    others = functools.reduce(
        lambda text, change: text.replace(*change), changes.items(), command
    )
    decode, prefill = planned(command), planned(others)
    assert decode["speed_up"] == pytest.approx(50 / 40) and decode[
        "overlapped_s"
    ] == pytest.approx(0.040)
    assert prefill["speed_up"] == pytest.approx(100 / 85) and prefill[
        "overlapped_s"
    ] == pytest.approx(0.1275)
    assert prefill["exposed_s"] == pytest.approx(0.150 * 0.2 * 0.25)


def test_every_number_of_requests_is_measured_at_every_length_on_one_server(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_config("qwen3_moe").to_dict()
    place.config("original", **tiny)
    place.config("model", **(tiny | CONVERTED))
    figures = json.loads((place.bin / "figures.json").read_text())
    for row in figures.values():
        # A rank communicates for 0.05 of 0.25 s, and for 0.5 of 2 s with whole answers,
        # and as long in the warm-up.
        row |= {"duration": {"1": 0.25, "8": 2.0}, "total": {"1": 0.1, "8": 1.0}}
    figures["blocking"]["exposed"] = {"1": 0.1, "8": 1.0}
    figures["overlapped"]["exposed"] = {"1": 0.025, "8": 0.25}
    (place.bin / "figures.json").write_text(json.dumps(figures))
    rows = "--rows=stock,farskip_blocking,farskip_overlapped"
    shapes = [(32, 1), (32, 8), (64, 1), (64, 8)]
    lists = ("--requests=1,8", "--prompt-tokens=32,64", "--rounds=1")
    assert main(place.words(rows, TIMED, *lists)) == 0
    calls = place.calls()
    assert len([call for call in calls if "serve" in call]) == 3
    sent = [
        tuple(
            int(call["bench"][call["bench"].index(f"--{name}") + 1])
            for name in ("random-input-len", "num-prompts", "max-concurrency")
        )
        for call in calls
        if "bench" in call and call["row"] == "stock"
    ]
    # Each shape once for first tokens, and once with whole answers.
    assert sent == [
        (length, number, number) for length, number in shapes for _ in range(2)
    ]
    # No measurement repeats another's prompts.
    seeds = [call["seed"] for call in calls if "bench" in call][: len(sent)]
    assert seeds == [1000, 1000, 1001, 1001, 1002, 1002, 1003, 1003]
    result = place.result()
    assert result["settings"]["requests"] == [1, 8]
    for row in result["rows"]:
        found = [(point["prompt_tokens"], point["requests"]) for point in row["points"]]
        assert found == shapes
    page = (place.out / "serving.md").read_text()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")][1:3]
        for line in page.splitlines()
        if line.startswith("| FarSkip, overlapped")
    ]
    assert cells == [["32", "1"], ["32", "8"], ["64", "1"], ["64", "8"]]

    # A plan reads the file of each.
    files = [
        f"times-{phase}-{length + extra}-{number}.json"
        for length, number in shapes
        for phase, extra in (("prefill", 0), ("decode", 4))
    ]
    assert [gain["file"] for gain in result["gains"]] == files
    assert {file.name for file in place.out.glob("times-*")} == set(files)
    monkeypatch.chdir(place.out)
    capsys.readouterr()
    for file, (length, number) in (files[0], shapes[0]), (files[6], shapes[3]):
        words = f"--phase prefill --tp 2 --batch {number} --length {length}"
        model = str(place.folder / "model")
        command = ["plan", model, *words.split(), "--measured", file, "--json"]
        assert fcsd(command) == 0
        times = json.loads(capsys.readouterr().out)["times"]
        assert times["regular_s"] == pytest.approx(0.150)


def test_over_an_emulated_network_farskip_is_set_against_its_own_blocking_row() -> None:
    comm = {"comm": "timed", "latency_ms": 2}
    runs = {"stock": 50, "farskip_blocking": 300, "farskip_overlapped": 200}
    runs |= {"wide_stock": 40, "wide_blocking": 100, "wide_overlapped": 80}
    result = summed_up({name: [ttft] for name, ttft in runs.items()}, comm)
    ratios = [
        row["points"][0]["ttft_ms"]["speedup"]["median"] for row in result["rows"]
    ]
    assert ratios == [1.0, 1.0, 1.5, 1.0, 1.0, 1.25]
    assert (
        "Their x is the speed-up over FarSkip, blocking (for wide rows, the wide one)."
        in table(result)
    )
    assert "fastest server" not in table(result)


def summed_up(
    times: dict[str, list[float]], comm: Any, limits: Any = None
) -> dict[str, Any]:
    """Return the result of rows whose first tokens took these milliseconds, a round each."""

    def run(ttft: float) -> dict[str, Any]:
        figures = {
            "median_ttft_ms": ttft,
            "median_tpot_ms": 1.0,
            "output_throughput": 9.0,
        }
        point = {"prompt_tokens": 512, "requests": 4}
        point |= {"prefill": figures, "decode": figures}
        return {
            "begin": "2026-11-23 10:00:00 UTC",
            "end": "2026-11-23 10:01:00 UTC",
            "load": ttft / 100,
        } | {"points": [point]}

    rows = make_rows("vllm", list(times), {}, (), 2, comm, "allgather_reducescatter")
    runs = {name: [run(ttft) for ttft in each] for name, each in times.items()}
    settings = {
        "engine": "vllm", "model": "M", "against": "O", "tensor_parallel": 2, "requests": [4], "output_tokens": 8,
        "nodes": [],
        "all2all": "allgather_reducescatter", "rounds": len(next(iter(times.values()))), "comm": comm,
        "prompt_tokens": [512],
    }  # fmt: skip
    versions = {"vllm": "0.32.0", "fcsd-serving": "0.1.0", "devices": [], "cores": 2}
    return summarise(
        {"settings": settings, "versions": versions}, rows, runs, {}, {}, limits or {}
    )


def test_a_speed_up_beyond_what_can_be_hidden_is_noise_and_no_gain() -> None:
    times = {
        "stock": [200.0, 220.0, 210.0],
        "farskip_overlapped": [100.0, 110.0, 105.0],
    }
    for limit, cell in ((2.5, "2.00"), (1.4, "noise")):
        result = summed_up(times, {}, {"farskip_overlapped": [{"ttft_ms": limit}]})
        page = table(result)
        line = next(
            line
            for line in page.splitlines()
            if line.startswith("| FarSkip, overlapped")
        )
        assert [each.strip() for each in line.strip("|").split("|")][4] == cell
        assert (
            ("TTFT noise, TBT x 1.00 (stock)" in page)
            == (cell == "noise")
            == ("2.00" not in page)
        )
        assert ("measure again" in page.lower()) == (cell == "noise")
        assert "Fewer than 3 rounds" not in page
    assert result["rows"][1]["points"][0]["ttft_ms"]["limit"] == 1.4


def test_few_rounds_and_the_load_beside_them_are_said() -> None:
    result = summed_up(
        {"stock": [200.0, 220.0], "farskip_overlapped": [100.0, 110.0]}, {}
    )
    assert [each["load"] for each in result["rounds"]] == [
        {"lowest": 1.0, "highest": 2.0},
        {"lowest": 1.1, "highest": 2.2},
    ]
    page = table(result)
    assert_readable(fit(page, 80))
    assert "**Fewer than 3 rounds: a gain cannot be told from noise.**" in page
    assert (
        "Measured from 2026-11-23 10:00:00 UTC to 2026-11-23 10:01:00 UTC; load of this"
        " machine (2 cores)" in page
    )
    assert "before its servers started 1.0 to 2.2." in page


def test_wide_rows_have_the_same_back_end_and_are_set_against_wide_stock(
    place: Place,
) -> None:
    rows = "--rows=stock,wide_stock,wide_blocking,wide_overlapped"
    assert main(place.words(rows, "--rounds=1", "--all2all=deepep_low_latency")) == 0
    serves = [call["serve"] for call in place.calls() if "serve" in call]
    wide = "--tensor-parallel-size 1 --data-parallel-size 2 --enable-expert-parallel"
    wide += " --all2all-backend deepep_low_latency"
    assert [wide in " ".join(words) for words in serves] == [False, True, True, True]
    assert [words[0].rpartition("/")[2] for words in serves] == [
        "original", "original", "model", "model",
    ]  # fmt: skip
    result = place.result()
    assert [row["base"] for row in result["rows"]] == ["stock", *("wide_stock",) * 3]
    (point,) = result["rows"][3]["points"]
    assert point["ttft_ms"]["speedup"]["median"] == pytest.approx(1.2)
    assert (
        "(wide: data parallel 2, deepep_low_latency, x over wide stock)"
        in (place.out / "serving.md").read_text()
    )


def test_a_round_that_was_cut_off_is_measured_again_as_a_whole(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.words("--rows=stock,dbo_prefill,farskip_overlapped", "--rounds=2")
    # the second server of round 2, after the first was measured
    (place.bin / "fail").write_text("8")
    assert main(words) == 2
    assert sorted(file.name for file in (place.out / "rounds").glob("*.json")) == [
        *("1-farskip_overlapped.json", "1-stock.json", "2-farskip_overlapped.json")
    ]
    before, kept = len(place.calls()), (place.out / "rounds/1-stock.json").read_text()
    capsys.readouterr()
    assert main(words) == 0
    assert (
        "fcsd-bench: round 2 was interrupted; measuring it again"
        in capsys.readouterr().err
    )
    assert [call["row"] for call in place.calls()[before:] if "serve" in call] == [
        "overlapped",
        "stock",
    ]
    assert (
        place.out / "rounds/1-stock.json"
    ).read_text() == kept  # with what dbo said, which is not asked again
    rounds = place.result()["rounds"]
    assert len(rounds) == 2 and rounds[0]["end"] <= rounds[1]["begin"]
    assert place.result()["rows"][1]["missing"].startswith(
        "Dual-Batch Overlap is not supported"
    )


@pytest.mark.parametrize("damage", ["another digit", "another row's figures"])
def test_a_measured_round_that_was_changed_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    words = place.words("--rows=stock,farskip_overlapped", "--rounds=2")
    (place.bin / "fail").write_text("8")
    assert main(words) == 2
    file = place.out / "rounds" / "1-stock.json"
    figures = read_json(file) | {"begin": 0}
    if damage == "another row's figures":
        figures = read_json(file.with_name("1-farskip_overlapped.json"))
    write_json(file, figures)
    capsys.readouterr()
    assert main(words) == 2
    assert (
        f"{file}: is damaged: its content differs from what was written; remove it to measure"
        " it again" in capsys.readouterr().err
    )
    file.unlink()
    assert main(words) == 0


def test_a_server_over_two_machines_is_started_on_both_and_ends_on_both(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.program(
        "ssh", '#!/bin/sh\nwhile [ "$1" != there ]; do shift; done\nexec sh -c "$2"\n'
    )
    monkeypatch.setenv("PATH", f"{place.bin}:{os.environ['PATH']}")
    rows = "--rows=stock,wide_stock"
    assert (
        main(
            place.words(rows, "--rounds=1", "--nodes=here,there", "--tensor-parallel=4")
        )
        == 0
    )
    serves = [" ".join(call["serve"]) for call in place.calls() if "serve" in call]
    head, second, wide_head, wide_second = sorted(
        serves, key=lambda words: ("data-p" in words, "headless" in words)
    )
    for words in (head, second):
        assert (
            "--tensor-parallel-size 4" in words
            and "--nnodes 2 --master-addr here --master-port " in words
        )
    assert "--headless --node-rank 1" in second and "--host" not in second
    for words in (wide_head, wide_second):
        assert (
            "--data-parallel-size-local 2 --data-parallel-address here"
            " --data-parallel-rpc-port" in words
        )
    assert "--headless --data-parallel-start-rank 2" in wide_second
    assert "tensor parallel 4 on 2 machines" in (place.out / "serving.md").read_text()
    assert gone(pids(place))


def test_servers_of_sglang_are_measured_in_its_own_words(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.with_sglang().words(TIMED, "--rounds=1", "--serve-args=--device cpu")
    assert main(words) == 0
    serves = [call for call in place.calls() if "serve" in call]
    # all that SGLang has
    assert [call["row"] for call in serves] == ["stock", "blocking", "overlapped"]
    for call, model in zip(serves, ("original", "model", "model"), strict=True):
        flags = [
            "--disable-radix-cache", "--device", "cpu", "--tp-size", "2", "--ep-size", "2",
        ]  # fmt: skip
        assert call["serve"][:9] == [str(place.folder / model), *flags, "--host"]
    stock, blocking, overlapped = (call["environment"] for call in serves)
    # for its experts' sake, on a CPU
    assert stock == {"SGLANG_EXTERNAL_MODEL_PACKAGE": "fcsd_sglang"}
    assert (
        make_rows("sglang", ["stock"], {}, ("some GPU",) * 2, 2, {}, "")[0].environment
        == {}
    )
    assert overlapped["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "fcsd_sglang"
    assert json.loads(overlapped["FCSD_SERVING"]) == {"comm": "timed"}
    assert json.loads(blocking["FCSD_SERVING"])["min_overlap_bytes"] > 2**40
    benches = [" ".join(call["bench"]) for call in place.calls() if "bench" in call]
    assert len(benches) == 6
    for words_of, tokens in zip(benches, (1, 8) * 3, strict=True):
        assert (
            "--backend sglang --dataset-name random-ids --random-range-ratio 1"
            " --warmup-requests 4" in words_of
        )
        # of the warm-up, too
        assert f'"max_new_tokens": {tokens}, "ignore_eos": true' in words_of
    result = place.result()
    assert (
        result["settings"]["engine"] == "sglang"
        and result["versions"]["sglang"] == "0.5.23"
    )
    ours = result["rows"][2]
    assert (
        ours["environment"]
        == {name: overlapped[name] for name in ours["environment"]}
        != {}
    )
    assert ours["points"][0]["ttft_ms"]["speedup"]["median"] == pytest.approx(1.2)
    assert ours["points"][0]["overlap_prefill"]["median"] == pytest.approx(0.875)
    printed = capsys.readouterr().out
    assert "SGLang 0.5.23, fcsd-serving 0.1.0, CPU, tensor parallel 2;" in printed
    assert "**Fewer than 3 rounds" in printed and gone(pids(place))


EVEN = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
SERVED = "--rows=stock,farskip_blocking,farskip_overlapped"


def test_a_model_without_weights_is_measured_with_dummies_in_every_server(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.without_weights().words(SERVED, "--serve-args=--dtype bfloat16")
    assert main([*words, "--rounds=1"]) == 0
    printed = capsys.readouterr()
    assert (
        f"fcsd-bench: {place.folder}/model has no weights (--config-only): all servers"
        " get --load-format dummy\n" in printed.err
    )
    serves = [call for call in place.calls() if "serve" in call]
    assert [call["row"] for call in serves] == ["stock", "blocking", "overlapped"]
    for call, model in zip(serves, ("original", "model", "model"), strict=True):
        assert call["serve"][:6] == [
            str(place.folder / model), "--no-enable-prefix-caching",
            "--dtype", "bfloat16", "--load-format", "dummy",
        ]  # fmt: skip
        assert EVEN.items() <= call["environment"].items()
    result = place.result()
    assert result["dummy_weights"] is True
    assert all(EVEN.items() <= row["environment"].items() for row in result["rows"])
    assert result["settings"]["serve_args"] == [
        "--dtype", "bfloat16", "--load-format", "dummy",
    ]  # fmt: skip
    page = (place.out / "serving.md").read_text()
    sentence = "**Weights were dummies (`--load-format dummy`): these are times of the"
    assert sentence in page and sentence in printed.out
    # Weights that are there by now are another benchmark's.
    (place.folder / "model/model.safetensors").write_bytes(b"")
    assert main([*words, "--rounds=1"]) == 2
    assert "was made with other settings (serve_args: " in capsys.readouterr().err


def test_weights_that_are_not_there_cannot_be_asked_for(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.without_weights().words("--serve-args=--load-format auto")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"fcsd-bench serve: error: --serve-args: --load-format auto: {place.folder}/model was"
        " written by `fcsd convert --config-only` and has no weights; leave"
        " --load-format out, and fcsd sets it to dummy"
    )
    assert not (place.bin / "calls.jsonl").exists() and not place.out.exists()


def test_dummies_may_be_asked_for_and_real_weights_are_not_called_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(place.words("--rows=stock", "--rounds=1")) == 0
    assert place.result()["dummy_weights"] is False
    assert "Weights were" not in (place.out / "serving.md").read_text()
    (first,) = (call for call in place.calls() if "serve" in call)
    assert "--load-format" not in first["serve"] and first["environment"] == {}
    place.out = place.folder / "asked"
    (name,) = EVEN
    monkeypatch.setenv(name, "normal_routing")  # which the user has chosen
    words = ["--rows=stock", "--rounds=1", "--serve-args=--load-format=dummy"]
    assert main(place.words(*words)) == 0
    assert place.result()["dummy_weights"] is True
    (row,) = place.result()["rows"]
    assert row["environment"] == {name: "normal_routing"}


def test_sglang_simulates_routes_on_gpus_alone(place: Place) -> None:
    place.with_sglang().without_weights()
    for gpus, environment in (
        (0, {"SGLANG_EXTERNAL_MODEL_PACKAGE": "fcsd_sglang"}),
        (2, {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}),
    ):
        place.gpus(gpus)
        output = f"--output={place.folder / str(gpus)}"
        assert main(place.words("--rounds=1", "--rows=stock", output)) == 0
        *_, last = (call for call in place.calls() if "serve" in call)
        assert last["serve"][1:4] == ["--disable-radix-cache", "--load-format", "dummy"]
        assert last["environment"] == environment


def test_a_server_of_sglang_over_two_machines_gets_the_address_of_the_first(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.with_sglang()
    place.program(
        "ssh", '#!/bin/sh\nwhile [ "$1" != there ]; do shift; done\nexec sh -c "$2"\n'
    )
    monkeypatch.setenv("PATH", f"{place.bin}:{os.environ['PATH']}")
    assert (
        main(
            place.words("--rows=farskip_overlapped", "--rounds=1", "--nodes=here,there")
        )
        == 0
    )
    head, second = sorted(
        (call for call in place.calls() if "serve" in call),
        key=lambda call: "--node-rank" in call["serve"],
    )
    for call in (head, second):
        assert call["environment"]["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "fcsd_sglang"
        address, number = (
            call["serve"][call["serve"].index(flag) + 1]
            for flag in ("--dist-init-addr", "--nnodes")
        )
        assert address.startswith("here:") and number == "2"
    assert (
        second["serve"][-2:] == ["--node-rank", "1"]
        and "--headless" not in second["serve"]
    )
    assert gone(pids(place))


def test_a_first_token_without_text_is_no_time_of_zero(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.with_sglang()
    (place.bin / "mute").touch()
    assert main(place.words("--rows=stock", "--rounds=1")) == 2
    assert (
        "4 of 4 answers had no text, so the time to their first token is unknown"
        in capsys.readouterr().err
    )


def test_a_rival_is_started_only_where_it_has_something_to_overlap() -> None:
    def missing(
        config: dict[str, Any], devices: tuple[str, ...], ranks: int
    ) -> dict[str, str]:
        rows = make_rows(
            "vllm",
            get_args(RowName),
            config,
            devices,
            ranks,
            {},
            "allgather_reducescatter",
        )
        assert [row.name for row in rows] == list(get_args(RowName))
        return {row.name: row.missing for row in rows if row.missing is not None}

    gpus, shared = ("some GPU",) * 2, {"text_config": {"n_shared_experts": 1}}
    assert missing(shared, gpus, 2) == {}
    assert missing({}, gpus, 2) == {"shared_stream": "the model has no shared experts"}
    # DBO: vLLM's own log says so
    assert set(missing(shared, (), 2)) == {"shared_stream", "fused_allreduce"}
    wide = {"wide_stock", "wide_blocking", "wide_overlapped"}
    assert (
        set(missing(shared, gpus, 1))
        == {"dbo_prefill", "dbo_decode", "fused_allreduce"} | wide
    )


def test_a_plugin_that_the_environment_leaves_out_is_named(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert main(place.words()) == 2
    assert "VLLM_PLUGINS=others leaves out the plugin" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_of_a_server_outlives_the_command(place: Place, number: int) -> None:
    words = [sys.executable, "-m", "fcsd_bench", *place.words("--rows=stock")]
    (place.bin / "fail").write_text("1")  # a measurement that takes long
    place.program(
        "vllm",
        (place.bin / "vllm").read_text().replace('(HERE / "die").touch()', "pass"),
    )
    command = subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'serving'}"},
        stderr=subprocess.DEVNULL,
        # a shell that runs the tests in the background lets its children ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(
        lambda: (
            (place.bin / "calls.jsonl").exists()
            and any("bench" in call for call in place.calls())
        )
    )
    assert not gone(pids(place))
    command.send_signal(number)
    assert command.wait(120) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    wait_for(lambda: gone(pids(place)))


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def other(place: Place, name: str, **changes: Any) -> None:
    place.config(name, **changes)


BAD = {
    "MODEL is not converted": lambda p: other(p, "model"),
    "--against is also converted": lambda p: other(p, "original", **CONVERTED),
    "was converted from 'qwen3_moe'": lambda p: other(
        p, "original", model_type="mixtral"
    ),
    "hidden_size is 128, but 64 in": lambda p: other(p, "original", hidden_size=128),
    "make 520 tokens, more than the context of": lambda p: [
        other(p, "model", **CONVERTED, max_position_embeddings=256),
        other(p, "original", max_position_embeddings=256),
    ],
    "has no tokenizer, which a server needs even with dummy weights": lambda p: (
        p.without_weights().folder / "model/tokenizer.json"
    ).unlink(),
    "no such program": lambda p: (p.bin / "vllm").unlink(),
    "vLLM is not installed in the environment": lambda p: shutil.rmtree(
        p.folder / "env/site/vllm.dist-info"
    ),
    "its environment lacks the plugin that serves converted models": lambda p: (
        p.distribution("fcsd_serving", "0.1.0")
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_what_cannot_be_measured_is_one_line_before_any_server_starts(
    place: Place, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    BAD[said](place)
    assert main(place.words("--rows=stock")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fcsd-bench serve: error: ") and said in line
    assert not (place.bin / "calls.jsonl").exists() and not place.out.exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--comm=rccl", "--comm: additional_config: fcsd.comm: must be one of blocking, stream, nccl, c10d, timed"),
        ("--serve-args=--port 8000", "--port is set by the benchmark; leave it out"),
        ("--prompt-tokens=512,x", "--prompt-tokens: 'x' is not a number"),
        ("--requests=8,x", "--requests: 'x' is not a number; write for example 1,8,64"),
        ("--requests=8,8", "8 is given twice"),
        ("--requests=0", "--requests"),
        ("--rows=stock,stok", "rows"),
        ("--rounds=0", "rounds"),
        ("--nodes=here", "--nodes: 2 ranks on 1 machine(s): give two or more"),
        ("--nodes=a,b,c", "--nodes: 2 ranks on 3 machine(s): give two or more"),
    ],
)  # fmt: skip
def test_an_option_without_a_meaning_is_one_line(
    place: Place, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    assert main(place.words(option)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--rows=stock,wide_stock"],
            "--rows: wide_stock belongs to another engine; SGLang has stock, farskip_blocking,",
        ),
        (["--all2all=deepep_low_latency"], "--all2all deepep_low_latency: applies to wide rows, which only vLLM has"),
        (["--trace"], "--trace: works with vLLM's profiler only"),
        (["--comm=stream"], "--comm: FCSD_SERVING.comm: must be one of c10d, blocking, timed with SGLang"),
        (["--serve-args=--ep-size 1"], "--ep-size is set by the benchmark"),
        (["--serve-args=--dp-size 2"], "--dp-size is set by the benchmark"),
    ],
)  # fmt: skip
def test_what_sglang_has_not_is_refused_in_a_line(
    place: Place, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(place.with_sglang().words(*options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not place.out.exists()


def test_another_sglang_is_refused_and_one_engine_is_measured_at_a_time(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.with_sglang().distribution("sglang", "0.5.24")
    assert main(place.words()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "fcsd-serving 0.1.0 refuses SGLang 0.5.24" in line
        and "install sglang==0.5.23" in line
    )
    with pytest.raises(SystemExit):
        main(place.words("--vllm=vllm"))
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_vllm_that_is_not_verified_is_measured_with_a_warning(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.distribution("vllm", "0.99.1")
    assert main(place.words("--rows=stock", "--rounds=1")) == 0
    output = capsys.readouterr()
    assert (
        "warning: vLLM 0.99.1 is not verified with fcsd-serving 0.1.0 (0.32.0 is)"
        in output.err
    )
    assert "vLLM 0.99.1 is not verified" in output.out


def test_the_reason_is_the_error_that_the_others_follow_from() -> None:
    # Lines of vLLM 0.32's logs.
    assert (
        reason_of(
            "(APIServer pid=7) INFO 11-22 14:20:26 [utils.py:1] non-default args:"
            " {}\npydantic_core._pydantic_core.ValidationError: 1 validation error for"
            " VllmConfig\n  Value error, fcsd-serving: FarSkipQwen3MoeForCausalLM:"
            " leave it off [type=value_error, input_value=…]\n    For further"
            " information visit https://errors.pydantic.dev/2.14/v/value_error\n"
        )
        == "Value error, fcsd-serving: FarSkipQwen3MoeForCausalLM: leave it off"
    )
    assert (
        reason_of(
            "(EngineCore_DP0 pid=31) ERROR 11-22 14:20:26 [core.py:871] AssertionError:"
            " DeepEP is not installed\n(APIServer pid=7) RuntimeError: Engine core"
            " initialization failed. See root cause above.\n"
        )
        == "AssertionError: DeepEP is not installed"
    )
    assert reason_of("vllm: error: unrecognized arguments: --enable-dbo\n").endswith(
        "--enable-dbo"
    )
    # And of SGLang 0.5.23's.
    assert (
        reason_of(
            "[2026-11-23 20:17:51 TP0 EP0] Scheduler hit an exception: Traceback (most"
            " recent call last):\nRuntimeError: index -1 is out of bounds for dimension"
            " 1 with size 8\n\n[2026-11-23 20:18:57] kill_process_tree called:"
            " parent_pid=4211, include_parent=True, pid=4211\n"
        )
        == "RuntimeError: index -1 is out of bounds for dimension 1 with size 8"
    )
    assert (
        reason_of("[2026-11-23 20:17:51] ValueError: no such flag\n")
        == "ValueError: no such flag"
    )


def test_an_environment_without_fcsd_is_told_where_the_command_runs() -> None:
    run = subprocess.run(
        [sys.executable, "-S", "-m", "fcsd_bench", "serve", "--help"],
        cwd=ROOT / "serving",
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("fcsd-bench: error: ") and "has no fcsd" in run.stderr
