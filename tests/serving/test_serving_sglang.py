"""The parts of `fcsd_sglang` that need no SGLang: its names, its version, its
refusals.
"""

import json
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest

from fcsd.model.families import FAMILIES, SERVED_BY_SGLANG
from tests.support import ROOT, load_modules

SERVING = ROOT / "serving"
PURE = ("families", "models", "refusals", "settings", "versions")


@pytest.fixture(scope="module")
def package() -> Any:
    """The modules that need no engine."""
    return load_modules("serving", "fcsd_sglang", PURE)


def test_every_family_is_named_as_in_fcsd(package: Any) -> None:
    assert list(package.families.FAMILIES) == list(package.families.ROWS)
    assert sorted(package.families.ROWS) == list(SERVED_BY_SGLANG)
    for name, row in package.families.FAMILIES.items():
        assert (row.config, row.causal_lm) == (
            FAMILIES[name].config,
            FAMILIES[name].causal_lm,
        )


def test_a_family_is_either_served_or_refused(package: Any) -> None:
    families = package.families
    assert not set(families.ROWS) & set(families.REFUSED)
    assert set(families.ALL) <= {*families.ROWS, *families.REFUSED}
    assert set(families.REFUSED) - {"instella_moe"} <= set(FAMILIES)


def test_a_field_that_sglang_computes_wrongly_is_refused(package: Any) -> None:
    row = package.families.ROWS["ernie4_5_moe"]
    package.refusals.check_fields(SimpleNamespace(use_bias=False), row, "X")
    with pytest.raises(package.refusals.Refused, match="has use_bias: true, but"):
        package.refusals.check_fields(SimpleNamespace(use_bias=True), row, "X")


def test_another_version_of_sglang_is_refused_in_a_line_that_names_it(
    package: Any,
) -> None:
    package.versions.check_version("0.5.23+cpu")
    for other in ("0.5.22", "0.5.23.post1", "0.6.0"):
        with pytest.raises(package.versions.EngineError) as refused:
            package.versions.check_version(other)
        assert f"SGLang {other} is not supported" in str(refused.value)
        assert "install sglang==0.5.23" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"attn_dp_size": 2}, "data-parallel attention"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"speculative_algorithm": "EAGLE3"}, "stream between layers"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
    ],
)
def test_what_farskip_layers_do_not_go_with_is_refused(
    package: Any, arguments: dict[str, Any], message: str
) -> None:
    package.refusals.check_arguments(
        SimpleNamespace(tp_size=8, pp_size=2, moe_a2a_backend="none"), "X"
    )
    with pytest.raises(package.refusals.Refused, match=message):
        package.refusals.check_arguments(SimpleNamespace(**arguments), "X")


def test_the_distribution_names_the_plugin_of_sglang() -> None:
    configured = tomllib.loads((SERVING / "pyproject.toml").read_text(encoding="utf-8"))
    assert configured["project"]["entry-points"]["sglang.srt.plugins"] == {
        "fcsd": "fcsd_sglang:register"
    }
    assert (
        "fcsd_sglang"
        in configured["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
    version = configured["project"]["version"]
    assert (
        f'__version__ = "{version}"'
        in (SERVING / "fcsd_sglang/__init__.py").read_text()
    )


@pytest.mark.parametrize(
    "chosen, message",
    [("looked_at", "applies to vLLM only"), ("comm", "must be one of c10d")],
)
def test_a_setting_of_vllms_plugin_alone_is_refused(
    chosen: str, message: str, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCSD_SERVING", json.dumps({chosen: "stream"}))
    with pytest.raises(ValueError, match=f"FCSD_SERVING.{chosen}: {message}"):
        package.settings.settings()
