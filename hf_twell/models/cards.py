"""Model cards: the templates in `model_cards/`, filled from measured figures alone. What was not measured is absent."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, TypeGuard

from huggingface_hub import ModelCardData
from transformers import AutoConfig, AutoModelForCausalLM

from hf_twell.blocks import modeling_twell
from hf_twell.blocks.architectures import ExpertsSite, block_places, find_ffns, loading_class
from hf_twell.convert.entry import mean_unions
from hf_twell.files.carried import carried_folder
from hf_twell.files.configs import one_line_errors
from hf_twell.files.tables import markdown_table, percent, unions_cell, unions_head
from hf_twell.models.card_scores import Scores, evaluation_section, lost_writing
from hf_twell.models.loading import without_weights
from hf_twell.models.quantizing import CONFIGS

CLAUSES = {  # by `term`
    "l1": " and were trained with an L1 term on their activations",
    "count": " and were trained with a penalty on how many of them are active",
}
STOCK_ENGINES = (  # lines of a quotation
    "These weights need ReLU, as `hidden_act` in `config.json` says. Engines that compute the architecture's usual "
    "activation\n> (SiLU for Llama and Qwen) whatever the config says give wrong outputs without an error; llama.cpp, "
    "Ollama, MLX LM, CTranslate2,\n> ExLlamaV2 and TensorRT-LLM are of that kind. vLLM needs the plugin of `hf_twell` "
    "(its extra `vllm`) or `--model-impl transformers`."
)
OWN_ENGINES = (
    "The blocks need ReLU, as `ffn_act` in `config.json` says, whatever `hidden_act` says. Engines that "
    "do not know\n> this `model_type` refuse it; under the stock model's name they would compute another activation "
    "without an error.\n> vLLM serves Qwen3.5, Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE of this form by the plugin of "
    "`hf_twell` (its extra `vllm`)."
)
OWN_TYPE: dict[bool, dict[str, str]] = {  # whether the `model_type` is one of ours (hf_twell.blocks.modeling_twell)
    False: {"code": "no remote code", "arguments": "", "engines": STOCK_ENGINES},
    True: {
        "code": "`trust_remote_code` allows the file that says where ReLU is, `modeling_twell.py`",
        "arguments": ", trust_remote_code=True",
        "engines": OWN_ENGINES,
    },
}
BARE_DENSITY = 0.25  # that of a bare swap to ReLU is higher
LOST = 1.25  # times the dense parent's loss, from which on a card and a training warn; our study ended within 1.06
UNTRAINED = """A model that was pretrained with another activation loses most of its quality by
> the swap alone: fine-tune it before you use it (`hf-twell train`)."""
CHEAPER = "More tokens or a higher density cost less."
COSTLY = "Compare it with that parent before you use it."
REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # and no path such as ./model


def model_card(
    repo_id: str,
    config: Mapping,
    *,
    base_model: str | None = None,
    method: Mapping | None = None,
    measured: Mapping | None = None,
    sparsity: Mapping | None = None,
    scores: Scores = None,
    parent_scores: Scores = None,
    chat: bool = False,
) -> str:
    """The card of a whole sparse model.

    Args:
        repo_id: where it will be loaded from.
        config: its config.json.
        base_model: Hub name of the dense model that it was made from.
        method: what `hf_twell.train.resuming.method_of` says of a trainer, or the `twell_state.json` of a checkpoint or
            a recipe's final model: l1_weight, target_density or target_union, share, step, warmup_steps, warmup,
            settings.
        measured: the `twell_measured.json` of a final model: its losses and, in place of `sparsity`, its sparsity.
        sparsity: what `hf_twell.measure_sparsity` returned or `hf-twell inspect --json` printed.
        scores: what `hf_twell.evaluate` returned or `hf-twell eval --json` printed, or a list of such results.
        parent_scores: likewise, of the dense parent.
        chat: whether its tokenizer has a chat template.

    Raises:
        ValueError: figures that are not such results, or that are of another model's size; scores of the parent that
            cannot stand beside the model's.
    """
    facts = {"base model": _link(base_model)}
    text_config = config.get("text_config", config)
    sizes = (text_config.get("num_hidden_layers"), text_config.get("hidden_size"), text_config.get("intermediate_size"))
    if (mixture := _mixture(config)) is not None:
        facts["shape"] = mixture
    elif None not in sizes:
        facts["shape"] = "{} layers, D={:,}, F={:,}".format(*sizes)
    layers = (config.get("twell") or {}).get("layers")
    if layers:
        facts["kernels and L1 term on layers"] = ", ".join(map(str, layers))
    facts |= _quantization(config)
    earlier = "" if sparsity else _earlier(config)  # figures that are given are of the model as it is
    sparsity = sparsity or measured_sparsity(measured)
    section = sparsity_section(sparsity, sizes[0], earlier) if sparsity else ""
    density, active = mean_density(sparsity, config), ""
    if density is None:
        facts["density"] = "not known; `hf_twell.measure_sparsity` measures it"
    if method:
        facts |= _method(method)
    if density is not None:
        facts[f"density measured{earlier}"] = share = percent(density)
        stored = (config.get("twell") or {}).get("unions") or {}
        if unions := sparsity.get("unions") if sparsity else mean_unions(stored):
            runs = sorted(unions, key=int)
            facts[f"{unions_head(runs)}, measured{earlier}"] = unions_cell(unions, runs)
        active = f", so that {share} of a block's neurons {'were' if earlier else 'are'} active for a token{earlier}"
    facts |= _losses(measured or {}, _earlier(config))
    pressed = method and any(method.get(key) for key in ("l1_weight", "target_density", "target_union"))
    trained = CLAUSES[method.get("term", "l1")] if method and pressed else ""
    loader = loading_class(config)
    return _fill(
        "model.md",
        repo_id,
        _head("transformers", loader, base_model),
        facts,
        architecture=(config.get("architectures") or [config.get("model_type", "model")])[0],
        loader=loader.__name__,
        needs=_needs(config.get("quantization_config")),
        **OWN_TYPE[str(config.get("model_type")).startswith("twell_")],
        method_clause=trained + active,
        warning=_warning(untrained(method, density), costly(measured, config, scores, parent_scores)),
        sparsity=section,
        evaluation=evaluation_section(scores, parent_scores, chat=chat),
    )


def untrained(method: Mapping | None, density: float | None) -> str | None:
    """What says that a sparse model may be a bare swap to ReLU, or None; `method` as in `model_card`, and the model's
    `mean_density`."""
    if method and method.get("step") == 0:
        return "This is the bare swap to ReLU, without any fine-tuning."
    if method or (density is not None and density < BARE_DENSITY):
        return None
    return "Whether it was fine-tuned after the swap to ReLU is not recorded here."


def costly(
    measured: Mapping | None, config: Mapping, scores: Scores = None, parent_scores: Scores = None
) -> str | None:
    """What says that a conversion took much of a model, or None; of its `twell_measured.json` and config.json, and of
    scores as in `model_card`."""
    dense, after = ((measured or {}).get(key) for key in ("dense", "after"))
    costs = [lost_writing(scores, parent_scores)]
    if dense and after and after["loss"] > LOST * dense["loss"]:
        above = f"{100 * (after['loss'] / dense['loss'] - 1):.0f} %"
        costs.append(f"Its held-out loss{_earlier(config)} is {above} above that of its dense parent. {CHEAPER}")
    return " ".join(filter(None, costs)) or None


def _warning(recorded: str | None, cost: str | None) -> str:
    if recorded:
        return f"> **Warning.** {recorded} {UNTRAINED}\n\n"
    return f"> **Warning.** {cost} {COSTLY}\n\n" if cost else ""


def measured_sparsity(measured: Mapping | None) -> dict | None:
    """The figures of sparsity of a final model as a card gives them, from its `twell_measured.json`."""
    measured = measured or {}
    last = measured.get("after") or measured.get("before")
    if last and last.get("sparsity"):
        return {**last["sparsity"], "files": measured.get("heldout")}
    return None


def mean_density(sparsity: Mapping | None, config: Mapping) -> float | None:
    """The mean over layers: of figures of sparsity, without these of the densities that config.json stores."""
    if sparsity:
        return sparsity.get("density")
    stored = (config.get("twell") or {}).get("density")
    return sum(stored) / len(stored) if stored else None


def _head(library: str, loader: type, base_model: str | None) -> ModelCardData:
    """What the Hub reads of a card."""
    return ModelCardData(
        library_name=library,
        pipeline_tag="text-generation" if loader is AutoModelForCausalLM else None,
        tags=["hf_twell", "sparse", "relu"],
        base_model=base_model if is_repo(base_model) else None,
    )


def _needs(quantization: Mapping | None) -> str:
    method = (quantization or {}).get("quant_method")
    if method == "torchao":
        return "it needs torchao (`pip install torchao`)"
    return f"it needs what reads {method}" if quantization else "nothing else is needed"


def adapter_card(base: str | None, repo_id: str | None = None, *, loader: type = AutoModelForCausalLM) -> str:
    """The card of an adapter of a sparsified base that `loader` loads: how to load the adapter, and how not to."""
    repo_id = repo_id or "this/adapter"
    head, facts = _head("peft", loader, base), {"base model, before `hf_twell.sparsify`": _link(base)}
    base = base if is_repo(base) else "the/base"
    load = f'\nmodel = hf_twell.load_adapter("{repo_id}")  # sparsifies the base, then loads the adapter onto it'
    if loader is not AutoModelForCausalLM:  # which is what `load_adapter` loads by itself
        name = loader.__name__
        labels = "  # with num_labels, as in training" if "Classification" in name else ""
        load = (
            f'from transformers import {name}\n\nbase = {name}.from_pretrained("{base}"){labels}\n'
            f'model = hf_twell.load_adapter("{repo_id}", base)  # sparsifies the base'
        )
    return _fill("adapter.md", repo_id, head, facts, base=base, load=load, loader=loader.__name__)


def read_result(path: str | Path) -> dict:
    """A result that one of the commands wrote with --json or --output; a ValueError where it is no file, or no JSON
    object."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file at {path}; write one with `hf-twell inspect --output` or `hf-twell eval --output`")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from error
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds no JSON object; give what `hf-twell inspect` or `hf-twell eval` wrote")
    return result


