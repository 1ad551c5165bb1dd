"""`hf-twell inspect`: its figures against a brute-force count, its files, and what it says when something is wrong."""

import copy
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2MoeForCausalLM

import hf_twell
from hf_twell.blocks.architectures import find_ffns
from hf_twell.cli import main
from hf_twell.cli.inspect import _asked_to_stop
from hf_twell.files.text import read_documents
from hf_twell.inspection.inspecting import inspect_text
from hf_twell.inspection.passages import read_pieces, windows
from hf_twell.inspection.places import LISTED_COUNT, readable
from hf_twell.inspection.report.findings import savings_sentence
from hf_twell.inspection.savings import IF_DENSITIES, ffn_savings, predicted_share
from tests.conftest import one_of, shared_path, started
from tests.mixtures import MIXTURES
from tests.paths import DEMO, HELDOUT, ROOT


@pytest.fixture(scope="module")
def relu_demo():
    """The demo model with ReLU, in stock form."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    return hf_twell.unpatch(hf_twell.sparsify(model)).eval()


@pytest.fixture(scope="module")
def relu_folder(relu_demo, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("relu")
    relu_demo.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path) -> Path:
    """Two short documents and a long one."""
    documents = read_documents(HELDOUT)
    path = tmp_path / "text.txt"
    long = "\n\n".join(documents)[2000:11000]
    path.write_text("\n<|endoftext|>\n".join([documents[0][:90], long, documents[2][:400]]) + "\n")
    return path


@pytest.mark.parametrize("command", one_of("sparsify", ["inspect", "sparsify"]))
def test_no_figures_from_a_model_that_overflows(command, relu_demo, tokenizer, text, tmp_path, capsys):
    """Infinite and NaN neurons would count as active, and NaN is no JSON."""
    model = copy.deepcopy(relu_demo).half()
    for linear in (model.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.gate_proj):
        linear.weight.data *= 3000
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    output = [str(tmp_path / "out")] if command == "sparsify" else ["--html", str(tmp_path / "out")]
    assert main([command, str(tmp_path / "model"), *output, "--text", str(text)]) == 1
    printed = capsys.readouterr()
    assert "model.layers.1.mlp: h is not finite" in printed.err.splitlines()[-1]
    assert not printed.out
    assert not (tmp_path / "out").exists()


def test_blocks_of_a_mixture_are_named_by_their_layer(tokenizer, text, tmp_path, capsys):
    """A layer may have two: routed experts, and a shared one."""
    torch.manual_seed(0)
    config = MIXTURES["qwen2_moe"][1]()
    config.vocab_size = len(tokenizer)
    model = Qwen2MoeForCausalLM(config)
    with torch.no_grad():  # none of its neurons fires
        model.model.layers[1].mlp.shared_expert.gate_proj.weight[:] = 0
    hf_twell.sparsify(model).save_pretrained(tmp_path / "sparse")
    tokenizer.save_pretrained(tmp_path / "sparse")
    files = [*("--html", str(tmp_path / "page.html")), *("--output", str(tmp_path / "figures.json"))]
    assert main(["inspect", str(tmp_path / "sparse"), "--text", str(text), "--tokens", "300", *files]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    blocks = ["0 experts", "0 shared_expert", "1 experts", "1 shared_expert"]
    layers = json.loads((tmp_path / "figures.json").read_text())["layers"]
    assert [layer["label"] for layer in layers] == blocks
    for block in blocks:
        assert re.search(rf"^\W*{block}\b", printed, re.MULTILINE), "a row of the table"
    assert re.findall(r'<option value="\d">layer (.*?)</option>', page) == blocks
    assert "layer 1 shared_expert sparsest (0 %)" in printed
    assert "1 of 4 blocks are mostly dead. More than half of the neurons of blocks 1 shared_expert nev" in printed
    for told in (printed, page):
        assert not re.search(r"layer [23]\b", told)
    assert "TwellQwen2MoeForCausalLM, 2 layers" in page


@torch.no_grad()
def brute_force(model, tokenizer, path, context) -> dict:
    """L0 of every token of every layer, one window at a time: no batches, no padding, no streaming."""
    sites, ids, places, l0 = find_ffns(model), [], [], [[] for _ in find_ffns(model)]
    for document in read_documents(path):
        rest = tokenizer(document, add_special_tokens=False)["input_ids"]
        for at in range(0, len(rest), context - 1):
            window = [tokenizer.bos_token_id, *rest[at : at + context - 1]]
            seen = []
            hooks = [
                site.linear("down").register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0][0]))
                for site in sites
            ]
            model(torch.tensor([window]))
            for hook in hooks:
                hook.remove()
            ids += window
            places += range(len(window))
            for layer, h in enumerate(seen):
                l0[layer] += (h != 0).sum(1).tolist()
    return {"ids": torch.tensor(ids), "places": torch.tensor(places), "l0": torch.tensor(l0, dtype=torch.float64)}


def test_against_a_brute_force_count(relu_demo, tokenizer, text):
    result = inspect_text(relu_demo, tokenizer, [text], context=64, batch_tokens=320)
    truth = brute_force(relu_demo, tokenizer, text, 64)
    l0, places, ids = truth["l0"], truth["places"], truth["ids"]
    assert result["tokens"] == len(ids)
    # Batches add in another order, so a gate a rounding away from zero may open or close.
    close = {"abs": 0.02}
    for layer, values in zip(result["layers"], l0, strict=True):
        assert layer["l0"] == pytest.approx(values.mean().item(), **close)
        assert layer["l0_quantiles"]["max"] == pytest.approx(values.max().item(), abs=2)
    assert sum(row["tokens"] for row in result["positions"]) == len(ids)
    assert result["positions"][-1]["last"] == 63
    for row in result["positions"]:
        inside = (places >= row["first"]) & (places <= row["last"])
        assert row["tokens"] == inside.sum()
        assert row["l0"] == pytest.approx(l0[:, inside].mean(1).tolist(), abs=0.5)
    counts = torch.bincount(ids)
    items = {item["id"]: item for which in ("quietest", "busiest") for item in result["vocabulary"][which]}
    for id_, item in items.items():
        assert item["count"] == counts[id_] >= LISTED_COUNT
        assert item["l0"] == pytest.approx(l0[:, ids == id_].mean().item(), abs=0.5)
        assert item["text"] == tokenizer.decode([id_])
    listed = [id_ for id_ in counts.nonzero().flatten().tolist() if counts[id_] >= LISTED_COUNT]
    means = {id_: l0[:, ids == id_].mean().item() for id_ in listed}
    assert result["vocabulary"]["quietest"][0]["l0"] == pytest.approx(min(means.values()), abs=0.5)
    assert result["vocabulary"]["busiest"][0]["l0"] == pytest.approx(max(means.values()), abs=0.5)
    for row in result["vocabulary"]["by_count"]:
        inside = (counts[ids] >= row["first"]) & (counts[ids] <= row["last"])
        assert row["tokens"] == inside.sum()
        assert row["l0"] == pytest.approx(l0[:, inside].mean().item(), abs=0.5)
    assert result["vocabulary"]["seen"] == (counts > 0).sum()
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_the_passage_is_the_models_own(relu_demo, tokenizer, text):
    result = inspect_text(relu_demo, tokenizer, [text], context=200)
    passage = result["passage"]
    ids = tokenizer("".join(passage["text"]), add_special_tokens=False, return_tensors="pt")["input_ids"]
    report = hf_twell.measure_sparsity(relu_demo, [ids])
    assert ids.shape[1] == len(passage["text"]) == 160
    for layer, values in zip(report["layers"], passage["l0"], strict=True):
        assert sum(values) / len(values) == pytest.approx(layer["l0"], abs=0.1)


def test_a_dense_model_says_so(tokenizer, text):
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    result = inspect_text(model, tokenizer, [text])
    assert not result["sparse"]
    assert result["density"] == pytest.approx(1, abs=0.001)
    assert result["activation"] == "silu"
    for layer in result["layers"]:
        assert 0.1 < layer["magnitude_share"]["10%"] < 1
        assert 1 < layer["effective_neurons"] < 1024
    ranked = [item["effective_neurons"] for item in result["vocabulary"]["busiest"]]
    assert ranked == sorted(ranked, reverse=True)
    savings = ffn_savings(model, torch.arange(3, 40)[None], result["layers"])
    assert {row[which]["path"] for row in savings["layers"] for which in ("decode", "prefill")} == {"dense"}
    assert savings["total"]["decode"]["speedup"] == 1


@pytest.mark.slow
def test_the_model_stays_as_it_was(relu_demo, tokenizer, text):
    relu_demo.train()
    before = {name: value.clone() for name, value in relu_demo.state_dict().items()}
    kinds = [type(module) for module in relu_demo.modules()]
    result = inspect_text(relu_demo, tokenizer, [text])
    ffn_savings(relu_demo, torch.arange(3, 40)[None], result["layers"], measure=True, rounds=1)
    assert [type(module) for module in relu_demo.modules()] == kinds
    assert all(module.training for module in relu_demo.modules())
    assert not any(module._forward_pre_hooks for module in relu_demo.modules())
    for name, value in relu_demo.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.is_contiguous()
    relu_demo.eval()


@pytest.mark.slow
def test_measured_savings(relu_demo):
    model, ids = copy.deepcopy(relu_demo), torch.arange(3, 200)[None]
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data[torch.arange(1024) % 16 > 0] = 0  # sparse enough for kernels in both passes
    layers = hf_twell.measure_sparsity(model, [ids])["layers"]
    predicted = ffn_savings(model, ids, layers)
    measured = ffn_savings(model, ids, layers, measure=True, rounds=2)
    if measured["backend"] == "reference":
        pytest.skip("no compiled backend works on this machine")
    assert (predicted["measured"], measured["measured"]) == (False, True)
    # Kernels add in another order, so a difference of nothing at all would be that of the same blocks.
    assert all(0 < row["difference"] < 1e-5 for row in measured["layers"])
    for which in ("decode", "prefill"):
        assert all(row[which]["sparse_ms"] != row[which]["dense_ms"] for row in measured["layers"])
    for savings in (predicted, measured):
        assert savings["tokens"] == {"decode": 1, "prefill": 197}
        for which in ("decode", "prefill"):
            total = savings["total"][which]
            assert total["dense_ms"] == pytest.approx(sum(row[which]["dense_ms"] for row in savings["layers"]))
            assert total["speedup"] == total["dense_ms"] / total["sparse_ms"]
    assert [row["measured"] for row in measured["if_density"]] == [True] * 5
    assert [row["measured"] for row in predicted["if_density"]] == [False] * 5


def test_savings_are_of_the_layers_that_are_sparse(relu_demo):
    """As saved; the others stay dense."""
    model = hf_twell.unpatch(hf_twell.sparsify(copy.deepcopy(relu_demo), layers=[0, 2]))
    layers = hf_twell.measure_sparsity(model, [torch.arange(3, 99)[None]])["layers"]
    layers = [{**layer, "density": 0.001} for layer in layers]
    savings = ffn_savings(model, torch.arange(3, 99)[None], layers)
    if savings["backend"] == "reference":
        pytest.skip("no compiled backend works on this machine")
    for which in ("decode", "prefill"):
        assert [row[which]["path"] for row in savings["layers"]] == ["sparse", "dense", "sparse", "dense"]
        assert all(row[which]["sparse_ms"] == row[which]["dense_ms"] for row in savings["layers"][1::2])


def test_predictions_are_the_formulas(relu_demo):
    """The share of the dense time and 0.025 ms a call, of each layer's own time and density, and never a loss."""
    layers = [{"density": density} for density in (0.001, 0.01, 0.1, 0.9)]
    savings = ffn_savings(relu_demo, torch.arange(3, 200)[None], layers)
    if savings["backend"] != "cpu":
        pytest.skip("no CPU backend works on this machine")

    def predicted(which, dense_ms, density):
        first, rest = {"decode": (0.72, 0.98), "prefill": (1.08, 7.5)}[which]
        return min(dense_ms, dense_ms * (first + rest * 2 * density) / 3 + 0.025)

    for which in ("decode", "prefill"):
        for row in savings["layers"]:
            mine = row[which]
            is_sparse = mine["path"] == "sparse"
            sparse = predicted(which, mine["dense_ms"], row["density"]) if is_sparse else mine["dense_ms"]
            assert mine["sparse_ms"] == pytest.approx(sparse)
        each = savings["total"][which]["dense_ms"] / len(layers)
        for row in savings["if_density"]:
            assert row[which] == pytest.approx(each / predicted(which, each, row["density"]))
    paths = [[row[which]["path"] for row in savings["layers"]] for which in ("decode", "prefill")]
    assert paths[0] == ["sparse"] * 4, "one token's matmuls are bound by the weights' traffic"
    assert paths[1][3] == "dense"
    assert predicted_share("decode", 0.1, "cpu", matrices=2) == pytest.approx((0.72 + 0.98 * 0.1) / 2)
    assert predicted_share("prefill", 0.1, "cuda") == pytest.approx((1 + 2 * 0.1) / 3), "the work that is left"


