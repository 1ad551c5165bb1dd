"""Models of Transformers whose feed-forward blocks compute ReLU, where the stock config's `hidden_act` cannot say so.

It also means other layers, or engines pass it over: vLLM computes SiLU in the experts of most mixtures. So such a model
has a `model_type` of its own, "twell_" before the stock one, and its config is the stock one with `ffn_act` beside it.
A copy of this file lies beside its weights and needs Transformers alone:

    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)

Without that, Transformers and other engines refuse the unknown type and do not compute another activation in silence.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

if TYPE_CHECKING:  # what the mixins are put before
    from transformers import PreTrainedConfig as StockConfig
    from transformers import PreTrainedModel as StockModel
else:
    StockConfig = StockModel = object

PREFIX, FILE = "twell_", "modeling_twell.py"

# By stock `model_type`: where the text decoder's layers have the activations of their feed-forward blocks. A layer has
# those of the places that it has: some of a model's layers may be dense and others mixtures of experts.
MLP, EXPERTS = "mlp.act_fn", ("mlp.experts.act_fn", "mlp.shared_expert.act_fn")
DEEPSEEK = (MLP, "mlp.experts.act_fn", "mlp.shared_experts.act_fn")
LLAMA4 = tuple(f"feed_forward.{act}" for act in ("activation_fn", "experts.act_fn", "shared_expert.activation_fn"))
GRANITE = ("block_sparse_moe.experts.act_fn", "shared_mlp.activation")
ACTIVATIONS = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe"), DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "cohere2_moe", "dots1", "afmoe"), DEEPSEEK),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), GRANITE),
    **dict.fromkeys(("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"), (MLP, *EXPERTS)),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "qwen3_vl_moe", "qwen3_vl_moe_text"), (MLP, *EXPERTS)),
    "hunyuan_v1_moe": (MLP, "mlp.experts.act_fn", "mlp.shared_mlp.act_fn"),
    "falcon_h1": ("feed_forward.act_fn",),
    "gemma4": (MLP, "experts.act_fn"),
    "gemma4_text": (MLP, "experts.act_fn"),
    **dict.fromkeys(("llama4", "llama4_text"), LLAMA4),
    "olmo_hybrid": (MLP,),
    "qwen3_5": (MLP,),
    "qwen3_5_moe": EXPERTS,
    "qwen3_5_moe_text": EXPERTS,
    "qwen3_5_text": (MLP,),
    "qwen3_next": (MLP, *EXPERTS),
}
HEADS = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForMultimodalLM": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "AutoModelForPreTraining": modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTextEncoding": modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


class TwellConfig(StockConfig):
    """Mixin put before a stock config class; it takes a stock config's settings."""

    def __post_init__(self, **settings: Any) -> None:
        settings.pop("model_type", None)
        super().__post_init__(**settings)
        if "twell" in settings:  # AutoModelForCausalLM takes the text model's config alone of one that sees
            self.get_text_config().twell = settings["twell"]
        register_models(type(self))

    @classmethod
    def get_config_dict(cls, *path: Any, **options: Any) -> tuple[dict, dict]:
        """Of a checkpoint of the stock type, too, without Transformers' warning of another type."""
        settings, options = super().get_config_dict(*path, **options)
        for part in (settings, *(value for value in settings.values() if isinstance(value, dict))):
            if part.get("model_type") == cls.model_type.removeprefix(PREFIX):
                part["model_type"] = cls.model_type
        return settings, options

    def save_pretrained(self, save_directory: str | os.PathLike, **options: Any) -> None:
        names = {head: cls.__name__ for head, cls in heads(self.model_type.removeprefix(PREFIX)).items()}
        names["AutoConfig"] = type(self).__name__
        # Of what wraps a model's class or holds the model, too: by a stock name an engine would compute `hidden_act`.
        stock: list[str] = vars(self).get("architectures") or []
        self.architectures = [f"Twell{name.removeprefix('Twell')}" for name in stock]
        self.auto_map = {head: f"{FILE.removesuffix('.py')}.{name}" for head, name in names.items()}
        code = Path(__file__).read_bytes()  # which may be the file that is written
        os.makedirs(save_directory, exist_ok=True)
        Path(save_directory, FILE).write_bytes(code)
        super().save_pretrained(save_directory, **options)


