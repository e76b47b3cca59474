"""Profile and simulation against real TCP between ranks whose wires are known: CAMoE's
A.3 at a tenth of its rates.
"""

import multiprocessing
import os
import signal
import socket
import statistics
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from namespaces import Wires, appendix_a3, in_namespaces
from testbed import exchange_counts, routed_counts, slowest_edge

from fcsd.planning.network.links import PHASES, Array, Collective, LinkModel
from fcsd.planning.network.simulate import Payload, simulate
from fcsd_steering.network.exchange import GroupExchange
from fcsd_steering.network.measure import Comparison, measure_and_simulate, patterns
from fcsd_steering.network.profile import profile

pytestmark = [
    pytest.mark.skipif(
        "FCSD_NETWORK" not in os.environ,
        reason="namespaces are made by `make test-network` alone",
    ),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.path.exists("/dev/net/tun"),
        reason="namespaces need root and /dev/net/tun",
    ),
]
OFF = ~np.eye(4, dtype=bool)
LARGEST = 1 << 21
STRENGTHS = (0.0, 0.5)


@dataclass
class Measurement:
    links: LinkModel
    edge: Comparison
    port: Comparison
    measured: list[float]
    predicted: list[float]
    floor: Array


def round_trips(rank: int, size: int, times: int = 60) -> Array:
    """Seconds of a byte there and back between two ranks over plain TCP, [N, N]: what
    wires and machine take.
    """
    floors = np.zeros((size, size))
    for first, second in combinations(range(size), 2):
        dist.barrier()
        if rank == second:
            with socket.create_server((f"10.79.0.{rank + 1}", 7000)) as server:
                dist.barrier()
                with server.accept()[0] as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for _ in range(times):
                        connection.sendall(connection.recv(1))
        else:
            dist.barrier()
            if rank == first:
                with socket.create_connection(
                    (f"10.79.0.{second + 1}", 7000)
                ) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    each = []
                    for _ in range(times):
                        began = time.monotonic()
                        connection.sendall(b"x")
                        connection.recv(1)
                        each.append(time.monotonic() - began)
                floors[first, second] = floors[second, first] = statistics.median(each)
    whole = torch.from_numpy(floors)
    dist.all_reduce(whole)
    return whole.numpy()


