"""Apple's GPUs have no fp64: training and measuring there make no such tensor. Emulated, as no test machine has one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_twell.measure import activity
from hf_twell.ops import reference
from hf_twell.train import step_counts
from tests.one_step import make_trainer

pytestmark = pytest.mark.numeric


class NoFp64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise TypeError(f"{func}: this device has no float64")
        return result


def train(folder) -> list[dict]:
    torch.manual_seed(0)
    sizes = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 2}
    trainer = make_trainer(folder, term={"target_density": 0.05, "revive_after": 64}, **sizes)
    trainer.train()
    return [
        {key: value for key, value in row.items() if key == "loss" or key.startswith("twell/")}
        for row in trainer.state.log_history
        if "loss" in row
    ]


def test_training_needs_no_fp64(monkeypatch, tmp_path):
    expected = train(tmp_path)
    with pytest.raises(TypeError, match="float64"), NoFp64():
        train(tmp_path)
    monkeypatch.setattr(step_counts, "long_sum_dtype", lambda device: reference.long_sum_dtype("mps"))
    with NoFp64():
        seen = train(tmp_path)
    for row, other in zip(seen, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


def test_activity_needs_no_fp64(monkeypatch):
    h = torch.relu(torch.randn(2, 150, 96, generator=torch.Generator().manual_seed(0)) - 1)
    wide = activity.LayerActivity(96, sample_every=1)
    with pytest.raises(TypeError, match="float64"), NoFp64():
        activity.LayerActivity(96)
    monkeypatch.setattr(activity, "long_sum_dtype", lambda device: reference.long_sum_dtype("mps"))
    with NoFp64():
        narrow = activity.LayerActivity(96, sample_every=1)
        narrow.add(h)
    wide.add(h)
    for key in ("l0", "l1", "effective_neurons", "magnitude_share"):
        assert narrow.report()[key] == pytest.approx(wide.report()[key], rel=1e-5)
