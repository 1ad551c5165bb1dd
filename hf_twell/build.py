"""Which backends work on this machine, and why the others do not."""

from typing import NamedTuple

import torch

BACKENDS = ("reference", "cpu", "cuda")


class BackendStatus(NamedTuple):
    name: str
    available: bool
    reason: str


def status(name: str) -> BackendStatus:
    """Whether one backend can run here; `reason` says why not, and what would change it."""
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose one of 'auto', {', '.join(map(repr, BACKENDS))}")
    if name == "reference":
        return BackendStatus(name, True, f"plain PyTorch {torch.__version__}")
    if name == "cuda" and not torch.cuda.is_available():
        return BackendStatus(name, False, "PyTorch sees no CUDA GPU; install a CUDA build of PyTorch on a GPU machine")
    return BackendStatus(name, False, f"this version of hf_twell contains no {name} kernels; 'reference' is used")
