#!/usr/bin/env bash
# Install from a source archive, offline, with and without ninja, in an environment that has torch:
# scripts/check_install.sh [PYTHON]. Leaves the package installed there; prints what each build made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${1:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

git archive --format=tar HEAD | tar -x -C "$work"
(cd "$work" && "$python" setup.py -q sdist) > "$work/log" 2>&1 || { tail -n 20 "$work/log"; exit 1; }
archive=("$work"/dist/*.tar.gz)
for ninja in ${NINJA_MODES:-0 1}; do
  GDN_NINJA="$ninja" "$python" -m pip install --verbose --no-index --no-build-isolation --no-deps \
    --force-reinstall "${archive[0]}" > "$work/log" 2>&1 || { tail -n 60 "$work/log"; exit 1; }
  grep -m 1 'gdn_ops: built' "$work/log" | sed 's/^ */  /'
  (cd "$work/dist" && "$python" -c "import gdn_ops; print('  imports:', gdn_ops.backends())")
  echo "ok: source archive, offline, GDN_NINJA=$ninja"
done
