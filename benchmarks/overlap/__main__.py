"""See `benchmarks.overlap`."""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmarks.overlap
from benchmarks.overlap.links import namespaces
from benchmarks.overlap.modes import MODES, exchanged_bytes, run_rank
from benchmarks.overlap.report import printed, summary, write_blocking_times

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=benchmarks.overlap.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument(
        "--link", choices=["emulated", "plain", "netns"], default="emulated"
    )
    made.add_argument(
        "--compute",
        choices=["sleeps", "real"],
        help="default: sleeps on a CPU, real on a GPU",
    )
    made.add_argument("--model", choices=["shared", "none"], default="shared")
    made.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        help="default: all; the first is what others are compared with",
    )
    made.add_argument("--checkpointing", action="store_true")
    made.add_argument("--ranks", type=int, help="default: 2 on a CPU; a GPU has 1")
    made.add_argument(
        "--virtual-ranks", type=int, default=8, help="of a GPU's emulated link"
    )
    made.add_argument(
        "--rate-gb-s", type=float, default=150.0, help="of a GPU's emulated link, GB/s"
    )
    made.add_argument(
        "--exchange-ms",
        type=float,
        default=60.0,
        help="of a CPU's emulated link: one exchange",
    )
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--rows", type=int, help="sequences per rank")
    made.add_argument("--length", type=int, help="tokens per sequence")
    for name in ("layers", "dim", "expert-dim", "experts", "top-k", "heads"):
        made.add_argument(f"--{name}", type=int)
    # a process that --link netns has started
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--store", help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path)
    made.add_argument(
        "--times",
        type=Path,
        help="folder for times.json and config.json: `fcsd plan --measured` (modes: blocking)",
    )
    made.add_argument("--traces", help="folder for the profiler's traces (GPU)")
    return made


_SIZE_NAMES = (
    "layers",
    "dim",
    "expert_dim",
    "experts",
    "top_k",
    "heads",
    "rows",
    "length",
)
_SIZES = {
    "sleeps": (4, 64, 32, 16, 4, 4, 2, 64),
    "real": (4, 512, 256, 16, 4, 8, 2, 512),
    "cuda": (6, 2048, 1408, 8, 6, 16, 4, 4096),
}
"""By name. cuda: the layer of DeepSeek-V2-Lite as one of 8 ranks computes it: 8 of its
64 experts, and the corresponding rows.
"""


def complete(options: argparse.Namespace) -> argparse.Namespace:
    cuda = options.device == "cuda"
    options.compute = options.compute or ("real" if cuda else "sleeps")
    options.ranks = 1 if cuda else options.ranks or 2
    for name, value in zip(
        _SIZE_NAMES, _SIZES["cuda" if cuda else options.compute], strict=True
    ):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.link == "netns":
        options.length = 512  # tbf lets the first 32 kB through at once
    if options.modes is None:
        skipped = {"beside", "both"} if options.model == "none" else set()
        if options.checkpointing:
            skipped |= set(MODES) - {"blocking", "full"}
        options.modes = [mode for mode in MODES if mode not in skipped]
    return options


def in_namespaces(options: argparse.Namespace, arguments: list[str], store: str) -> Any:
    rate = exchanged_bytes(options) * 8 / (options.exchange_ms / 1e3)
    again = [sys.executable, "-m", "benchmarks.overlap", *arguments, "--store", store]
    with namespaces(rate) as names:
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *again, "--rank", str(end)],
                cwd=ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": name},
            )
            for end, name in enumerate(names)
        ]
        if any(process.wait() for process in started):
            raise SystemExit("a rank has failed; see above")
    return json.loads(Path(f"{store}.json").read_text())


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = complete(parser().parse_args(arguments))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        if options.rank is not None:
            measurements = run_rank(options.rank, options, options.store)
            if options.rank == 0:
                Path(f"{options.store}.json").write_text(json.dumps(measurements))
            return {}
        if options.link == "netns":
            measurements = in_namespaces(options, arguments, store)
        elif options.ranks == 1:
            measurements = run_rank(0, options, store)
        else:
            context = multiprocessing.get_context("spawn")
            receiver, sender = context.Pipe(duplex=False)
            ranks = [
                context.Process(
                    target=run_rank,
                    args=(r, options, store, sender if r == 0 else None),
                )
                for r in range(options.ranks)
            ]
            for each in ranks:
                each.start()
            sender.close()
            measurements = receiver.recv()
            for each in ranks:
                each.join()
    table = summary(measurements)
    print(f"load {os.getloadavg()[0]:.1f}; {vars(options)}")
    print(printed(table))
    if options.times is not None:
        write_blocking_times(options, measurements["blocking"])
    if options.json is not None:
        options.json.write_text(
            json.dumps(
                {"options": vars(options), "table": table}, indent=1, default=str
            )
        )
    return table


if __name__ == "__main__":
    main()
