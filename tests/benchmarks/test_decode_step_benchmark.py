"""The benchmark of a decoding step: its two orders against equations by hand, its
figures on a simulated clock, and the files that `fcsd plan --measured` reads.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode_devices import Gpu, Rehearsal
from benchmarks.decode_rank import ATTENTION, PAGE, Layer, Rank, shape_of
from benchmarks.decode_step import (
    Setting,
    compared,
    farskip,
    main,
    measure,
    microseconds,
    regular,
)
from fcsd.base.files import read_json
from fcsd.cli.main import main as fcsd
from tests.real_configs import CONFIGS

PUBLISHED = CONFIGS / "Qwen3-30B-A3B.json"
SMALL = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 64, "max_window_layers": 3,
}  # fmt: skip
BATCH, LENGTH = 3, 2 * PAGE


def small(dtype: torch.dtype, **changes: Any) -> Rank:
    shape = shape_of(read_json(PUBLISHED) | SMALL | changes, 1)
    return Rank(shape, BATCH, LENGTH, "gathered", {"device": "cpu", "dtype": dtype})


# ---- the equations


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """The rotation of pairs (i, i + 4) by the last position's angles."""
    angles = [(LENGTH - 1) * 1e6 ** (-i / 4) for i in range(4)]
    angle = torch.tensor(angles, dtype=torch.float64)
    first, second = x[..., :4], x[..., 4:]
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            first * angle.sin() + second * angle.cos(),
        ],
        -1,
    )


