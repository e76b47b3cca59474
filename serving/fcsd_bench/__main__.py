"""`python -m fcsd_bench`, and the program `fcsd-bench`."""

import importlib.util
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, as `fcsd` does."""
    # The engine's environment also has this distribution, and cannot have fcsd.
    if importlib.util.find_spec("fcsd") is None:
        print(
            f"fcsd-bench: error: {sys.prefix} has no fcsd: install this distribution"
            " in fcsd's environment as well (pip install SERVING, where SERVING is the"
            " folder serving/ of fcsd's repository); --vllm and --sglang name the"
            " engine's environment",
            file=sys.stderr,
        )
        return 2
    from fcsd_bench.cli import BENCH

    return BENCH.run(argv)


if __name__ == "__main__":
    sys.exit(main())
