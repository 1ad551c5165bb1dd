"""`Revival`: dead neurons' gate rows are drawn back towards their initial state until some token activates them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

RATE = 0.1  # of the paper
# Names that optimizers give to what a row can get anew. Others' "z" or "ax" are weights, and a "state2" may be either.
FIRST_MOMENTS = {"exp_avg", "momentum_buffer", "grad_avg"}
SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}


class Revival:
    """Re-initialises, a little after each optimizer step, the gate rows of neurons that have fallen silent.

    Formula: for each neuron j that none of the last `after` tokens activated,
    Wg[j] <- 0.9 Wg[j] + 0.1 N(0, sigma^2) (and its gate bias <- 0.9 of it). The row shrinks and wanders until one token
    activates it, then training goes on with it; without a gate it is the row of the up projection. The row's momentum,
    which drove it there, becomes 0, and its second moment the mean over living neurons: from 0, the first gradient
    would move it by several learning rates.

    All ranks draw the same noise, and a resumed run the same as a whole one.

    Args:
        ffns: sparse blocks.
        after: tokens without an activation after which a neuron counts as dead.
        sigma: standard deviation of the noise, the model's `initializer_range`.
        seed: of the noise.

    Raises:
        ValueError: projections that are not trained as plain linears.

    Source: arXiv 2603.23198, appendix C.3 (there `after` is a step's million tokens; optimizer state is not mentioned).
    """

    def __init__(self, ffns: Sequence[nn.Module], after: int, *, sigma: float = 0.02, seed: int = 0) -> None:
        if isinstance(after, bool) or not isinstance(after, int) or after < 1:
            raise ValueError(f"revive_after={after!r}; give a whole number of tokens, such as 1_000_000")
        experts = next((ffn.twell.name for ffn in ffns if ffn.sizes().experts is not None), None)
        if experts is not None:
            raise ValueError(f"revive_after: {experts} holds routed experts, which revival does not know; leave it out")
        self.linears = [getattr(ffn, ffn.twell.form.first) for ffn in ffns]
        for ffn, linear in zip(ffns, self.linears, strict=True):
            _check(linear, f"{ffn.twell.name}.{ffn.twell.form.first}")
        self.after, self.sigma, self.seed = after, sigma, seed
        self.idle: list[torch.Tensor] = []  # for each layer, every neuron's tokens since it was active

    def count(self, tokens: torch.Tensor, active: Sequence[torch.Tensor]) -> None:
        """Take in a step's tokens, (), and for each layer every neuron's active tokens, (F,)."""
        if not self.idle:
            self.idle = [torch.zeros_like(layer) for layer in active]
        for index, layer in enumerate(active):
            self.idle[index] = torch.where(layer > 0, 0, self.idle[index].to(layer.device) + tokens)

    @torch.no_grad()
    def revive(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Draw dead rows back; returns the share of neurons that were dead. A ValueError where the optimizer keeps a
        state for the rows that is not known."""
        silent = [idle >= self.after for idle in self.idle]
        dead = torch.stack([layer.sum() for layer in silent]).tolist()  # the one wait for the device
        for layer, (linear, mask, count) in enumerate(zip(self.linears, silent, dead, strict=True)):
            if count == 0:
                continue
            # Dead rows first, both kinds in their order: `nonzero` would wait to learn how many there are.
            order = mask.to(linear.weight.device, torch.uint8).argsort(descending=True, stable=True)
            rows, living = order.split([count, len(order) - count])
            generator = torch.Generator(rows.device).manual_seed((self.seed * 1_000_003 + step) * 1009 + layer)
            shape = (len(rows), linear.in_features)
            noise = torch.randn(shape, generator=generator, device=rows.device) * self.sigma
            linear.weight[rows] = ((1 - RATE) * linear.weight[rows].float() + RATE * noise).to(linear.weight.dtype)
            _reset_state(optimizer, linear.weight, rows, living)
            if linear.bias is not None:
                linear.bias[rows] *= 1 - RATE
                _reset_state(optimizer, linear.bias, rows, living)
        return sum(dead) / sum(map(len, silent))

    def state(self) -> dict[str, torch.Tensor]:
        return {f"idle_{index:03d}": idle.cpu() for index, idle in enumerate(self.idle)}

    def load_state(self, state: dict[str, torch.Tensor], device: torch.device) -> None:
        self.idle = [state[key].to(device) for key in sorted(state)]


def check_optimizer(optimizer: torch.optim.Optimizer, revival: Revival) -> None:
    """Refuse, by a ValueError before any training, an optimizer that does not hold the rows themselves."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(id(linear.weight) in known for linear in revival.linears):
        raise ValueError(
            "revive_after: the optimizer trains copies or shards of the gate projections, whose state cannot be "
            "reached (ZeRO, FSDP); leave it out, or train without sharding"
        )


def _check(linear: nn.Module, name: str) -> None:
    if not isinstance(linear, nn.Linear) or not linear.weight.requires_grad:
        raise ValueError(
            f"revive_after needs to change {name} ({type(linear).__name__}), which is wrapped by an adapter or frozen; "
            "leave it out, or train the feed-forward blocks in full"
        )
    if isinstance(linear.weight, DTensor) or hasattr(linear.weight, "ds_id"):
        raise ValueError(f"revive_after: {name} is sharded, so its optimizer state cannot be reached; leave it out")


def _reset_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, rows: torch.Tensor, living: torch.Tensor
) -> None:
    state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if torch.is_tensor(value)}
    moments = {key: value for key, value in state.items() if value.numel() > 1}
    if any(
        key not in FIRST_MOMENTS | SECOND_MOMENTS or type(value) is not torch.Tensor or value.shape != parameter.shape
        for key, value in moments.items()
    ):
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        raise ValueError(
            f"revive_after cannot reset the state of {type(inner).__name__} ({', '.join(state)}) by rows; use "
            "torch's AdamW or SGD (optim='adamw_torch' or 'sgd'), or leave it out"
        )
    for key, value in moments.items():
        fresh = value[living].mean(0) if key in SECOND_MOMENTS and len(living) else torch.zeros_like(value[rows])
        value[rows] = fresh
