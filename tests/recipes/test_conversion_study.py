"""recipes/study: rows that a kill cut, runs that two commands want, texts that share no sources, and the table."""

import dataclasses
import json
import re
import sys

import pytest
import yaml
from filelock import FileLock

from hf_twell.recipe.arguments import training_arguments
from hf_twell.recipe.schema import load_recipe
from hf_twell.recipe.yaml12 import read_yaml
from tests.paths import ROOT

FOLDER = ROOT / "recipes" / "study"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("study", "report", "texts"):
        sys.modules.pop(name, None)


def test_a_row_that_was_cut_is_left_out_by_name(tmp_path, capsys):
    import study

    rows = tmp_path / "rows.jsonl"
    assert study.rows_of(rows) == {}
    study.add_row(rows, {"run": "parent", "losses": {"code": 1.5}})
    with rows.open("a") as file:
        file.write('{"run": "five", "losses"')
    assert list(study.rows_of(rows)) == ["parent"]
    assert capsys.readouterr().err == f"{rows}, line 2 is no whole row, and is left out\n"
    study.add_row(rows, {"run": "five", "losses": {"code": 1.7}})
    study.add_row(rows, {"run": "parent", "written": {}})
    assert study.rows_of(rows) == {
        "parent": {"run": "parent", "losses": {"code": 1.5}, "written": {}},
        "five": {"run": "five", "losses": {"code": 1.7}},
    }


def test_a_run_belongs_to_one_command_at_a_time(tmp_path, capsys):
    import study

    told = tmp_path / "study.yaml"
    told.write_text("recipe: none.yaml\nheldout: []\nruns: {five: []}\n")
    command = [str(told), "--model", "parent", "--eval", str(tmp_path), "--output", str(tmp_path / "out")]
    with FileLock(tmp_path / "out" / "claims" / "five"):
        study.main(command)
    assert capsys.readouterr().err == "five: another command works on it\n"
    with pytest.raises(ValueError, match=r"no recipe at .*none\.yaml"):
        study.main(command)


def test_changes_name_the_output_and_the_models_of_other_runs(tmp_path):
    import study

    runs = {"books": [], "five": ["model={books}", "train=[{OUTPUT}/texts/own.jsonl]"]}
    told = {"runs": runs, "heldout": ["{OUTPUT}/texts/heldout/code.txt"]}
    with pytest.raises(ValueError, match=r"five needs the model of books.*run books first"):
        study.changes_of("five", told, "parent", tmp_path)
    final = tmp_path / "runs" / "books" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    assert study.changes_of("five", told, "parent", tmp_path) == [
        "model=parent",
        f"output_dir={tmp_path}/runs/five",
        f'heldout=["{tmp_path}/texts/heldout/code.txt"]',
        f"model={final}",
        f"train=[{tmp_path}/texts/own.jsonl]",
    ]


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_every_run_of_a_study_is_a_recipe(tmp_path, name):
    import report
    import study

    told = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert (set(told["tasks"]), set(told["written_tasks"])) == (set(report.METRICS), set(report.WRITTEN))
    for text in re.findall(r"{OUTPUT}/([\w/.-]+)", json.dumps(told)):
        (tmp_path / text).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / text).write_text("{}")
    seen = {}
    for run in (run for run, how in told["runs"].items() if how is not None):
        recipe = load_recipe(FOLDER / told["recipe"], study.changes_of(run, told, "parent", tmp_path))
        training_arguments(dataclasses.replace(recipe, training={**recipe.training, "bf16": False, "use_cpu": True}))
        assert recipe.relu == (not run.startswith("dense"))
        assert recipe.distill is None or recipe.relu
        seen[run] = {**recipe.training, **recipe.sparsity, "relu": recipe.relu, "distill": recipe.distill}
    assert len({json.dumps(each) for each in seen.values()}) == len(seen), "none is there twice"
    natural = next(each for run, each in seen.items() if run.startswith("natural"))
    assert (natural["l1_weight"], natural["target_density"], natural["target_union"]) == (0, None, None)


