"""Format an estimate and a plan as text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fcsd.base.text import markdown, named, nats, size
from fcsd.model.inspect.table import ranges
from fcsd.planning.cost.assumptions import ALL_REDUCES, WITHOUT_AITER
from fcsd.planning.cost.plan import MORE_GPUS, PRINTED
from fcsd.planning.layers.front import chosen_text, front_text


def _joined(parts: Iterable[list[str]]) -> str:
    return "\n\n".join("\n".join(part) for part in parts)


def _memory(memory: Mapping[str, Any], available: str = "") -> str:
    rows = [[name, size(number)] for name, number in memory["parts"].items()]
    return markdown(
        ["memory per rank", ""],
        [*rows, ["all", size(memory["total_bytes"]) + available]],
    )


def estimate_table(facts: Mapping[str, Any]) -> str:
    """Format the result of `fcsd.planning.cost.estimate` for `fcsd estimate`."""
    return _joined(_parts(facts))


def _parts(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    yield _head(facts)
    memory = facts["memory"]
    yield [_memory(memory)]
    yield [_fits(facts), *_activations(memory["activations"])]
    # Changes are computed only where the training does not fit.
    if facts["changes"]:
        rows = [
            [
                row["change"],
                size(row["total_bytes"]),
                _yes_or_no(row["fits"]),
                _yes_or_no(row["supported"]),
            ]
            for row in facts["changes"]
        ]
        yield [
            markdown(
                ["change, in addition to those above", "memory", "fits", "supported"],
                rows,
            )
        ]
    yield [
        *_disk(facts["disk"]),
        *_scoring(facts["scoring"]),
        *_own_text(facts["own_text"]),
        *_written(facts["written"]),
    ]
    flops = facts["flops"]
    rows = [
        [name, f"{number / 1e9:.2f}"] for name, number in flops["per_token"].items()
    ]
    rows.append(["all", f"{sum(flops['per_token'].values()) / 1e9:.2f}"])
    yield [markdown(["10^9 operations per token", ""], rows)]
    yield _time(facts)
    rows = [
        [
            row["stage"],
            str(row["runs"]),
            f"{row['steps']:,}",
            f"{row['tokens']:.3g}",
            _expected(row["expected_hours"], row["hours"]),
        ]
        for row in facts["totals"]
    ]
    yield [markdown(["", "runs", "steps each", "tokens", "hours"], rows)]
    if facts["refused"]:
        yield [
            "`fcsd run` refuses with this many processes:",
            *(f"- {text}" for text in facts["refused"]),
        ]
    yield ["assumed:", *(f"- {text}" for text in facts["assumptions"])]


def _head(facts: Mapping[str, Any]) -> list[str]:
    hardware, settings = facts["hardware"], facts["settings"]
    numbers = facts["parameters"]
    # Switches are named only where they are on.
    notes = [
        name
        for name in ("gradient_checkpointing", "freeze_embeddings_and_head", "bf16")
        if settings[name]
    ]
    ranks = hardware["expert_parallel"]
    spread = f", expert parallel {ranks}" if ranks > 1 else ""
    supported = "" if hardware["supported"] else " (not with lora)"
    rows = [
        ("run", f"{facts['recipe']}: {facts['run']}, objective {settings['objective']}"),
        ("model", f"{facts['model']}, {facts['model_type']}, {numbers['total']:,} parameters,"
         f" {numbers['trained']:,} trained"),
        ("hardware", f"{hardware['num_gpus']} x {hardware['name']}, sharding {hardware['sharding']}{spread}"
         f"{supported}"),
        ("micro-batch", f"{settings['rows']} x {settings['max_length']} tokens per rank,"
         f" {settings['micro_batches']} per step"),
        ("training", ", ".join([settings["dtype"], *notes, *(["lora"] if settings["lora"] else [])])),
    ]  # fmt: skip
    if settings["teacher"]:
        rows.append(("teacher", settings["teacher"] + _cache(facts["cache"])))
    return [named(*row) for row in rows]


def _cache(cache: Mapping[str, int] | None) -> str:
    if cache is None:
        return ""
    return (
        f": {size(cache['bytes_per_token'])} on disk per token with loss,"
        f" {size(cache['at_most_bytes'])} for {cache['at_most_tokens']:.3g} of them,"
        " if the training reads no row twice"
    )


def _fits(facts: Mapping[str, Any]) -> str:
    memory = facts["memory"]
    room = f"{size(memory['total_bytes'])} of {size(memory['gpu_bytes'])}"
    if memory["fits"]:
        return named("fits", room)
    advice = "with the changes below it would"
    if not facts["changes"] or not facts["changes"][-1]["fits"]:
        advice = "no change below suffices: use a larger GPU or a smaller model"
    return named("DOES NOT FIT", f"{room}; {advice}")


def _activations(values: Mapping[str, int | None]) -> Iterator[str]:
    without = values["without_checkpointing_bytes"]
    checkpointed = values["with_checkpointing_bytes"]
    text = f"{size(without or 0)} without activation checkpointing, "
    if checkpointed is None:
        yield named("activations", text + "which this family does not support")
        return
    yield named("activations", text + f"{size(checkpointed)} with it")
    inputs, second = values["layer_inputs_bytes"], values["second_inputs_bytes"]
    second_inputs = (
        f", and {size(second)} for the second one of FarSkip layers" if second else ""
    )
    text = f"checkpointed inputs of the layers {size(inputs or 0)}{second_inputs}"
    yield named("", text)


def _disk(disk: Mapping[str, int]) -> Iterator[str]:
    parts = [
        f"{disk['num_checkpoints']} checkpoints of {size(disk['checkpoint_bytes'])}"
    ]
    if disk["best_bytes"]:
        parts.append(
            f"{size(disk['best_bytes'])} for the best weights, those before and those"
            " being written"
        )
    parts.append(f"{size(disk['model_bytes'])} for the model")
    yield named("disk", f"{size(disk['total_bytes'])}: {', '.join(parts)}")
    if copy := disk["host_copy_bytes"]:
        text = (
            f"{size(copy)} on each machine that writes: a copy of the checkpoint that is"
            " being written"
        )
        yield named("host memory", text)


def _scoring(scoring: Mapping[str, Any] | None) -> Iterator[str]:
    if scoring is None:
        return
    when = "once for a score" if scoring["once"] else "for every token"
    text = (
        f"gathers {size(scoring['gathered_bytes'])} of weights {when}, in"
        f" {scoring['seconds']:.2g} s; this leaves {size(scoring['free_bytes'])} of a"
        " GPU free"
    )
    yield named("scoring", text)


def _own_text(own: Mapping[str, Any] | None) -> Iterator[str]:
    if own is None:
        return
    fast, expected, slow = own["seconds"]
    text = (
        f"{own['texts']:.3g} texts of {own['tokens']:,} tokens per rank and step, in"
        f" {own['passes']:,} passes: {_expected(expected, [fast, slow])} s"
    )
    yield named("own text", text)


def _written(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for source in sources:
        text = (
            f"{source['source']}: the original writes {source['texts']:,} texts of at"
            f" most {source['tokens']:,} tokens, {size(source['num_bytes'])} on disk"
            " (twice while they are joined)"
        )
        time = "behind its server, in a time that is not estimated"
        if source["seconds"] is not None:
            fast, expected, slow = source["seconds"]
            time = (
                f"in {source['passes']:,} passes per rank:"
                f" {_expected(expected, [fast, slow])} s"
            )
        yield named("written", f"{text}, {time}")


def _time(facts: Mapping[str, Any]) -> list[str]:
    time, flops = facts["time"], facts["flops"]
    step = _expected(time["expected_s"], time["step_s"])
    rate = _expected(time["expected_tokens_per_second"], time["tokens_per_second"])
    # The parts of a step whose exchanges block; they add up to the step.
    parts = {
        "compute": time["compute_s"],
        "exchanges of experts": time["exchanges_s"],
        "weights and gradients that nothing hides": time["sharding_s"],
        "own text": facts["own_text"]["seconds"][1] if facts["own_text"] else 0.0,
    }
    shares = [f"{name} {seconds:.2g} s" for name, seconds in parts.items() if seconds]
    operations = f"{flops['per_step'] / 1e15:.3g} x 10^15 operations"
    rows = [
        ("step", f"{operations}, {step} s, {rate} tokens/s"),
        ("of that", ", ".join(shares)),
    ]
    if (share := flops["float32_share"]) > 0:
        rows.append(("float32", f"{share:.0%} of the operations run in float32"))
    tokens = facts["tokens"]
    minutes, minutes_alone = (f"{seconds / 60:,.2g}" for seconds in tokens["seconds"])
    text = (
        f"{tokens['num_tokens']:,} once for all trainings: {size(tokens['bytes'])} on"
        f" disk, {minutes} min with {tokens['processes']} processes, {minutes_alone}"
        " with one"
    )
    return [named(*row) for row in [*rows, ("tokens", text)]]


def _expected(value: float, values: list[float]) -> str:
    expected, ends = _number(value), _range(values)
    return expected if expected == ends else f"{expected} ({ends})"


def _range(values: list[float]) -> str:
    # Ends that round to the same text are not a range.
    low, high = map(_number, values)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def plan_table(facts: Mapping[str, Any]) -> str:
    """Format the result of `fcsd.planning.cost.plan` for `fcsd plan`."""
    return _joined(_plan_parts(facts))


def sweep_table(facts: Mapping[str, Any]) -> str:
    """Format the result of `fcsd.pipeline.plan.sweep_plans` for `fcsd plan --sweep`."""
    rows, notes = [], []
    for row in facts["rows"]:
        if "refused" in row:
            notes.append(f"{facts['swept']} {row['value']}: {row['refused']}")
            continue
        times, rates = row["times"], row["tokens_per_second_per_gpu"]
        hours, memory = row["gpu_hours_per_billion_tokens"], row["memory"]
        rows.append(
            [
                row["value"],
                str(row["settings"]["num_gpus"]),
                "-" if memory is None else _yes_or_no(memory["fits"]),
                _times_as_fast(row["expected_over_exact"]),
                f"{times['over_exact']:.3f}",
                f"{times['speed_up']:.3f}",
                _ms(times["regular_s"]),
                _ms(times["overlapped_s"]),
                f"{times['communication_share']:.1%}",
                f"{times['exposed_s'] / times['overlapped_s']:.1%}",
                *(_number(rates[name]) for name in ("regular", "overlapped")),
                *(_number(hours[name]) for name in ("regular", "overlapped")),
            ]
        )
    # Measured for one number of tokens, which a sweep may change.
    constant = [
        name
        for name in ALL_REDUCES.values()
        if name in facts["assumptions"] and facts["swept"] in ("batch", "length", "tp")
    ]
    if constant:
        notes.append(f"every row has the same {' and '.join(constant)}, as given")
    seconds = f"{_DURATIONS[facts['phase']]}, ms"
    table = markdown(
        [
            facts["swept"], "GPUs", "fits", "times as fast as the best exact", "the same, planned",
            "planned, as regular", f"regular {seconds}", f"overlapped {seconds}", "communication, regular",
            "exposed, overlapped", "regular tokens/s per GPU", "overlapped tokens/s per GPU",
            "regular GPU hours per billion tokens", "overlapped GPU hours per billion tokens",
        ],
        rows,
    )  # fmt: skip
    return "\n".join([table, *notes])


_DURATIONS = {
    "train": "step",
    "prefill": "time to first token",
    "decode": "time between tokens",
}


def _plan_parts(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    yield _plan_head(facts)
    if headline := _headline(facts):
        yield [headline]
    yield [_result(facts["times"], facts["settings"]["phase"]), *_notes(facts)]
    yield [_windows(facts["times"])]
    if facts.get("study"):
        yield [_study(facts["study"])]
    for front in facts.get("fronts", []):
        weights = "calibrated" if front["calibrated"] else "copied"
        head = f"HALVES by time saved per loss, {weights} weights:"
        yield [head, "", *front_text(front), "", *chosen_text(front["chosen"])]
    if (memory := facts["memory"]) is not None:
        yield [_memory(memory, f" of {size(memory['gpu_bytes'])}")]
        if not memory["fits"]:
            yield [_does_not_fit(memory)]
    if facts["sensitivity"]:
        yield [_sensitivity(facts["sensitivity"])]


def _does_not_fit(memory: Mapping[str, Any]) -> str:
    needs = memory["needs_gpus"]
    need = f"without changes it needs {needs} GPUs"
    if needs is None:
        need = (
            "more GPUs alone do not make it fit (tried: up to"
            f" {MORE_GPUS[-1]} times as many)"
        )
    changes = " or ".join(memory["changes"])
    alternatives = f"; one of these makes it fit: {changes}" if changes else ""
    return f"DOES NOT FIT: {need}{alternatives}"


def _plan_head(facts: Mapping[str, Any]) -> list[str]:
    machine, settings = facts["machine"], facts["settings"]
    gpu = machine["gpu"]
    rewired = f"{len(settings['layers'])} of {settings['num_layers']} layers rewired"
    batch = f"{settings['batch']} x {settings['length']} tokens"
    # A server shares its layers by tensor parallelism, or only its experts (wide).
    if settings["phase"] == "train":
        ranks, whose = f"expert parallel {settings['expert_parallel']}", "rank"
        if "megatron" in facts["times"]:
            ranks = (
                f"Megatron, tensor parallel {settings['tensor_parallel']}, pipeline"
                f" parallel {settings['pipeline_parallel']}, {ranks}"
            )
            whose = "micro-batch"
        batch += f" per {whose}, micro-batches per step: {settings['micro_batches']}"
    else:
        wide = settings["data_parallel"] is not None
        kind = "data" if wide else "tensor"
        ranks = (
            f"{kind} parallel {settings[f'{kind}_parallel']}, expert parallel"
            f" {settings['expert_parallel']}"
        )
        if wide:
            ranks += f" over {settings['all2all']}"
    network = f"{machine['nic_gb_s']:g} GB/s per GPU between nodes"
    if facts["links"]:
        network = "measured links"
    rows = [
        ("model", f"{facts['model']}, {facts['model_type']}, {rewired}"),
        (
            "machine",
            (
                f"{machine['num_nodes']} x {machine['gpus_per_node']} x {gpu['name']},"
                f" {network}"
            ),
        ),
        ("phase", f"{settings['phase']}, {ranks}, {batch}"),
        ("weights", settings["weights"]["name"]),
    ]
    return [named(*row, width=10) for row in rows]


def _result(times: Mapping[str, Any], phase: str) -> str:
    columns = [
        f"{_DURATIONS[phase]}, ms",
        "communication",
        "exposed",
        "times as fast as regular",
    ]
    regular_s, overlapped_s = times["regular_s"], times["overlapped_s"]
    sent_s = times["communication_s"]
    steps = [("regular", regular_s, sent_s, sent_s)]
    marks = {"exact": " (in no release)", "architectures": " (another architecture)"}
    steps += [
        (row["name"] + mark * (row["released"] is None),
         row["step_s"], row["communication_s"], row["exposed_s"])
        for kind, mark in marks.items()
        for row in times.get(kind, ())
    ]  # fmt: skip
    sent_s = times["overlapped_communication_s"]
    steps.append(("overlapped", overlapped_s, sent_s, times["exposed_s"]))
    rows = [
        [
            name,
            _ms(step_s),
            f"{sent_s / step_s:.1%}",
            f"{exposed_s / step_s:.1%}",
            f"{regular_s / step_s:.3f}",
        ]
        for name, step_s, sent_s, exposed_s in steps
    ]
    if "over_exact" in times:
        columns.append("times as fast as the best exact")
        for row, (_, step_s, *_) in zip(rows, steps, strict=True):
            row.append(f"{times['over_exact'] * overlapped_s / step_s:.3f}")
    return markdown(["", *columns], rows)


def _headline(facts: Mapping[str, Any]) -> str:
    """Return the gain to expect over the best exact schedule, and those planned; empty
    where times were measured.
    """
    times, expected = facts["times"], facts["expected_over_exact"]
    if expected is None:
        return ""
    gain = f"GAIN: {_times_as_fast(expected)} times as fast as"
    plain = f"planned {times['speed_up']:.3f}"
    if times["best_exact"] == "regular":
        return (
            f"{gain} regular blocks ({plain}); no exact schedule below is faster than"
            " those"
        )
    over_regular = f"{plain} times as fast as regular blocks"
    if (over := facts["expected_gain"]) is not None:
        over_regular = (
            f"{_times_as_fast(over)} times as fast as regular blocks ({plain})"
        )
    return (
        f"{gain} the best exact schedule, {times['best_exact']} (planned"
        f" {times['over_exact']:.3f}); {over_regular}"
    )


def _times_as_fast(gains: Sequence[float]) -> str:
    """Format a smallest and a largest gain, in shares: `0.983 to 1.092`."""
    low, high = (f"{1 + gain:.3f}" for gain in gains)
    return low if low == high else f"{low} to {high}"


def _kernels(facts: Mapping[str, Any]) -> str | None:
    """Return which kernels a prefill in FP8 on AMD GPUs is planned with; None for any
    other plan.
    """
    if facts["settings"]["aiter"] is False:
        times = WITHOUT_AITER
        return (
            f"without AITER, dense matmuls take {times['gemm']:g}, experts"
            f" {times['fp8_grouped']:g} and attention {times['fused_core']:g} times as"
            " long (AMD's averages for DeepSeek-R1 on MI300X)"
        )
    if facts["settings"]["aiter"]:
        return (
            "AITER's, which vLLM uses only with VLLM_ROCM_USE_AITER=1; for vLLM's own,"
            " add --without-aiter"
        )
    return None


def _main_assumption(facts: Mapping[str, Any]) -> str:
    """Name the assumption on which the gain hangs most, with its range."""
    row = next(r for r in facts["sensitivity"] if r["name"] == facts["hangs_on"])
    low, high = row["range"]
    return f"{row['name']}, {_value(low)} to {_value(high)}: {row['what']}"


def _all_reduces(facts: Mapping[str, Any], ideal: float) -> str:
    """Say what a server's all-reduces take and where that is from.

    ideal: gain over regular blocks if the engine's own ran beside computation.
    """
    engine, side = (
        _value(1e6 * facts["times"]["exchange_s"][name])
        for name in ("all_reduce", "side")
    )
    published = any(row["name"] == "side_us" for row in facts["sensitivity"])
    if engine == side and not published:
        duration_text = (
            f"{engine} µs, from latency and rates: nobody published times of these"
            " GPUs, or between nodes. If the engine's own kernel is faster than NCCL's,"
            " the gain is smaller"
        )
    else:
        duration_text = (
            f"the engine's own in line {engine} µs, NCCL's on a side stream {side}. If"
            f" the engine's own run beside computation ({_runs_them(facts)}):"
            f" {ideal:.3f} times as fast as regular blocks"
        )
    return (
        f"ALL-REDUCES: {duration_text}. Measure yours first: `assumptions: {{all_reduce_us: …,"
        " side_us: …}` in the file of --cluster"
    )


def _runs_them(facts: Mapping[str, Any]) -> str:
    """Name what runs an engine's own all-reduces beside this family's computation."""
    if "vLLM" in facts["served_by"]:
        return "vLLM with fcsd-serving, AMD's fork"
    return "vLLM with fcsd-serving does so with other families"


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    times = facts["times"]
    for row in (*times.get("exact", ()), *times.get("architectures", ())):
        had = f"Released: {row['released']}" if row["released"] else "In no release"
        yield f"{row['name']}: {row['hides']}. {had}. Source: {row['source']}"
    if reasons := times.get("not_exact"):
        yield "not compared with: " + "; ".join(reasons)
    yield "hidden: " + ", ".join(
        f"{name} {share:.1%}" for name, share in times["overlap"].items()
    )
    if (ideal_s := times.get("engine_beside_s")) is not None:
        yield _all_reduces(facts, times["regular_s"] / ideal_s)
    if (fused_s := times.get("fused_norms_s", {})).get("regular"):
        yield (
            "FUSED NORMS: the engine fuses its all-reduces with the norms behind them,"
            f" which saves {_ms(fused_s['regular'])} ms; FarSkip loses"
            f" {_ms(fused_s['lost'])} ms of that, because those on a side stream cannot"
        )
    if kernels := _kernels(facts):
        yield f"KERNELS: {kernels}"
    if reason := facts["overlap_refused"]:
        yield (
            f"NOT IN FCSD: its training does not overlap {facts['model_type']}, because"
            f" {reason}"
        )
    if facts["served_by"] == []:
        yield (
            f"NOT SERVED: no engine runs {facts['model_type']} with overlap"
            " (docs/serve.md), so this gain cannot be had yet"
        )
    if rates := facts.get("tokens_per_second_per_gpu"):
        yield "tokens/s per GPU: " + ", ".join(
            f"{name} {_number(rate)}" for name, rate in rates.items()
        )
    if mfu := facts.get("mfu"):
        yield "MFU (FLOPs of the model, of the GPU's peak): " + ", ".join(
            f"{name} {share:.1%}" for name, share in mfu.items()
        )
    if hours := facts.get("gpu_hours_per_billion_tokens"):
        yield "GPU hours per billion tokens: " + ", ".join(
            f"{name} {_number(number)}" for name, number in hours.items()
        )
    if facts["upper_bound"] and facts["hangs_on"] is None:
        pass  # nothing is hidden
    elif facts["upper_bound"] and facts["over_prediction"] is None:
        (least, most), (low, high) = facts["expected_gain"], facts["step_ratio"]
        yield (
            "EXPECTED GAIN: published times between tokens (DeepSeek-V3, gpt-oss-120b)"
            f" are {low:g} to {high:g} times the planned ones (longest for"
            " DeepSeek-V3 on MI300X). Longer steps hide the same communication: expect"
            f" {least:.1%} to {most:.1%} over regular blocks, mostly by"
            f" {_main_assumption(facts)}. With measured times (--measured) the gain is"
            " f v / (1 - f v)"
        )
    elif facts["upper_bound"]:
        (least, most), (low, high) = facts["expected_gain"], facts["over_prediction"]
        yield (
            f"EXPECTED GAIN: {least:.1%} to {most:.1%} over regular blocks, at the ends"
            f" of the assumptions (mostly by {_main_assumption(facts)}) or with slower kernels"
            " than planned; planned gains in the time to the"
            f" first token were {low:g} to {high:g} times those that the FarSkip paper"
            " measured. With measured times (--measured) the gain is f v / (1 - f v)"
        )
    # Real routing is uneven, and `fcsd-steer routing` can measure it.
    elif facts["imbalance"] == 1 and "measured" not in facts:
        yield (
            "EVEN ROUTING is assumed (imbalance 1); fine-tuning on 16 H100 showed 2.6 to"
            " 5.1. Measure your model with `fcsd-steer routing`, and pass the result to"
            " --routing"
        )
    if megatron := times.get("megatron"):
        yield (
            "MEGATRON: fcsd does not train with tensor or pipeline parallelism. Nothing"
            f" hides {_ms(megatron['tensor_parallel_s'])} ms between tensor-parallel"
            f" ranks and {_ms(megatron['sends_s'])} ms between stages; the bubble is"
            f" {megatron['bubble']:.1%} of the step"
        )
    # Only training gathers weights; a server's values are 0 or missing.
    if any(sharding := times.get("sharding_s", ())) and not times.get("megatron"):
        yield (
            "FSDP2 gathers weights (forward, backward) and reduces gradients in every"
            f" micro-batch; exposed of that: {_ms(sharding[0])} ms of the regular step,"
            f" {_ms(sharding[1])} ms of the overlapped one"
        )
    if (ratio := times.get("equation_9")) is not None:
        holds = "does not hold: something stays exposed"
        if ratio <= 1:
            holds = "holds: necessary, not sufficient"
        yield (
            "equation 9: (dispatch + combine) / (layer - experts - router) ="
            f" {ratio:.2f}, {holds}"
        )


def _windows(times: Mapping[str, Any]) -> str:
    """Format the windows of the layers, with equal layers in one row."""
    exchange, groups = times["exchange_s"], _groups(times["windows"])
    kinds = [name for name in times["windows"][0] if name != "layer"]
    rows = []
    for seconds, layers in groups.items():
        cells = []
        for kind, window_s in zip(kinds, seconds, strict=True):
            # A tensor-parallel server has one kind of exchange, the all-reduce, for
            # both windows; without a window, the engine sends it in line.
            way = "side" if window_s else "all_reduce"
            exchange_s = exchange.get(kind.removesuffix("_s"), exchange.get(way, 0.0))
            cells += [_ms(exchange_s), _ms(window_s)]
        rows.append([_layers(layers), *cells])
    names = {"attention_s": "attention's all-reduce", "routed_s": "routed all-reduce"}
    header = ["MoE layers"]
    for kind in kinds:
        name = names.get(kind, kind.removesuffix("_s"))
        header += [f"{name}, ms", f"window of {name}, ms"]
    return markdown(header, rows)


def _groups(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[float, ...], list[int]]:
    """Return the layers of each kind of windows."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for row in rows:
        seconds = tuple(value for name, value in row.items() if name != "layer")
        groups.setdefault(seconds, []).append(row["layer"])
    return groups


