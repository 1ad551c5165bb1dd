"""Which way a call of a sparse block goes: as the last one did, where all is as that left it; else as is chosen anew.

Anybody may have hooked, replaced, moved or quantized a part of a block since its last call, so each call asks many
things. Behind other work, which leaves nothing of that code in the caches, to ask takes a quarter as long as one
token's kernels. So a call first makes sure that every answer is still the last call's.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from hf_twell.blocks.architectures import FfnForm
from hf_twell.blocks.layout import settle_down
from hf_twell.blocks.operands import OWN_FORWARDS, Operands, first_of, quantizes_x
from hf_twell.dispatch.activity import UNKNOWN, Activity, RecentInputs, stored_activity
from hf_twell.dispatch.choose import (
    Way,
    choice_for,
    choices_by_tokens,
    choose,
    goes_by_union,
    problem,
    sample_weight,
    training_problem,
)
from hf_twell.dispatch.key import EIGHT_BIT, HOPPER, CallKey, key_of
from hf_twell.dispatch.training import sampled_on_cpu
from hf_twell.ops import api

if TYPE_CHECKING:  # it imports this
    from transformers import PreTrainedConfig

    from hf_twell.blocks.modeling import SparseBlock, SparseFfn

ACTIVITY = ("density", "unions")  # keys of what a config's `twell` entry holds of the weights as they are

# Bound here: in torch's own large tables each look-up costs a walk through memory.
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_transforms_active, _capturing = torch._C._are_functorch_transforms_active, torch.cuda.is_current_stream_capturing
_deterministic = torch._C._get_deterministic_algorithms
_Tensor, _Linear, _ReLU, _FLOAT32 = torch.Tensor, nn.Linear, nn.ReLU, torch.float32
_linear_forward, _relu_forward = OWN_FORWARDS[nn.Linear], OWN_FORWARDS[nn.ReLU]


class LastCall(NamedTuple):
    """What a call in evaluation looked at, and which way it went.

    It holds no tensor and no module, so what is replaced is freed. Copies and pickles of it are None.

    Attributes:
        compute: the operator, or `api.dense_ffn`; None where the call went by the block's own linears.
        weight: see `sample_weight`.
        kind: what holds the weights' values: parameters, or torchao's tensors.
        fused: whether gate and up are one linear.
        linears: name and weight's shape of up, down and gate; of gate None where there is none, or up is both.
    """

    key: CallKey
    shape: torch.Size
    compute: Any
    weight: int
    dtype: torch.dtype
    device: torch.device
    block: type
    forward: Any
    settings: Any
    backend: str
    form: Any
    kind: type
    fused: bool
    linears: tuple[tuple[str | None, tuple[int, int]], ...]

    def __reduce__(self) -> tuple:
        return type(None), ()

    def of_tokens(self, x: torch.Tensor, recent: RecentInputs) -> "LastCall | None":
        """What the same call with so many other tokens would find out; None where that takes a look at them."""
        if x.shape[-1:] != self.shape[-1:] or x.numel() == 0:
            return None
        if self.device.type == "cuda" and recent.wants_runs:
            return None
        key = self.key._replace(tokens=x.numel() // self.key.hidden)
        weight = sample_weight(key)
        if weight and (recent.density is None or (recent.wants_runs and goes_by_union(key, recent.density))):
            return None
        way = choose(key, Activity(recent.density, union=recent.union) if weight else UNKNOWN)
        return self._replace(key=key, shape=x.shape, compute=_function_of(way), weight=weight)


def _function_of(way: Way) -> Any:
    return torch.ops.hf_twell.infer if way == "kernels" else api.dense_ffn if way == "dense" else None


def repeat(ffn: "SparseFfn", x: torch.Tensor) -> torch.Tensor | None:
    """The block's y, where all is as its last call left it and its density need not be looked at; else None."""
    own = ffn.__dict__
    state, block = own["twell_state"], type(ffn)
    last = state.last_call
    if last is None:
        return None
    if type(x) is not _Tensor:
        return None
    if x.shape != last.shape:
        last = state.last_call = last.of_tokens(x, state.recent)
        if last is None:
            return None
    if (
        x.dtype is not last.dtype
        or x.device != last.device
        or state.recent.look_in < last.weight
        or own["training"]
        or _grad_enabled()
        or _autocast_enabled(last.device.type)
        or _transforms_active()
        or forward_ad._current_level >= 0
        or _has_any_global_hook()
        or block is not last.block
        or block.forward is not last.forward
        or own["twell"] is not last.settings
        or last.settings.backend != last.backend
        or own.get("_compiled_call_impl") is not None
        or "forward" in own
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or (last.device.type == "cuda" and (_capturing() or _deterministic()))
    ):
        return None
    modules = own["_modules"]
    if last.compute is None:
        for name, _ in last.linears:
            if name is not None and type(modules[name]._parameters.get("weight")) is not last.kind:
                return None
        state.recent.look_in -= last.weight
        return ffn._through_submodules(x, None)
    relu = modules[last.form.activation]
    watched = relu.__dict__
    if (
        type(relu) is not _ReLU
        or _ReLU.forward is not _relu_forward
        or _Linear.forward is not _linear_forward
        or "forward" in watched
        or watched["_forward_hooks"]
        or watched["_forward_pre_hooks"]
    ):
        return None
    kind, dtype, device = last.kind, last.dtype, last.device
    scaled = kind is not nn.Parameter and kind is not _Tensor
    weights: list[Any] = [None, None, None]
    biases: list[torch.Tensor | None] = [None, None, None]
    scales: list[torch.Tensor | None] = [None, None, None]
    for place, (name, shape) in enumerate(last.linears):
        if name is None:
            continue
        linear = modules[name]
        if type(linear) is not _Linear:
            return None
        watched, parameters = linear.__dict__, linear._parameters
        if "forward" in watched or watched["_forward_hooks"] or watched["_forward_pre_hooks"]:
            return None
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # pruned or weight-normed, or a tensor that is no parameter took its place
            return None
        if type(weight) is not kind:
            return None
        if scaled:
            if weight.act_quant_kwargs is not None or getattr(weight, "act_pre_scale", None) is not None:
                return None
            weight, scale = weight.qdata, weight.scale
            if scale.dtype is not _FLOAT32 or scale.shape != (shape[0], 1) or scale.device != device:
                return None
            scales[place] = scale
        if weight.dtype is not last.key.weights or weight.shape != shape or weight.device != device:
            return None
        if bias is not None and (bias.dtype is not dtype or bias.shape != shape[:1] or bias.device != device):
            return None
        weights[place], biases[place] = weight, bias
    if last.fused:  # gate's rows, then up's
        for parts in (weights, biases, scales):
            if parts[0] is not None:
                parts[2], parts[0] = parts[0].chunk(2)
    weights[1] = weights[1].detach()  # another thread may give the parameter new memory while this one computes
    state.recent.look_in -= last.weight
    return last.compute(x, *weights, *biases, *scales) if scaled else last.compute(x, *weights, *biases)


