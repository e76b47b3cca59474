"""Training steps with expert parallelism, rewired and regular, over one link: ratios of one run, and what was hidden.

    python benchmarks/overlap.py                                    # 2 gloo ranks, emulated link, computation by sleeps
    python benchmarks/overlap.py --model none --checkpointing
    python benchmarks/overlap.py --compute real --link plain        # real products over gloo as it is
    python benchmarks/overlap.py --device cuda --rate-gb-s 150      # one GPU: real kernels and streams, emulated link

Modes, interleaved step by step; a ratio is the median over rounds of (time of `regular` / time of the mode):

    regular     the original connectivity, exchanges block
    beside      the same; the dispatch runs beside the shared expert
    batons      the same in two halves of the batch, in two threads that hand on a baton at every wait: the strongest
                schedule that changes no equation (host waits, so on a CPU only)
    blocking    FarSkip connectivity, the overlapped runtime, every exchange waited for at once
    forward     overlapped in the forward pass only
    full        overlapped both ways
    start, end  full, where attention is not cut in the middle but behind the combine (start) or before it (end)

--model shared: DeepSeek-V3 layers with a shared expert; none: Qwen3-MoE layers without. --checkpointing compares
blocking and full with activation checkpointing. Experts are spread, nothing else is: gathered weights would drown the
tokens on the link.

--link netns (root; `ip` and `tc`): two network namespaces joined by a pair of interfaces whose rate tbf limits, so that
an exchange takes --exchange-ms; gloo's own messages go over it. They are removed at the end, whatever happens.

The emulated link is a thread (a stream of high priority on a GPU) that is busy for bytes / rate, one exchange after the
other. On the GPU the group has one rank, which stands for one of --virtual-ranks: what it would send the others is what
occupies the link, by `torch.cuda._sleep`; the rows themselves are copied. Hidden there is what the profiler's trace
says, on a CPU what the host has not waited (`fcsd.overlap.measure`).

--compute sleeps: parts of a layer sleep, and twice that in the backward pass (ms: a 30, b 50, shared 25, experts 40,
router 5), and the link's rate is such that an exchange takes --exchange-ms.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

MODES = ("regular", "beside", "batons", "blocking", "forward", "full", "start", "end")
SLEEPS_MS = {"a": 30.0, "b": 50.0, "shared": 25.0, "experts": 40.0, "router": 5.0, "share": 1.0}


# ---- links


class Link:
    """A link between CPU ranks: one exchange after the other, each busy for the bytes that leave this rank."""

    def __init__(self, seconds_per_byte: float):
        self.seconds_per_byte = seconds_per_byte
        self.jobs: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, group: Any) -> "_OnLink":
        return _OnLink(self, group)

    def _run(self) -> None:
        while True:
            work = self.jobs.get()
            began = time.perf_counter()
            work.exchange()
            time.sleep(max(0.0, work.num_bytes * self.seconds_per_byte - (time.perf_counter() - began)))
            work.finish()


class _OnLink:
    """`fcsd.overlap.transport.Transport` over a `Link`."""

    def __init__(self, link: Link, group: Any):
        self.link, self.group = link, group

    def start(self, received: Any, sent: Any, receive: Any, send: Any) -> "_Work":
        import torch.distributed as dist

        own = send[dist.get_rank(self.group)]
        row_bytes = sent[:1].numel() * sent.element_size() if len(sent) else 0
        work = _Work(
            lambda: dist.all_to_all_single(received, sent, receive, send, group=self.group),
            (sum(send) - own) * row_bytes,
        )
        self.link.jobs.put(work)
        return work


class _Work:
    """One exchange; its own future, too."""

    def __init__(self, exchange: Any, num_bytes: int):
        self.exchange, self.num_bytes = exchange, num_bytes
        self.done, self.callbacks = threading.Event(), []

    def finish(self) -> None:
        for callback in self.callbacks:
            callback(self)
        self.done.set()

    def wait(self) -> None:
        self.done.wait()

    def get_future(self) -> "_Work":
        return self

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


class CudaLink:
    """A link of one GPU to `ranks` - 1 others that are not there: rows are copied, and the link's stream is busy."""

    def __init__(self, bytes_per_second: float, ranks: int):
        import torch

        self.stream = torch.cuda.Stream(priority=-1)
        self.share = (ranks - 1) / ranks
        self.cycles_per_byte = _cycles_per_second() / bytes_per_second

    def __call__(self, group: Any) -> "CudaLink":
        return self

    def start(self, received: Any, sent: Any, receive: Any, send: Any) -> Any:
        import torch

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            received.copy_(sent)
            torch.cuda._sleep(int(sent.numel() * sent.element_size() * self.share * self.cycles_per_byte))
            arrived = torch.cuda.Event()
            arrived.record()
        return _Arrival(arrived)


