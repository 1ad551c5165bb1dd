"""Patched models on a GPU: prefill, generation, compilation, adapters, and the memory order of down_proj."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import hf_twell
from hf_twell.blocks import calls as block_calls
from hf_twell.blocks.calls import store_density
from hf_twell.dispatch import limits
from hf_twell.ops import api, reference
from tests.conftest import tiny_llama
from tests.ffn_cases import relative_rms
from tests.kernels.test_cuda_kernels import pytestmark  # noqa: F401

SIZES = {"hidden_size": 64, "intermediate_size": 688, "num_hidden_layers": 2, "vocab_size": 96}


def tiny_qwen2():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **heads, initializer_range=0.2, pad_token_id=0))


MODELS = {"llama": lambda: tiny_llama(**SIZES), "qwen2": tiny_qwen2}


def sparse_model(name="llama", dtype=torch.bfloat16, backend="cuda"):
    """Three percent of its neurons are active: half of those whose gate is not all zero."""
    model = MODELS[name]().eval()
    for layer in model.model.layers:
        gate = layer.mlp.gate_proj.weight.data
        gate[torch.rand(len(gate)) < 0.94] = 0
    return hf_twell.sparsify(model.to("cuda", dtype), backend=backend)


def first_block_and_input():
    block = sparse_model(backend="auto").model.layers[0].mlp
    return block, torch.randn(2, 50, 64, device="cuda", dtype=torch.bfloat16)


def on_reference(model, dtype=None):
    model = copy.deepcopy(model)
    for block in model.modules():
        if hasattr(block, "twell"):
            block.twell.backend = "reference"
    return model if dtype is None else model.to(dtype)


def tokens_of(*shape):
    return torch.randint(1, 96, shape, generator=torch.Generator().manual_seed(3)).to("cuda")


def watch(monkeypatch) -> list:
    """One entry for each call of the kernels from now on, and a failure where one falls back to plain PyTorch."""
    calls, fused = [], api.ffn
    monkeypatch.setattr(api, "ffn", lambda *args, **options: calls.append(1) or fused(*args, **options))
    monkeypatch.setattr(block_calls, "repeat", lambda block, x: None)  # which goes past it
    monkeypatch.setattr(reference, "ffn", lambda *args, **options: pytest.fail("the reference ran"))
    return calls


def assert_logits_as_good(ours, model, tokens, first=0):
    """From the `first` token on, at most twice the error of the reference backend in the same dtype against fp32."""
    with torch.no_grad():
        eager, truth = (on_reference(model, dtype)(tokens).logits[:, first:] for dtype in (None, torch.float32))
    assert relative_rms(ours, truth) <= 2 * relative_rms(eager, truth)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_prefill(name, dtype, monkeypatch):
    model = sparse_model(name, dtype)
    calls = watch(monkeypatch)
    for shape in [(1, 1), (2, 40), (8, 120), (40, 120)]:
        assert_logits_as_good(model(tokens_of(*shape)).logits, model, tokens_of(*shape))
    assert len(calls) == 2 * 4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_generation_with_a_static_cache(name, batch, monkeypatch):
    model, prompt, new = sparse_model(name), tokens_of(batch, 12), 8
    calls = watch(monkeypatch)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
    out = model.generate(prompt, **options, disable_compile=True, return_dict_in_generate=True, output_logits=True)
    assert len(calls) == 2 * new
    ours = torch.stack(out.logits, 1)
    assert torch.equal(ours.argmax(-1)[:, 0], out.sequences[:, 12])
    assert_logits_as_good(ours, model, out.sequences[:, :-1], first=11)


def test_generation_compiled_as_transformers_does_it():
    """A static cache on a GPU makes Transformers compile the decoding step into CUDA graphs."""
    torch._dynamo.reset()
    model, prompt = sparse_model(), tokens_of(2, 12)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    out = model.generate(prompt, **options, return_dict_in_generate=True, output_logits=True)
    again = model.generate(prompt, **options)
    assert torch.equal(out.sequences, again)
    assert_logits_as_good(torch.stack(out.logits, 1), model, out.sequences[:, :-1], first=11)


@torch.no_grad()
def test_a_compiled_model_has_no_breaks():
    torch._dynamo.reset()
    model, tokens = sparse_model(), tokens_of(2, 40)
    model(tokens)
    compiled = torch.compile(model, fullgraph=True)
    assert_logits_as_good(compiled(tokens, use_cache=False).logits, model, tokens)


LARGE = {  # matrices so large that a density above 55 % is too much for kernels even at one token
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.035,
}


def with_stored_density(model, density):
    """The same model, as if it had been measured so."""
    model.config.twell = model.config.twell | {"density": [density] * model.config.num_hidden_layers}
    return hf_twell.sparsify(model)


def runs_kernels(call) -> bool:
    """Whether the profiler sees our operator or our kernels, a CUDA graph's too."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return any("twell" in event.key for event in profiler.key_averages())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(("density", "kernels"), [(0.6, False), (0.005, True)])