def remember(ffn: "SparseFfn", x: torch.Tensor, operands: Operands, key: CallKey, way: Way | None) -> None:
    """Keep what a call has found out, if later ones can go by it; never under autocast, which has casts of its own."""
    if way is None or key.compiled or _grad_enabled() or ffn.training or x.numel() == 0 or type(x) is not _Tensor:
        return
    if _autocast_enabled(x.device.type):
        return
    # With other tokens the way may become kernels', which say anew what they do not take.
    if not (problem(key) or (way == "kernels" and key.quantize_x)):
        settings, block = ffn.twell, type(ffn)
        ffn.twell_state.last_call = LastCall(
            key=key,
            shape=x.shape,
            compute=_function_of(way),
            weight=sample_weight(key),
            dtype=x.dtype,
            device=x.device,
            block=block,
            forward=block.forward,
            settings=settings,
            backend=settings.backend,
            form=settings.form,
            kind=type(ffn._modules[settings.form.up]._parameters.get("weight")),
            fused=settings.form.fused,
            linears=_linears(settings.form, *operands.w_up.shape),
        )


def _linears(form: FfnForm, width: int, hidden: int) -> tuple[tuple[str | None, tuple[int, int]], ...]:
    rows = (2 * width if form.fused else width, hidden)
    return (form.up, rows), (form.down, (hidden, width)), (None if form.fused else form.gate, rows)


def settle(ffn: "SparseFfn", x: torch.Tensor, operands: Operands, reports: bool) -> tuple[CallKey, Way | None]:
    """Bring down_proj's memory into the order that a call wants, and choose its way. None: no kernels train, as the
    operator says. `reports`: backward is to count what is active, though nothing else be learned."""
    key = _key(ffn, x, operands, reports)
    way = choose(key, _activity(ffn, x, operands, key)) if training_problem(key) is None else None
    state = ffn.twell_state
    if not key.compiled:
        settle_down(ffn, operands.w_down, x, state.recent.density)
    if way and key.training and key.device == "cuda" and not key.compiled:
        state.on_kernels = way == "kernels"
    return key, way


def takes_kernels(ffn: "SparseFfn", x: torch.Tensor) -> bool:
    """Whether a block would go by kernels with x after the calls it has seen."""
    if api.resolve(ffn.twell.backend, x.device.type) == "reference":  # asked for, or no kernels could be had
        return False
    operands = ffn._read_weights()
    if operands is None:  # adapters, say, which the submodules compute
        return False
    key = _key(ffn, x, operands)
    if training_problem(key) is not None:
        return False
    return choose(key, _activity(ffn, x, operands, key, look=False)) == "kernels"


