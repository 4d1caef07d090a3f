#!/usr/bin/env bash
# Build and test against other versions of torch and Python:
#   scripts/check_matrix.sh [TORCH/PYTHON]...     e.g. 2.5.1/3.10 2.14.1/3.11
# Each pair gets an environment of its own (under $MATRIX_DIR, kept, several GB where the wheel
# brings CUDA), a source tree from HEAD, a CPU build and the tests of the CPU families; the last lines
# are a table. PYTHON is a version (python3.10 must be on PATH or under $PYTHONS) or a path.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pairs=("${@:-2.5.1/3.10}")
dir="${MATRIX_DIR:-$(mktemp -d)}"
export GDN_BACKEND=none MAX_JOBS="${MAX_JOBS:-2}"
suites=(${SUITES:-recurrent gates norm conv linear decode windows chunk nn isa opcheck arguments reports
  layering build compile})
table=()

interpreter() {
  case "$1" in
    */*) echo "$1" ;;
    *) command -v "python$1" || ls "${PYTHONS:-/nowhere}/$1".*/bin/python 2> /dev/null | head -n 1 ;;
  esac
}

for pair in "${pairs[@]}"; do
  torch="${pair%%/*}" version="${pair#*/}"
  python="$(interpreter "$version")"
  home="$dir/torch$torch-python${version//\//_}"
  log="$home.log"
  result="no interpreter"
  if [ -n "$python" ]; then
    mkdir -p "$home"
    rm -rf "$home/src" && mkdir "$home/src" && git archive HEAD | tar -x -C "$home/src"
    bin="$home/venv/bin"
    if {
      [ -x "$bin/python" ] || "$python" -m venv "$home/venv"
      "$bin/python" -c "import torch, pytest" 2> /dev/null \
        || "$bin/pip" install "torch==$torch" 'setuptools>=77' wheel packaging ninja numpy \
          'pytest>=8' 'hypothesis>=6.100' expecttest
    } > "$log" 2>&1; then
      if (cd "$home/src" && "$bin/python" setup.py build_ext --inplace) >> "$log" 2>&1; then
        files=()
        for s in "${suites[@]}"; do files+=("tests/test_$s.py"); done
        (cd "$home/src" && PYTHONPATH="$home/src" TORCHINDUCTOR_CACHE_DIR="$home/inductor" \
          "$bin/python" -m pytest -q -ra "${files[@]}") > "$home.tests" 2>&1
        result="$(tail -n 1 "$home.tests" | tr -d '=' | sed 's/^ *//; s/ *$//')"
      else
        result="build failed ($log)"
      fi
    else
      result="not installed ($log)"
    fi
  fi
  table+=("$(printf '%-8s %-6s %s' "$torch" "$version" "$result")")
  echo "${table[-1]}"
done
printf '\n%-8s %-6s %s\n' torch python result
printf '%s\n' "${table[@]}"