def _fill(template: str, repo_id: str, head: ModelCardData, facts: dict, **sections: str) -> str:
    """A template with its head, its table of facts (None: absent) and its sections; `repo_id` may be a local folder."""
    rows = [[fact, value] for fact, value in facts.items() if value is not None]
    text = (carried_folder("model_cards", holds=template) / template).read_text(encoding="utf-8")
    sections |= {"name": repo_id.rpartition("/")[2], "facts": markdown_table(["", ""], rows) if rows else ""}
    return f"---\n{head.to_yaml()}\n---\n\n{Template(text).substitute(repo_id=repo_id, **sections)}"


def _method(method: Mapping) -> dict:
    steps, over, warmup = method.get("step"), method.get("warmup_steps"), ""
    if over:
        unit = "of the steps" if over < 1 else "steps" if over > 1 else "step"
        warmup = f" after a {method['warmup']} warm-up over {over} {unit}"
    return {
        "coefficient of the L1 term": f"{method['l1_weight']:g}{warmup}" if "l1_weight" in method else None,
        "density aimed at": f"{percent(method['target_density'])}{warmup}" if "target_density" in method else None,
        **_union(method, warmup),
        "optimizer steps": f"{steps:,}" if steps is not None else None,
        **_settings(method.get("settings") or {}, steps),
    }


