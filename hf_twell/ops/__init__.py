"""The feed-forward operator: what it computes (`ffn`), its backends, and how they are built."""

__all__ = ["ffn"]


def __getattr__(name):  # without hints, as typing would be imported for them
    if name == "ffn":  # at first use, so that `hf-twell --help` does not wait for PyTorch
        from hf_twell.ops.api import ffn

        return ffn
    raise AttributeError(f"module 'hf_twell.ops' has no attribute {name!r}; it has ffn")
