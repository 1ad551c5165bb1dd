"""`measure_sparsity`: how many neurons of each layer a model really uses on given batches."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_twell.blocks.architectures import ExpertsSite, Site, block_places, find_ffns
from hf_twell.blocks.batches import batch_size_tokens, check_one_stream, token_weight
from hf_twell.blocks.modeling import check_whole, sparse_ffns
from hf_twell.convert.entry import record_density
from hf_twell.measure.activity import RUNS, LayerActivity
from hf_twell.measure.experts import ExpertsActivity, NegativeExperts, RoutedH
from hf_twell.measure.inference import input_device
from hf_twell.measure.negative_gates import NegativeGates
from hf_twell.models.modes import evaluation_mode

CPU_TOKENS = 2048  # of h, counted at a time


def measure_sparsity(
    model: nn.Module, batches: Iterable[Mapping | torch.Tensor], *, progress: bool = False
) -> dict[str, Any]:
    """L0, density, L1 and dead neurons of every feed-forward block, and how its activity is spread.

    Works on dense, sparsified and unpatched models alike; the model's mode and weights stay as they are, and the config
    of a sparsified one keeps each layer's density and unions (`config.twell`), which `save_pretrained` then saves. A
    layer's neuron is active for a token where h, the input of its down projection, is not zero. Memory does not grow
    with the number of batches. All routed experts of a layer count as one, and a shared expert as another: see
    `hf_twell.measure.experts.ExpertsActivity`.

    Args:
        model: a Transformers model.
        batches: what the model is called with: mappings with `input_ids` and, where there is padding,
            `attention_mask`; or tensors of token ids, (batch, sequence).
        progress: show a progress bar on stderr.

    Returns:
        {"tokens", "l0", "density", "unions", "l1", "dead" (share of neurons never active), "negative_share",
        "layers": [...]}; the top figures are layer means, and those of a layer are means over non-padding tokens. A
        layer is a dict of
        "name", "intermediate_size", "l0", "density", "l1", "dead", "dead_neurons";
        "layer": index of the model's layer;
        "label": the same as text, "3", or, where some layer has two blocks, "3 experts" and "3 shared_expert";
        "unions": {"16": share of neurons that are active in at least one of 16 neighbouring tokens, "64", "128"}, by
        which the time of many tokens at once goes, as that of one goes by the density;
        "always_on_neurons": active for every token;
        "l0_quantiles": {"min", "p1", "p10", "p50", "p90", "p99", "max"} of L0 over tokens;
        "effective_neurons": (sum |h|)^2 / sum h^2, how many equally strong neurons would carry a token as unevenly;
        "hottest_share": {"1%": share of all firings that the 1 % of neurons firing most often have, ...};
        "distinct": {"16": {"neurons": of the union, "if_independent": the same if tokens were strangers to each
        other, "runs"}, "64", "128"};
        "magnitude_share": {"1%": share of a token's sum |h| that its strongest 1 % of neurons carry, "5%", "10%"}, over
        "magnitude_sample" tokens, an even sample;
        "negative_share": share of the block's output energy, sum of (h_j ||Wd_:,j||)^2, that comes from neurons whose
        gate (without one, whose up projection) is negative: what ReLU would silence, and 0 in a model that has it.
        What cannot be known (no whole run; the weight of a quantized, offloaded or adapted down projection) is None.
        Of routed experts "intermediate_size" is K F, the neurons of a token's K experts; "dead" the share of its own
        experts' neurons that a token meets dead; and there are "experts" (E), "experts_per_token" (K),
        "reached_experts", "expert_tokens": [of each expert], "expert_dead": [of each, None where no token came].

    Raises:
        ValueError: no tokens, a mask of another shape than the batch, an encoder-decoder, a model whose blocks cannot
            be read or see other positions than the batch has (prompt tuning), or an h that is not finite.
    """
    sites, tokens = find_ffns(model), 0
    activity = ModelActivity(sites)
    shape = torch.Size()  # of the batch that is read now, and which of its tokens count
    valid: torch.Tensor | None = None

    def see(index: int, h: torch.Tensor | RoutedH) -> None:
        positions = len(h.h) if isinstance(h, RoutedH) else h.numel() // h.shape[-1]
        if positions != shape.numel():
            raise ValueError(
                f"{sites[index].name} sees {positions} positions where the batch has {shape.numel()}; "
                "what adds positions (prompt tuning) cannot be measured: measure the base model"
            )
        activity.add(index, h, shape, valid)

    check_one_stream(model)
    device = input_device(model)
    with watching(model, activity, see):
        for batch in tqdm(batches, desc="measuring sparsity", disable=not progress):
            batch = _inputs(batch, device)
            weight = token_weight(batch)
            positions = batch_size_tokens(batch)
            counted = positions if weight is None else int(weight.sum())
            if counted:
                ids = batch.get("input_ids")
                shape = (batch["inputs_embeds"] if ids is None else ids).shape[:2]
                if weight is not None and weight.shape != shape:
                    raise ValueError(
                        f"attention_mask has shape {tuple(weight.shape)}, the batch {tuple(shape)}; give one of the "
                        "batch's shape, and no past_key_values"
                    )
                valid = None if weight is None else weight > 0
                model(**batch)
                tokens += counted
    if not tokens:
        raise ValueError("no tokens to measure on: the batches are empty or all padding")
    report = activity.report(tokens)
    density = [layer["density"] for layer in report["layers"]]
    known = [run for run, mean in report["unions"].items() if mean is not None]
    unions = {run: [layer["unions"][run] for layer in report["layers"]] for run in known}
    record_density(getattr(model, "config", None), sparse_ffns(model), density, unions)
    return report


@contextlib.contextmanager
def watching(
    model: nn.Module, activity: "ModelActivity", see: Callable[[int, torch.Tensor | RoutedH], None]
) -> Iterator[None]:
    """Evaluation mode without gradients in which `see(index, h)` gets each block's h, (..., F), in layer order.

    Before that, `activity` gets the signs of what the block's activation gets. The h of routed experts is computed
    beside them, as no module of theirs has it.
    """

    def hook(index: int) -> Callable:
        # A hook on the down projection also sends a sparse block through its submodules, where h exists.
        return lambda _, args: see(index, args[0])

    def experts_hook(index: int, site: ExpertsSite) -> Callable:
        return lambda _, args: see(index, RoutedH.of(site, *args))

    handles = []
    try:
        for index, (site, gates) in enumerate(zip(activity.sites, activity.gates, strict=True)):
            if isinstance(site, ExpertsSite):
                handles.append(site.module.register_forward_pre_hook(experts_hook(index, site)))
                continue
            handles.append(site.linear("down").register_forward_pre_hook(hook(index)))
            if not gates.relu:
                handles.append(site.linear("first").register_forward_hook(gates.hook))
        # Compiled code may not notice the hooks.
        with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


class ModelActivity:
    """What the neurons of all of a model's blocks do: a `LayerActivity` and a `NegativeGates` for each of `sites`."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.gates: list[Any] = [
            NegativeExperts(site) if isinstance(site, ExpertsSite) else NegativeGates(site) for site in sites
        ]
        self._layers: dict[int, Any] = {}

    def add(
        self, index: int, h: torch.Tensor | RoutedH, shape: torch.Size, valid: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count one block's h (..., F) in, of tokens (B, S); returns L0 and effective neurons, (B, S) each. A
        ValueError of a part of h, as tensor parallelism leaves to one process."""
        site = self.sites[index]
        if isinstance(h, RoutedH):
            return self._add_routed(index, h, shape, valid)
        h = h.reshape(*shape, h.shape[-1])
        check_whole(h, site.intermediate_size, site)
        if index not in self._layers:
            self._layers[index] = LayerActivity(site.intermediate_size, h.device)
        layer = self._layers[index]
        valid = None if valid is None else valid.to(h.device)
        everywhere = torch.ones(h.shape[:-1], dtype=torch.bool, device=h.device) if valid is None else valid
        self.gates[index].add(h.flatten(0, 1), everywhere.flatten())
        if h.device.type != "cpu":
            return layer.add(h, valid)
        # Some sequences at a time: the copies stay small, and the calls few.
        size = max(1, CPU_TOKENS // h.shape[1])
        masks = [None] * len(h) if valid is None else valid.split(size)
        rows = [layer.add(part, mask) for part, mask in zip(h.split(size), masks, strict=False)]
        l0, effective = zip(*rows, strict=True)
        return torch.cat(l0), torch.cat(effective)

    def _add_routed(
        self, index: int, routed: RoutedH, shape: torch.Size, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        site: Any = self.sites[index]
        (experts, width, _), per_token = site.sizes, routed.expert.shape[1]
        device = routed.h.device
        if index not in self._layers:
            self._layers[index] = ExpertsActivity(experts, per_token, width, device)
        valid = torch.ones(shape, dtype=torch.bool, device=device) if valid is None else valid.to(device)
        self.gates[index].add(routed, valid.flatten())
        size = max(1, CPU_TOKENS // shape[1])
        parts = (part.unflatten(0, shape).split(size) for part in (routed.h, routed.expert))
        rows = [self._layers[index].add_routed(*part) for part in zip(*parts, valid.split(size), strict=True)]
        l0, effective = zip(*rows, strict=True)
        return torch.cat(l0), torch.cat(effective)

    def report(self, tokens: int) -> dict[str, Any]:
        """What `measure_sparsity` returns; a ValueError of an h that is not finite."""
        names = [site.name for site in self.sites]
        layers: list[dict[str, Any]] = [
            {"name": name, "layer": place.layer, "label": place.label, **self._layers[index].report()}
            for index, (name, place) in enumerate(zip(names, block_places(names), strict=True))
        ]
        for layer in layers:
            if not math.isfinite(layer["l1"]):  # infinite and NaN neurons would count as active
                raise ValueError(
                    f"{layer['name']}: h is not finite, so figures of its activity would mean nothing; where float16 "
                    "overflows, load the model in bfloat16 or float32"
                )
        mean = {key: sum(layer[key] for layer in layers) / len(layers) for key in ("l0", "density", "l1", "dead")}
        for layer, gates in zip(layers, self.gates, strict=True):
            layer["negative_share"] = gates.report()
        negative = _mean([layer["negative_share"] for layer in layers])
        unions = {str(run): _mean([layer["unions"][str(run)] for layer in layers]) for run in RUNS}
        return {"tokens": tokens, **mean, "unions": unions, "negative_share": negative, "layers": layers}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _inputs(batch: Mapping | torch.Tensor, device: torch.device) -> dict:
    if isinstance(batch, torch.Tensor) and batch.ndim == 2:
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch of type {type(batch).__name__}; batches holds mappings with input_ids, or tensors of token ids "
            "(batch, sequence). Put a single batch into a list."
        )
    moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    moved.pop("labels", None)
    return {**moved, "use_cache": False}
