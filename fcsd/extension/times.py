"""Measured times: read from a trace, and written for `fcsd plan --measured`."""

from fcsd.parallel.overlap.measure import from_trace, timeline
from fcsd.planning.cost.measured import Times, write_times
from fcsd.planning.cost.times import gain

__all__ = ["Times", "from_trace", "gain", "timeline", "write_times"]
