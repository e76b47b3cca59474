"""Which SGLang the package serves in: one version, any other is refused. Standard
library only.

Rewired layers complete their own sums, where stock ones leave that to
`sglang.srt.layers.layer_boundary`. What a layer hands to a boundary and when it is
summed changes between releases without notice, and a sum that is made twice or not at
all raises nothing.
"""

VERSION = "0.5.23"
"""The SGLang whose models were compared with fcsd's."""


class EngineError(ValueError):
    """This engine cannot serve FarSkip models; the message is one line."""


def check_version(version: str) -> None:
    """Raise EngineError for another version than the one whose layers are known."""
    if version.partition("+")[0] != VERSION:
        raise EngineError(
            f"fcsd-serving: SGLang {version} is refused: FarSkip layers bypass"
            f" layer_boundary, known for {VERSION} alone; install sglang=={VERSION}, or"
            " serve with vLLM"
        )


def installed() -> str:
    """Return the version of the SGLang that runs."""
    from sglang.version import __version__

    return str(__version__)
