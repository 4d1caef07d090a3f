#!/usr/bin/env bash
# Compiles every CUDA kernel with plain nvcc (no torch, no GPU) for each architecture given, or for
# sm_80, sm_90 and sm_100. Prints register and spill counts with GDN_PTXAS=1.
set -euo pipefail
cd "$(dirname "$0")/../csrc/cuda/kernels"
nvcc="${NVCC:-nvcc}"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
flags=(-O3 -std=c++17 -Xcompiler -fPIC)
[[ "${GDN_PTXAS:-0}" == 1 ]] && flags+=(-Xptxas -v)
if grep -lE '#include *<(torch|ATen|c10)/' ./*; then
  echo "a kernel includes a torch header" >&2
  exit 1
fi
for arch in "${@:-sm_80 sm_90 sm_100}"; do
  for a in $arch; do
    for source in *.cu; do
      "$nvcc" "${flags[@]}" -arch="$a" -c "$source" -o "$out/${source%.cu}.$a.o"
    done
    echo "compiled for $a"
  done
done