@pytest.mark.slow
def test_predictions_know_blocks_that_are_too_small(stories_model, monkeypatch):
    monkeypatch.undo()  # sizes as users have them
    hf_twell.unpatch(hf_twell.sparsify(stories_model))
    layers = hf_twell.measure_sparsity(stories_model, [torch.arange(3, 200)[None]])["layers"]
    for measure in (False, True):
        savings = ffn_savings(stories_model, torch.arange(3, 200)[None], layers, measure=measure, rounds=1)
        if savings["backend"] == "reference":
            pytest.skip("no compiled backend works on this machine")
        assert savings["too_small"] == ["decode", "prefill"]
        assert {row[which]["path"] for row in savings["layers"] for which in ("decode", "prefill")} == {"dense"}
        assert "keep plain matmuls in decode and prefill at any density" in savings_sentence(savings)
        if not measure:
            assert savings["total"]["decode"]["speedup"] == savings["total"]["prefill"]["speedup"] == 1
            assert all(row["decode"] == row["prefill"] == 1 for row in savings["if_density"])


def test_predictions_are_the_benchmarks():
    """The formula repeats the rows it was fitted to, within the noise of a benchmark."""
    lines = (ROOT / "kernels/twell_cpu/bench/epyc-2026-11-21/bench.jsonl").read_text().splitlines()
    rows = list(map(json.loads, lines))
    fitted = {"bench": "ffn", "dtype": "bfloat16", "pass": "forward", "processor": "AMD EPYC"}
    compared = 0
    for row in rows:
        if not fitted.items() <= row.items():
            continue
        which = {1: "decode", 1024: "prefill"}.get(row["tokens"])
        if which and row["density"] < 0.18:
            predicted = predicted_share(which, row["density"], "cpu")
            assert predicted == pytest.approx(row["sparse_ms"] / row["eager_ms"], rel=0.15)
            compared += 1
    assert compared >= 4
    assert predicted_share("prefill", 0.5, "cpu") == 1


