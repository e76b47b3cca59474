"""Draw a decoder layer, regular and FarSkip: what each block reads, and what runs when.

    python docs/pictures/layer.py        # writes layer.svg beside this file

The upper half is the connectivity of docs/architecture.md, the lower half the forward pass under expert parallelism
(`layer_schedule.py`). Standard library only.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from layer_schedule import Operation, farskip_layer, queue, regular_layer, schedule

OUTPUT = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 920, 572

PAPER, INK, FAINT, RULE = "#ffffff", "#1f2933", "#52606d", "#cbd2d9"
COLOURS = {
    "q, k, v": "#2b6cb0",
    "core attention": "#2b6cb0",
    "attention": "#2b6cb0",
    "router": "#52606d",
    "routed experts": "#0f766e",
    "shared": "#5b7a14",
    "shared experts": "#5b7a14",
    "dispatch": "#c05621",
    "combine": "#c05621",
}
COMMUNICATION = COLOURS["dispatch"]


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 12,
    colour: str = INK,
    anchor: str = "start",
    extra: str = "",
) -> str:
    """Write words; `_{…}` is a subscript, `*…*` italic."""
    spans, lowered = [], False
    for part in re.split(r"(_\{[^}]*\}|\*[^*]*\*)", words):
        if not part:
            continue
        shift = -size * 0.25 if lowered else 0.0
        lowered = part.startswith("_{")
        style = ""
        if lowered:
            shift += size * 0.25
            style += f' font-size="{size * 0.75:g}"'
            part = part[2:-1]
        if part.startswith("*"):
            style += ' font-style="italic"'
            part = part[1:-1]
        if shift:
            style += f' dy="{shift:g}"'
        spans.append(f"<tspan{style}>{escape(part)}</tspan>" if style else escape(part))
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"{extra}>'
        f"{''.join(spans)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, fill: str, *, extra: str = ""
) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"{extra}/>'


def block(x: float, y: float, width: float, name: str) -> str:
    return box(x, y, width, 28, COLOURS[name]) + text(
        x + width / 2, y + 18.5, name, colour=PAPER, anchor="middle"
    )


def line(
    *points: tuple[float, float],
    colour: str = INK,
    width: float = 1.5,
    arrow: bool = False,
    dash: str = "",
) -> str:
    """Draw straight strokes from point to point."""
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    head = (
        f' marker-end="url(#{"net" if colour == COMMUNICATION else "ink"})"'
        if arrow
        else ""
    )
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes}{head}/>'


def in_flight(*points: tuple[float, float]) -> str:
    return line(*points, colour=COMMUNICATION, width=2.5, arrow=True, dash="6 4")


def plus(x: float, y: float) -> str:
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="{PAPER}" stroke="{INK}" stroke-width="1.5"/>'
        + line((x - 4.5, y), (x + 4.5, y))
        + line((x, y - 4.5), (x, y + 4.5))
    )


def connectivity(left: float, top: float, *, farskip: bool) -> list[str]:
    """Draw what the blocks of layer k read, the residual stream from left to right."""

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x, top + y

    stream, attention, shared, routed, edge = 80, 30, 124, 170, 430
    before, inside = (
        ("*o*_{k−1} − routed_{k−1}", "*o*_{k−1}") if farskip else ("*o*_{k−1}", "*h*")
    )
    after = "*o*_{k} − routed_{k}" if farskip else "*o*_{k}"
    drawn = [
        line(at(0, stream), at(edge, stream), width=2.5, arrow=True),
        line(at(32, stream), at(32, attention), at(50, attention), arrow=True),
        line(at(182, stream), at(182, shared), at(230, shared), arrow=True),
        line(at(182, shared), at(182, routed)),
        line(
            at(182, routed),
            at(230, routed),
            colour=COMMUNICATION,
            width=2.5,
            arrow=True,
        ),
        line(at(334, shared), at(348, shared), at(348, stream + 9), arrow=True),
    ]
    if farskip:
        drawn += [
            line(
                at(130, attention), at(348, attention), at(348, stream - 9), arrow=True
            ),
            in_flight(at(0, routed), at(150, routed), at(150, stream + 9)),
            in_flight(at(334, routed), at(edge, routed)),
            text(*at(0, routed - 8), "routed_{k−1}, in flight", colour=COMMUNICATION),
            text(
                *at(edge, routed - 8), "in flight", colour=COMMUNICATION, anchor="end"
            ),
        ]
    else:
        out = (at(334, routed), at(392, routed), at(392, stream + 9))
        drawn += [
            line(
                at(130, attention), at(150, attention), at(150, stream - 9), arrow=True
            ),
            line(*out, colour=COMMUNICATION, width=2.5, arrow=True),
            plus(*at(392, stream)),
        ]
    return [
        *drawn,
        plus(*at(150, stream)),
        plus(*at(348, stream)),
        block(*at(52, attention - 14), 78, "attention"),
        block(*at(232, shared - 14), 102, "shared experts"),
        block(*at(232, routed - 14), 102, "routed experts"),
        text(
            *at(205, routed + 18),
            "dispatch",
            size=11.5,
            colour=COMMUNICATION,
            anchor="middle",
        ),
        text(
            *at(363, routed + 18),
            "combine",
            size=11.5,
            colour=COMMUNICATION,
            anchor="middle",
        ),
        text(*at(40, stream - 8), before),
        text(*at(162, stream - 8), inside),
        text(*at(edge, stream - 8), after, anchor="end"),
    ]


@dataclass(frozen=True)
class Axis:
    """The time axis: window in units of `DURATIONS`, with 0 at the start of layer k."""

    left: float
    right: float
    begin: float
    end: float

    def x(self, time: float) -> float:
        time = min(max(time, self.begin), self.end)
        return self.left + (time - self.begin) / (self.end - self.begin) * (
            self.right - self.left
        )


COMPUTE_ROW, NETWORK_ROW = (24, 32), (66, 24)
"""Distance from the top of a timeline, and height."""


def timeline(
    axis: Axis, top: float, name: str, operations: list[Operation]
) -> list[str]:
    """Draw the two queues around layer 0 of `operations`: computation, and below it the network."""
    placed = schedule(operations)
    zero = placed["q, k, v", 0][0]
    spans = {key: (start - zero, end - zero) for key, (start, end) in placed.items()}
    return [
        text(20, top + 12, name, size=15, extra=' font-weight="bold"'),
        text(20, top + COMPUTE_ROW[0] + 20.5, "computation", colour=FAINT),
        text(20, top + NETWORK_ROW[0] + 16.5, "network", colour=FAINT),
        *brackets(axis, top, spans["q, k, v", 1][0]),
        *waits(axis, top, spans),
        *results(axis, top, operations, spans),
        *(
            part
            for one in operations
            for part in bar(axis, top, one, spans[one.name, one.layer])
        ),
    ]


def brackets(axis: Axis, top: float, finish: float) -> list[str]:
    """Mark which layer is at work: k from 0 to `finish`, its neighbours beside it."""
    begin, end = axis.x(0) + 1, axis.x(finish) - 1
    middle, y = (begin + end) / 2, top + 9
    drawn = [
        line((begin, y + 8), (begin, y), (middle - 34, y), colour=FAINT, width=1.2),
        line((middle + 34, y), (end, y), (end, y + 8), colour=FAINT, width=1.2),
        text(middle, y + 4, "layer *k*", colour=FAINT, anchor="middle"),
        text((axis.left + begin) / 2, y + 4, "*k* − 1", colour=FAINT, anchor="middle"),
    ]
    return [
        *drawn,
        text((axis.right + end) / 2, y + 4, "*k* + 1", colour=FAINT, anchor="middle"),
    ]


def waits(
    axis: Axis, top: float, spans: dict[tuple[str, int], tuple[float, float]]
) -> list[str]:
    """Fill the times in which the compute queue is empty."""
    drawn = []
    busy = sorted(span for (name, _), span in spans.items() if queue(name) == "compute")
    for (_, idle_from), (idle_until, _) in pairwise(busy):
        begin, end = axis.x(idle_from), axis.x(idle_until)
        if end - begin > 1:
            y, height = top + COMPUTE_ROW[0], COMPUTE_ROW[1]
            drawn += [
                box(begin + 1, y, end - begin - 2, height, "url(#waits)"),
                text(
                    (begin + end) / 2, y + 20.5, "waits", colour=FAINT, anchor="middle"
                ),
            ]
    return drawn


def results(
    axis: Axis,
    top: float,
    operations: list[Operation],
    spans: dict[tuple[str, int], tuple[float, float]],
) -> list[str]:
    """Draw an arrow from the end of each collective to the first computation that reads its result."""
    readers: dict[tuple[str, int], float] = {}
    for one in operations:
        for need in one.reads:
            if queue(need[0]) == "network" and need in spans:
                start = spans[one.name, one.layer][0]
                readers[need] = min(start, readers.get(need, start))
    drawn = []
    for need, start in readers.items():
        if axis.begin < spans[need][1] and start < axis.end:
            y, x = top + NETWORK_ROW[0] + NETWORK_ROW[1] / 2, axis.x(start) + 6
            points = (
                (axis.x(spans[need][1]) - 2, y),
                (x, y),
                (x, top + sum(COMPUTE_ROW) + 1),
            )
            drawn.append(line(*points, colour=COMMUNICATION, arrow=True))
    return drawn


def bar(axis: Axis, top: float, one: Operation, span: tuple[float, float]) -> list[str]:
    """Draw one operation, pale where it is of a neighbouring layer, with as much of its name as has room."""
    begin, end = (axis.x(time) for time in span)
    if end - begin < 3:
        return []
    row = NETWORK_ROW if queue(one.name) == "network" else COMPUTE_ROW
    y, height, colour = top + row[0], row[1], COLOURS[one.name]
    drawn = [box(begin + 1, y, end - begin - 2, height, PAPER)] if one.layer else []
    drawn.append(
        box(
            begin + 1,
            y,
            end - begin - 2,
            height,
            colour,
            extra=' fill-opacity="0.15"' if one.layer else "",
        )
    )
    for label in (one.name, one.name.split()[-1]):
        if end - begin > 6.3 * len(label) + 6:
            ink = colour if one.layer else PAPER
            return [
                *drawn,
                text(
                    (begin + end) / 2,
                    y + height / 2 + 4.5,
                    label,
                    colour=ink,
                    anchor="middle",
                ),
            ]
    return drawn


DEFINITIONS = f"""<defs>
<marker id="ink" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" \
orient="auto"><path d="M0 0.5 L10 5 L0 9.5 z" fill="{INK}"/></marker>
<marker id="net" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="10" markerHeight="10" markerUnits="userSpaceOnUse" \
orient="auto"><path d="M0 0.5 L10 5 L0 9.5 z" fill="{COMMUNICATION}"/></marker>
<pattern id="waits" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect width="7" height="7" fill="#f0f2f4"/><rect width="2" height="7" fill="#d9dee3"/></pattern>
</defs>"""

TITLE = "A mixture-of-experts decoder layer, regular and with FarSkip connectivity"
DESCRIPTION = (
    "Above: in the regular layer attention reads the whole residual stream, and the experts read it after attention."
    " In the FarSkip layer attention reads the stream without the routed output of the layer before, which is still in"
    " flight, and the experts read the stream without this layer's attention. Below: in the regular layer computation"
    " waits for dispatch and combine; in the FarSkip layer dispatch runs beside attention, and combine beside the"
    " shared experts and the next layer's queries, keys and values."
)
REGULAR = (
    "*h* = *o*_{k−1} + attn(*o*_{k−1}),\u2003*o*_{k} = *h* + shared(*h*) + routed(*h*)"
)
FARSKIP = "*o*_{k} = *o*_{k−1} + attn(*o*_{k−1} − routed_{k−1}) + shared(*o*_{k−1}) + routed(*o*_{k−1})"
CAPTION = (
    "Forward pass under expert parallelism; lengths are not measurements. Shared experts can hide part of a regular"
    " combine, too.",
    "With replicated activations (tensor parallelism) the all-reduces after attention and experts are hidden in the"
    " same way.",
)


def picture() -> str:
    """Return the whole SVG."""
    axis = Axis(108, WIDTH - 20, -3.5, 39.75)
    regular = [one for k in (-1, 0, 1) for one in regular_layer(k)]
    farskip = [one for k in (-1, 0, 1) for one in farskip_layer(k)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' xml:space="preserve" role="img" aria-labelledby="title description"'
        " font-family=\"Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif\">"
    )
    parts = [
        head,
        f'<title id="title">{TITLE}</title>',
        f'<desc id="description">{DESCRIPTION}</desc>',
        DEFINITIONS,
        box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, PAPER, extra=f' stroke="{RULE}"'),
        text(20, 32, "Regular", size=17, extra=' font-weight="bold"'),
        text(104, 32, "each block waits for the one before it", size=13, colour=FAINT),
        *connectivity(20, 44, farskip=False),
        text(20, 262, REGULAR, size=12.5),
        text(470, 32, "FarSkip", size=17, extra=' font-weight="bold"'),
        text(552, 32, "each block reads what is already there", size=13, colour=FAINT),
        *connectivity(470, 44, farskip=True),
        text(470, 262, FARSKIP, size=12.5),
        line((20, 286), (WIDTH - 20, 286), colour=RULE, width=1),
        *timeline(axis, 306, "Regular", regular),
        *timeline(axis, 420, "FarSkip", farskip),
        *(
            text(20, HEIGHT - 34 + 17 * i, words, size=11.5, colour=FAINT)
            for i, words in enumerate(CAPTION)
        ),
        text(WIDTH - 66, HEIGHT - 17, "time", size=11.5, colour=FAINT, anchor="end"),
        line(
            (WIDTH - 60, HEIGHT - 21),
            (WIDTH - 20, HEIGHT - 21),
            colour=FAINT,
            width=1.2,
            arrow=True,
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(picture(), encoding="utf-8")
