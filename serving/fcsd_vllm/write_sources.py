"""Add the digests of the installed vLLM to `sources.json`: python -m fcsd_vllm.write_sources."""

import json

import vllm

from fcsd_vllm.models import forwards
from fcsd_vllm.sources import FILE, SOURCES, digests
from fcsd_vllm.versions import needed_functions, release

if __name__ == "__main__":
    SOURCES[release(vllm.__version__)] = digests([*needed_functions(), *forwards()])
    FILE.write_text(json.dumps(SOURCES, indent=1) + "\n", encoding="utf-8")
