"""Whether a model's feed-forward blocks can be made sparse exactly.

Each is checked by running its own forward on tiny weights: whatever its class is called, it must compute
down(relu(gate) * up) or down(relu(up)), and nothing else; of routed experts each that, and their weighted sum.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_twell.blocks.architectures import SUPPORTED, ExpertsSite, FfnSite, Site, base_layer, stock_class
from hf_twell.blocks.operands import operands_of
from hf_twell.convert.own_type import needs_own_type
from hf_twell.files.weights import DTYPES, is_plain
from hf_twell.ops import experts, reference


def check_convertible(model: nn.Module, sites: Sequence[Site]) -> bool:
    """Refuse, by a ValueError, a model whose blocks hold something that cannot be converted exactly: quantized or
    meta-device weights, a replaced forward, another formula, or what `needs_own_type` refuses, whose answer it
    returns."""
    blocks = [block for site in sites for block in site.blocks()]
    for site in blocks:
        where = f"{site.name} ({type(site.module).__name__})"
        if "forward" in vars(site.module):
            raise ValueError(
                f"{where} has its forward replaced on the instance (by accelerate's offloading, Liger or another "
                "patch), which would bypass the sparse block. Load the model without it."
            )
        activation = site.activation
        if isinstance(activation, nn.Module) and activation.state_dict():
            raise ValueError(
                f"{site.name}.{site.form.activation} ({type(activation).__name__}) has parameters of its own, which "
                f"ReLU would drop from the checkpoint. {SUPPORTED}."
            )
        # A block that computes ReLU already keeps computing through its linears, whatever they are.
        converts = not isinstance(activation, nn.ReLU)
        if isinstance(site, ExpertsSite):
            for name in (site.form.gate_up, site.form.down):
                _check_weight(getattr(site.module, name), site.module, f"{site.name}.{name}", converts)
            _check_experts_formula(site, where)
            continue
        for name in site.form.linears:
            linear = getattr(site.module, name)
            _check_weight(base_layer(linear).weight, linear, f"{site.name}.{name}", converts)
        _check_formula(site, where)
    return needs_own_type(model, sites)


def _check_weight(weight: torch.Tensor, module: nn.Module, name: str, converts: bool) -> None:
    if weight.is_meta:
        raise ValueError(
            f"{name} ({type(module).__name__}) has its weight on the meta device; load the weights before converting "
            "(without init_empty_weights, and with a device_map that offloads nothing)."
        )
    # Eight-bit floats count as floating point too.
    if converts and (weight.dtype not in DTYPES or not is_plain(weight)):
        raise ValueError(
            f"{name} ({type(module).__name__}) is quantized ({weight.dtype}, {type(weight.data).__name__}); convert "
            "the model in bfloat16, float16 or float32 and quantize the result."
        )


def _check_formula(site: FfnSite, where: str) -> None:
    """Run the block's own forward on tiny weights with ReLU, in both modes, and compare with the reference."""
    tiny: Any = object.__new__(stock_class(site.module))
    replaced = (*site.form.linears, site.form.activation)
    others = {name: child for name, child in site.module._modules.items() if name not in replaced}
    tiny.__dict__ = {**vars(site.module), "_modules": copy.deepcopy(others)}
    # Whatever the caller's default dtype and device are.
    cpu = {"device": "cpu", "dtype": torch.float32}
    generator = torch.Generator("cpu").manual_seed(0)
    hidden, intermediate = 8, 24
    for name in site.form.linears:
        rows, columns = (2 * intermediate if site.form.fused else intermediate), hidden
        if name == site.form.down:
            rows, columns = hidden, intermediate
        bias = base_layer(getattr(site.module, name)).bias is not None
        linear = nn.utils.skip_init(nn.Linear, columns, rows, bias=bias, **cpu)
        for parameter in linear.parameters():
            parameter.data.normal_(generator=generator)
        tiny._modules[name] = linear
    operands: Any = operands_of(tiny._modules, site.form, lambda linear: (linear.weight, linear.bias))
    weights = {key: value for key, value in operands._asdict().items() if key[0] in "wb"}
    setattr(tiny, site.form.activation, nn.ReLU())
    x = torch.randn(2, 3, hidden, generator=generator, **cpu)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        expected = reference.ffn(x, **weights)
        for mode in (True, False):
            nn.Module.train(tiny, mode)
            try:
                exact = torch.allclose(tiny.forward(x), expected, rtol=1e-4, atol=1e-4)
            except Exception as error:
                raise ValueError(f"{where} takes more than hidden states through its linears. {SUPPORTED}.") from error
            if not exact:
                raise ValueError(
                    f"{where} does more than down(relu(gate) * up) (dropout, a norm, a scale, a threshold, ...), so it "
                    f"cannot be replaced exactly. {SUPPORTED}."
                )


def _check_experts_formula(site: ExpertsSite, where: str) -> None:
    """The same of routed experts: their class's own forward, and what Transformers' implementations call of it."""
    cls: Any = stock_class(site.module)
    tiny: Any = object.__new__(cls)
    number, width, hidden, tokens = site.sizes[0], 24, 8, 6
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)

    weights = normal(number, 2 * width, hidden), normal(number, hidden, width)
    parameters = dict(zip((site.form.gate_up, site.form.down), weights, strict=True))
    if site.form.transposed:
        parameters = {name: weight.mT for name, weight in parameters.items()}
    others = {name: child for name, child in site.module._modules.items() if name != site.form.activation}
    tiny.__dict__ = {**vars(site.module), "_modules": copy.deepcopy(others), "_parameters": parameters}
    tiny.hidden_size = hidden  # which Llama 4's read
    setattr(tiny, site.form.activation, nn.ReLU())
    index = torch.randint(number, (tokens, 1), generator=generator, device="cpu")
    index = torch.cat([index, (index + 1) % number], dim=1)[:, : min(2, number)]
    x, share = normal(tokens, hidden), normal(*index.shape).abs()
    given: tuple = (index, share)
    if site.form.transposed:  # each expert computes its own tokens
        index = torch.arange(number, device="cpu").repeat_interleave(tokens).unsqueeze(1)
        x, share, given = normal(len(index), hidden), torch.ones_like(index), ()
    eager = getattr(cls.forward, "__wrapped__", cls.forward)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        for mode in (True, False):
            nn.Module.train(tiny, mode)
            for scale in (1.0, 1000.0):  # a limit of the values would show in large ones
                expected = experts.experts(scale * x, index, share, *weights) / scale**2
                gate_up = scale * normal(tokens, 2 * width)
                gate, up = gate_up.chunk(2, dim=-1)
                try:
                    exact = torch.allclose(eager(tiny, scale * x, *given) / scale**2, expected, 1e-4, 1e-4)
                    if hasattr(tiny, "_apply_gate"):
                        exact &= torch.allclose(tiny._apply_gate(gate_up), gate.relu() * up, 1e-4, 1e-4)
                except Exception as error:
                    raise ValueError(
                        f"{where} takes other things than hidden states, experts and their weights. {SUPPORTED}."
                    ) from error
                if not exact:
                    raise ValueError(
                        f"{where} computes more of an expert than down(relu(gate) * up) (a limit, a norm, ...), so it "
                        f"cannot be replaced exactly. {SUPPORTED}."
                    )