def store_density(
    ffns: Iterable[nn.Module],
    density: Sequence[float] | None,
    unions: Mapping[str, Sequence[float]] | None = None,
    config: "PreTrainedConfig | None" = None,
) -> None:
    """Tell sparse blocks the activity of every block of their model, which a compiled graph cannot sample: the density,
    and the `unions` of neighbouring tokens. None: it is not known (any more). A trace takes what `choices_by_tokens`
    makes of it for constants. `config` is the model's, where its `twell` entry says the same."""
    known = dict(enumerate(stored_activity(density or (), unions)))
    settings, layers = [], []
    for ffn in ffns:
        ffn.twell.activity = known.get(ffn.twell.place)
        ffn.twell.choices = ffn.twell.choices_elsewhere = None
        ffn.twell.config = None if density is None else config
        if ffn.twell.activity is not None and isinstance(ffn.twell.form, FfnForm):
            down = getattr(ffn, ffn.twell.form.down)
            # Which 16 bits the block computes in makes no difference on a GPU, and may change after this.
            kind = getattr(down.weight, "qdata", down.weight).dtype
            weights = kind if kind in EIGHT_BIT else torch.bfloat16
            key = CallKey("cuda", HOPPER, torch.bfloat16, weights, 1, down.out_features, down.in_features)
            settings.append(ffn.twell)
            layers.append((key, ffn.twell.activity))
    elsewhere = [(key._replace(capability="8.0"), stored) for key, stored in layers]
    for each, here, others in zip(settings, *map(choices_by_tokens, (layers, elsewhere)), strict=True):
        each.choices, each.choices_elsewhere = here, others


def drop_activity(ffn: "SparseBlock", x: torch.Tensor) -> None:
    """Drop what is stored of a block, and of all in its model's config, where a call with x learns, by any trainer.

    Of the weights that the step makes it is not true. Where nothing learns up to this block, it stays true.
    The blocks do it themselves, without a hook: a graph that was compiled before one would not notice it. Dynamo traces
    it without a break, and traces a model anew once it is done.
    """
    settings, config = ffn.twell, ffn.twell.config
    if config is None or not torch.is_grad_enabled():
        return
    if not (x.requires_grad or any(each.requires_grad for each in ffn.parameters())):
        return
    if (entry := getattr(config, "twell", None)) is not None:
        config.twell = without_activity(entry)
    settings.activity = settings.choices = settings.choices_elsewhere = settings.config = None


def without_activity(entry: Mapping) -> dict:
    """A config's `twell` entry without what was measured: of other weights it is not true."""
    return {key: value for key, value in entry.items() if key not in ACTIVITY}


def _key(ffn: "SparseFfn", x: torch.Tensor, operands: Operands, reports: bool = False) -> CallKey:
    scaled = operands.s_up is not None
    quantize_x = scaled and quantizes_x(ffn._modules[ffn.twell.form.up])
    training, l1 = not scaled and (reports or _learns(ffn, x)), ffn.twell_state.l1
    known = {"runs": training and l1 is not None and l1.runs is not None, "asked": ffn.twell.backend != "auto"}
    key = key_of(x, operands.w_up, operands.w_down, training=training, quantize_x=quantize_x, **known)
    # In training mode without gradients runs the forward of re-entrant checkpointing, which goes as its recomputation.
    # Where no kernels train, text that is generated there goes by kernels all the same.
    return key if torch.is_grad_enabled() or training_problem(key) is None else key._replace(training=False, runs=False)


def _learns(ffn: "SparseFfn", x: torch.Tensor) -> bool:
    """Whether there is something to learn here."""
    if not (torch.is_grad_enabled() or ffn.training):
        return False
    learns = x.requires_grad
    for name in ffn.twell.form.linears:
        parameters = ffn._modules[name]._parameters
        bias = parameters["bias"]
        learns = learns or parameters["weight"].requires_grad or (bias is not None and bias.requires_grad)
    return learns


def _activity(ffn: "SparseFfn", x: torch.Tensor, operands: Operands, key: CallKey, look: bool = True) -> Activity:
    """What is known of the activity of a call: counted or sampled in steps, stored, or sampled now and then."""
    recent, on_gpu = ffn.twell_state.recent, key.device == "cuda"
    weight, bias, scale = first_of(operands)
    if key.training:
        sampled = ffn.twell_state.step_choice.activity if on_gpu else sampled_on_cpu
        return sampled(key, x, weight, bias)
    if torch.is_grad_enabled():
        return UNKNOWN
    if key.compiled:  # on a CPU the operator itself follows the density
        if not on_gpu or key.exported:
            return UNKNOWN
        choices = ffn.twell.choices if key.capability == HOPPER else ffn.twell.choices_elsewhere
        # One answer: a graph would be guarded by all of a dictionary that an Activity holds.
        return UNKNOWN if choices is None else Activity(chosen=choice_for(choices, key.tokens))
    calls = sample_weight(key)
    # What has arrived from a GPU depends on timing, and the ways round differently.
    if calls == 0 or (on_gpu and torch.are_deterministic_algorithms_enabled()):
        return UNKNOWN
    if look:
        recent.look(x, weight, bias, scale, calls, partial(goes_by_union, key))
    return Activity(recent.density, union=recent.union)
