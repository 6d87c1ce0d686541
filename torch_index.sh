#!/bin/sh
# Which build of PyTorch fits this machine: sh torch_index.sh prints pip's options for it, and says why on stderr.
#
# Where nvidia-smi answers it is a build for CUDA: 13.0, or 12.6 for a driver or a GPU that is too old for it. Elsewhere
# it is the build for CPUs, a tenth of the size. TORCH_BUILD=cpu, cu126, … decides instead; TORCH_WHEELS is a mirror of
# PyTorch's index. If the index cannot be reached, pip's own settings decide, as on a machine without a network.
set -eu
wheels=${TORCH_WHEELS:-https://download.pytorch.org/whl}
python=${PYTHON:-python3}

at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

build=${TORCH_BUILD:-}
if [ -n "$build" ]; then
    why="TORCH_BUILD says so"
elif ! smi=$(nvidia-smi 2>/dev/null); then
    build=cpu why="nvidia-smi does not answer here"
else
    # drivers from 610 on call it the CUDA UMD Version
    cuda=$(printf '%s\n' "$smi" | sed -n 's/.*CUDA \(UMD \)*Version: *\([0-9][0-9.]*\).*/\2/p' | head -n 1)
    # of the oldest GPU, as one build serves all of them
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -V | head -n 1)
    why="the driver knows CUDA ${cuda:-of no version}, and a GPU has compute capability ${capability:-of no version}"
    if [ -z "$cuda" ] || ! at_least "$cuda" 12.0; then
        build=cpu why="$why: update the driver to 525 or newer for CUDA"
    elif ! at_least "${capability:-7.5}" 5.0; then
        build=cpu why="$why, too old for any build"
    elif at_least "$cuda" 13.0 && at_least "${capability:-7.5}" 7.5; then
        build=cu130
    elif at_least "${capability:-7.5}" 10.0; then
        build=cpu why="$why, which the build for CUDA 12.6 cannot run: update the driver to 580 or newer for CUDA"
    else
        build=cu126
    fi
fi

if "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=8).close()' "$wheels/$build/torch/" 2>/dev/null; then
    echo "PyTorch for $build: $why" >&2
    echo "--extra-index-url $wheels/$build"
else
    echo "PyTorch for $build is wanted ($why), but $wheels/$build cannot be reached: pip's own index decides" >&2
fi
