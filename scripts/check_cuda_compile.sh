#!/usr/bin/env bash
# Compiles every CUDA kernel with plain nvcc (no torch, no GPU) for each architecture given, or for
# sm_80, sm_90a and sm_100; JOBS at a time (all cores). Prints register and spill counts with
# GDN_PTXAS=1.
set -euo pipefail
cd "$(dirname "$0")/../csrc/cuda/kernels"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
if grep -lE '#include *<(torch|ATen|c10)/' ./*; then
  echo "a kernel includes a torch header" >&2
  exit 1
fi
compile() {
  local arch="$1" source="$2" flags=(-O3 -std=c++17 -Xcompiler -fPIC)
  [[ "${GDN_PTXAS:-0}" == 1 ]] && flags+=(-Xptxas -v)
  "${NVCC:-nvcc}" "${flags[@]}" -arch="$arch" -c "$source" -o "$OUT_DIR/${source%.cu}.$arch.o"
}
export -f compile
export OUT_DIR="$out"
for arch in "${@:-sm_80 sm_90a sm_100}"; do
  for a in $arch; do
    printf '%s\0' *.cu | xargs -0 -P "${JOBS:-$(nproc)}" -I{} bash -c 'compile "$0" "$1"' "$a" {}
    echo "compiled for $a"
  done
done
