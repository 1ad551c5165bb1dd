"""Neurons that are active for every token and carry what ReLU takes from a block: its linear part, in closed form.

What a block loses by the swap, silu(g) * u less relu(g) * u, sums many small terms, and is nearly a linear map of the
block's input x. A neuron whose gate is 1 for every token adds (row of up_proj . x) times its column of down_proj, so r
of them add a linear map of rank r. No bias is needed: normalized inputs have a direction v with v . x near 1.
"""

import torch
from model import FeedForward, Llama
from torch import nn

RIDGE = 1e-3  # of the mean squared feature


@torch.no_grad()
def add_always_on(student: Llama, teacher: Llama, tokens: torch.Tensor, neurons: int) -> list[float]:
    """Widens the student's ReLU blocks by `neurons`, layer by layer, each towards the teacher's stream behind it.

    `tokens` is [window, position]. Returns for each layer the share of what was missing there that is there now.
    """
    (cos, sin), found = teacher.positions(tokens.shape[1]), []
    ours = theirs = teacher.embed(tokens)
    for layer, parent in zip(student.layers, teacher.layers, strict=True):
        theirs = parent(theirs, cos, sin)[0]
        middle = ours + layer.self_attn(layer.input_layernorm(ours), cos, sin)
        x = layer.post_attention_layernorm(middle)
        missing = theirs.float() - middle.float() - layer.mlp(x)[0].float()
        # So that no token of a great norm rules: the first one's is a hundred times the others'.
        weight = torch.maximum(theirs.float().norm(dim=-1), middle.float().norm(dim=-1)).clamp(min=1e-6).reciprocal()
        gate, up, down = fit(x.flatten(0, 1).float(), missing.flatten(0, 1), weight.flatten(), neurons)
        widen(layer.mlp, gate, up, down)
        y = layer.mlp(x)[0]
        left = theirs.float() - middle.float() - y.float()
        sizes = [(part * weight[..., None]).pow(2).sum() for part in (left, missing)]
        found.append(float(1 - sizes[0] / sizes[1].clamp(min=1e-12)))
        ours = middle + y
    return found


def fit(x: torch.Tensor, missing: torch.Tensor, weight: torch.Tensor, neurons: int):
    """Rows of gate_proj and up_proj and columns of down_proj that add the best linear map of their rank.

    Shapes: x, missing (T, D); weight (T,); returns (r, D), (r, D), (D, r).
    """
    second = x.T @ x / len(x)
    eye = torch.eye(x.shape[1], device=x.device)
    direction = torch.linalg.solve(second + RIDGE * second.diagonal().mean() * eye, x.mean(0))
    features = torch.relu(x @ direction)[:, None] * x * weight[:, None]
    second = features.T @ features
    second = second + RIDGE * second.diagonal().mean() * eye
    whole = torch.linalg.solve(second, features.T @ (missing * weight[:, None]))
    # The rank's best map in the features' own metric, which has the eigenvectors of the predictions' second moment.
    _, vectors = torch.linalg.eigh(whole.T @ second @ whole)
    down = vectors[:, -neurons:]
    up = (whole @ down).T
    size = up.norm(dim=1, keepdim=True).clamp(min=1e-12).sqrt()  # both factors of a neuron are equally large
    return direction.expand(len(up), -1), up / size, down * size.T


def widen(mlp: FeedForward, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    for name, part, axis in (("gate_proj", gate, 0), ("up_proj", up, 0), ("down_proj", down, 1)):
        old = getattr(mlp, name)
        if old.bias is not None:
            raise ValueError("always_on goes with no biases: it needs none")
        old.weight = nn.Parameter(torch.cat((old.weight, part.to(old.weight)), axis))
        old.out_features, old.in_features = old.weight.shape
    mlp.always_on += len(gate)
