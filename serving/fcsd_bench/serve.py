"""Run `fcsd-bench serve`: servers of vLLM or SGLang against each other, one at a time,
in turns.

    OUT/rounds/ROUND-ROW.json     one server, started once: its figures at every length of
                                  prompt and number of requests
    OUT/logs/ROUND-ROW.log        what that server printed
    OUT/traces/ROW.json with `trace`: its overlap, from the trace of vLLM's profiler in
    the same folder
    OUT/serving.json, .md, .png   the result, when all is measured; layer.png of the traces
    OUT/times-*.json for `fcsd plan --measured`, if the communication is known:
    times-PHASE-LENGTH, and
                                  times-wide-PHASE-LENGTH of wide rows; with several
                                  numbers of requests, -REQUESTS follows
    OUT/stage.json, manifest.json

A round measures every row once, and each round begins with a different row, so that a
machine that slows down affects all rows. The prompts are random tokens, the same for
all rows and new in every round, and no server keeps prefixes. Each length of prompt and
number of requests is measured twice: with one token each for the time to the first
token, then with whole answers for the time between tokens.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fcsd.base.artifact import Stage, check_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, read_sealed, write_sealed
from fcsd.base.text import progress_bar
from fcsd.base.writing import hold_folder, release_folder, write_json, write_text
from fcsd_bench.engines import ENGINES, Program, find_program
from fcsd_bench.gains import find_limits, served_gains, write_gains
from fcsd_bench.plan import check_models, with_dummies
from fcsd_bench.rows import Row, make_rows, node_flags, with_even_routing
from fcsd_bench.server import (
    NotServed,
    Server,
    free_port,
    measure,
    running_server,
    tail_of,
)
from fcsd_bench.settings import Benchmark, Shape
from fcsd_bench.summary import summarise, table
from fcsd_bench.times import (
    TIMES_VARIABLE,
    communication_between,
    settled_times,
)
from fcsd_bench.trace import TRACED, profiler_flags, read_trace

# What to do where a file of a cut-off benchmark is damaged.
_AGAIN = "remove it to measure it again"


def bench_serve(benchmark: Benchmark, program: str, folder: Path) -> dict[str, Any]:
    """Measure all rows and return the result; continue an interrupted benchmark.

    Args:
        program: the engine's program, a path or a name on PATH.

    Raises:
        UserError: models that do not belong together, prompts that are too long, an
            environment without engine or plugin, the folder of another benchmark, a
            failing server (only rivals and wide rows may fail).
    """
    # Everything that can be refused is refused before a server starts, which may take
    # an hour.
    config = check_models(benchmark)
    asked, benchmark = benchmark, with_dummies(benchmark)
    if benchmark != asked:
        print(
            f"fcsd-bench: {benchmark.model} has no weights (--config-only): all servers"
            " get --load-format dummy",
            file=sys.stderr,
        )
    engine = find_program(benchmark.engine, program, benchmark.comm)
    if engine.warning:
        print(f"fcsd-bench: warning: {engine.warning}", file=sys.stderr)
    bench = _Bench(benchmark, engine, folder, config)
    if benchmark.trace and not engine.devices:
        raise UserError(
            "--trace: measures overlap on GPUs, and this machine has none; on a CPU,"
            " use --comm timed"
        )
    stage = bench.stage
    if stage.state() == "finished":
        check_outputs(folder)
        print(f"fcsd-bench: finished before, in {folder}", file=sys.stderr)
        return dict(read_json(folder / "serving.json"))
    for part in ("rounds", "logs", *(["traces"] if benchmark.trace else [])):
        (folder / part).mkdir(parents=True, exist_ok=True)
    # Two benchmarks in one folder would mix their rounds.
    hold_folder(folder)
    stage.start()
    ranks = benchmark.tensor_parallel
    options = (ranks, benchmark.comm, benchmark.all2all)
    rows = make_rows(benchmark.engine, benchmark.rows, config, engine.devices, *options)
    if benchmark.dummy_weights:
        rows = with_even_routing(rows, benchmark.engine, engine.devices, os.environ)
    missing = bench.measure_rounds(rows)
    # Read back from the files, which an earlier process may have written.
    measured = {
        row.name: [
            bench.read(bench.file(number, row))
            for number in range(1, benchmark.rounds + 1)
        ]
        for row in rows
        if row.name not in missing
    }
    settings = benchmark.model_dump(mode="json")
    versions = bench.versions | {"cores": os.cpu_count()}
    facts = {
        "settings": settings,
        "versions": versions,
        "warning": engine.warning,
        "dummy_weights": benchmark.dummy_weights,
    }
    traces = {
        name: bench.traced(row)
        for row in rows
        if (name := row.name) in TRACED and benchmark.trace
    }
    gains = served_gains(settings, config, measured, traces)
    limits = find_limits(settings, rows, measured, traces)
    result = summarise(facts, rows, measured, missing, traces, limits) | {
        "gains": gains
    }
    write_gains(gains, folder)
    write_json(folder / "serving.json", result)
    write_text(folder / "serving.md", table(result) + "\n")
    # Imports matplotlib, which the refusals above need not wait for.
    from fcsd_bench.plots import plot_serving

    plot_serving(result, folder)
    stage.finish({})
    release_folder(folder)
    if gains:
        print(
            f"fcsd-bench: times for `fcsd plan --measured`: {folder}/times-*.json",
            file=sys.stderr,
        )
    return result


@dataclass(frozen=True)
class _Bench:
    benchmark: Benchmark
    program: Program
    folder: Path
    config: Mapping[str, Any]

    @property
    def versions(self) -> dict[str, Any]:
        return {
            self.program.name: self.program.version,
            "fcsd-serving": self.program.plugin,
            "devices": list(self.program.devices),
        }

    @property
    def stage(self) -> Stage:
        """Return the stage with everything that the times depend on; the weights'
        values do not matter.
        """
        text = json.dumps(self.config, sort_keys=True)
        inputs = {"config": hashlib.sha256(text.encode()).hexdigest()}
        return Stage(
            self.folder,
            "bench serve",
            self.benchmark.model_dump(mode="json") | self.versions,
            inputs,
        )

    def write(self, file: Path, figures: dict[str, Any]) -> None:
        write_sealed(file, figures, self._owner(file))

    def read(self, file: Path) -> dict[str, Any]:
        return read_sealed(file, _AGAIN, self._owner(file))

    def _owner(self, file: Path) -> list[str]:
        # The figures of another row, round or benchmark are not read as this one's.
        return [self.stage.identity, str(file.relative_to(self.folder))]

    def file(self, number: int, row: Row) -> Path:
        return self.folder / "rounds" / f"{number}-{row.name}.json"

    def measure_rounds(self, rows: list[Row]) -> dict[str, str]:
        """Measure the missing rounds; return the reasons why rows are missing.

        A round that was cut off is measured again as a whole, because its ratios
        compare servers that ran one after another.
        """
        missing = {row.name: row.missing for row in rows if row.missing is not None}
        missing |= {
            row.name: reason
            for row in rows
            if (reason := self.refused(row)) is not None
        }
        rounds = self.benchmark.rounds
        # The start of a server, and two measurements per shape.
        steps = 1 + 2 * len(self.benchmark.shapes)
        with progress_bar(
            total=rounds * len(rows) * steps, desc="bench", unit="step", smoothing=0.1
        ) as bar:
            for number in range(1, rounds + 1):
                # Each round begins with a different row, see above.
                first = (number - 1) % len(rows)
                self.forget_cut(
                    number, [row for row in rows if row.name not in missing]
                )
                for index, row in enumerate([*rows[first:], *rows[:first]]):
                    if row.name not in missing and not self.file(number, row).is_file():
                        where = f"round {number} of {rounds}, {row.title}"
                        try:
                            figures = self.measure_row(
                                row, number, _Progress(bar, where)
                            )
                            self.write(self.file(number, row), figures)
                        except NotServed as failure:
                            # Only rivals and wide rows may be missing, and only from
                            # the first round on: a server that worked once must work
                            # again.
                            if not (row.exact or row.wide) or number > 1:
                                raise UserError(
                                    f"the server of row {row.name} failed:"
                                    f" {failure.reason}; the last lines of"
                                    f" {self.log(number, row)}: {failure.tail}"
                                ) from None
                            missing[row.name] = failure.reason
                            self.write(
                                self.file(1, row).with_suffix(".refused"),
                                {"reason": failure.reason},
                            )
                    # Rows that were measured before, or are missing, advance the bar as
                    # well.
                    bar.update(((number - 1) * len(rows) + index + 1) * steps - bar.n)
        return missing

    def refused(self, row: Row) -> str | None:
        """Return the recorded reason why a row is missing; None without one."""
        file = self.file(1, row).with_suffix(".refused")
        return str(self.read(file)["reason"]) if file.is_file() else None

    def forget_cut(self, number: int, rows: list[Row]) -> None:
        """Remove the files of a round that lacks rows."""
        files = [file for row in rows if (file := self.file(number, row)).is_file()]
        if 0 < len(files) < len(rows):
            print(
                f"fcsd-bench: round {number} was interrupted; measuring it again",
                file=sys.stderr,
            )
            for file in files:
                file.unlink()

    def server(
        self, row: Row, environment: Mapping[str, str], log: Path, *extra_flags: str
    ) -> AbstractContextManager[Server]:
        """Return a row's server as a context manager."""
        benchmark = self.benchmark
        model = benchmark.model if row.farskip else benchmark.against
        words = [
            model,
            *ENGINES[benchmark.engine].serve,
            *benchmark.serve_args,
            *row.flags,
            *extra_flags,
        ]
        # This machine has the first node's flags and answers the requests.
        first_flags, *other_flags = node_flags(
            benchmark.engine,
            row,
            benchmark.tensor_parallel,
            benchmark.nodes,
            free_port(),
        )
        words_by_node = {
            node: [*words, *flags]
            for node, flags in zip(benchmark.nodes[1:], other_flags, strict=True)
        }
        return running_server(
            self.program,
            [*words, *first_flags],
            environment,
            log,
            row.signs,
            words_by_node,
        )

    def traced(self, row: Row) -> dict[str, Any]:
        """Return the profiler's trace of a row's prompts of the first length and number
        of requests, from a separate server.
        """
        folder = self.folder / "traces" / row.name
        log = self.folder / "logs" / f"trace-{row.name}.log"
        file = folder.with_suffix(".json")
        # A profiled server is slower, so its times are not used as measurements.
        if not file.is_file():
            print(f"fcsd-bench: trace of {row.title}", file=sys.stderr)
            folder.mkdir(exist_ok=True)
            try:
                with self.server(
                    row, row.environment, log, *profiler_flags(folder)
                ) as server:
                    first_shape = self.benchmark.shapes[0]
                    self.measure_phase(server, None, first_shape, 1, 0, "--profile")
                self.write(file, read_trace(folder))
            except NotServed as failure:
                raise UserError(
                    f"the traced server of row {row.name} failed: {failure.reason}; the"
                    f" last lines of {log}:"
                    f" {failure.tail or tail_of(log.read_text(encoding='utf-8', errors='replace'))}"
                ) from None
        return self.read(file)

    def log(self, number: int, row: Row) -> Path:
        return self.folder / "logs" / f"{number}-{row.name}.log"

    def measure_row(
        self, row: Row, number: int, progress: "_Progress"
    ) -> dict[str, Any]:
        """Start a row's server, measure it at every shape, and end it."""
        # The load tells whether other programs disturbed the measurement.
        begin, load = datetime.now(UTC), os.getloadavg()[0]
        log, environment = self.log(number, row), dict(row.environment)
        times = None
        # Only the plugin's ranks write times.
        if row.farskip:
            times = log.with_suffix(".times")
            times.mkdir(exist_ok=True)
            # Files of a killed attempt would be subtracted as if this server had
            # written them.
            for leftover in times.iterdir():
                leftover.unlink()
            environment[TIMES_VARIABLE] = str(times.resolve())
        progress.next("starting")
        with self.server(row, environment, log) as server:
            points = []
            for index, shape in enumerate(self.benchmark.shapes):
                point: dict[str, Any] = shape._asdict()
                decoded = self.benchmark.output_tokens
                for phase, tokens in (("prefill", 1), ("decode", decoded)):
                    progress.next(
                        f"{phase}, {shape.requests} x {shape.prompt_tokens} tokens",
                        step=True,
                    )
                    point[phase] = self.measure_phase(
                        server, times, shape, tokens, 1000 * number + index
                    )
                points.append(point)
        facts = {
            "begin": _written(begin),
            "end": _written(datetime.now(UTC)),
            "load": load,
        }
        return {
            "row": row.name,
            "round": number,
            "start_s": server.start_s,
            **facts,
            "points": points,
        }

    def measure_phase(
        self,
        server: Server,
        times: Path | None,
        shape: Shape,
        output_tokens: int,
        seed: int,
        *extra_flags: str,
    ) -> dict[str, Any]:
        """Measure one shape and length of answers, with the ranks' communication during
        the measurement.
        """
        # Ranks count from the start of the server, so a measurement is a difference.
        times_before = settled_times(times) if times is not None else None
        figures = measure(
            self.program,
            server,
            self.benchmark.against,
            shape,
            output_tokens,
            seed,
            *extra_flags,
        )
        if times is not None and times_before is not None:
            figures["communication"] = communication_between(
                times_before, settled_times(times)
            )
        return figures


def _written(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


class _Progress:
    """The current activity of a row, shown by the bar."""

    def __init__(self, bar: Any, where: str) -> None:
        self.bar, self.where = bar, where

    def next(self, activity: str, *, step: bool = False) -> None:
        self.bar.set_postfix_str(f"{self.where}: {activity}")
        self.bar.update(int(step))
