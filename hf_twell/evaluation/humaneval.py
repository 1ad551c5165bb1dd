"""lm-eval's HumanEval with a metric that needs no network: each program runs confined.

lm-eval's own metric is loaded from the Hub, once its definition is, and runs programs without such a bound.
"""

from collections.abc import Mapping, Sequence

from hf_twell.evaluation.sandbox import run_programs

# Task: does the model write its answer in a block of Markdown?
CODE_TASKS = {"humaneval": False, "humaneval_instruct": True}


def with_own_metric(definition: Mapping) -> dict:
    """lm-eval's definition of one of CODE_TASKS, prompts and stop strings as they are, scored by `run_programs`."""
    run = _run_fenced if CODE_TASKS[definition["task"]] else _run_plain
    (pipeline,) = definition["filter_list"]
    return {
        **definition,
        "filter_list": [{**pipeline, "filter": [{"function": "custom", "filter_fn": run}]}],
        "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
        "process_results": _score,
    }


def _run_plain(responses: Sequence[Sequence[str]], rows: Sequence[Mapping]) -> list[str]:
    """How it ends with each row's program: its prompt, what the model wrote on from there, and its tests."""
    return run_programs(
        [
            f"{row['prompt']}{text}\n{row['test']}\ncheck({row['entry_point']})"
            for (text,), row in zip(responses, rows, strict=True)
        ]
    )


def _run_fenced(responses: Sequence[Sequence[str]], rows: Sequence[Mapping]) -> list[str]:
    """The same, of what stands before the end of a block of Markdown."""
    return _run_plain([[text.partition("```")[0]] for (text,) in responses], rows)


def _score(row: Mapping, results: Sequence[str]) -> dict[str, float]:
    return {"pass@1": float(results[0] == "passed")}