class _Arrival:
    def __init__(self, event: Any):
        self.event = event

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().wait_event(self.event)


def _cycles_per_second() -> float:
    import torch

    torch.cuda._sleep(10_000_000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(200_000_000)
    end.record()
    end.synchronize()
    return 200_000_000 / (begin.elapsed_time(end) / 1e3)


class Batons:
    """Two threads of which one computes; each hands on when it waits, so the order is the same on all ranks."""

    def __init__(self) -> None:
        self.changed, self.turn, self.running = threading.Condition(), 0, {0, 1}
        self.own = threading.local()

    def run(self, functions: Any) -> None:
        self.turn, self.running = 0, {0, 1}
        threads = [threading.Thread(target=self._run, args=pair) for pair in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, number: int, function: Any) -> None:
        self.own.number = number
        self._await_turn()
        function()
        with self.changed:
            self.running.discard(number)
            self.turn = 1 - number
            self.changed.notify_all()

    def hand_on(self) -> None:
        with self.changed:
            if 1 - self.own.number in self.running:
                self.turn = 1 - self.own.number
                self.changed.notify_all()
        self._await_turn()

    def _await_turn(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == self.own.number)

    def transport(self, inner: Any) -> Any:
        batons = self

        class Handing:
            def start(self, *args: Any) -> Any:
                return _Handing(batons, inner.start(*args))

        return Handing()


class _Handing:
    def __init__(self, batons: Batons, work: Any):
        self.batons, self.work = batons, work
        self.get_future = work.get_future

    def wait(self) -> None:
        self.batons.hand_on()
        self.work.wait()


# ---- models


def config_of(options: argparse.Namespace) -> Any:
    from transformers import AutoConfig

    common = {
        "vocab_size": 1000,
        "hidden_size": options.dim,
        "intermediate_size": options.dim * 2,
        "moe_intermediate_size": options.expert_dim,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "num_experts_per_tok": options.top_k,
        "max_position_embeddings": 65536,
    }
    if options.model == "none":
        own = {
            "num_experts": options.experts,
            "head_dim": options.dim // options.heads,
            "norm_topk_prob": True,
        }
        return AutoConfig.for_model("qwen3_moe", **common, **own)
    rope = max(8, options.dim // options.heads // 4)
    return AutoConfig.for_model(
        "deepseek_v3",
        **common,
        n_routed_experts=options.experts,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=options.dim // 2,
        kv_lora_rank=options.dim // 4,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=options.dim // options.heads,
        v_head_dim=options.dim // options.heads,
    )


def spread_model(options: argparse.Namespace, rewired: bool) -> Any:
    """The model with its experts spread over all ranks, everything else whole."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    import fcsd.overlap  # noqa: F401  # registers the implementation
    from fcsd.connectivity import Connectivity, convert_model

    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config_of(options), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if rewired:
        convert_model(model, Connectivity("all"))
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh(options.device, (world, 1), mesh_dim_names=("ep", "tp"))
    plan = {}
    for name, _ in model.named_modules():
        if name.endswith("mlp.experts"):
            plan |= {f"{name}.gate_up_proj": "grouped_gemm", f"{name}.down_proj": "grouped_gemm"}
            plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="farskip")
    model.config.use_cache = False
    return model.train()


def in_steps(model: Any, transport: Any, overlaps: tuple[bool, bool], beside: bool) -> None:
    """Let a regular model's blocks run in the runtime's steps, so that they use the same link."""
    from fcsd.overlap import schedule
    from fcsd.overlap.block import BlockNames, BlockRun, Call

    router, start, shared_expert, *experts, finish = schedule.BLOCK
    steps = schedule.BLOCK if beside else (router, start, *experts, shared_expert, finish)
    for k, layer in enumerate(model.model.layers):
        block = layer.mlp
        shared = "shared_experts" if hasattr(block, "shared_experts") else None
        names = BlockNames(type(block).forward, "experts", shared, None, False)
        block.experts.farskip_ep.open(k, overlaps, transport)

        def forward(x: Any, block: Any = block, names: Any = names) -> Any:
            run = BlockRun(
                block.experts.farskip_ep, names, block, Call(None, False, False, 1), steps, lambda _: None
            )
            run.m = x
            run.until(None)
            return run.output

        block.forward = forward


def add_sleeps(model: Any) -> None:
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, milliseconds: float) -> Any:
            ctx.milliseconds = milliseconds
            time.sleep(SLEEPS_MS["share"] * milliseconds / 1e3)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(SLEEPS_MS["share"] * 2 * ctx.milliseconds / 1e3)
            return gradient, None

    def sleeps(module: Any, milliseconds: float) -> None:
        module.register_forward_pre_hook(lambda _, args: (Sleep.apply(args[0], milliseconds), *args[1:]))

    for layer in model.model.layers:
        attention, block = layer.self_attn, layer.mlp
        sleeps(getattr(attention, "kv_a_proj_with_mqa", None) or attention.v_proj, SLEEPS_MS["a"])
        sleeps(attention.o_proj, SLEEPS_MS["b"])
        sleeps(block.gate, SLEEPS_MS["router"])
        if hasattr(block, "shared_experts"):
            sleeps(block.shared_experts, SLEEPS_MS["shared"])
        ep = block.experts.farskip_ep
        own = ep.experts_forward
        ep.experts_forward = lambda x, *rest, own=own: own(Sleep.apply(x, SLEEPS_MS["experts"]), *rest)


# ---- steps


class Bench:
    """The models of one rank, and steps of them in every mode."""

    def __init__(self, options: argparse.Namespace):
        import torch

        self.options = options
        self.batons = Batons()
        generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
        shape = (options.rows, options.length)
        self.ids = torch.randint(3, 999, shape, generator=generator).to(options.device)
        self.models: dict[bool, Any] = {}
        self.records: list[Any] = []
        self.link: Any = None
        if options.device == "cuda":
            self.link = CudaLink(options.rate_gb_s * 1e9, options.virtual_ranks)
        elif options.link == "emulated":
            self.link = Link(options.exchange_ms / 1e3 / exchanged_bytes(options))

    def prepare(self, mode: str) -> Any:
        from fcsd.overlap import attach, detach
        from fcsd.overlap.transport import AllToAll

        regular = mode in ("regular", "beside", "batons")
        if regular not in self.models:
            model = self.models[regular] = spread_model(self.options, not regular)
            if self.options.compute == "sleeps":
                add_sleeps(model)
            if self.options.checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
        model = self.models[regular]
        if regular:
            link = self.link or AllToAll
            transport = (lambda group: self.batons.transport(link(group))) if mode == "batons" else link
            in_steps(model, transport, (mode != "regular",) * 2, mode == "beside")
        else:
            detach(model)
            split = {"start": "start", "end": "end"}.get(mode)
            overlap: Any = mode if mode in ("blocking", "forward") else "full"
            attach(model, overlap, split=split, transport=self.link)
        self.records.clear()
        for layer in model.model.layers:
            layer.mlp.experts.farskip_ep.port.records = self.records
        return model

    def step(self, mode: str) -> dict[str, float]:
        """Seconds of one step and of its parts."""
        import torch

        model = self.prepare(mode)
        model.zero_grad(set_to_none=True)
        torch.distributed.barrier()
        self.synchronize()
        began = time.perf_counter()
        if mode == "batons":
            halves = self.ids.chunk(2, dim=0 if len(self.ids) > 1 else 1)
            SLEEPS_MS["share"] = 0.5
            self.batons.run([lambda x=x: model(x, labels=x).loss.backward() for x in halves])
            SLEEPS_MS["share"] = 1.0
            middle = began
        else:
            loss = model(self.ids, labels=self.ids).loss
            middle = time.perf_counter()
            loss.backward()
        self.synchronize()
        ended = time.perf_counter()
        found = {"step": ended - began, "forward": middle - began}
        if self.options.device != "cuda" and mode != "batons":  # whose waits are the other half's computation
            found |= self.hidden()
        torch.distributed.barrier()
        return found

    def synchronize(self) -> None:
        if self.options.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def hidden(self) -> dict[str, float]:
        from fcsd.overlap.measure import from_records

        time.sleep(0.02)  # callbacks of the last exchange
        measured = from_records(record for event, record in self.records if event == "start")
        return flat(measured)

    def traced(self, mode: str, path: Path) -> dict[str, float]:
        """Of one step on a GPU, by the profiler's trace."""
        from torch.profiler import ProfilerActivity, profile

        from fcsd.overlap.measure import from_trace

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.step(mode)
        profiler.export_chrome_trace(str(path))
        return flat(from_trace(path))


def flat(measured: dict[str, Any]) -> dict[str, float]:
    return {
        f"{what} of {key}": getattr(value, what)
        for key, value in measured.items()
        for what in ("total", "exposed")
    }


def rank(number: int, options: argparse.Namespace, store: str, pipe: Any = None) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1 if options.device == "cpu" else 8)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        store=dist.FileStore(store, options.ranks),
        rank=number,
        world_size=options.ranks,
    )
    bench = Bench(options)
    modes = [mode for mode in options.modes if not (mode == "batons" and options.device == "cuda")]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for number_of_round in range(options.rounds + 1):
        for mode in modes:
            measured = bench.step(mode)
            if number_of_round:  # the first warms up
                found[mode].append(measured)
    if options.device == "cuda":
        folder = Path(options.traces) if options.traces else Path(store).parent
        folder.mkdir(parents=True, exist_ok=True)
        for mode in modes:
            measured = bench.traced(mode, folder / f"{mode}.json")
            for each in found[mode]:
                each |= measured
    dist.destroy_process_group()
    if pipe is not None:
        pipe.send(found)
    return found


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each mode: seconds of a step, its ratio to the first mode's, and what was hidden of what was sent."""
    first = next(iter(found))
    table = {}
    for mode, rounds in found.items():
        row = {
            "step": statistics.median(each["step"] for each in rounds),
            "ratio": statistics.median(
                base["step"] / each["step"] for base, each in zip(found[first], rounds, strict=True)
            ),
        }
        for key in ("all", "forward", "backward", "dispatch", "combine"):
            shares = [
                1 - each[f"exposed of {key}"] / each[f"total of {key}"]
                for each in rounds
                if each.get(f"total of {key}")
            ]
            if shares:
                row[f"hidden of {key}"] = statistics.median(shares)
        totals = [each["total of all"] / each["step"] for each in rounds if "total of all" in each]
        if totals:
            row["communication / step"] = statistics.median(totals)
        table[mode] = row
    return table


