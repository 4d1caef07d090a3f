#!/usr/bin/env bash
# Build and test against other versions of torch and Python:
#   scripts/check_matrix.sh [TORCH/PYTHON]...     e.g. 2.5.1/3.10 2.14.1/3.11
# Each pair gets an environment of its own (under $MATRIX_DIR, kept, several GB where the wheel
# brings CUDA), a source tree from HEAD, a CPU build and the tests of the CPU families; the last lines
# are a table. PYTHON is a version (python3.10 must be on PATH or under $PYTHONS) or a path.
# Each suite is a run of its own, with a line in PAIR.suites as soon as it ends. CONTINUE=1 goes on
# with a stopped run of the same commit: what is built stays, what passed is not run again. With ccache
# on PATH the kernels, which know no torch, compile once for all pairs that give them the same flags
# (the C++ standard, the ABI of std::string and Python's own may differ).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pairs=("${@:-2.5.1/3.10}")
dir="${MATRIX_DIR:-$(mktemp -d)}"
mkdir -p "$dir" && dir="$(cd "$dir" && pwd)"
export GDN_BACKEND=none MAX_JOBS="${MAX_JOBS:-2}"
suites=(${SUITES:-recurrent gates norm conv causal_conv1d linear decode windows chunk fla nn opcheck
  arguments random_calls reports layering build precision memory vllm_compat sglang_compat paged plugin
  state_machine compile isa})
commit="$(git rev-parse HEAD)"
failed=0
table=()

if ccache="$(command -v ccache)"; then
  mkdir -p "$dir/ccache"
  for name in gcc g++; do ln -sf "$ccache" "$dir/ccache/$name"; done
  export PATH="$dir/ccache:$PATH" CC="${CC:-gcc}" CXX="${CXX:-g++}" CCACHE_NOHASHDIR=1
fi

interpreter() {
  case "$1" in
    */*) echo "$1" ;;
    *) command -v "python$1" || ls "${PYTHONS:-/nowhere}/$1".*/bin/python 2> /dev/null | head -n 1 ;;
  esac
}

# The sum of a word of pytest's last lines over all suites: "1406 passed".
total() {
  grep -oE "[0-9]+ $1" "$home.suites" | awk -v word="$1" '{ n += $1 } END { if (n) print n, word }'
}

for pair in "${pairs[@]}"; do
  torch="${pair%%/*}" version="${pair#*/}"
  python="$(interpreter "$version")"
  home="$dir/torch$torch-python${version//\//_}"
  log="$home.log"
  result="no interpreter"
  if [ -n "$python" ]; then
    mkdir -p "$home"
    if [ "${CONTINUE:-0}" != 1 ] || [ "$(cat "$home/commit" 2> /dev/null)" != "$commit" ]; then
      rm -rf "$home/src" && mkdir "$home/src" && git archive "$commit" | tar -x -C "$home/src"
      echo "$commit" > "$home/commit"
      rm -f "$home.suites" "$home.tests"
    fi
    bin="$home/venv/bin"
    if {
      [ -x "$bin/python" ] || "$python" -m venv "$home/venv"
      "$bin/python" -c "import torch, pytest" 2> /dev/null \
        || "$bin/pip" install "torch==$torch" 'setuptools>=77' wheel packaging ninja numpy \
          'pytest>=8' 'hypothesis>=6.100' expecttest rich
    } > "$log" 2>&1; then
      if (cd "$home/src" && CCACHE_BASEDIR="$home/src" \
        "$bin/python" setup.py build_ext --inplace) >> "$log" 2>&1; then
        touch "$home.suites"
        for s in "${suites[@]}"; do
          grep -q "^ok $s: " "$home.suites" && continue
          (cd "$home/src" && PYTHONPATH="$home/src" TORCHINDUCTOR_CACHE_DIR="$home/inductor" \
            "$bin/python" -m pytest -q -ra "tests/test_$s.py") > "$home.part" 2>&1
          [ $? = 0 ] && state=ok || state=FAILED
          sed -i "/^[A-Za-z]* $s: /d" "$home.suites"
          # Not simply the last line: torch has more to say when a process ends.
          echo "$state $s: $(grep -E '^=*[ 0-9]+ [a-z]+.* in [0-9.]+s' "$home.part" | tail -n 1 | tr -d =)" \
            >> "$home.suites"
          cat "$home.part" >> "$home.tests" && rm "$home.part"
        done
        result="$(for word in passed failed error skipped; do total $word; done | paste -sd, -)"
        broken="$(sed -n 's/^FAILED \([a-z0-9_]*\):.*/\1/p' "$home.suites" | paste -sd' ' -)"
        [ -z "$broken" ] || { failed=1 result+="; FAILED: $broken"; }
      else
        failed=1 result="build failed ($log)"
      fi
    else
      failed=1 result="not installed ($log)"
    fi
  fi
  table+=("$(printf '%-8s %-6s %s' "$torch" "$version" "$result")")
  echo "${table[-1]}"
done
printf '\n%-8s %-6s %s\n' torch python result
printf '%s\n' "${table[@]}"
exit $failed
