"""Plans and estimates of the same training are traced once."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest


@pytest.fixture(scope="session", autouse=True)
def traced_once() -> Iterator[None]:
    """Trace a training's step once for all tests of a process: it takes seconds, and
    depends on nothing but the values of the training.
    """
    from fcsd.planning.cost import job, plan
    from fcsd.planning.cost.trace import Setting, Trace
    from fcsd.planning.cost.training import Training, tracer

    kept: dict[tuple[str, Setting], Trace] = {}

    def remembering(training: Training) -> Callable[[Setting], Trace]:
        trace_of = tracer(training)
        values = repr(replace(training, name="", where="", data_tokens=0))

        def trace(setting: Setting) -> Trace:
            if (values, setting) not in kept:
                kept[values, setting] = trace_of(setting)
            return copy.deepcopy(kept[values, setting])

        return trace

    with pytest.MonkeyPatch.context() as patch:
        for module in (job, plan):
            patch.setattr(module, "tracer", remembering)
        yield