@pytest.mark.parametrize("size", [50, 1000, 1 << 16])
@pytest.mark.parametrize("ending", ["txt", "xz"])
def test_pieces_are_the_documents(size, ending, tmp_path):
    raw = HELDOUT.read_bytes()[:30000].decode(errors="ignore").replace("\n", "\r\n" if size == 50 else "\n")
    path = tmp_path / f"text.{ending}"
    path.write_bytes(lzma.compress(raw.encode()) if ending == "xz" else raw.encode())
    documents, parts, read = [], [], []
    for piece, ends in read_pieces(path, size=size, on_bytes=read.append):
        assert len(piece) <= 2 * size
        parts.append(piece)
        if ends:
            documents.append("".join(parts))
            parts = []
    assert not parts
    assert documents == read_documents(path)
    assert sum(read) == path.stat().st_size


def test_windows_hold_every_token_once(tokenizer, text):
    expected = [tokenizer(document, add_special_tokens=False)["input_ids"] for document in read_documents(text)]
    got = list(windows(tokenizer, [text], 64))
    assert all(window[0] == tokenizer.bos_token_id and 2 <= len(window) <= 64 for window in got)
    assert [id_ for window in got for id_ in window[1:]] == [id_ for ids in expected for id_ in ids]


def test_windows_are_never_of_bos_alone(tokenizer, tmp_path):
    """A document of whole windows ends with the last of them; a mark of the bytes' order is no text."""
    path = tmp_path / "text.txt"
    path.write_text("\ufeffThe cell is small.\n<|endoftext|>\nThe cell is small.", encoding="utf-8")
    ids = tokenizer("The cell is small.", add_special_tokens=False)["input_ids"]
    assert list(windows(tokenizer, [path], 1 + len(ids))) == 2 * [[tokenizer.bos_token_id, *ids]]
    halves = list(windows(tokenizer, [path], 1 + len(ids) // 2))
    assert len(halves) == 4 + 2 * (len(ids) % 2)
    assert all(len(window) > 1 for window in halves)


def test_command(relu_folder, text, tmp_path, capsys, run_json):
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    command = ["inspect", str(relu_folder), "--text", str(text), "--html", str(page), "--output", str(figures)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "fire for a token" in printed.out
    assert "predicted, not measured" in printed.out
    assert "inspecting" in printed.err
    result = json.loads(figures.read_text())
    assert result["layers"][0]["name"] == "model.layers.0.mlp"
    assert result["savings"]["tokens"]["decode"] == 1
    assert not result["partial"]
    html = page.read_text()
    assert "predicted, not measured" in html
    assert "http://" not in html.replace("http-equiv", "")
    result = run_json(*command[:4], "--tokens", "100", "--batch-tokens", "512")
    assert result["tokens"] == sum(row["tokens"] for row in result["positions"]) == 100


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: [str(DEMO / "model"), "--text", str(p)], "no text file"),
        (lambda p: [str(DEMO / "model"), "--text", str(written(p, b" \n\n"))], "no text"),
        (lambda p: [str(DEMO / "model"), "--text", str(written(p, b"a\0b"))], "NUL"),
        (lambda p: [str(DEMO / "model"), "--text", str(DEMO / "model" / "model.safetensors")], "text file"),
        (lambda p: [str(DEMO / "model"), "--text", str(written(p, b"text", "t.xz"))], "cannot be unpacked"),
        (lambda p: [str(DEMO / "model"), "--text", str(HELDOUT), "--context", "9999"], "context"),
        (lambda p: [str(DEMO / "model"), "--text", str(HELDOUT), "--tokens", "0"], "at least 1"),
        (lambda p: [str(DEMO / "model"), "--text", str(HELDOUT), "--context", "1"], "context=1 leaves no token"),
        (lambda p: [str(gpt2(p)), "--text", str(HELDOUT)], "GPT2LMHeadModel"),
    ],
)
def test_mistakes_end_in_one_line(make, says, tmp_path, error_line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in error_line("inspect", *make(tmp_path))


def written(folder: Path, content: bytes, name: str = "text.txt") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def test_a_files_name_that_is_no_utf8(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    path.write_text("A few words.")
    page = tmp_path / "page.html"
    assert main(["inspect", str(DEMO / "model"), "--text", str(path), "--html", str(page), "--json"]) == 0
    assert "caf?.txt" in page.read_text(encoding="utf-8")


def test_tokens_of_sentencepiece_keep_their_spaces():
    tokenizer = AutoTokenizer.from_pretrained(shared_path("data/stories260K-hf"))
    text = "Once upon a time, there was"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(readable(tokenizer, id_) for id_ in ids) == " " + text
    assert readable(tokenizer, 1) == "<s>"


def gpt2(folder: Path) -> Path:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=3072, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(folder / "gpt2")
    return folder / "gpt2"


def test_another_tokenizer_is_noticed(tmp_path, text, capsys):
    stories = str(shared_path("data/stories260K-hf"))
    command = ["inspect", str(DEMO / "model"), "--text", str(text), "--tokens", "300"]
    assert main([*command, "--tokenizer", stories]) == 0
    assert "Warning: The model predicts this text worse than an even guess" in capsys.readouterr().out
    assert main(command) == 0
    assert "Warning" not in capsys.readouterr().out


@pytest.mark.parametrize("extra", [[], pytest.param(["--measure"], marks=pytest.mark.slow)])
def test_a_dense_models_table_is_printed(text, capsys, extra):
    assert main(["inspect", str(DEMO / "model"), "--text", str(text), "--tokens", "300", *extra]) == 0
    printed = capsys.readouterr().out
    sentence = printed.index("The table says what this model's blocks would gain at lower densities")
    kind = "measured on synthetic activations" if extra else "predicted, not measured"
    head, _, *rows = printed[printed.index(f"Speed-up at other densities ({kind}):", sentence) :].splitlines()[1:]
    assert head.split()[:2] == ["density", "decode,"]
    assert len(rows) == len(IF_DENSITIES)
    assert all(row.endswith("x") for row in rows)


def test_ctrl_c_while_the_progress_bar_writes(monkeypatch):
    class Interrupted(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            if not asked():
                signal.raise_signal(signal.SIGINT)
            return len(data)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Interrupted()), line_buffering=True))
    with _asked_to_stop() as asked:
        print("progress", file=sys.stderr, flush=True)
        assert asked()


@pytest.mark.slow
def test_ctrl_c_writes_what_was_seen(relu_folder, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text(HELDOUT.read_text() * 40)
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    files = ("--text", long, "--output", figures, "--html", page)
    process = started("inspect", relu_folder, *files, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline, seen = time.monotonic() + 120, b""
    while b"tokens" not in seen and time.monotonic() < deadline:
        seen += process.stderr.read1()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert b"PARTIAL" in out
    assert b"Traceback" not in error
    result = json.loads(figures.read_text())
    assert result["partial"]
    assert 0 < result["tokens"] < 1_000_000
    assert sum(row["tokens"] for row in result["positions"]) == result["tokens"]
    assert all(layer["l0"] > 0 for layer in result["layers"])
    assert "Partial: interrupted" in page.read_text()