@torch.no_grad()
def test_a_compiled_model_goes_by_its_stored_density(density, kernels, mode):
    torch._dynamo.reset()
    model = tiny_llama(**SIZES | LARGE).eval().to("cuda", torch.bfloat16)
    model = with_stored_density(hf_twell.sparsify(model), density)
    plain = on_reference(model)
    compiled, compiled_plain = (torch.compile(each, fullgraph=True, mode=mode) for each in (model, plain))
    for tokens in (1024, 64, 1):
        ids = tokens_of(1, tokens)
        for _ in range(3):  # a CUDA graph is recorded in the second call
            y, _ = (each(ids, use_cache=False).logits.clone() for each in (compiled, compiled_plain))
        assert_logits_as_good(y, model, ids)  # two compiled models may differ in the last bit, plain or not
        for each, expected in ((compiled, kernels), (compiled_plain, False)):
            assert runs_kernels(lambda each=each, ids=ids: each(ids, use_cache=False)) == expected, tokens


@pytest.mark.parametrize(
    ("density", "graphs", "at"),  # `at`: the numbers of tokens at which kernels run
    [(0.005, 3, {200, 300, 64, 20, 1, 100, 30}), (0.1, 4, {64, 20, 1, 30})],
)
@torch.no_grad()
def test_a_compiled_block_makes_a_graph_for_each_answer(density, graphs, at):
    """One for the first number of tokens, one for others, one for a single token; and where the answer is another."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = with_stored_density(sparse_model(backend="auto"), density).model.layers[0].mlp
    compiled = torch.compile(block, fullgraph=True)
    for tokens in (200, 300, 64, 20, 1, 100, 30, 200, 64):
        x = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16)
        compiled(x)
        assert runs_kernels(lambda x=x: compiled(x)) == (tokens in at), tokens
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize(("tokens", "graphs"), [(20, 1), (200, 2)])
@torch.no_grad()
def test_compiled_blocks_share_a_graph_where_they_go_the_same_way(tokens, graphs):
    """Though at other numbers of tokens they go other ways."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = sparse_model(backend="auto")
    model.config.twell = model.config.twell | {"density": [0.005, 0.1]}
    for layer in hf_twell.sparsify(model).model.layers:
        x = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16)
        torch.compile(layer.mlp, fullgraph=True, dynamic=False)(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@torch.no_grad()
def test_a_compiled_block_that_is_asked_for_kernels_or_knows_no_density_takes_them():
    for backend, density in (("cuda", 0.6), ("auto", None)):
        torch._dynamo.reset()
        model = sparse_model(backend=backend)
        store_density([model.model.layers[0].mlp], density and [density] * 2)
        compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True)
        x = torch.randn(1, 200, 64, device="cuda", dtype=torch.bfloat16)
        compiled(x)
        assert runs_kernels(lambda compiled=compiled, x=x: compiled(x))


