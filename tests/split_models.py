"""Models that Transformers or PyTorch split over two CPU processes: what they compute, and what is refused.

Run under torchrun with a folder that holds the models `sparse`, `dense` and `own_type`; writes `results.pt` and `saved`
into it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_twell import L1Penalty, TwellLlamaForCausalLM, measure_sparsity, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from tests.conftest import ids, leave, logits

PLAN = {"gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}


def parallelized(model):
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, {name: style() for name, style in PLAN.items()})
    return model


def split(cls, name, **sizes):
    return cls.from_pretrained(folder / name, distributed_config=DistributedConfig(**sizes)).eval()


def whole(name):
    return AutoModelForCausalLM.from_pretrained(folder / name).eval()


def computed(model) -> dict:
    result = {"logits": logits(model), "text": model.generate(ids(), max_new_tokens=5, do_sample=False)}
    model.train()(input_ids=ids(), labels=ids()).loss.backward()
    model.eval()
    gradient = model.model.layers[0].mlp.up_proj.weight.grad
    assert isinstance(gradient, DTensor), "nothing is split"
    return {**result, "gradient": gradient.full_tensor(), "blocks": len(sparse_ffns(model)), "layers": 3}


def train(model, rows):
    """Five steps with the L1 term on these rows of tokens, which are the process's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(5):
        l1_step(model, rows)
        optimizer.step()
        optimizer.zero_grad()


def refusal(call, *args) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "taken\nin silence"


def l1_step(model, rows):
    for batch in L1Penalty(model.train(), 0.1).micro_batches([{"input_ids": rows, "labels": rows}]):
        model(**batch).loss.backward()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    by_tensors = sparsify(split(AutoModelForCausalLM, "dense", tp_size=2))
    evaluated = sparsify(whole("dense"))
    logits(evaluated)
    exact = {
        "tensors": computed(by_tensors),
        "tensors of a sparse model": computed(sparsify(split(AutoModelForCausalLM, "sparse", tp_size=2))),
        "tensors, custom class": computed(split(TwellLlamaForCausalLM, "dense", tp_size=2)),
        "parallelize_module before": computed(sparsify(parallelized(whole("dense")))),
        "parallelize_module after": computed(parallelized(evaluated)),
        "FSDP": computed(sparsify(split(AutoModelForCausalLM, "dense", fsdp_size=2))),
        "FSDP, custom class": computed(split(TwellLlamaForCausalLM, "dense", fsdp_size=2)),
    }
    by_tensors.save_pretrained(folder / "saved")
    own_type = sparsify(split(AutoModelForCausalLM, "own_type", fsdp_size=2), backend="reference")
    train(own_type, ids()[dist.get_rank()].unsqueeze(0))
    trained = {name: weight.full_tensor() for name, weight in own_type.state_dict().items()}
    refused = {
        "pipeline": refusal(sparsify, split(AutoModelForCausalLM, "dense", pp_size=2)),
        "measure": refusal(measure_sparsity, by_tensors, [ids()]),
        "L1 term": refusal(l1_step, by_tensors, ids()),
    }
    leave({"exact": exact, "refused": refused, "trained": trained}, folder / "results.pt")
