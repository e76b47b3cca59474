"""`vllm serve` on two data-parallel ranks: a killed client, a killed rank, a plan from
what `fcsd-bench serve` saw.

The benchmark and the plan are fcsd's, in an environment of its own: FCSD_PYTHON, which
`make test-serving` sets.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import BOUND, NEW_TOKENS

VLLM = Path(sys.executable).with_name("vllm")
ENVIRONMENT = {
    **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
FLAGS = shlex.split(
    "--dtype float32 --enforce-eager --max-model-len 1152 --max-num-seqs 8"
    " --api-server-count 1"
)
PATIENCE_S = 1200
LONG = 1000
"""Tokens that the client asks for which is killed."""

CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request):
    print(line.decode().strip(), flush=True)
"""


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return what a condition gives once it is true."""
    until = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < until
        time.sleep(0.2)
    return value


class Server:
    """A server of the model qwen2_moe-all, and what it answers."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        words = [str(VLLM), "serve", str(folder), "--served-model-name", "tiny", *FLAGS]
        words += ["--data-parallel-size", "2", "--enable-expert-parallel"]
        words += ["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]]
        self.reference, self.log = np.load(folder / "data_parallel.npz"), log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                env=ENVIRONMENT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def answers(self) -> bool:
        """Say whether it does, and fail where it has ended."""
        assert self.process.poll() is None
        try:
            with urllib.request.urlopen(f"{self.url}/health") as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def body(self, k: int, tokens: int = NEW_TOKENS, **more: Any) -> dict[str, Any]:
        """Return a request for one of the eight prompts."""
        return {
            "model": "tiny",
            "prompt": self.reference[f"prompt{k}"].tolist(),
            "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 5, "return_token_ids": True,
            "return_tokens_as_token_ids": True, **more,
        }  # fmt: skip

    def worst(self, k: int) -> float:
        """Ask for a prompt; its ids are the reference's. Return the largest difference
        of a log-probability.
        """
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(self.body(k)).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            (choice,) = json.load(answer)["choices"]
        assert choice["token_ids"] == self.reference[f"ids{k}"].tolist()
        rows = self.reference[f"logprobs{k}"][-NEW_TOKENS - 1 : -1]
        return max(
            abs(value - float(row[int(token.removeprefix("token_id:"))]))
            for row, top in zip(rows, choice["logprobs"]["top_logprobs"], strict=True)
            for token, value in top.items()
        )

    def count(self, metric: str) -> float:
        """Return a figure that it counts, over both ranks."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        return sum(
            float(value)
            for value in re.findall(rf"^vllm:{metric}{{.*}} (\S+)$", text, re.M)
        )


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Server]:
    started = Server(models / "qwen2_moe-all", tmp_path / "log")
    try:
        wait_for(started.answers)
        yield started
    finally:
        print((tmp_path / "log").read_text()[-2000:])
        if started.process.poll() is None:
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


def engines_of(server: Server) -> dict[str, int]:
    """Return the processes of a server's engines by their titles."""
    engines = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            title, group = (
                (place / "cmdline").read_text().strip("\0 "),
                os.getpgid(int(place.name)),
            )
        except (OSError, UnicodeDecodeError):
            continue
        if "EngineCore" in title and group == server.process.pid:
            engines[title] = int(place.name)
    return engines


def test_a_killed_client_changes_nothing_for_the_others_and_a_killed_rank_ends_the_server(
    server: Server,
) -> None:
    long = server.body(1, LONG, stream=True)
    client = subprocess.Popen(
        [
            sys.executable, "-c", CLIENT, f"{server.url}/v1/completions", json.dumps(long),
        ],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None and client.stdout.readline().startswith(b"data: ")
    with ThreadPoolExecutor(8) as clients:
        others = [clients.submit(server.worst, k) for k in range(8)]
        client.kill()
        worst = max(other.result() for other in others)
    print(f"off by {worst:.1e}")
    assert worst < BOUND
    wait_for(lambda: server.count("num_requests_running") == 0)
    assert 8 * NEW_TOKENS < server.count("generation_tokens_total") < LONG
    assert server.worst(3) < BOUND

    engines = engines_of(server)
    assert len(engines) == 2
    os.kill(
        next(pid for title, pid in engines.items() if "DP1" in title), signal.SIGKILL
    )
    server.process.wait(PATIENCE_S)  # with status 0: vLLM takes it for a shutdown
    assert "EngineDeadError" in server.log.read_text()
    wait_for(lambda: not engines_of(server))


def test_the_times_of_wide_servers_are_read_by_a_plan(
    models: Path, tmp_path: Path
) -> None:
    if "FCSD_PYTHON" not in os.environ or "FCSD_SERVING_BREADTH" not in os.environ:
        pytest.skip(
            "starts four servers; run `FCSD_SERVING_BREADTH=1 make test-serving`"
        )
    python, out = os.environ["FCSD_PYTHON"], tmp_path / "served"
    comm = {"comm": "timed", "latency_ms": 2, "bandwidth_gb_per_s": 0.5}
    words = [
        *(
            "serve",
            str(models / "qwen2_moe-all"),
            "--against",
            str(models / "qwen2_moe-original"),
        ),
        *(
            "--output", str(out), "--vllm", str(VLLM), "--tensor-parallel", "2", "--comm", json.dumps(comm),
        ),
        *(
            "--rows", "wide_blocking,wide_overlapped", "--rounds", "1", "--prompt-tokens", "64",
        ),
        *(
            "--requests",
            "4",
            "--output-tokens",
            "128",
            f"--serve-args={shlex.join(FLAGS)}",
        ),
    ]  # fmt: skip
    serving, root = Path(__file__).parents[1:3]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{root}:{serving}"}
    run = subprocess.run(
        [python, "-m", "fcsd_bench", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    gains = {
        each["phase"]: each
        for each in json.loads((out / "serving.json").read_text())["gains"]
    }
    # on a busy machine decoding may communicate for longer than its answers take
    assert "prefill" in gains
    plans = []
    for phase, gain in gains.items():
        words = [
            "plan", str(models / "qwen2_moe-all"), "--phase", phase, "--dp", "2", "--batch", "4",
        ]  # fmt: skip
        words += ["--length", str(gain["times"]["length"]), "--measured", gain["file"]]
        plans.append(shlex.join(["fcsd", *words]))
        plan = subprocess.run(
            [python, "-m", "fcsd", *words, "--json"],
            cwd=out,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert plan.returncode == 0, plan.stderr
        times = json.loads(plan.stdout)["times"]
        print(
            f"{phase}: {times['speed_up']:.3f} planned,"
            f" {gain['measured']['median']:.3f} measured"
        )
        assert times["speed_up"] == pytest.approx(gain["planned"])
        assert 1 <= times["speed_up"] <= gain["limit"]
    assert f"    {plans[-1]}\n" in run.stdout
