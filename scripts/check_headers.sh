#!/usr/bin/env bash
# Check that our torch-facing sources are valid against the headers of another torch release, without
# installing it: scripts/check_headers.sh [VERSION [PYTHON]]; VERSION defaults to 2.5.1, the oldest we
# support. The smallest wheel of the release is fetched for its headers, which are the same on every
# platform; only the syntax is checked, nothing is linked. STD names the language (c++17; from torch
# 2.14 on c++20). The XPU's files are read as the twin's and as a Kunlun build's, the latter
# with a stub for the one header of CUDA that it includes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version="${1:-2.5.1}"
python="${2:-python3}"
cache="build/headers/torch-$version"

if [ ! -d "$cache/torch/include" ]; then
  mkdir -p "$cache"
  "$python" -m pip download --quiet "torch==$version" --no-deps --only-binary=:all: \
    --platform macosx_11_0_arm64 --python-version 3.11 --dest "$cache"
  "$python" - "$cache" <<'PY'
import pathlib, sys, zipfile
cache = pathlib.Path(sys.argv[1])
(wheel,) = cache.glob("torch-*.whl")
with zipfile.ZipFile(wheel) as z:
    z.extractall(cache, [n for n in z.namelist() if n.startswith("torch/include/")])
wheel.unlink()
PY
fi

include="$cache/torch/include"
status=0
check() { # SOURCE FLAG...
  if "${CXX:-c++}" -std="${STD:-c++17}" "${@:2}" -fsyntax-only -fopenmp -Wno-psabi \
    -isystem "$include" -isystem "$include/torch/csrc/api/include" "$1"; then
    echo "ok: $* against torch $version"
  else
    echo "FAILED: $* against torch $version"
    status=1
  fi
}
for source in csrc/*.cpp csrc/cpu/*.cpp csrc/xpu/*.cpp; do
  # The kernels of other instruction sets see no torch header.
  if [[ "$source" == csrc/cpu/isa_* ]]; then continue; fi
  check "$source" -DGDN_XPU_TWIN
done
for source in csrc/xpu/ops.cpp csrc/xpu/chunk.cpp; do
  check "$source" -Itests/xpu/stubs
done
exit "$status"
