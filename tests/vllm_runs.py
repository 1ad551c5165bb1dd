"""Runs engines one after the other, in the environment that has vLLM: `python vllm_runs.py PIPE`.

The pipe, a file descriptor, brings lists of `{"model": path, "options": LLM's, "calls": [...]}`; a call has the
`prompts` (lists of ids), and at will `new_tokens`, `logprobs`, `lora` or `reload` (paths). For each list one of what
came out goes back: `{"lines", "blocks", "activations", "norms", "calls"}`, or `{"error"}`.
"""

import contextlib
import gc
import logging
import sys
from multiprocessing.connection import Connection

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

OPERATORS = ("hf_twell_vllm::ffn", "hf_twell_vllm::quantized_ffn", "hf_twell::infer")


@contextlib.contextmanager
def kept_lines():
    """What the plugin logs; by a filter, as vLLM takes handlers away when it sets up its own."""
    lines, logger = [], logging.getLogger("vllm.hf_twell")

    def keep(record) -> bool:
        lines.append(record.getMessage())
        return True

    logger.addFilter(keep)
    yield lines
    logger.removeFilter(keep)


def decoder(model):
    """Of a model that sees, the text model's."""
    return getattr(model, "language_model", model).model


def blocks(model) -> list[str]:
    return [type(block(layer)).__name__ for layer in decoder(model).layers]


def activations(model) -> list[str]:
    return [type(getattr(block(layer), "act_fn", None)).__name__ for layer in decoder(model).layers]


def block(layer):
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe  # Mixtral's


def norms(model) -> list[str]:
    """Of the norms of every layer, and of the last."""
    layers = decoder(model).layers
    each = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    return [type(norm).__name__ for norm in (*each, decoder(model).norm)]


def call(llm, prompts, new_tokens=8, logprobs=False, lora=None, reload=None) -> dict:
    """`tokens` of every prompt, and by operator of ours the token counts it was called with (`rows`).

    With logprobs, also the log-probability of each prompt's tokens from the second on, in nats.
    """
    if reload:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
    sampling = SamplingParams(
        max_tokens=new_tokens, temperature=0, ignore_eos=True, prompt_logprobs=0 if logprobs else None
    )
    request = LoRARequest("adapter", 1, lora) if lora else None
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, lora_request=request)
    rows = {name: set() for name in OPERATORS}
    for event in profile.events():
        if event.name in rows:
            rows[event.name].add(event.input_shapes[0][0])
    result = {"tokens": [list(output.outputs[0].token_ids) for output in done]}
    result["rows"] = {name: sorted(counts) for name, counts in rows.items()}
    result["cached"] = [output.num_cached_tokens for output in done]
    if logprobs:
        pairs = [zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True) for output in done]
        result["logprobs"] = [[step[token].logprob for token, step in each] for each in pairs]
    return result


def run(model, options, calls) -> dict:
    llm = None
    try:
        with kept_lines() as lines:
            llm = LLM(model, max_model_len=256, skip_tokenizer_init=True, **options)
        result = {"lines": lines}
        result["blocks"], result["activations"] = llm.apply_model(blocks)[0], llm.apply_model(activations)[0]
        result["norms"] = llm.apply_model(norms)[0]
        result["calls"] = [call(llm, **arguments) for arguments in calls]
        return result
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send([run(**each) for each in pipe.recv()])
