"""The random Llama of the benchmarks as a checkpoint, for engines that load one.

    python -m hf_twell.bench.save_llama FOLDER --layers 28 --l0 30      # 1.57B parameters, in bfloat16
    python -m hf_twell.bench.save_llama FOLDER --weights fp8            # its linears in 8 bits, for vLLM

FOLDER gets the weights in stock form, each layer's density in the config, and ids.json: texts of the workload as token
ids, since it has no tokenizer. Speed alone means something: it recites, and was not trained.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from hf_twell.bench.compressed import KINDS, quantize_folder
from hf_twell.bench.workload_llama import make_llama, make_text
from hf_twell.files.folders import save_model
from hf_twell.measure.sparsity import measure_sparsity


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--l0", type=float, default=30.0, help="active neurons per token (default: 30)")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, help="default: D / 64")
    parser.add_argument("--kv-heads", type=int, help="default: as many")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--weights", choices=KINDS, help="of all linears but the last (default: bfloat16)")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    args = parser.parse_args(argv)
    if Path(args.folder).exists():
        parser.error(f"{args.folder} exists; choose another folder")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {key: getattr(args, key) for key in ("hidden", "intermediate", "layers", "vocabulary", "heads", "kv_heads")}
    model, _ = make_llama(args.l0, **sizes, device=device, report=lambda *words: print(*words, file=sys.stderr))
    text = make_text(args.vocabulary, args.prompts, args.length)
    found = measure_sparsity(model, text[:4].to(device).split(1))  # which keeps each layer's density in the config
    save_model(model, args.folder, None)
    if args.weights:
        quantize_folder(model, args.folder, args.weights)
    (Path(args.folder) / "ids.json").write_text(json.dumps(text.tolist()))
    print(f"{args.folder}: {model.num_parameters() / 1e9:.2f}B parameters, L0 {found['l0']:.1f}")


if __name__ == "__main__":
    main()
