"""The SGLang that the package supports: it refuses all but one version. Standard
library only.

Rewired layers complete their sums themselves; stock layers leave that to
`sglang.srt.layers.layer_boundary`. Releases change without notice what a layer passes
to a boundary and when it is summed, and no error shows a sum that is computed twice or
not at all.
"""

VERSION = "0.5.23"
"""The SGLang whose models were compared with fcsd's."""


class EngineError(ValueError):
    """This engine cannot serve FarSkip models; the message is one line."""


def check_version(version: str) -> None:
    """Raise EngineError unless the version is `VERSION`."""
    if version.partition("+")[0] != VERSION:
        raise EngineError(
            f"fcsd-serving: SGLang {version} is not supported: FarSkip layers bypass"
            f" layer_boundary, which was reviewed in {VERSION} only; install"
            f" sglang=={VERSION}, or serve with vLLM"
        )


def installed() -> str:
    """Return the version of the SGLang that runs."""
    from sglang.version import __version__

    return str(__version__)
