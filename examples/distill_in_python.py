# %% [markdown]
# # Distil a FarSkip model in Python
#
# A small MoE with random weights gets FarSkip connectivity and is trained back to its
# earlier outputs, on one CPU core in under a minute. A real model
# (`fcsd.load("Qwen/Qwen3-30B-A3B")`) needs lower rates and more steps.

# %% The original: a transformers model and its tokenizer
import copy
import tempfile
from pathlib import Path

import datasets
from transformers import AutoModelForCausalLM

import fcsd
from fcsd.pipeline.tiny.models import tiny_model, tiny_tokenizer

tokenizer = tiny_tokenizer(300)
original = tiny_model("qwen3_moe", num_hidden_layers=4, vocab_size=300, num_experts=4)

# %% The same weights with FarSkip connectivity in the last three quarters of the layers
model = fcsd.convert(copy.deepcopy(original), layers="last:75%")
print(f"{type(model).__name__}: layers {model.config.farskip['layers']} are rewired")

# %% Text: any data set with the column messages, text, prompt and response, or
# input_ids
conversations = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} + {n % 9}?"},
            {"role": "assistant", "content": f"{n} + {n % 9} is {n + n % 9}."},
        ]
    }
    for n in range(400)
]
data = datasets.Dataset.from_list(conversations).train_test_split(test_size=40, seed=0)

# %% The trainer; its teacher is a copy of the model with the original connectivity
folder = Path(tempfile.mkdtemp())
arguments = fcsd.FCSDConfig(
    output_dir=str(folder),
    max_steps=40,
    max_length=128,
    batch_size_tokens=1024,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    warmup_steps=4,
    eval_strategy="steps",
    eval_steps=20,
    logging_steps=10,
    save_strategy="no",
    disable_tqdm=True,
)
trainer = fcsd.FCSDTrainer(
    model=model,
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
)

# %% Train, and measure the held-out KL to the original before and after
before = trainer.evaluate()["eval_kl"]
trainer.train()
after = trainer.evaluate()["eval_kl"]

# %% The saved model loads without fcsd
trainer.save_model()
loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

# %% The result
agreement = [
    entry["top1_agreement"]
    for entry in trainer.state.log_history
    if "top1_agreement" in entry
]
print(
    f"held-out KL to the original: {before:.4f} before, {after:.4f} after"
    f" {trainer.state.global_step} steps"
)
print(
    f"same most probable token as the original: {agreement[0]:.0%} of tokens at first,"
    f" {agreement[-1]:.0%} at the end"
)
print(f"saved and loaded again: {type(loaded).__name__} in {folder}")