def printed(table: dict[str, dict[str, float]]) -> str:
    keys = ("all", "forward", "backward", "dispatch", "combine")
    head = [
        "mode",
        "ms a step",
        "times as fast as the first",
        "communication / step",
        *(f"hidden, {k}" for k in keys),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for mode, row in table.items():
        shares = [f"{row[f'hidden of {key}']:.1%}" if f"hidden of {key}" in row else "-" for key in keys]
        share = f"{row['communication / step']:.0%}" if "communication / step" in row else "-"
        lines.append(
            "| "
            + " | ".join([mode, f"{row['step'] * 1e3:.0f}", f"{row['ratio']:.2f}", share, *shares])
            + " |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--link", choices=["emulated", "plain", "netns"], default="emulated")
    made.add_argument("--compute", choices=["sleeps", "real"], help="default: sleeps on a CPU, real on a GPU")
    made.add_argument("--model", choices=["shared", "none"], default="shared")
    made.add_argument(
        "--modes", nargs="+", choices=MODES, help="default: all; the first is what others are compared with"
    )
    made.add_argument("--checkpointing", action="store_true")
    made.add_argument("--ranks", type=int, help="default: 2 on a CPU; a GPU has 1")
    made.add_argument("--virtual-ranks", type=int, default=8, help="of a GPU's emulated link")
    made.add_argument("--rate-gb-s", type=float, default=150.0, help="of a GPU's emulated link, GB/s")
    made.add_argument(
        "--exchange-ms", type=float, default=60.0, help="of a CPU's emulated link: one exchange"
    )
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--rows", type=int, help="sequences a rank")
    made.add_argument("--length", type=int, help="tokens a sequence")
    for name in ("layers", "dim", "expert-dim", "experts", "top-k", "heads"):
        made.add_argument(f"--{name}", type=int)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # a process that --link netns has started
    made.add_argument("--store", help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path)
    made.add_argument("--traces", help="folder for the profiler's traces (GPU)")
    return made


_SIZE_NAMES = ("layers", "dim", "expert_dim", "experts", "top_k", "heads", "rows", "length")
_SIZES = {
    "sleeps": (4, 64, 32, 16, 4, 4, 2, 64),
    "real": (4, 512, 256, 16, 4, 8, 2, 512),
    "cuda": (6, 2048, 1408, 8, 6, 16, 4, 4096),
}
"""By name. cuda: the layer of DeepSeek-V2-Lite as one of 8 ranks computes it: 8 of its 64 experts, and as many rows."""


def complete(options: argparse.Namespace) -> argparse.Namespace:
    cuda = options.device == "cuda"
    options.compute = options.compute or ("real" if cuda else "sleeps")
    options.ranks = 1 if cuda else options.ranks or 2
    for name, value in zip(_SIZE_NAMES, _SIZES["cuda" if cuda else options.compute], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.link == "netns":
        options.length = 512  # tbf lets the first 32 kB through at once
    if options.modes is None:
        skipped = {"beside"} if options.model == "none" else set()
        if options.checkpointing:
            skipped |= set(MODES) - {"blocking", "full"}
        options.modes = [mode for mode in MODES if mode not in skipped]
    return options


@contextlib.contextmanager
def namespaces(rate_bits: float) -> Iterator[list[str]]:
    """Two network namespaces, whose interfaces towards each other are called as they are."""
    names = [f"fcsd{os.getpid() % 10000}-{end}" for end in (0, 1)]

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for end, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"10.44.0.{end + 1}/24", "dev", name)
            run(*inside, "ip", "link", "set", name, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            limit = ("rate", f"{int(rate_bits)}bit", "burst", "32kb", "latency", "400ms")
            run(*inside, "tc", "qdisc", "replace", "dev", name, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def in_namespaces(options: argparse.Namespace, arguments: list[str], store: str) -> Any:
    rate = exchanged_bytes(options) * 8 / (options.exchange_ms / 1e3)
    with namespaces(rate) as names:
        started = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    __file__,
                    *arguments,
                    "--rank",
                    str(end),
                    "--store",
                    store,
                ],
                env={**os.environ, "GLOO_SOCKET_IFNAME": name},
            )
            for end, name in enumerate(names)
        ]
        if any(process.wait() for process in started):
            raise SystemExit("a rank has failed; see above")
    return json.loads(Path(f"{store}.json").read_text())


