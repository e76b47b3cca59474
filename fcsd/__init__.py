"""fcsd: FarSkip-Collective self-distillation for Hugging Face MoE checkpoints.

Importing this package loads neither torch nor transformers and never touches the network.
"""

__version__ = "0.1.0"
