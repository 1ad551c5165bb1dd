"""A model's linears in 8 bits, as compressed-tensors stores them: for vLLM, which takes torchao's in another way."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

# What the config says of the values, the largest of them, and its name of the format.
KINDS = {
    "int8": (torch.int8, 127, {"num_bits": 8, "type": "int", "symmetric": True}, "int-quantized"),
    "fp8": (torch.float8_e4m3fn, 448, {"num_bits": 8, "type": "float", "symmetric": True}, "float-quantized"),
}


def quantize_folder(
    model: PreTrainedModel, folder: str | Path, kind: str, part: str = "_proj", ignore: tuple[str, ...] = ("lm_head",)
) -> None:
    """Quantize the stock checkpoint of `model` in `folder` to "int8" or "fp8" (e4m3): one scale for each row, tokens
    quantized as they come, of the linears with `part` in their names; `ignore` names the others as compressed-tensors
    does. Formula: scale_n = max_k |w_nk| / 127 (fp8: 448), in w's dtype; value_nk = w_nk / scale_n, rounded."""
    folder, state = Path(folder), {}
    dtype, largest, numbers, form = KINDS[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if part in name and name.endswith(".weight"):
            scale = (tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / largest).to(tensor.dtype)
            values = tensor.float() / scale.float()
            values = (values.round() if kind == "int8" else values).clamp(-largest, largest)
            state[f"{name}_scale"] = scale.cpu()
            tensor = values.to(dtype)
        state[name] = tensor.cpu().clone()
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
