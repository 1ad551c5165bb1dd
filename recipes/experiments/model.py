"""A plain Llama whose feed-forward blocks report their density and penalty, and losses that never hold all logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    vocab: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config) -> "Shape":
        """From a Transformers LlamaConfig with tied embeddings and the default rotary positions."""
        theta = config.rope_parameters["rope_theta"]
        sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers)
        return cls(*sizes, config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps, theta)


def linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.kv_heads, size = shape.heads, shape.kv_heads, shape.width // shape.heads
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def project(self, x, cos, sin):
        batch, length, width = x.shape
        size = width // self.heads
        q = linear(x, self.q_proj).view(batch, length, self.heads, size).transpose(1, 2)
        k = linear(x, self.k_proj).view(batch, length, self.kv_heads, size).transpose(1, 2)
        v = linear(x, self.v_proj).view(batch, length, self.kv_heads, size).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x, cos, sin):
        q, k, v = self.project(x, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.transpose(1, 2).reshape(x.shape), self.o_proj)


class FeedForward(nn.Module):
    """`activation`: "silu", "relu", or on the way from one to the other "mix" (of both) or "sharpen" (steeper SiLU)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)
        self.activation, self.penalty, self.temperature = "silu", "", 0.1
        self.always_on = 0  # the last so many neurons are those of `always_on.py`, and no penalty is on them
        self.register_buffer("relu_share", torch.zeros(()), persistent=False)

    def activate(self, gate):
        if self.activation == "relu":
            return F.relu(gate)
        if self.activation == "mix":
            share = self.relu_share.to(gate.dtype)
            return (1 - share) * F.silu(gate) + share * F.relu(gate)
        if self.activation == "sharpen":  # x sigmoid(b x), b from 1 upwards
            return gate * torch.sigmoid(gate / (1 - self.relu_share).clamp(min=1e-3).to(gate.dtype))
        return F.silu(gate)

    def forward(self, x):
        gate, up = linear(x, self.gate_proj), linear(x, self.up_proj)
        h = self.activate(gate) * up
        y = linear(h, self.down_proj)
        density = (gate > 0).float().mean()
        return y, torch.stack((density, self.measure_penalty(gate, up, h, y)))

    def measure_penalty(self, gate, up, h, y):
        """Mean over tokens; what SiLU's negative lobe adds during a fade is not pressed on."""
        if not self.penalty:
            return torch.zeros((), device=gate.device)
        pressed = slice(gate.shape[-1] - self.always_on)
        gate, up, h = gate[..., pressed], up[..., pressed], h[..., pressed]
        if self.penalty == "sigmoid_count":
            return torch.sigmoid(gate.float() / self.temperature).mean()
        if self.penalty == "active_count":
            return torch.tanh(F.relu(gate.float()) / (2 * self.temperature)).mean()
        if self.penalty == "relative_count":  # as wide as a tenth of what active gates measure
            active = F.relu(gate.float())
            size = active.detach().pow(2).sum() / (active > 0).sum().clamp(min=1)
            return torch.tanh(active / (2 * self.temperature * size.sqrt())).mean()
        if self.penalty == "weighted_count":  # what adds little is pressed on more
            added = h.detach().float().abs() * self.down_proj.weight.detach().norm(dim=0)[pressed]
            mean = added.sum() / (added > 0).sum().clamp(min=1)
            return (torch.tanh(F.relu(gate.float()) / (2 * self.temperature)) * 2 / (1 + added / mean)).mean()
        if self.penalty == "rational":
            active = F.relu(gate.float())
            return (active / (active + self.temperature)).mean()
        if self.penalty == "hinge":
            gate = gate.float()
            return (F.relu(gate) / gate.detach().pow(2).mean(-1, keepdim=True).sqrt()).mean()
        active = h if self.activation == "relu" else F.relu(gate) * up
        if self.penalty == "l1":
            return active.float().abs().mean()
        columns = self.down_proj.weight.detach().norm(dim=0)[pressed]
        size = y.detach().float().norm(dim=-1).clamp(min=1e-6)
        return ((active.float().abs() * columns).sum(-1) / size).mean()


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), FeedForward(shape)
        self.input_layernorm = Norm(shape.width, shape.eps)
        self.post_attention_layernorm = Norm(shape.width, shape.eps)

    def feed(self, middle):
        """The feed-forward block with its norm, alone."""
        return self.mlp(self.post_attention_layernorm(middle))

    def forward(self, x, cos, sin):
        """The next residual stream, (density, penalty), the stream between the halves, the second half's output."""
        middle = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, figures = self.feed(middle)
        return middle + y, figures, middle, y