def test_lines_of_the_larger_coders_study_are_what_ran():
    runs = yaml.safe_load((FOLDER / "qwen2.5-coder-1.5b.yaml").read_text())["runs"]
    rows = (ROOT / "model_cards/qwen2.5-coder-1.5b/rows.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        assert row["changes"] == runs[row["run"]], row["run"]


def test_the_coders_recipe_is_the_row_that_kept_most_code():
    """But for text and what a GGUF file has besides, as its head says."""
    rows: dict[str, dict] = {}
    for line in (ROOT / "model_cards/qwen2.5-coder-0.5b/rows_own_text.jsonl").read_text().splitlines():
        rows.setdefault(json.loads(line)["run"], {}).update(json.loads(line))
    solved = {
        run: row["written"]["humaneval_instruct"]["pass@1,create_test"]["value"]
        for run, row in rows.items()
        if "written" in row and row["changes"] is not None
    }
    name = max(solved, key=solved.get)
    text = (ROOT / "recipes" / "qwen2.5-coder-0.5b.yaml").read_text()
    assert f"the row {name} of" in text.replace("\n# ", " ")
    recipe = read_yaml(text, "the recipe")
    assert rows[name]["changes"] == [f"target_density={recipe['target_density']}", "distill={logits: 0.5}"]
    assert recipe["distill"] == {"logits": 0.5}
    training, trained = recipe["training"], rows[name]["training"]
    step = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * recipe["sequence_length"]
    assert (step, step * training["max_steps"]) == (trained["tokens_per_step"], trained["tokens"])
    assert training["learning_rate"] == trained["learning_rate"]


def test_sources_have_no_tests_and_no_copies_of_other_packages(tmp_path):
    import texts

    source = "x = 1\n" * 200
    kept = ["one/core.py", "one/sub/core.py", "two/latest.py"]
    left_out = ["one/tests/a.py", "one/test_a.py", "one/_vendor/two/core.py", "one/externals/core.py"]
    for name in [*kept, *left_out]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert {name: len(found) for name, found in texts.packages(tmp_path).items()} == {"one": 2, "two": 1}


def test_the_table_compares_with_the_better_of_parent_and_control(tmp_path, capsys, monkeypatch):
    import report

    def row(run, loss, right, changes, **more) -> dict:
        tasks = {task: {"rows": 9, metric: {"value": right}} for task, metric in report.METRICS.items()}
        return {"run": run, "changes": changes, "losses": {"code": loss, "books": 2 * loss}, "tasks": tasks, **more}

    trained = {"tokens": 2e7, "learning_rate": 1e-4, "density": 0.05, "union": {"64": 0.5}}
    written = {task: {metric: {"value": 0.25}} for task, metric in report.WRITTEN.items()}
    rows = [
        row("parent", 2.0, 0.6, None, written=written),
        row("dense", 1.6, 0.5, ["relu=false"], training=trained),
        row("books", 1.0, 0.9, ["relu=false", "train=[books.txt]"], training=trained),
        row("five", 1.8, 0.4, ["target_density=0.05"], training=trained, limit=1000),
        row("other code", 1.2, 0.4, ["target_density=0.05"], training=trained, heldout_tokens={"code": 9}),
        {"run": "killed", "changes": [], "training": trained},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    monkeypatch.setattr(sys, "argv", ["report.py", str(path)])
    report.main()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.strip().splitlines()]
    table = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    assert list(table) == ["parent", "dense", "books", "five (first 1,000 rows)", "other code"]
    other = table["other code"]
    assert (other["loss: code"], other["loss: books"], other["excess"]) == ("", "2.400", "-25.0 %")  # 2.4 over 3.2
    five = table["five (first 1,000 rows)"]
    assert five["excess"] == "+12.5 %"  # 1.8 over the control's 1.6
    assert five["kept"] == "52 %"  # 0.4 - 0.1875 over the parent's 0.6 - 0.1875
    assert (five["hellaswag (acc_norm)"], five["density"]) == ("40.0", "5.00 %")
    assert table["dense"]["density"] == table["parent"]["density"]
    assert table["parent"]["gsm8k_cot (exact_match)"] == "25.0"
