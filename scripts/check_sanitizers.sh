#!/usr/bin/env bash
# The CPU kernels under sanitizers, driven without torch by tests/native/driver.cpp:
#   scripts/check_sanitizers.sh [CASES]        (100; 14 kernels x every instruction set a case)
# Address and undefined-behaviour sanitizers on one thread, the thread sanitizer on four. SANITIZERS
# picks some of them ("plain address thread"), OBJECTS keeps the objects, CXX is the compiler, RUN goes
# before the driver. So the kernels of another processor run under an emulator:
#   CXX=aarch64-linux-gnu-g++ RUN="qemu-aarch64 -L /usr/aarch64-linux-gnu" SANITIZERS=plain scripts/check_sanitizers.sh 100
# EMULATED_TILES=1 runs the level amx on a processor without AMX (tests/native/emulated_tiles.h).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cases="${1:-100}"
cxx="${CXX:-g++}"
work="${OBJECTS:-$(mktemp -d)}"
[ -n "${OBJECTS:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
# The flags of setup.py that change what the kernels compute, and -O1 for readable reports.
common=(-std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -fno-math-errno -Wall -Wno-psabi)
[ -z "${EMULATED_TILES:-}" ] ||
  common+=(-DGDN_EMULATED_TILES=1 -include "$PWD/tests/native/emulated_tiles.h")

declare -A flags=(
  [plain]=""
  [address]="-fsanitize=address,undefined -fno-sanitize-recover=all"
  [thread]="-fsanitize=thread"
)
declare -A threads=([plain]=1 [address]=1 [thread]=4)

for kind in ${SANITIZERS:-address thread}; do
  objects=()
  jobs=()
  for source in csrc/cpu/isa_*.cpp csrc/cpu/dispatch.cpp tests/native/driver.cpp; do
    object="$work/$kind-$(basename "$source" .cpp).o"
    objects+=("$object")
    # shellcheck disable=SC2086
    [ "$object" -nt "$source" ] && [ "${REUSE:-0}" = 1 ] && continue
    while [ "$(jobs -rp | wc -l)" -ge "${MAX_JOBS:-2}" ]; do wait -n; done
    # shellcheck disable=SC2086
    "$cxx" "${common[@]}" ${flags[$kind]} -c "$source" -o "$object" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job"; done
  # shellcheck disable=SC2086
  "$cxx" ${flags[$kind]} "${objects[@]}" -pthread -o "$work/$kind"
  echo "== $kind: ${flags[$kind]:-no sanitizer}"
  # The frames of detect_stack_use_after_return, which GCC 13 has on, are not aligned for the locals
  # of 64 bytes that AVX-512 code has.
  # shellcheck disable=SC2086
  ASAN_OPTIONS="${ASAN_OPTIONS:-detect_stack_use_after_return=0}" UBSAN_OPTIONS=print_stacktrace=1 \
    ${RUN:-} "$work/$kind" "$cases" "${SEED:-0}" "${threads[$kind]}"
done