def attention_by_hand(rank: Rank, layer: Layer, x: Tensor) -> Tensor:
    outputs = []
    for request in range(BATCH):
        q, k, v = (layer.qkv @ x[request]).view(8, 8).split((4, 2, 2))
        q, k = turned(normed(q, layer.q_norm)), turned(normed(k, layer.k_norm))
        places = [
            int(page) * PAGE + i for page in rank.table[request] for i in range(PAGE)
        ]
        heads = []
        for head in range(4):
            before = layer.cache[places[:-1], :, head // 2]
            keys = torch.cat([before[:, 0], k[head // 2][None]])
            values = torch.cat([before[:, 1], v[head // 2][None]])
            heads.append((keys @ q[head] / math.sqrt(8)).softmax(0) @ values)
        outputs.append(layer.out @ torch.cat(heads))
    return torch.stack(outputs)


def experts_by_hand(rank: Rank, layer: Layer, x: Tensor) -> Tensor:
    outputs = []
    for token in x:
        shares = (layer.router @ token).softmax(0)
        chosen = sorted(range(8), key=lambda e: -float(shares[e]))[:2]
        total = sum(shares[e] for e in chosen)
        out = torch.zeros_like(token)
        for e in chosen:
            gate, up = (layer.gate_up[e] @ token).split(16)
            out += (
                shares[e] / total * (layer.down[e] @ (gate / (1 + (-gate).exp()) * up))
            )
        outputs.append(out)
    return torch.stack(outputs)


def by_hand(rank: Rank, rewired: bool) -> Tensor:
    """o_k = o_{k-1} + attn_k(o_{k-1} - routed_{k-1}) + routed_k(o_{k-1})."""
    o, in_flight = rank.embedded, torch.zeros_like(rank.embedded)
    for layer in rank.layers:
        partial = o - in_flight if rewired else o
        attention = attention_by_hand(
            rank, layer, normed(partial, layer.attention_norm)
        )
        read = o if rewired else o + attention
        routed = experts_by_hand(rank, layer, normed(read, layer.experts_norm))
        o, in_flight = o + attention + routed, routed
    return normed(o, rank.norm) @ rank.head.T


def grouped_in_float64(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """torch's grouped matmul, which knows no float64."""
    assert offs.dtype == torch.int32 and int(offs[-1]) == len(rows)
    parts = rows.tensor_split(offs[:-1].long())
    return torch.cat([part @ w for part, w in zip(parts, weights, strict=True)])


Start = Callable[[Tensor, float, int], Any]


def run(rank: Rank, order: Any, device: Rehearsal, start: Start) -> Tensor:
    return order(rank, lambda x: start(x, 11.0, 24), device.wait)


@torch.no_grad()
def test_both_orders_have_the_equations_of_their_layers_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the side stream a sum is NaN until it has been waited for."""
    monkeypatch.setattr(F, "grouped_mm", grouped_in_float64)
    rank, device = small(torch.float64), Rehearsal()
    expected = {rewired: by_hand(rank, rewired) for rewired in (False, True)}
    for order, start, rewired in (
        (regular, device.absent, False),
        (regular, device.in_line, False),
        (farskip, device.beside, True),
        (farskip, device.absent, True),
    ):
        logits = run(rank, order, device, start)
        torch.testing.assert_close(logits, expected[rewired], rtol=1e-9, atol=1e-12)
    difference = (expected[True] - expected[False]).norm() / expected[False].norm()
    assert difference > 1e-2


@torch.no_grad()
def test_torchs_grouped_matmul_gives_the_same_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single, device = small(torch.float32), Rehearsal()
    logits = run(single, farskip, device, device.beside).double()
    # The same weights, widened.
    double = small(torch.float32)
    double.layers = [Layer(*(part.double() for part in x)) for x in single.layers]
    for name in ("embedded", "norm", "head", "cos", "sin"):
        setattr(double, name, getattr(single, name).double())
    monkeypatch.setattr(F, "grouped_mm", grouped_in_float64)
    exact = run(double, farskip, device, device.beside)
    assert (logits - exact).norm() / exact.norm() < 1e-5


# ---- shapes and settings


def test_a_ranks_share_of_the_published_model_has_its_heads_and_experts() -> None:
    shape = shape_of(read_json(PUBLISHED), 8)
    assert (shape.heads, shape.kv_heads, shape.inner, shape.vocab) == (4, 1, 96, 18992)
    assert (shape.layers, shape.hidden, shape.experts, shape.top_k) == (
        48, 2048, 128, 8,
    )  # fmt: skip
    for changes, message in (
        ({"model_type": "gpt_oss"}, "gpt_oss; only qwen3_moe"),
        ({"mlp_only_layers": [0]}, "layers without routed experts"),
        ({"moe_intermediate_size": 100}, "does not divide moe_intermediate_size"),
    ):
        with pytest.raises(SystemExit, match=message):
            shape_of(read_json(PUBLISHED) | changes, 8)


def test_an_all_reduce_takes_the_microseconds_of_its_size() -> None:
    assert Setting(microseconds("15"), 24).us(256) == 15
    by_size = Setting(microseconds("512:15,8:9,64:10"), 8)
    assert by_size.us(64) == 10
    # A half of three doublings, of 5 us.
    assert by_size.us(64 * math.sqrt(8)) == pytest.approx(12.5)
    with pytest.raises(SystemExit, match="no size in the table reaches 1024 KiB"):
        by_size.us(1024)


# ---- figures


@torch.no_grad()
@pytest.mark.parametrize(
    ("us", "in_line", "side", "hidden"),
    [
        # Per block 20 and 1 to launch; the last sum has nothing beside it.
        (11, 4 * (21 + 12), 4 * 21 + 11, 33 / 44),
        # 30 is longer than a block, so sums queue up; each hides one block's 20.
        (30, 4 * (21 + 31), 21 + 4 * 30, 3 * 20 / 120),
    ],
)
def test_a_simulated_step_has_the_times_that_its_order_allows(
    us: float, in_line: float, side: float, hidden: float
) -> None:
    rank = small(torch.float32, num_hidden_layers=2)
    (row,) = measure(rank, Rehearsal(), [Setting(((1, us),), 24)], 1, math.inf)
    assert {mode: s * 1e6 for mode, s in row["step_s"].items()} == pytest.approx(
        {"absent": 84, "in line": in_line, "side stream": side}
    )
    assert row["communication_s"] == pytest.approx((in_line - 84) / 1e6)
    assert row["saved"] == pytest.approx((in_line - side) / (in_line - 84))
    assert row["hidden"] == pytest.approx(hidden)
    assert row["slowdown"] == pytest.approx(0) and row["difference"] == 0
    assert row["gaps_s"]["absent"] == pytest.approx(4e-6)
    assert row["traced"]["side stream"]["kernels"] == 8


def test_slowdown_is_the_computation_lost_per_hidden_second() -> None:
    seconds = {"absent": 10.0, "in line": 15.0, "side stream": 12.0}
    parts = {
        "absent": {"computed_s": 9.0, "all_reduce_s": 0.0, "exposed_s": 0.0},
        "in line": {"computed_s": 9.0, "all_reduce_s": 4.5, "exposed_s": 4.5},
        "side stream": {"computed_s": 9.8, "all_reduce_s": 5.0, "exposed_s": 1.0},
    }
    figures = compared(seconds, parts)
    assert figures["slowdown"] == pytest.approx(0.8 / 4)
    assert figures["hidden"] == pytest.approx(0.8)
    assert figures["saved"] == pytest.approx(0.6)
    assert figures["gaps_s"] == pytest.approx(
        {"absent": 1.0, "in line": 1.5, "side stream": 1.2}
    )
    unseen = compared(seconds, dict.fromkeys(seconds))
    assert unseen["hidden"] is None and unseen["saved"] == pytest.approx(0.6)


# ---- the command


def test_a_rehearsal_writes_times_from_which_a_plan_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.json"
    config.write_text(json.dumps(read_json(PUBLISHED) | SMALL))
    folder = tmp_path / "times"
    words = ["--device", "cpu", "--config", str(config), "--layers", "2"]
    words += ["--ranks", "2", "--batch", "2", "--length", str(LENGTH)]
    words += ["--all-reduce", "11", "30", "--sms", "8", "--rounds", "1"]
    words += ["--json", str(tmp_path / "all.json"), "--times", str(folder)]
    assert main(words) == 0
    assert "| 2 | 11 | 8 | 0.084 | 0.132 | 0.095 |" in capsys.readouterr().out
    assert len(read_json(tmp_path / "all.json")["rows"]) == 2
    plan = ["plan", str(folder), "--phase", "decode", "--gpu", "h100", "--json"]
    plan += ["--gpus-per-node", "2", "--batch", "2", "--length", str(LENGTH)]
    for us, ratio in ((11, 132 / 95), (30, 208 / 141)):
        assert fcsd([*plan, "--measured", str(folder / f"2-{us}us-8sms.json")]) == 0
        times = json.loads(capsys.readouterr().out)["times"]
        assert times["speed_up"] == pytest.approx(ratio)
        assert times["compute_s"] == pytest.approx(84e-6)


def test_settings_for_which_no_time_is_left_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--layers", "1", "--batch", "1", "--length", "256"]
    words += ["--minutes", "-1"]
    assert main([*words, "--times", str(tmp_path / "times")]) == 0
    assert "left out, as the time is over: 15 us, 24 SMs" in capsys.readouterr().out
    assert [x.name for x in (tmp_path / "times").iterdir()] == ["config.json"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of CUDA")
@torch.no_grad()
def test_on_a_gpu_sums_hide_and_the_paged_kernel_has_torchs_attention() -> None:
    config = read_json(PUBLISHED) | {"num_hidden_layers": 2}
    made = {"device": "cuda", "dtype": torch.bfloat16}
    rank = Rank(shape_of(config, 8), 16, 4 * PAGE, "triton", made)
    queries = torch.randn(16, 4, 128, **made)
    cache = rank.layers[0].cache.unflatten(0, (-1, PAGE)).unbind(2)
    paged = rank.core(queries, *cache).float()
    exact = ATTENTION["gathered"](rank)(queries.float(), *(x.float() for x in cache))
    assert (paged - exact).norm() / exact.norm() < 2e-2
    settings = [Setting(((1, 50.0),), 24)]
    (row,) = measure(rank, Gpu(), settings, 1, math.inf)
    assert row["difference"] < 1e-2 and row["hidden"] > 0
    side = row["traced"]["side stream"]
    assert side["all_reduce_s"] > 0 and row["step_s"]["side stream"] > 0