def _settings(settings: Mapping, steps: int | None) -> dict:
    """Of what `hf_twell.recipe.runs.settings` recorded of a run; None of what is not there."""
    kept, order = (settings.get(key) or {} for key in ("kept", "order"))
    teacher: Any = settings.get("teacher")
    tokens = (order.get("sequences a step") or 0) * (order.get("sequence_length") or 0) * (steps or 0)
    text = order.get("train")
    if isinstance(text, list):  # files, of which each may be named several times
        counts = Counter(Path(name).name for name, _ in text)
        text = ", ".join(f"{name} ({count} times)" if count > 1 else name for name, count in counts.items())
    elif text:
        text = text["hub"]
    if teacher:
        of = "the dense parent" if teacher["model"] == kept.get("model") else f"`{teacher['model'].partition(' (')[0]}`"
        parts = [f"its logits, {100 * teacher['logits']:g} % of the objective"] if teacher["logits"] else []
        parts += [f"its blocks' outputs, with a weight of {teacher['layers']:g}"] if teacher["layers"] else []
        teacher = f"{of}: {' and '.join(parts)}"
    rate = kept.get("training.learning_rate")
    return {
        "tokens read, steps times their size": f"{tokens:,}" if tokens else None,
        "learning rate": f"{rate:g}" if rate is not None else None,
        "texts": text or None,
        "teacher": teacher or None,
    }


def _union(method: Mapping, warmup: str) -> dict:
    """What was pressed on in runs of neighbouring tokens."""
    share = method.get("share")
    if share is None:
        return {}
    aim = f"{percent(method['target_union'])}{warmup}" if "target_union" in method else None
    return {"tokens pressed to share their neurons": str(share), f"active in any of {share} tokens, aimed at": aim}


def _earlier(config: Mapping) -> str:
    """Of what a folder records of its training: quantized models are not trained, and so were quantized after it."""
    return " before the weights were quantized" if config.get("quantization_config") else ""


