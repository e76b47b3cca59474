"""Set the environment that tests need, whatever the shell's is.

`conftest.py` imports this before torch and transformers, which read some of it once;
the processes that tests start inherit it.
"""

import os

SETTINGS = {
    # the order of sums depends on it; two workers on two cores, and ranks fork further
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# Variables that a launcher, a user's configuration of one, or a terminal sets.
_OTHERS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MKL_NUM_THREADS",
)  # fmt: skip
_OTHERS += (
    "HF_TOKEN",
    "HF_ENDPOINT",
    "MBPP_OVERRIDE_PATH",
    "DS_ACCELERATOR",
    "PYTHONWARNINGS",
    "COLUMNS",
    "LINES",
)
_FAMILIES = (
    "ACCELERATE_", "FSDP_", "PMI_", "OMPI_", "MV2_", "TQDM_", "TRANSFORMERS_", "WANDB_",
)  # fmt: skip

for name in [*os.environ]:
    if name in _OTHERS or name.startswith(_FAMILIES):
        del os.environ[name]
os.environ.update(SETTINGS)
