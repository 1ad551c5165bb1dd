"""Score a model with lm-eval's own tasks, and by its loss on text files.

The tasks are by default arc_easy, arc_challenge and hellaswag; with --data-dir these, lambada_openai, gsm8k_cot,
humaneval and humaneval_instruct run without network. A model that `hf-twell sparsify` converted runs on its sparse
kernels; any other model runs as it is.

examples:
  hf-twell eval ./my-model
  hf-twell eval ./my-model --tasks arc_easy --data-dir data/eval --split validation --json > scores.json
  hf-twell eval ./my-model --tasks arc_challenge --num-fewshot 25
  hf-twell eval ./my-chat-model --tasks arc_easy --chat-template
  hf-twell eval ./my-chat-model --tasks gsm8k_cot humaneval_instruct --chat-template --run-code --batch-size 64
  hf-twell eval ./my-model --tasks arc_easy --dtype bfloat16 --flips
  hf-twell eval ./my-model --text book.txt stories.txt.xz
"""

import argparse
from pathlib import Path

from hf_twell.cli.output import DTYPES, check_output, print_json, stdout_for_result, write_json
from hf_twell.files.tables import text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, an adapter's, a GGUF file or a Hub name")
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="lm-eval tasks (`lm_eval ls tasks`; default: arc_easy arc_challenge hellaswag, none with --text alone)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="folder with the tasks' rows: ARC-{Easy,Challenge}-{Test,Validation}, hellaswag-validation, "
        "lambada_openai-test, gsm8k-test and humaneval, each as .jsonl or .jsonl.xz",
    )
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="FILE", help="text files (.txt, .xz) to score the loss on"
    )
    parser.add_argument("--split", choices=("validation", "test"), help="rows to score (default: what lm-eval scores)")
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each row (default: the task's own: 0 for most)"
    )
    parser.add_argument(
        "--chat-template", action="store_true", help="put the tasks' prompts through the tokenizer's chat template"
    )
    parser.add_argument(
        "--run-code",
        action="store_true",
        help="allow humaneval and humaneval_instruct, which run programs that the model writes (confined; Linux)",
    )
    parser.add_argument(
        "--flips",
        action="store_true",
        help="also count the answers that kernels change, beside those that two dense paths change (three runs)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows of a task, documents of a file")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="requests per forward pass (default: 8)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="window on text in tokens (default: the model's, <= 2048)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--backend", default="auto", help="of the sparse kernels of a converted model (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    parser.add_argument(
        "--log-samples", action="store_true", help="put each row's log-likelihoods or texts into the JSON too"
    )
    parser.add_argument("--output", metavar="FILE", help="also write the JSON to FILE")


def run(args: argparse.Namespace) -> int:
    """Evaluate, then print a table or JSON; errors say in one line what was given and what is wrong with it."""
    check_output("--output", args.output, [args.model, args.data_dir, *args.text])
    tasks = args.tasks and [name for item in args.tasks for name in item.split(",") if name]
    with stdout_for_result():
        result = _evaluate(args, tasks)
    try:
        if args.output:
            write_json(result, args.output)
        if args.flips:
            with stdout_for_result():
                result["flips"] = _flips(args, tasks)
            if args.output:
                write_json(result, args.output)
    finally:  # what took hours is shown even where a full disk does not take it, or the flips end in an error
        if args.json:
            print_json(result)
        else:
            print(format_table(result))
    return 0


def _evaluate(args: argparse.Namespace, tasks: list[str] | None) -> dict:
    from hf_twell.evaluation import flips, harness

    converted = []
    if args.flips and args.text and not tasks and not args.data_dir:
        raise ValueError("--flips counts answers: name multiple-choice tasks with --tasks")

    def on_load(model):
        if getattr(model.config, "twell", None) is None:
            if args.backend != "auto" or args.flips:
                option = "--flips" if args.flips else f"--backend {args.backend}"
                raise ValueError(
                    f"{option}: {args.model} is no converted model (its config has no `twell` entry); "
                    "convert it with `hf-twell sparsify` or leave that out"
                )
            return model
        import hf_twell

        converted.append(args.backend)
        return hf_twell.sparsify(model, backend=args.backend)

    result = harness.evaluate(
        args.model,
        tasks=tasks,
        data_dir=args.data_dir,
        text=args.text,
        split=args.split,
        limit=args.limit,
        batch_size=args.batch_size,
        context=args.context,
        num_fewshot=args.num_fewshot,
        chat_template=args.chat_template,
        run_code=args.run_code,
        log_samples=args.log_samples,
        dtype=args.dtype,
        device=args.device,
        on_load=on_load,
        on_tasks=flips.check_choices if args.flips else None,
    )
    result["backend"] = converted[0] if converted else None
    return result


def _flips(args, tasks) -> dict:
    from hf_twell.evaluation.flips import answer_flips
    from hf_twell.evaluation.tasks import DEFAULT_TASKS
    from hf_twell.models.adapters import load_with_adapter
    from hf_twell.models.loading import load_model

    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device, load=load_with_adapter)
    names = ("data_dir", "split", "limit", "batch_size", "num_fewshot", "chat_template", "backend")
    return answer_flips(model, tokenizer, tasks or DEFAULT_TASKS, **{name: getattr(args, name) for name in names})


def format_table(result: dict) -> str:
    """The results for people: one row per metric of a task, and one per text file."""
    shots = sorted({entry["num_fewshot"] or 0 for entry in result["tasks"].values()}) or [0]
    how = " and ".join(f"{number}-shot" if number else "zero-shot" for number in shots)
    how += ", chat template" if result["tasks"] and result["chat_template"] else ""
    parts = [f"{result['model']} ({result['dtype']}, {result['device']}, batch size {result['batch_size']}, {how})"]
    if result["limit"]:
        parts.append(f"Only the first {result['limit']} rows or documents of each: not comparable with full scores.")
    scores = [
        [task, entry.get("split"), entry.get("n_samples"), metric, score["value"], score["stderr"]]
        for task, entry in result["tasks"].items()
        for metric, score in entry["metrics"].items()
    ]
    if scores:
        parts.append(text_table(["task", "split", "rows", "metric", "value", "stderr"], _without_none(scores)))
    keys = ("documents", "tokens", "context", "nats_per_token", "perplexity", "bits_per_byte")
    losses = [[Path(path).name, *(entry[key] for key in keys)] for path, entry in result["text"].items()]
    if losses:
        parts.append(text_table(["text", *(key.replace("_", " ") for key in keys)], _without_none(losses)))
    if "flips" in result:
        headers = ["answers that differ", "rows", "kernels from dense", "dense from dense at another batch size"]
        parts.append(text_table(headers, [[name, *counts.values()] for name, counts in result["flips"].items()]))
    return "\n\n".join(parts)


def _without_none(rows: list[list]) -> list[list]:
    return [["-" if value is None else value for value in row] for row in rows]
