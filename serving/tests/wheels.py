"""Say whether the wheels of a requirements file exist for this machine, before an
environment is made of them.

    python wheels.py requirements.txt

Exit status: 0 they do; 77 one exists for other machines only, so what needs it is
skipped; 1 one exists for none, or cannot be looked up: a wrong name or version, no
network. Asks `pip index`, with whatever pip is configured for.
"""

import subprocess
import sys
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

SKIP = 77
_OTHERS = [
    f"--platform={tag}_{cpu}"
    for tag in ("manylinux_2_28", "manylinux2014")
    for cpu in ("x86_64", "aarch64")
]
OTHERS = [
    *_OTHERS, "--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none",
]  # fmt: skip
"""The machines that vLLM's wheels are made for."""


def decide(line: str) -> tuple[int, str]:
    """Return the exit status of one requirement, and why."""
    try:
        wanted = Requirement(line)
    except InvalidRequirement as error:
        return 1, f"{line}: {str(error).splitlines()[0]}"
    here = _versions(_ask(wanted.name))
    if any(map(wanted.specifier.contains, here)):
        return 0, ""
    elsewhere = _ask(wanted.name, *OTHERS)
    if any(map(wanted.specifier.contains, _versions(elsewhere))):
        return SKIP, f"{line}: its wheels are for other machines"
    last = (elsewhere.strip().splitlines() or ["pip printed nothing"])[-1]
    return (
        1,
        (
            f"{line}: no machine has a wheel of it, here are"
            f" {', '.join(here[:3]) or 'none'}; pip: {last}"
        ),
    )


def _versions(printed: str) -> list[str]:
    """Return the versions in the output of `pip index versions`."""
    start = "Available versions: "
    return next(
        (
            line[len(start) :].split(", ")
            for line in printed.splitlines()
            if line.startswith(start)
        ),
        [],
    )


def _ask(name: str, *flags: str) -> str:
    words = [
        sys.executable, "-m", "pip", "index", "versions", name, "--only-binary=:all:", *flags,
    ]  # fmt: skip
    return subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


def main(file: str) -> int:
    """Print what is missing; return the exit status, of an error before a skip."""
    lines = [
        line.partition("#")[0].strip()
        for line in Path(file).read_text(encoding="utf-8").splitlines()
    ]
    decisions = [decide(line) for line in lines if line]
    for status, reason in decisions:
        if status:
            print(f"{'skipped' if status == SKIP else 'error'}: {file}: {reason}")
    statuses = {status for status, _ in decisions}
    return 1 if 1 in statuses else max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