def _quantization(config: Mapping) -> dict:
    quantization = config.get("quantization_config")
    if not quantization:
        return {}
    method, made_by = quantization.get("quant_method"), str(quantization.get("quant_type"))
    for weights, name in CONFIGS.items():
        if method == "torchao" and name in made_by:
            return {"feed-forward weights": f"{weights}, {method}"}
    return {"quantized weights": method}


def _mixture(config: Mapping) -> str | None:
    """The shape of a mixture of experts, None of another model: made without weights, as types say by different
    settings which layers have experts, and what beside them."""
    kind = str(config.get("model_type"))
    if kind.removeprefix(modeling_twell.PREFIX) not in modeling_twell.ACTIVATIONS:
        return None
    with one_line_errors(f"no {kind} can be made of config.json"):
        made: Any = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "auto_map"})
        sites = find_ffns(without_weights(made, loading_class(config)))
    if not any(isinstance(site, ExpertsSite) for site in sites):
        return None
    text, blocks = made.get_text_config(), Counter(site.layer for site in sites)
    layers: dict[int, list[str]] = {}
    for site, place in zip(sites, block_places([site.name for site in sites]), strict=True):
        told = f"F={site.intermediate_size:,}"
        if isinstance(site, ExpertsSite):
            per_token = text.top_k_experts if hasattr(text, "top_k_experts") else text.num_experts_per_tok
            told = f"{site.sizes[0]} experts of {told} ({per_token} a token)"
        elif blocks[site.layer] > 1:
            told = f"`{place.part}` of {told}"
        layers.setdefault(site.layer, []).append(told)
    kinds = Counter(" and ".join(told) for told in layers.values())
    shown = [f"{kind} in {count if len(kinds) > 1 else 'each'}" for kind, count in kinds.items()]
    return "; ".join([f"{len(layers)} layers, D={text.hidden_size:,}", *shown])


def _losses(measured: Mapping, earlier: str) -> dict:
    after = "after it" if measured.get("before") else "after training"
    names = {"dense": "dense parent", "before": "before training", "after": after}
    losses = {name: (measured.get(key) or {}).get("loss") for key, name in names.items()}
    told = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None)
    return {f"held-out loss (nats per token){earlier}": told or None}


def sparsity_section(sparsity: Mapping, layers: int | None, earlier: str = "") -> str:
    """L0, density and dead neurons of each layer; `layers` is how many there must be (None: any).

    `earlier` says when they were measured, where that was before the model became what it is.
    """
    rows = sparsity.get("layers")
    if not isinstance(rows, list) or not rows or not all({"l0", "density", "dead"} <= row.keys() for row in rows):
        raise ValueError("these are no figures of sparsity: give what measure_sparsity or `hf-twell inspect` returned")
    places = block_places([row.get("name", str(index)) for index, row in enumerate(rows)])
    measured = len({place.layer for place in places})
    if layers is not None and measured != layers:
        raise ValueError(f"the figures of sparsity are of {measured} layers, the model has {layers}; measure it again")
    known, about = all(row.get("unions") for row in (sparsity, *rows)), ""
    runs = sorted(sparsity["unions"], key=int) if known else []
    if known:
        run = runs[len(runs) // 2]
        about = f" The union of {run} tokens is the share of neurons that at least one of {run} neighbouring tokens "
        about += "activates."
    layers_table = markdown_table(
        ["layer", "active neurons per token (L0)", "of", "density", *([unions_head(runs)] if known else []), "dead"],
        [
            [
                *(name, f"{row['l0']:.1f}", row.get("intermediate_size", ""), percent(row["density"])),
                *([unions_cell(row["unions"], runs)] if known else []),
                percent(row["dead"]),
            ]
            for name, row in (
                *((place.label, row) for place, row in zip(places, rows, strict=True)),
                ("mean", sparsity),
            )
        ],
    )
    return f"## Sparsity\n\n{sparsity.get('where') or _where(sparsity, earlier)}{about}\n\n{layers_table}\n"


def _where(sparsity: Mapping, earlier: str) -> str:
    files = ", ".join(f"`{Path(str(name)).name}`" for name in sparsity.get("files") or ())
    partial = ", reading only part of it" if sparsity.get("partial") else ""
    of = f" of {files}" if files else ""
    return f"Measured on {sparsity['tokens']:,} tokens{of}{partial}{earlier}."


def is_repo(name: object) -> TypeGuard[str]:
    """Whether a name can be that of a model on the Hub, and is no folder here."""
    return isinstance(name, str) and REPO_ID.fullmatch(name) is not None and not Path(name).exists()


def _link(name: str | None) -> str | None:
    # A folder's path means nothing to others, and tells them of this machine.
    return f"[{name}](https://huggingface.co/{name})" if is_repo(name) else None