def measured(rank: int, collective: Collective, largest: int) -> Measurement:
    exchange = GroupExchange(None, collective, torch.device("cpu"))
    facts = {
        "endpoints": list("abcd"), "collective": collective, "backend": "gloo", "libraries": {},
    }  # fmt: skip
    floor = round_trips(rank, 4)
    links = profile(exchange, facts, largest_bytes=largest)
    given = patterns(4, LARGEST // 2)
    whole = measure_and_simulate(links, exchange, given)
    edges = whole
    if collective == "p2p":
        edges = Comparison(
            whole.names,
            whole.measured,
            slowest_edge(links, np.stack([each for _, each in given])),
        )
    payload = Payload(row_width=512, num_experts=32)
    falls: tuple[list[float], list[float]] = ([], [])
    for strength in STRENGTHS:
        counts = routed_counts(
            strength, links.alpha("dispatch"), links.beta("dispatch")
        )
        falls[0].append(float(exchange_counts(exchange, counts, payload).total.mean()))
        falls[1].append(float(simulate(links, counts, payload).total.mean()))
    return Measurement(links, edges, whole, *falls, floor)


def run(
    wires: Wires, collective: Collective = "p2p", largest: int = LARGEST
) -> Measurement:
    measurement: Measurement = in_namespaces(measured, wires, collective, largest)[0]
    links, off = measurement.links, OFF
    with np.printoptions(precision=3, suppress=True, linewidth=150):
        print(f"\n{collective}, load {os.getloadavg()[0]:.1f}")
        for phase in PHASES[:2]:  # alone, and under contention
            rates = 8 / np.where(off, links.beta(phase), 1)
            print(
                phase,
                "rates over the wires'",
                (rates / np.where(off, wires.rates, 1))[off],
            )
            print(
                "latency less round trip, ms",
                ((links.alpha(phase) - wires.round_trips) * 1e3)[off],
            )
        print(
            "plain TCP less round trip, ms",
            ((measurement.floor - wires.round_trips) * 1e3)[off],
        )
        print("R²", np.array(links.dispatch.r2)[off].astype(float))
        print(
            "ports, Mb/s",
            [each and 8e-6 / each for each in links.ports.egress_s_per_byte],
            links.ports,
        )
        print("edge:", measurement.edge, measurement.edge.errors)
        print("port or pair:", measurement.port, measurement.port.errors)
        print("counts, s:", measurement.measured, "simulated:", measurement.predicted)
    return measurement


@pytest.fixture(scope="module")
def independent() -> Measurement:
    return run(appendix_a3(), largest=2 * LARGEST)


def test_rates_and_latencies_of_real_links_are_recovered(
    independent: Measurement,
) -> None:
    links, wires = independent.links, appendix_a3()
    rates = (
        8 / links.beta("metadata")[OFF]
    )  # each alone; under contention the switch's processor is part of a link
    assert np.abs(rates / wires.rates[OFF] - 1).max() <= 0.03
    latencies = links.alpha("metadata")[OFF]
    # A message of gloo is announced and sent, as a byte goes there and back, and each
    # of both wakes a thread more, in Python: 2.9 times what plain TCP takes beside the
    # wires on an idle machine of 2.25 GHz. Twice the wires' round trip would be 25
    # times.
    machine = (independent.floor - wires.round_trips)[OFF].max()
    assert (latencies <= wires.round_trips[OFF] + 4 * machine).all()
    assert (latencies >= wires.delays[OFF]).all()
    assert (
        min(each for row in links.metadata.r2 for each in row if each is not None)
        >= 0.98
    )
    assert not links.port("egress").any() and not links.port("ingress").any()


def test_simulated_times_are_those_measured_on_independent_links(
    independent: Measurement,
) -> None:
    errors = np.abs(independent.edge.errors)
    assert len(errors) == 18 and errors.mean() <= 0.05 and errors.max() <= 0.15


def test_real_exchanges_of_counts_that_a_bias_has_moved_fall_as_predicted(
    independent: Measurement,
) -> None:
    (before, after), (expected_before, expected_after) = (
        independent.measured,
        independent.predicted,
    )
    assert after < 0.95 * before
    assert after / before == pytest.approx(expected_after / expected_before, abs=0.07)


def test_the_profile_has_a_shared_port_which_the_slowest_edge_alone_does_not_price() -> (
    None
):
    # a network card as fast as A.3's slow links
    measurement = run(appendix_a3(egress=150e6))
    np.testing.assert_allclose(8 / measurement.links.port("egress"), 150e6, rtol=0.1)
    assert not measurement.links.port("ingress").any()
    errors = np.abs(measurement.port.errors)
    assert errors.mean() <= 0.05 and errors.max() <= 0.15
    assert (measurement.edge.errors[:4] < -0.25).all()  # balanced


def test_gloos_all_to_all_takes_between_the_slowest_edge_and_both_directions_of_a_pair() -> (
    None
):
    """Which of both changes from run to run: whether a receiver's notice overtakes its own rows."""
    measurement = run(appendix_a3(), "all_to_all_single")
    links = measurement.links
    one_way = (links.alpha("dispatch") + links.beta("dispatch") * (LARGEST // 2)).max()
    balanced, pair = measurement.port.measured[3], measurement.port.simulated[3]
    assert pair > 1.5 * one_way
    assert 0.9 * one_way < balanced < 1.15 * pair


def test_nothing_is_left_of_namespaces_whose_test_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    killed = context.Process(
        target=in_namespaces, args=(stays, appendix_a3(), str(tmp_path))
    )
    killed.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    spaces = {os.readlink(f"/proc/{path.name}/ns/net") for path in tmp_path.iterdir()}
    assert len(spaces) == 4 and os.readlink("/proc/self/ns/net") not in spaces
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    while networks() & spaces and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not networks() & spaces


def stays(rank: int, folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(300)


def networks() -> set[Any]:
    """The network namespaces of all processes."""
    namespaces = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            namespaces.add(os.readlink(entry))
        except OSError:  # it has ended
            continue
    return namespaces