class TwellBlocks(StockModel):
    """Mixin put before a stock model class."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        text_config = config.get_text_config()
        if text_config.ffn_act not in ACT2FN:
            raise ValueError(f"ffn_act is {text_config.ffn_act!r}; allowed are {', '.join(ACT2FN)}")
        engine = str(text_config._attn_implementation)
        if engine.startswith(("vllm", "sglang")):  # which replaces parts by its own
            raise ValueError(
                f"{type(self).__name__} does not run in {engine}, which may compute SiLU in place of its ReLU; in vLLM "
                "leave out --trust-remote-code and --model-impl, and install hf_twell beside it"
            )
        super().__init__(config, *args, **options)
        paths = ACTIVATIONS[text_config.model_type.removeprefix(PREFIX)]
        for layer in decoder_of(self).layers:
            for path in {name for name, _ in layer.named_modules()}.intersection(paths):
                layer.set_submodule(path, ACT2FN[text_config.ffn_act])

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Tensors may have the names of a checkpoint, too, where an expert has its own: `Trainer` passes those of its
        files when it resumes and when it loads the best one, and would leave all of another name as they are."""
        if not state_dict.keys() <= self.state_dict().keys():
            loaded, about = type(self).from_pretrained(
                None, config=self.config, state_dict=dict(state_dict), output_loading_info=True
            )
            unknown = {name: state_dict[name] for name in about["unexpected_keys"]}
            state_dict = {name: of for name, of in loaded.state_dict().items() if name not in about["missing_keys"]}
            state_dict |= unknown
        return super().load_state_dict(state_dict, *args, **options)

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # what initializes the weights is the stock class's; of custom code Transformers leaves some out


@functools.cache
def twell_class(stock: Any) -> Any:
    """What takes the place of a stock class, a config's or a model's: always the same one for the same class."""
    name = f"Twell{stock.__name__}"
    about = f"`{stock.__name__}` with an activation of its own, `ffn_act`, in the feed-forward blocks."
    body: dict[str, Any] = {"__module__": __name__, "__qualname__": name, "__doc__": about}
    if not issubclass(stock, PreTrainedConfig):
        return type(name, (TwellBlocks, stock), body | {"config_class": twell_class(stock.config_class)})
    body["model_type"] = PREFIX + stock.model_type
    text = stock.sub_configs.get("text_config")
    if text is None:
        body |= {"ffn_act": "relu", "__annotations__": {"ffn_act": str}}
    else:  # Transformers 5.23 has the parts of a config under a new name
        key = "sub_configs_defaults" if hasattr(stock, "sub_configs_defaults") else "sub_configs"
        body[key] = {**getattr(stock, key), "text_config": twell_class(text)}
    _convert_weights_alike(stock.model_type)
    return type(name, (TwellConfig, stock), body)


def decoder_of(model: Any) -> Any:
    """The text decoder of a model, or the model itself where it has no other."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    # Llama4ForCausalLM takes itself for its decoder.
    return decoder if hasattr(decoder, "layers") else getattr(decoder, "model", decoder)


def heads(model_type: str) -> dict[str, Any]:
    """Our model classes for a config of a stock `model_type`, by the Auto class that loads each."""
    classes = ((head, getattr(transformers, names.get(model_type, ""), None)) for head, names in HEADS.items())
    return {head: twell_class(cls) for head, cls in classes if cls is not None}


def register() -> None:
    """Let Transformers know these models in this process, without code from a checkpoint."""
    for model_type in ACTIVATIONS:
        config = twell_class(getattr(transformers, CONFIG_MAPPING_NAMES[model_type]))
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)


def register_models(config: Any) -> None:
    """Let the Auto classes make models of a config's class: once there is such a config, as to import all is slow."""
    for head, cls in heads(config.model_type.removeprefix(PREFIX)).items():
        # Not by the Auto class itself: of one that sees it may take the text model, whose config is another.
        getattr(transformers, head)._model_mapping.register(config, cls, exist_ok=True)


def _convert_weights_alike(model_type: str) -> None:
    """What Transformers changes of the stock type's tensors when it loads and saves them holds for this type too."""
    conversions = get_checkpoint_conversion_mapping(model_type)
    if conversions is not None:
        register_checkpoint_conversion_mapping(PREFIX + model_type, conversions, overwrite=True)


def __getattr__(name: str) -> type:
    stock = getattr(transformers, name.removeprefix("Twell"), None) if name.startswith("Twell") else None
    if not isinstance(stock, type) or not issubclass(stock, PreTrainedConfig | nn.Module):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return twell_class(stock)
