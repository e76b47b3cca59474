"""The user's settings: `--additional-config '{"fcsd": {"comm": …}}'`. Standard library
only.
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

BACK_ENDS = ("blocking", "stream", "nccl", "c10d", "timed")


class SettingsError(ValueError):
    """A setting is unknown or has no effect; the message is one line."""


@dataclass(frozen=True)
class Settings:
    """How collectives run. vLLM hashes these settings and the plugin's version into the
    key of its compile cache.
    """

    comm: str = ""
    """blocking: the engine's own all-reduce; stream: its kernels, or NCCL or RCCL, on a
    stream of their own (the default on GPUs); nccl: NCCL or RCCL alone on such a stream;
    c10d: functional collectives (the default on CPUs); timed: a thread that also
    emulates a network."""
    min_overlap_bytes: int = 0
    """The engine's all-reduce reduces messages below this size at once. 0, because what
    NCCL alone takes longer does not depend on the size of a decode step's messages;
    whether computation hides it depends on the model.
    """
    latency_ms: float = 0.0
    """The delay of a collective in an emulated network; only `timed`."""
    bandwidth_gb_per_s: float = 0.0
    """The rate of an emulated network, 0 for none; only `timed`."""
    looked_at: str = ""
    """Digest of the changed functions of vLLM that a user has reviewed; the refusal
    prints it.
    """


def read_settings(additional_config: Any) -> Settings:
    """Return the settings of an engine.

    Raises:
        SettingsError: an unknown key or backend, a wrong type, a negative number, an
            emulated network without `timed`.
    """
    section: Any = {}
    if isinstance(additional_config, Mapping):
        section = additional_config.get("fcsd", {})
    where = "additional_config: fcsd"
    if not isinstance(section, Mapping):
        raise SettingsError(
            f"{where}: must be a mapping such as {{'comm': 'blocking'}}, got"
            f" {section!r}"
        )
    names = [field.name for field in fields(Settings)]
    chosen = {name: value for name, value in section.items() if name != "version"}
    for name, value in chosen.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else ""
            allowed = f"allowed: {', '.join(names)}"
            raise SettingsError(f"{where}.{name}: unknown key; {hint or allowed}")
        if name == "comm":
            if value not in BACK_ENDS:
                raise SettingsError(
                    f"{where}.comm: must be one of {', '.join(BACK_ENDS)}, got {value!r}"
                )
        elif name == "looked_at":
            if not isinstance(value, str):
                raise SettingsError(
                    f"{where}.looked_at: must be the digest that the refusal named, got {value!r}"
                )
        elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise SettingsError(
                f"{where}.{name}: must be a number of 0 or more, got {value!r}"
            )
    settings = Settings(**chosen)
    if (
        settings.latency_ms or settings.bandwidth_gb_per_s
    ) and settings.comm != "timed":
        raise SettingsError(
            f"{where}: latency_ms and bandwidth_gb_per_s emulate a network; they need comm: timed"
        )
    return settings


def with_version(additional_config: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return an additional config with the plugin's version, so that other versions do
    not reuse its compiled graphs.
    """
    chosen = {**additional_config.get("fcsd", {}), "version": version}
    return {**additional_config, "fcsd": chosen}


def shown(settings: Settings) -> str:
    """Return settings as `blocking` or `timed (latency_ms 2)`."""
    rest = ", ".join(
        f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}"
        for name, value in asdict(settings).items()
        if name != "comm" and value
    )
    return settings.comm + (f" ({rest})" if rest else "")