def _layers(layers: Sequence[int]) -> str:
    """Format layers as ranges, and every second one (or third, …) as `0,2,…,34`."""
    steps = {after - before for before, after in pairwise(layers)}
    if len(layers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{layers[0]},{layers[1]},…,{layers[-1]}"
    return ranges(layers)


def _study(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            row["selection"],
            row["weights"],
            str(row["num_layers"]),
            f"{row['speed_up']:.3f}",
            nats(row["loss"]),
        ]
        for row in rows
    ]
    first = rows[0]
    option = first["options"].removesuffix(first["selection"]).strip()
    rewired = "outdated MLP sides" if option == "--mlp" else "rewired"
    return markdown(
        [option, "weights", rewired, "times as fast", first["metric"]], cells, left=2
    )


def _sensitivity(rows: Sequence[Mapping[str, Any]]) -> str:
    # Measured times have no exact schedule beside them.
    kinds = {"over_exact": "as the best exact", "speed_up": "as regular blocks"}
    columns = [key for key in kinds if key in rows[0]]

    def reach(row: Mapping[str, Any]) -> float:
        return float(max(abs(row[key][1] - row[key][0]) for key in columns))

    # Assumptions that move the result by less than its last printed digit are only
    # listed, but for those that the cluster's file gives.
    ordered = sorted(
        (row for row in rows if reach(row) >= PRINTED or _is_given(row)),
        key=lambda row: -reach(row),
    )
    without = ", ".join(row["name"] for row in rows if row not in ordered)
    cells = [
        [
            row["name"],
            _value(row["value"]),
            "given" if _is_given(row) else " to ".join(map(_value, row["range"])),
            *(f"{row[key][0]:.3f} to {row[key][1]:.3f}" for key in columns),
        ]
        for row in ordered
    ]
    header = [
        "assumption",
        "value",
        "range",
        *(f"times as fast {kinds[key]}" for key in columns),
    ]
    table = f"{markdown(header, cells)}\n" if cells else ""
    none = f"no effect on it: {without}\n" if without else ""
    return (
        f"{table}{none}gains: the smallest and the largest at the planned value and"
        " both ends; a gain is largest where an exchange just fills its window, so more load"
        f" can raise or lower it\nfor the meaning and source of each assumption: --json, or"
        " fcsd/planning/cost/assumptions.py"
    )


def _is_given(row: Mapping[str, Any]) -> bool:
    low, high = row["range"]
    return bool(low == high)


def _value(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
