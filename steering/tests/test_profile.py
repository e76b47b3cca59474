"""What a profile finds against the links that it was shown."""

from typing import Any

import numpy as np
import pytest
from testbed import (
    Sleeping,
    Testbed,
    exchange_counts,
    routed_counts,
    slowest_edge,
)

from fcsd.planning.network.links import Array, LinkModel
from fcsd.planning.network.simulate import Payload, simulate
from fcsd_steering.network.measure import measure_and_simulate, patterns
from fcsd_steering.network.profile import fit_line, num_exchanges, profile

OFF = ~np.eye(4, dtype=bool)
# CAMoE, A.3, in units of 10 MB/s and of ms: one endpoint behind slow links, three near
# each other
ALPHA = (
    np.array(
        [
            [0, 6.5, 5.6, 5.5],
            [6.45, 0, 6.3, 6.5],
            [5.6, 6.3, 0, 0.7],
            [5.65, 6.5, 0.65, 0],
        ]
    )
    * 1e-3
)
BETA = (
    np.array([[0, 10, 10, 10], [10, 0, 1.5, 1.5], [10, 1.5, 0, 1.5], [10, 1.5, 1.5, 0]])
    * 1e-8
)
FACTS: dict[str, Any] = {
    "endpoints": ["a", "b", "c", "d"], "collective": "p2p", "backend": "gloo", "libraries": {},
}  # fmt: skip
LARGEST = 1 << 20
# all that b sends leaves through a port that is faster than any edge
SHARED = np.array([0.0, 1.2e-8, 0, 0])


def jitter(share: float) -> Any:
    """Delays of a busy machine: now and then an exchange takes longer, never less."""
    rng = np.random.default_rng(5)
    return lambda: float(rng.exponential(share) * (rng.random() < 0.5))


def errors(links: LinkModel, what: str, true: Array) -> Array:
    fitted: Array = getattr(links, what)("dispatch")
    return np.abs(fitted / np.where(OFF, true, 1) - 1)[OFF]


def test_a_line_is_fitted_by_relative_errors_and_never_below_zero() -> None:
    sizes = np.array([1.0, 2, 3, 4, 5]) * 1e5
    line = fit_line(sizes, 3e-3 + 2e-8 * sizes)
    assert (line.alpha_s, line.beta_s_per_byte) == pytest.approx((3e-3, 2e-8))
    assert line.r2 == pytest.approx(1)
    burst = fit_line(sizes, 2e-8 * sizes - 1e-3)  # a shaper's first bytes are free
    assert burst.alpha_s == pytest.approx(0, abs=1e-12) and burst.beta_s_per_byte > 0
    # by hand: alpha of the two times 1 and 1 (weight 1), 100 (weight 1/100) is near 1,
    # not near their mean 34
    far = fit_line(np.array([0.0, 0.0, 1e-9]), np.array([1.0, 1.0, 100.0]))
    assert far.alpha_s == pytest.approx(1, rel=1e-3)


