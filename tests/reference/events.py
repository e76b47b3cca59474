"""An event simulation of a step on one GPU and one link, with which `fcsd plan` is
compared: dependencies in, times out.

It knows neither windows nor exposed shares. Work is put into queues; a queue runs its
work in order, each piece when the pieces that it names are done. A GPU that several
queues share runs one piece at a time, that of the first queue that can go on. While the
link is busy, the GPU works more slowly by `slowdown`.

The order of a FarSkip layer is written here from the connectivity's equations
(a = o - routed, m = o): attention and the shared expert of a layer need nothing that is
in flight, its router needs the combine before it, and its experts their own dispatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Seconds = Mapping[str, float]


@dataclass(frozen=True)
class Work:
    """A piece of work of the GPU or of the link. after: names of what it waits for."""

    name: str
    seconds: float
    link: bool = False
    after: tuple[str, ...] = ()


@dataclass
class _Queue:
    work: list[Work]
    link: bool
    place: int = 0
    left: float = 0.0
    running: bool = False

    def head(self) -> Work | None:
        return self.work[self.place] if self.place < len(self.work) else None


def simulate(queues: Sequence[Sequence[Work]], slowdown: float = 0.0) -> float:
    """Return the seconds until all work is done. queues: of the GPU, the first of them
    first; work of the link goes to one queue, in the order in which it becomes ready.
    """
    done: set[str] = set()
    gpu = [_Queue([w for w in queue if not w.link], link=False) for queue in queues]
    waiting = [w for queue in queues for w in queue if w.link]
    sent: Work | None = None
    sent_left = now = 0.0
    current: _Queue | None = None
    while True:
        if sent is None:
            ready = [w for w in waiting if done.issuperset(w.after)]
            if ready:
                sent = ready[0]
                waiting.remove(sent)
                sent_left = sent.seconds
        if current is None:
            for queue in gpu:
                head = queue.head()
                if head is not None and done.issuperset(head.after):
                    current = queue
                    queue.left = head.seconds
                    break
        if sent is None and current is None:
            assert not waiting and all(queue.head() is None for queue in gpu), (
                "work waits for something that nobody does"
            )
            return now
        rate = 1.0 - slowdown if sent is not None else 1.0
        ends = [sent_left] if sent is not None else []
        if current is not None:
            ends.append(current.left / rate)
        passed = min(ends)
        now += passed
        if current is not None:
            current.left -= passed * rate
            if current.left <= 1e-15:
                head = current.head()
                assert head is not None
                done.add(head.name)
                current.place += 1
                current = None
        if sent is not None:
            sent_left -= passed
            if sent_left <= 1e-15:
                done.add(sent.name)
                sent = None


@dataclass
class Pass:
    """Work of one batch, in order. `before`: what the next piece of the GPU waits for."""

    name: str
    work: list[Work] = field(default_factory=list)
    before: tuple[str, ...] = ()

    def compute(self, seconds: float, after: tuple[str, ...] = ()) -> str:
        """Add computation; return its name."""
        name = f"{self.name} {len(self.work)}"
        self.work.append(Work(name, seconds, after=(*self.before, *after)))
        self.before = ()
        return name

    def send(self, seconds: float, after: str, *, blocks: bool) -> str:
        """Add an exchange behind some computation; return its name. blocks: the next
        piece of the GPU waits for it.
        """
        name = f"{self.name} {len(self.work)}"
        self.work.append(Work(name, seconds, True, (after,)))
        if blocks:
            self.before = (name,)
        return name


def regular_layer(
    batch: Pass, seconds: Seconds, dispatch: float, combine: float, factor: float = 1.0
) -> None:
    """Add a layer whose exchanges block. combine: 0: it is not sent."""
    last = seconds.get("experts", 0.0)
    arrive = seconds.get("arrive", 0.0)
    head = batch.compute(factor * (sum(seconds.values()) - last - arrive))
    if "experts" not in seconds:
        return
    batch.send(dispatch, head, blocks=True)
    experts = batch.compute(factor * last)
    if combine:
        batch.send(combine, experts, blocks=True)
    batch.compute(factor * arrive)


def regular_backward(
    batch: Pass, seconds: Seconds, dispatch: float, combine: float, factor: float
) -> None:
    """Add the backward pass of a layer whose exchanges block."""
    if "experts" not in seconds:
        batch.compute(factor * sum(seconds.values()))
        return
    arrive = batch.compute(factor * seconds["arrive"])
    batch.send(combine, arrive, blocks=True)
    experts = batch.compute(factor * seconds["experts"])
    batch.send(dispatch, experts, blocks=True)
    rest = sum(seconds.values()) - seconds["experts"] - seconds["arrive"]
    batch.compute(factor * rest)


def farskip_forward(
    batch: Pass, layers: Sequence[Seconds], dispatch: float, combine: float
) -> None:
    """Add the forward pass of rewired MoE layers, each behind the other."""
    in_flight: tuple[str, ...] = ()
    sums = 0.0
    for seconds in layers:
        batch.compute(seconds["attention a"])
        # The stream is whole from here on.
        router = batch.compute(sums + seconds["router"], in_flight)
        sent = batch.send(dispatch, router, blocks=False)
        batch.compute(seconds["attention b"])
        experts = batch.compute(seconds["experts"], (sent,))
        in_flight = (batch.send(combine, experts, blocks=False),)
        batch.compute(seconds.get("shared expert", 0.0))
        sums = seconds["arrive"]
    batch.compute(sums, in_flight)


def farskip_backward(
    batch: Pass,
    layers: Sequence[Seconds],
    dispatch: float,
    combine: float,
    factor: float,
    *,
    recomputes: bool,
) -> None:
    """Add the backward pass: the mirror image, each layer recomputed before its own."""
    start = batch.compute(factor * layers[-1]["arrive"])
    in_flight = batch.send(combine, start, blocks=False)
    for k in reversed(range(len(layers))):
        seconds = layers[k]
        if recomputes:
            batch.compute(seconds["attention a"])
            router = batch.compute(seconds["router"] + seconds["arrive"])
            sent = batch.send(dispatch, router, blocks=False)
            batch.compute(seconds["attention b"])
            batch.compute(seconds["experts"], (sent,))
            batch.compute(seconds.get("shared expert", 0.0))
        batch.compute(factor * seconds.get("shared expert", 0.0))
        experts = batch.compute(factor * seconds["experts"], (in_flight,))
        sent = batch.send(dispatch, experts, blocks=False)
        batch.compute(factor * seconds["attention b"])
        router = batch.compute(factor * seconds["router"], (sent,))
        if k:
            sums = batch.compute(factor * layers[k - 1]["arrive"])
            in_flight = batch.send(combine, sums, blocks=False)
        batch.compute(factor * seconds["attention a"])


def shared_layer(
    batch: Pass, seconds: Seconds, dispatch: float, combine: float
) -> None:
    """Add the forward pass of a layer whose shared expert runs beside its exchanges,
    half of it beside each.
    """
    half = seconds["shared expert"] / 2
    rest = sum(seconds.values()) - seconds["experts"] - seconds["arrive"] - 2 * half
    head = batch.compute(rest)
    sent = batch.send(dispatch, head, blocks=False)
    batch.compute(half)
    experts = batch.compute(seconds["experts"], (sent,))
    sent = batch.send(combine, experts, blocks=False)
    batch.compute(half)
    batch.compute(seconds["arrive"], (sent,))


def shortcut_layer(
    batch: Pass, seconds: Seconds, core: float, dispatch: float, combine: float
) -> None:
    """Add the forward pass of a layer whose experts read what its attention reads. core:
    seconds of attention without its projections.
    """
    router = batch.compute(seconds["router"])
    sent = batch.send(dispatch, router, blocks=False)
    batch.compute(seconds["attention a"] + core)
    experts = batch.compute(seconds["experts"], (sent,))
    sent = batch.send(combine, experts, blocks=False)
    batch.compute(seconds["attention b"] - core + seconds.get("shared expert", 0.0))
    batch.compute(seconds["arrive"], (sent,))


def fused_layer(batch: Pass, seconds: Seconds, dispatch: float, combine: float) -> None:
    """Add the forward pass of a layer whose experts compute while their rows arrive and
    leave, in one kernel.
    """
    outside_s = sum(seconds.values()) - seconds["experts"] - seconds["arrive"]
    before = batch.compute(outside_s)
    sent = batch.send(dispatch, before, blocks=False)
    back = batch.send(combine, before, blocks=False)
    batch.compute(seconds["experts"])
    batch.compute(seconds["arrive"], (sent, back))


def summed_forward(
    batch: Pass,
    layers: Sequence[Seconds],
    all_reduce: float,
    *,
    rewired: bool,
    fused: float = 0.0,
) -> None:
    """Add the forward pass of tensor-parallel ranks without shared experts, which sum
    behind attention and behind the experts.

    A rewired layer's attention needs the sum of the attention before it; its experts,
    the sums of both before it. fused: seconds by which the norm behind a sum that
    blocks is shorter.
    """
    attention_sum: tuple[str, ...] = ()
    routed_sum: tuple[str, ...] = ()
    for seconds in layers:
        attention_s = seconds["attention a"] + seconds["attention b"] - fused
        head = batch.compute(attention_s, attention_sum)
        sent = batch.send(all_reduce, head, blocks=not rewired)
        # The experts read what was there before this layer's attention.
        before = (*attention_sum, *routed_sum)
        attention_sum = (sent,)
        experts = batch.compute(
            sum(seconds.values())
            - attention_s
            - seconds.get("arrive", 0.0)
            - 2 * fused,
            before,
        )
        routed_sum = (batch.send(all_reduce, experts, blocks=not rewired),)
    batch.compute(0.0, (*attention_sum, *routed_sum))


def halves_of_a_layer(seconds: Seconds) -> tuple[float, float]:
    """Return the seconds of attention and of the rest of a tensor-parallel layer."""
    attention_s = seconds["attention a"] + seconds["attention b"]
    return attention_s, sum(seconds.values()) - attention_s - seconds.get("arrive", 0.0)


def ladder_forward(
    batch: Pass, layers: Sequence[Seconds], all_reduce: float, last: float
) -> None:
    """Add the forward pass of a Ladder Residual: each half of a layer reads the stream
    without the sum of the half before it. last: seconds of the last sum.
    """
    sums: list[str] = []
    halves = [half for seconds in layers for half in halves_of_a_layer(seconds)]
    for k, half in enumerate(halves):
        done = batch.compute(half, tuple(sums[:-1]))
        seconds = last if k + 1 == len(halves) else all_reduce
        sums.append(batch.send(seconds, done, blocks=False))
    batch.compute(0.0, tuple(sums))


def tracks_forward(
    batch: Pass, layers: Sequence[Seconds], all_reduce: float, depth: int
) -> None:
    """Add the forward pass of Parallel Track: ranks sum behind each `depth` layers, and
    behind the last.
    """
    for k, seconds in enumerate(layers, 1):
        done = batch.compute(sum(halves_of_a_layer(seconds)))
        if k % depth == 0 or k == len(layers):
            batch.send(all_reduce, done, blocks=True)
    batch.compute(0.0)