class Llama(nn.Module):
    """Parameters are named as in Transformers (less `model.`); `dtype` is what is computed in, weights stay fp32."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.eps)
        self.fast, self.fast_feed = list(self.layers), [layer.feed for layer in self.layers]

    def compile_blocks(self) -> None:
        self.fast = [torch.compile(layer, dynamic=False) for layer in self.layers]
        self.fast_feed = [torch.compile(layer.feed, dynamic=False) for layer in self.layers]

    def set_blocks(self, **attributes) -> None:
        for layer in self.layers:
            for name, value in attributes.items():
                setattr(layer.mlp, name, value)

    def positions(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        device, size = self.embed_tokens.weight.device, self.shape.width // self.shape.heads
        powers = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        angles = torch.outer(torch.arange(count, device=device, dtype=torch.float32), self.shape.theta**-powers)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def embed(self, tokens):
        return F.embedding(tokens, self.embed_tokens.weight).to(self.dtype)

    def forward(self, tokens, fast: bool = True, keep: str = ""):
        """The last hidden state, [layer, (density, penalty)], and per layer what `keep` names: "stream" after each
        block, or "feed": (the feed-forward block's input, its output)."""
        x, (cos, sin) = self.embed(tokens), self.positions(tokens.shape[1])
        figures, kept = [], []
        for layer in self.fast if fast else self.layers:
            x, figure, middle, y = layer(x, cos, sin)
            figures.append(figure)
            if keep:
                kept.append((middle, y) if keep == "feed" else x)
        return self.norm(x), torch.stack(figures), kept

    def logits(self, hidden):
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


def add_biases(model: Llama) -> None:
    """Biases of zero on the three projections of every feed-forward block (stock: `mlp_bias`)."""
    for layer in model.layers:
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            if projection.bias is None:
                zeros = torch.zeros(projection.out_features, device=projection.weight.device)
                projection.bias = nn.Parameter(zeros)


@torch.no_grad()
def fit_biases(model: Llama, teacher: Llama, tokens: torch.Tensor) -> None:
    """Gate biases with which relu(g + b) is nearest to silu(g), neuron by neuron; down_proj's carry the mean left."""
    _, _, kept = teacher(tokens, fast=False, keep="feed")
    for layer, parent, (middle, _) in zip(model.layers, teacher.layers, kept, strict=True):
        x = parent.post_attention_layernorm(middle).flatten(0, 1)[:4096]
        gate, up = linear(x, parent.mlp.gate_proj).float(), linear(x, parent.mlp.up_proj).float()
        wanted = F.silu(gate)
        shifts = torch.arange(-1.0, 0.51, 0.125, device=gate.device)
        errors = torch.stack([((F.relu(gate + shift) - wanted) * up).pow(2).mean(0) for shift in shifts])
        shift = shifts[errors.argmin(0)]
        missing = ((wanted - F.relu(gate + shift)) * up).mean(0)
        layer.mlp.gate_proj.bias.copy_(shift)
        layer.mlp.down_proj.bias.copy_(missing @ parent.mlp.down_proj.weight.float().T)


def chunk_loss(hidden, head, teacher_hidden, teacher_head, targets, weights, reverse: bool):
    """Sums over a chunk's tokens: the weighted loss, cross-entropy, and divergence from the teacher."""
    scores = F.linear(hidden, head).float().log_softmax(-1)
    ce = -scores.gather(-1, targets[:, None]).sum()
    kl = torch.zeros_like(ce)
    if teacher_hidden is not None:
        parent = F.linear(teacher_hidden, teacher_head).float().log_softmax(-1)
        kl = (scores.exp() * (scores - parent)).sum() if reverse else (parent.exp() * (parent - scores)).sum()
    return weights[0] * ce + weights[1] * kl, ce.detach(), kl.detach()


class HeadLoss(torch.autograd.Function):
    """Loss of hidden states through the tied head, chunk by chunk; gradients are taken in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, head, teacher_hidden, teacher_head, targets, weights, reverse, chunk, function):
        rows, dtype = hidden.shape[0], hidden.dtype
        cast = head.detach().to(dtype).requires_grad_()
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        sums = torch.zeros(3, device=hidden.device)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad():
                states = hidden[part].detach().requires_grad_()
                parent = None if teacher_hidden is None else teacher_hidden[part]
                loss, ce, kl = function(states, cast, parent, teacher_head, targets[part], weights, reverse)
                by_state, by_head = torch.autograd.grad(loss, (states, cast))
            grad_hidden[part] = by_state / rows
            grad_head += by_head.float() / rows
            sums += torch.stack((loss.detach(), ce, kl))
        ctx.save_for_backward(grad_hidden, grad_head)
        means = sums / rows
        ctx.mark_non_differentiable(means)
        return means[0].clone(), means

    @staticmethod
    def backward(ctx, grad, _):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, *[None] * 7