def exchanged_bytes(options: argparse.Namespace) -> float:
    """What leaves a CPU rank in one exchange, on average."""
    rows = options.rows * options.length * options.top_k
    return rows * (options.dim + 1) * 4 * (options.ranks - 1) / options.ranks


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = complete(parser().parse_args(arguments))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        if options.rank is not None:
            found = rank(options.rank, options, options.store)
            if options.rank == 0:
                Path(f"{options.store}.json").write_text(json.dumps(found))
            return {}
        if options.link == "netns":
            found = in_namespaces(options, arguments, store)
        elif options.ranks == 1:
            found = rank(0, options, store)
        else:
            context = multiprocessing.get_context("spawn")
            receiver, sender = context.Pipe(duplex=False)
            ranks = [
                context.Process(target=rank, args=(r, options, store, sender if r == 0 else None))
                for r in range(options.ranks)
            ]
            for each in ranks:
                each.start()
            sender.close()
            found = receiver.recv()
            for each in ranks:
                each.join()
    table = summary(found)
    print(f"load {os.getloadavg()[0]:.1f}; {vars(options)}")
    print(printed(table))
    if options.json is not None:
        options.json.write_text(json.dumps({"options": vars(options), "table": table}, indent=1, default=str))
    return table


if __name__ == "__main__":
    main()