@torch.no_grad()
def test_a_forward_never_waits_for_the_device():
    block, x = first_block_and_input()
    api.resolve("auto", "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        block(x)
        assert block.down_proj.weight.stride() == (1, 64)
        block(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_down_proj_lies_by_columns_in_evaluation_only():
    block, x = first_block_and_input()
    weight, values = block.down_proj.weight, block.down_proj.weight.detach().clone()
    with torch.inference_mode():
        block(x)
    assert block.down_proj.weight is weight
    assert weight.stride() == (1, 64)
    assert torch.equal(weight, values)
    assert not weight.is_inference()
    block.train()
    block(x).sum().backward()
    assert weight.stride() == weight.grad.stride() == (688, 1)
    assert torch.equal(weight, values)


@pytest.mark.parametrize("warm", [True, False])
def test_a_captured_graph_keeps_its_weights(warm):
    """Whatever runs after the capture, the weight's memory may not move under the graph."""
    block, x = first_block_and_input()
    with torch.no_grad():  # CUDA loads kernels at their first use, which a capture forbids
        sparse_model().model.layers[1].mlp(x)
    if warm:
        with torch.no_grad():
            block(x)
    strides, graph = block.down_proj.weight.stride(), torch.cuda.CUDAGraph()
    assert (strides == (1, 64)) == warm
    with torch.no_grad(), torch.cuda.graph(graph):
        y = block(x)
    graph.replay()
    first = y.clone()
    with torch.no_grad():
        block(x)
    block.train()
    block(x).sum().backward()
    block.zero_grad()
    assert block.down_proj.weight.stride() == strides
    spoil = [torch.full((688 * 64,), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(50)]
    graph.replay()
    assert torch.equal(y, first)
    del spoil


@torch.no_grad()
def test_weights_merged_into_after_a_forward_count():
    peft = pytest.importorskip("peft")
    model, tokens = sparse_model(), tokens_of(2, 40)
    before = model(tokens).logits
    config = peft.LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(model, config).merge_and_unload()
    after = merged(tokens).logits
    assert_logits_as_good(after, merged, tokens)
    assert relative_rms(before, after) > 0.01


def test_training_takes_the_reference():
    block, x = first_block_and_input()
    same = on_reference(block.train())
    for each in (block, same):
        each(x).float().square().sum().backward()
    for mine, theirs in zip(block.parameters(), same.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@torch.no_grad()
def test_a_dense_block_moves_to_plain_matmuls(monkeypatch):
    """Once a sample of its density has arrived, and back when it is sparse again; never in deterministic mode."""
    monkeypatch.setitem(limits.read(), "kCudaSampleCalls", 2)
    block = hf_twell.sparsify(MODELS["llama"]().eval().to("cuda", torch.bfloat16)).model.layers[0].mlp
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    calls = watch(monkeypatch)

    def took_kernels():
        before = len(calls)
        y = block(x)
        torch.cuda.synchronize()
        return len(calls) > before, y

    torch.cuda._sleep(100_000_000)  # 50 ms: the sample cannot have arrived when the call asks for it
    assert took_kernels()[0]  # nothing is known yet
    kernels, y = took_kernels()
    assert not kernels
    assert torch.equal(y, on_reference(block)(x))
    torch.use_deterministic_algorithms(True)
    try:
        assert took_kernels()[0]
    finally:
        torch.use_deterministic_algorithms(False)
    block.gate_proj.weight.zero_()
    assert [took_kernels()[0] for _ in range(4)][-1]
    assert copy.deepcopy(block).twell_state.recent.density is None


@torch.no_grad()
def test_many_tokens_go_by_what_neighbours_share(monkeypatch):
    block = hf_twell.sparsify(MODELS["llama"]().eval().to("cuda", torch.bfloat16)).model.layers[0].mlp
    x = torch.randn(2048, 64, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = 8
    gate, recent, calls = block.gate_proj.weight, block.twell_state.recent, watch(monkeypatch)

    def took_kernels(x):
        recent.look_in = before = 0  # the next call looks
        for _ in range(3):
            before = len(calls)
            block(x)
            torch.cuda.synchronize()
        return len(calls) > before

    gate.zero_()
    gate[:, 0] = -1
    gate[::5, 0] = 1
    assert took_kernels(x)
    assert (recent.density, recent.union) == pytest.approx((0.2, 0.2), abs=0.01)
    gate[:, 0] = 1
    took_kernels(x[:1])
    assert recent.union is None, "it was of other inputs than these"
    gate.normal_()
    gate[:, 0] = -1.9
    assert not took_kernels(x)
    assert recent.density < 0.06
    assert recent.union > 0.9


@torch.no_grad()
def test_a_later_call_is_the_first_one_again():
    """Without asking again what the last call found out, until something has changed."""
    block = hf_twell.sparsify(MODELS["llama"]().eval().to("cuda", torch.bfloat16)).model.layers[0].mlp
    x = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
    first = block(x)
    torch.cuda.synchronize()
    assert torch.equal(block(x), first)  # which finds the sample
    assert block.twell_state.recent.look_in > 0
    assert torch.equal(block_calls.repeat(block, x), first)
    block.up_proj.register_forward_hook(lambda *_: None)
    assert block_calls.repeat(block, x) is None
