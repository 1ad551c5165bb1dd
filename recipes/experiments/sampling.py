"""A model's own text: many sequences at once with a static cache of keys and values, temperature 1."""

import torch
import torch.nn.functional as F
from model import Llama, linear


class Sampler:
    """One step over all sequences; keys and values up to `length` of a bucket are read, so early steps are cheap."""

    def __init__(self, model: Llama, batch: int, length: int):
        shape, device = model.shape, model.embed_tokens.weight.device
        size = shape.width // shape.heads
        self.model, self.size = model, size
        self.cache = torch.zeros(2, shape.layers, batch, shape.kv_heads, length, size, dtype=model.dtype, device=device)
        self.cos, self.sin = model.positions(length)
        self.places = torch.arange(length, device=device)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)

    def step(self, length: int) -> None:
        """Reads `tokens` at `position`, and puts the sampled ones in their place."""
        model, batch = self.model, len(self.tokens)
        x = model.embed(self.tokens[:, None])
        cos, sin = self.cos[self.position], self.sin[self.position]
        mask = (self.places[:length] <= self.position)[None, None, None]
        for keys, values, layer in zip(*self.cache, model.layers, strict=True):
            attention = layer.self_attn
            q, k, v = attention.project(layer.input_layernorm(x), cos, sin)
            keys.index_copy_(2, self.position, k)
            values.index_copy_(2, self.position, v)
            q = q.reshape(batch, attention.kv_heads, -1, self.size)  # heads that share keys are rows of one query
            y = F.scaled_dot_product_attention(q, keys[:, :, :length], values[:, :, :length], attn_mask=mask)
            x = x + linear(y.reshape(batch, 1, -1), attention.o_proj)
            x = x + layer.feed(x)[0]
        scores = model.logits(model.norm(x)[:, 0]).float()
        self.tokens.copy_(self.choose(scores))
        self.position += 1

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores).exponential_().clamp_(min=1e-20)
        return (scores - noise.log_()).argmax(-1)


@torch.no_grad()
def sample(model: Llama, prefixes: torch.Tensor, length: int, bucket: int = 128, graphs: bool = True) -> torch.Tensor:
    """Sequences of `length` tokens that begin with the prefixes ([batch, n >= 1])."""
    batch, given = prefixes.shape
    sampler = Sampler(model, batch, length)
    out = torch.empty(batch, length, dtype=torch.long, device=prefixes.device)
    out[:, :given] = prefixes
    for begin in range(0, length, bucket):
        end = min(begin + bucket, length)
        run = capture(sampler, end) if graphs and prefixes.is_cuda else lambda end=end: sampler.step(end)
        for position in range(begin, min(end, length - 1)):
            if position < given:
                sampler.tokens.copy_(out[:, position])
            run()
            if position + 1 >= given:
                out[:, position + 1] = sampler.tokens
    return out


def capture(sampler: Sampler, length: int):
    """A CUDA graph of one step; its warm-up runs are undone, as they write only where the next step writes again."""
    tokens, position = sampler.tokens.clone(), sampler.position.clone()

    def rewind():
        sampler.tokens.copy_(tokens)
        sampler.position.copy_(position)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            sampler.step(length)
            rewind()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.step(length)
    rewind()
    return graph.replay
