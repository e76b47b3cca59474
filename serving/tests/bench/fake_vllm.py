"""A `vllm` for the tests: answers `serve` and `bench serve` as vLLM 0.32 does, with
figures that the tests know.

Called `sglang` it answers `serve` and the words of `python -m sglang.benchmark.serving`
as SGLang 0.5.23 does.

Beside it: `calls.jsonl`, what it was called with; `figures.json`, what a server
measures; `fail`, the row and number of the measurement at which a server ends.
"""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parent
SGLANG = Path(__file__).name == "sglang"
LOG = "(APIServer pid=7) {} 11-22 14:20:26 [cpu.py:347] {}"


def option(name):
    return sys.argv[sys.argv.index(name) + 1]


def note(**facts):
    with (HERE / "calls.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def row():
    text = " ".join([*sys.argv, os.environ.get("FCSD_SERVING", "")])
    for mark, name in (
        ("--enable-dbo", "dbo"),
        ("min_overlap", "blocking"),
        ('"blocking"', "blocking"),
    ):
        if mark in text:
            return name
    return (
        "overlapped"
        if "--additional-config" in text or "FCSD_SERVING" in os.environ
        else "stock"
    )


def serve():
    name = row()
    # a worker that leaves the group
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    chosen = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("FCSD_SERVING", "SGLANG_", "VLLM_MOE_"))
    }
    note(
        serve=sys.argv[2:], row=name, environment=chosen, pids=[os.getpid(), child.pid]
    )
    if name == "dbo":
        print(
            LOG.format(
                "WARNING", "Dual-Batch Overlap is not supported on CPU, disabled."
            ),
            flush=True,
        )
        time.sleep(600)
    if "--headless" in sys.argv or "--node-rank" in sys.argv:
        time.sleep(600)
    (HERE / "server").write_text(json.dumps({"row": name, "pid": os.getpid()}))
    times = os.environ.get("FCSD_SERVING_TIMES")
    spent = {
        "schema_version": 1, "collectives": 0, "bytes": 0, "total_s": 0.0, "exposed_s": 0.0,
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/measured/"):
                figures = json.loads((HERE / "figures.json").read_text())[name]
                tokens = self.path.rpartition("/")[2]
                spent["total_s"] += figures.get("total", {}).get(tokens, 2.0)
                spent["exposed_s"] += figures["exposed"][tokens]
                if "--profiler-config" in sys.argv:
                    write_trace(figures["trace"])
                if times:
                    for rank in range(2):
                        Path(times, f"rank{rank}.json").write_text(json.dumps(spent))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", int(option("--port"))), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while not (HERE / "die").exists():
        time.sleep(0.02)
    (HERE / "die").unlink()
    print(
        LOG.format(
            "ERROR",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        )
    )
    print(
        LOG.format(
            "ERROR",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ),
        flush=True,
    )
    os._exit(1)


def write_trace(kernels):
    """Write a trace as torch's profiler writes it; times in microseconds."""
    events = [
        {
            "ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "pid": 0, "tid": 7,
        }
        for name, begin, end in kernels
    ]  # fmt: skip
    folder = Path(json.loads(option("--profiler-config"))["torch_profiler_dir"])
    file = folder / "dp0_pp0_tp0_dcp0_ep0_rank0.17.pt.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def bench():
    server = json.loads((HERE / "server").read_text())
    figures = json.loads((HERE / "figures.json").read_text())[server["row"]]
    tokens, requests = int(option("--random-output-len")), int(option("--num-prompts"))
    seen = [
        json.loads(line) for line in (HERE / "calls.jsonl").read_text().splitlines()
    ]
    count = sum("bench" in each for each in seen) + 1
    note(
        bench=sys.argv[3:], row=server["row"], seed=int(option("--seed")), tokens=tokens
    )
    if (HERE / "fail").exists() and int((HERE / "fail").read_text()) == count:
        (HERE / "fail").unlink()
        (HERE / "die").touch()
        time.sleep(600)
    urllib.request.urlopen(
        f"http://127.0.0.1:{option('--port')}/measured/{tokens}"
    ).close()
    scale = max(1, int(option("--seed")) // 1000)  # the round
    ttft, itl = figures["ttft"] * scale, figures["itl"] * scale
    result = {
        "date": "20261122-141810", "endpoint_type": "openai", "backend": "openai", "label": None,
        "model_id": option("--model"), "tokenizer_id": option("--model"), "num_prompts": requests,
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": requests,
        "duration": figures.get("duration", {}).get(str(tokens), 0.24690129699592944),
        "completed": requests, "failed": 0, "total_input_tokens": requests * int(option("--random-input-len")),
        "total_output_tokens": requests * tokens, "request_throughput": 16.2, "request_goodput": None,
        "output_throughput": 1000.0 / itl, "total_token_throughput": 8424.4, "latencies": [0.24] * requests,
        "queue_times": [0.0001] * requests, "max_output_tokens_per_s": 32.0, "max_concurrent_requests": requests,
        "rtfx": 0.0,
    }  # fmt: skip
    for name, value in (("ttft", ttft), ("tpot", itl), ("itl", itl / 1000)):
        result |= {f"mean_{name}_ms": 9 * value, f"median_{name}_ms": value}
        result |= {f"std_{name}_ms": 1.0, f"p99_{name}_ms": 99 * value}
    if not SGLANG:
        Path(option("--result-dir"), option("--result-filename")).write_text(
            json.dumps(result)
        )
        return
    result["total_throughput"] = result.pop("total_token_throughput")
    del result["failed"]
    result["ttfts"] = [0.0 if (HERE / "mute").exists() else ttft / 1000] * requests
    with open(option("--output-file"), "a") as file:
        file.write(json.dumps(result) + "\n")


bench() if sys.argv[1] == "bench" else serve()
