"""The benchmark takes its activity from a measured model, and has it."""

import argparse
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.bench import block, sharing, workload
from hf_twell.bench.wanted import Wanted, measured_activity
from hf_twell.cli import bench, main
from hf_twell.files.folders import save_model
from hf_twell.measure.sparsity import measure_sparsity
from tests.paths import DEMO, HELDOUT


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> str:
    """The demo model with ReLU on disk, its gates lowered along what all tokens have in common, as training does."""
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    ids = tokenizer(HELDOUT.read_text(), return_tensors="pt")["input_ids"][:, :512]

    @torch.no_grad()
    def lower(block, args):
        mean = args[0].mean((0, 1))
        block.gate_proj.weight -= 1.5 * (args[0] @ block.gate_proj.weight.T).std() * mean / mean.dot(mean)

    hooks = [layer.mlp.register_forward_pre_hook(lower) for layer in model.model.layers]
    model.model(ids)
    for hook in hooks:
        hook.remove()
    measure_sparsity(model, [ids])
    folder = tmp_path_factory.mktemp("sparse") / "model"
    save_model(model, folder, tokenizer)
    return str(folder)


def test_inputs_have_the_activity_of_a_real_model(sparse, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert main(["inspect", sparse, "--text", str(HELDOUT), "--tokens", "4096", "--output", str(figures)]) == 0
    printed, measured = capsys.readouterr().out, json.loads(figures.read_text())
    shares = [100 * measured["layers"][2]["unions"][run] for run in ("16", "64", "128")]
    assert "{:.1f} / {:.1f} / {:.1f} %".format(*shares) in printed
    (mean,), layers = measured_activity(figures), measured_activity(figures, range(4))
    assert mean == Wanted(measured["density"], pytest.approx(measured["unions"]), "figures.json, mean layer")
    for wanted in (mean, layers[0]):
        x, w_gate, _, _ = workload.make_ffn(1024, 128, 512, 512 * wanted.density, unions=wanted.unions)
        active = workload.active_neurons(x, w_gate)
        assert active.double().mean().item() == pytest.approx(wanted.density, abs=0.002)
        assert sharing.unions_of(active) == pytest.approx(wanted.unions, abs=0.02), wanted.of


def test_rows_at_the_activity_that_a_checkpoint_holds(sparse, capsys, monkeypatch):
    monkeypatch.setattr(block, "COLD_BYTES", 0)  # what is timed here says nothing
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    command = ["ffn", "--activity", sparse, "--layer", "1", "3", "--hidden", "64", "--intermediate", "344"]
    command += ["--tokens", "1024", "--repeats", "1", "--no-compile", "--device", "cpu", "--json"]
    assert bench.run(parser.parse_args(command)) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    entry = AutoModelForCausalLM.from_pretrained(sparse).config.twell
    for layer, row in zip((1, 3), rows, strict=True):
        assert row["activity"] == f"model, layer {layer}"
        assert row["density"] == pytest.approx(entry["density"][layer], abs=0.002)
        assert row["unions"] == pytest.approx({run: of[layer] for run, of in entry["unions"].items()}, abs=0.02)


@pytest.mark.parametrize(
    "found", ["[]", "{}", "no JSON", '{"twell": {"density": [0.1]}}', '{"layers": [{"density": 1}]}']
)
def test_files_without_unions_are_refused(found, tmp_path):
    (tmp_path / "config.json").write_text(found)
    with pytest.raises(ValueError, match=r"config\.json holds no density and unions of layers; give figures"):
        measured_activity(tmp_path)


def test_files_and_layers_that_are_not_there_are_refused(sparse):
    with pytest.raises(ValueError, match=r"no file at nowhere\.json; give figures of"):
        measured_activity("nowhere.json")
    with pytest.raises(ValueError, match="has no layer 4; its layers are 0 to 3"):
        measured_activity(sparse, [0, 4])