def test_alpha_and_beta_of_every_edge_are_recovered_from_exchanges_that_sleep() -> None:
    links = profile(Sleeping(ALPHA, BETA), FACTS, largest_bytes=LARGEST // 8)
    assert (
        errors(links, "alpha", ALPHA).max() < 0.03
        and errors(links, "beta", BETA).max() < 0.03
    )
    assert min(links.dispatch.r2[u][v] or 0 for u, v in np.argwhere(OFF)) >= 0.99
    # none is invented
    assert not links.port("egress").any() and not links.port("ingress").any()


def test_the_minimum_of_the_repeats_is_what_a_busy_machine_does_not_hide() -> None:
    testbed = Testbed(ALPHA, BETA, delay=jitter(5e-3))
    links = profile(testbed, FACTS, largest_bytes=LARGEST, repeats=5)
    assert testbed.calls == num_exchanges(4, repeats=5)
    assert (
        errors(links, "alpha", ALPHA).max() < 0.2
        and errors(links, "beta", BETA).max() < 0.03
    )
    assert not links.port("egress").any() and not links.port("ingress").any()
    assert (
        errors(
            profile(testbed, FACTS, largest_bytes=LARGEST, repeats=1), "alpha", ALPHA
        ).max()
        > 0.5
    )


@pytest.mark.parametrize("direction", ["egress", "ingress"])
def test_the_profile_has_a_shared_port_with_its_rate_and_invents_no_other(
    direction: str,
) -> None:
    testbed = Testbed(ALPHA, BETA, **{direction: SHARED}, delay=jitter(1e-4))
    links = profile(testbed, FACTS, largest_bytes=LARGEST)
    other = "ingress" if direction == "egress" else "egress"
    rates = links.port(direction)  # type: ignore[arg-type]
    assert rates[1] == pytest.approx(SHARED[1], rel=0.1)
    assert not rates[[0, 2, 3]].any() and not links.port(other).any()  # type: ignore[arg-type]
    phase = links.dispatch if direction == "egress" else links.combine
    edges = [(1, n) if direction == "egress" else (n, 1) for n in (0, 2, 3)]
    # what the port says is not said twice
    assert not any(phase.refined[u][v] for u, v in edges)


def test_an_edge_that_was_never_the_slowest_keeps_what_was_measured_alone_and_the_file_says_so() -> (
    None
):
    slower_together = Testbed(ALPHA, BETA)
    own = slower_together.seconds
    # a one-to-many takes 8 % longer than its slowest edge: contention, but no shared
    # port
    slower_together.seconds = lambda b: own(b) * (1.08 if (b > 0).sum() > 1 else 1)  # type: ignore[method-assign]
    links = profile(slower_together, FACTS, largest_bytes=LARGEST)
    refined = np.array(links.dispatch.refined)
    np.testing.assert_array_equal(
        np.argwhere(refined), [[0, 1], [1, 0], [2, 0], [3, 0]]
    )
    np.testing.assert_allclose(
        links.beta("dispatch")[refined], 1.08 * BETA[refined], rtol=1e-6
    )
    np.testing.assert_allclose(
        links.beta("dispatch")[~refined & OFF], BETA[~refined & OFF], rtol=1e-6
    )
    np.testing.assert_array_equal(np.array(links.combine.refined), refined.T)
    assert not np.array(links.metadata.refined).any()


def test_two_endpoints_have_one_edge_each_way_and_no_port() -> None:
    testbed = Testbed(ALPHA[:2, :2], BETA[:2, :2])
    links = profile(testbed, FACTS | {"endpoints": ["a", "b"]}, largest_bytes=LARGEST)
    assert testbed.calls == num_exchanges(2)
    np.testing.assert_allclose(links.beta("combine"), BETA[:2, :2], rtol=1e-6)
    assert not links.port("egress").any() and not links.port("ingress").any()


def test_an_edge_that_was_the_slowest_at_two_sizes_only_keeps_what_was_measured_alone() -> (
    None
):
    """0 -> 1 has the latency and 0 -> 2 the bytes: the first is the slowest below 40 %
    of the largest size.
    """
    alpha, beta = np.full((3, 3), 1e-3), np.full((3, 3), 1e-8)
    alpha[0, 1] += 0.45 * LARGEST * 1e-8
    beta[0, 2] = 2e-8
    together = Testbed(alpha, beta)
    own = together.seconds
    together.seconds = lambda num_bytes: (
        own(num_bytes) * (1.08 if (num_bytes > 0).sum() > 1 else 1)
    )  # type: ignore[method-assign]
    links = profile(
        together, FACTS | {"endpoints": ["a", "b", "c"]}, largest_bytes=LARGEST
    )
    assert links.dispatch.refined[0] == [False, False, True]
    assert links.beta("dispatch")[0].tolist() == pytest.approx([0, 1e-8, 1.08 * 2e-8])


def test_exchanges_of_one_size_that_were_held_up_make_no_shared_port() -> None:
    held = Testbed(ALPHA, BETA)
    own = held.seconds

    def seconds(num_bytes: Array) -> float:
        sent = num_bytes[num_bytes > 0]
        return own(num_bytes) * (2 if len(sent) == 3 and sent.min() >= LARGEST else 1)

    held.seconds = seconds  # type: ignore[method-assign]
    links = profile(held, FACTS, largest_bytes=LARGEST)
    assert not links.port("egress").any() and not links.port("ingress").any()


def test_counts_are_exchanged_as_bytes_there_and_back_behind_their_metadata() -> None:
    sent: list[Array] = []

    def exchange(num_bytes: Array) -> float:
        sent.append(num_bytes)
        return float(num_bytes.sum())

    counts = np.array([[[1.0, 2], [3, 4]]])
    payload = Payload(
        row_width=3, num_experts=2, value_bytes=1, weight_bytes=2, count_bytes=5
    )
    times = exchange_counts(exchange, counts, payload)
    assert [each.tolist() for each in sent[::3]] == [
        [[10, 10], [10, 10]],
        [[5, 10], [15, 20]],
        [[3, 9], [6, 12]],
    ]
    assert (times.metadata, times.dispatch, times.combine) == ([40], [50], [30])


def test_a_pattern_is_simulated_with_the_links_of_the_dispatch() -> None:
    testbed = Testbed(ALPHA, BETA)
    links = profile(testbed, FACTS, largest_bytes=LARGEST)
    slower = links.dispatch.model_copy(update={"beta_s_per_byte": (2 * BETA).tolist()})
    given = patterns(4, LARGEST)[:1]
    both = [
        measure_and_simulate(each, testbed, given)
        for each in (links, links.model_copy(update={"dispatch": slower}))
    ]
    assert both[1].simulated > 1.5 * both[0].simulated
    other = links.model_copy(update={"metadata": slower, "combine": slower})
    assert measure_and_simulate(other, testbed, given).simulated == both[0].simulated


def test_times_simulated_from_a_profile_are_those_measured_and_edges_alone_do_not_price_a_shared_port() -> (
    None
):
    given = patterns(4, LARGEST)
    free = Testbed(ALPHA, BETA, delay=jitter(1e-4))
    comparison = measure_and_simulate(
        profile(free, FACTS, largest_bytes=LARGEST), free, given
    )
    assert len(comparison.measured) == 18
    assert (
        np.abs(comparison.errors).mean() <= 0.05
        and np.abs(comparison.errors).max() <= 0.15
    )
    shared = Testbed(ALPHA, BETA, egress=np.full(4, 1.0e-7), delay=jitter(1e-4))
    links = profile(shared, FACTS, largest_bytes=LARGEST)
    comparison = measure_and_simulate(links, shared, given)
    assert (
        np.abs(comparison.errors).mean() <= 0.05
        and np.abs(comparison.errors).max() <= 0.15
    )
    edges = slowest_edge(links, np.stack([pattern for _, pattern in given]))
    assert (edges[:4] < 0.75 * comparison.measured[:4]).all()  # balanced
    assert str(comparison).startswith(
        "simulated against measured, 18 patterns: mean error"
    )


def test_exchanges_of_counts_that_a_bias_has_moved_fall_as_predicted() -> None:
    testbed = Testbed(ALPHA, BETA, egress=np.full(4, 4e-8), delay=jitter(1e-4))
    links, payload = (
        profile(testbed, FACTS, largest_bytes=LARGEST),
        Payload(row_width=512, num_experts=32),
    )
    plain, moved = (routed_counts(strength, ALPHA, BETA) for strength in (0, 0.5))
    assert plain.sum() == moved.sum()
    measured = [
        exchange_counts(testbed, counts, payload).total.mean()
        for counts in (plain, moved)
    ]
    predicted = [
        simulate(links, counts, payload).total.mean() for counts in (plain, moved)
    ]
    assert measured[1] < 0.95 * measured[0]
    assert predicted[1] / predicted[0] == pytest.approx(
        measured[1] / measured[0], abs=0.07
    )
