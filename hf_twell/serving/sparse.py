"""A loaded model made ready to be served: its kernels compiled, and what computes its blocks said in a line."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.sparsify import sparsify
from hf_twell.measure.inference import blocks_on_kernels
from hf_twell.models.gguf_files import is_gguf
from hf_twell.ops import api

WARM_UP = "The cell is the smallest unit of life."
WARM_UP_TOKENS = 8  # enough for each block to have seen how dense its tokens are


@torch.no_grad()
def prepare(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, backend: str) -> str:
    """Let a sparse model's blocks run on their kernels, compile these, and say in a line what computes. A ValueError of
    a backend that does not work here, or for a model that is not sparse."""
    kind = f"{name} ({type(model).__name__}, {str(model.dtype).removeprefix('torch.')}, {model.device})"
    if getattr(model.config, "twell", None) is None:
        if backend != "auto":
            raise ValueError(
                f"--backend {backend}: {name} is no converted model (its config has no `twell` entry); convert it with "
                "`hf-twell sparsify` or leave that out"
            )
        if is_gguf(name):
            return f"{kind} is served densely: GGUF files do not tell sparse models; `hf-twell sparsify` converts"
        return f"{kind} is dense (no `twell` entry in its config): served as it is, without sparse kernels"
    sparsify(model, backend=backend)
    used = api.resolve(backend, model.device.type)
    ids = tokenizer(WARM_UP, return_tensors="pt")["input_ids"].to(model.device)
    model.generate(ids, max_new_tokens=WARM_UP_TOKENS, do_sample=False)
    count, kernels = len(sparse_ffns(model)), blocks_on_kernels(model, ids[:, -1:])
    return f"{kind} is sparse: its {count} blocks decode by {_how(kernels, count, used, backend)}"


def _how(kernels: int, count: int, used: str, backend: str) -> str:
    if kernels:
        return f"{used} kernels" + (
            "" if kernels == count else f" in {kernels} of them, by plain matmuls in the others"
        )
    if backend == "reference":
        return "plain matmuls, as asked"
    if used == "reference":
        return "plain matmuls, as kernels do not work here (`hf-twell doctor` says why)"
    return "plain matmuls: adapters are on them, or they are too small or too dense for kernels to be faster"
