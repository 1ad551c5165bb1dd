"""Scores of a causal language model: lm-eval's own tasks, also from local files, and loss on text files."""

import contextlib
import copy
import functools
import importlib.metadata
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.evaluation.humaneval import CODE_TASKS
from hf_twell.evaluation.sandbox import check_sandbox
from hf_twell.evaluation.tasks import DATA_FILES, DEFAULT_TASKS, load_tasks, quiet_logs
from hf_twell.files.text import read_documents
from hf_twell.measure.inference import check_ids, describe
from hf_twell.measure.perplexity import text_loss
from hf_twell.models.adapters import load_with_adapter
from hf_twell.models.loading import load_model, load_tokenizer
from hf_twell.models.modes import evaluation_mode

# For the standard error of a perplexity, the one that lm-eval has no formula for: its own 100,000 take a minute.
BOOTSTRAP_DRAWS = 1000


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    """Give the random states back as they were: lm-eval draws from them, and a training under way must not notice."""
    python, numpy_state = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpy_state)


@_random_states()
def evaluate(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    tasks: Sequence[str] | None = None,
    *,
    data_dir: str | Path | None = None,
    text: Sequence[str | Path] = (),
    split: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    context: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
    run_code: bool = False,
    log_samples: bool = False,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    on_load: Callable | None = None,
    on_tasks: Callable[[dict], None] | None = None,
) -> dict:
    """Score a model on lm-eval tasks and on text files, and leave it as it was.

    Prompts, choices, metrics and the way of scoring are lm-eval's, so the numbers are those of the `lm_eval` command
    with the same model, dtype and batch size. With `data_dir` the rows come from local files (named in
    `hf_twell.evaluation.tasks.DATA_FILES`), and neither network nor any cache is used. Training flags, tokenizer and
    random states come back unchanged. Runs in one process.

    Args:
        model: a Transformers model (it stays on its device), or the path or Hub name of one.
        tokenizer: its tokenizer, or the path of one; by default the one saved beside the model.
        tasks: names of lm-eval tasks, groups or tags (`lm_eval ls tasks` lists them); by default arc_easy,
            arc_challenge and hellaswag, or none where `text` is given without `data_dir`.
        data_dir: folder with the rows of the tasks in DATA_FILES as `.jsonl` or `.jsonl.xz`.
        text: UTF-8 text files (also `.xz`), scored as `hf_twell.measure.perplexity.text_loss` says.
        split: "test" or "validation" rows; by default what lm-eval scores (ARC: test, HellaSwag: validation).
        limit: score only the first `limit` rows of each task and documents of each text file.
        batch_size: requests, or text windows, per forward pass.
        context: window length on text in tokens; by default the model's own, at most 2,048.
        num_fewshot: examples before each row; by default as many as the task's definition says (8 of its own for
            gsm8k_cot, none for most). lm-eval draws them with its own seed: from train rows, or with `data_dir` from
            ARC's validation rows. Never from the rows that are scored: HellaSwag is refused with `data_dir`.
        chat_template: put prompts, and examples as earlier turns, through the tokenizer's chat template, as lm-eval's
            `--apply_chat_template` does; text files are scored as they are.
        run_code: allow humaneval and humaneval_instruct, which run programs that the model writes, confined as
            `hf_twell.evaluation.sandbox` says. humaneval_instruct alone is meant for a chat template.
        log_samples: also return, for each row, the log-likelihood (nats) of every choice, or the text that the model
            wrote and what a filter of the task made of it, and the metrics.
        dtype, device: how to load a model given by path; by default the checkpoint's dtype, and CUDA if there is one.
        on_load: applied to a model given by path once it is loaded; returns the model to score.
        on_tasks: applied to lm-eval's tasks, by name, before a model is loaded; may refuse them.

    Returns:
        Plain data: `tasks[name]` = {version, num_fewshot, split, n_samples, data_file, metrics: {metric: {value,
        stderr}}, written: whether the model writes its answers, chance: the share that guessing gets right},
        `text[file]` = {tokens, nats_per_token, perplexity, bits_per_byte, ...}, and how it was run. A number
        that does not exist or is not finite is None.

    Raises:
        ValueError: unknown task, split or argument; unusable data or text; log-likelihoods that are NaN; lm-eval is not
            installed.
        OSError: a file, the model, or a data set on the Hub cannot be read.
    """
    text = [text] if isinstance(text, str | Path) else list(text)
    if tasks is None:
        tasks = () if text and data_dir is None else DEFAULT_TASKS
    tasks = list(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    _check_arguments(model, tasks, text, split, limit, batch_size, num_fewshot, dtype, device)
    code_tasks = [name for name in tasks if name in CODE_TASKS]
    if code_tasks:
        _check_code(code_tasks, run_code, chat_template)
    # Everything cheap that can be wrong is read before the model.
    documents = {str(path): read_documents(path)[:limit] for path in text}
    loaded, files = load_tasks(tasks, data_dir, split, num_fewshot) if tasks else ({}, {})
    if loaded and on_tasks:
        on_tasks(loaded["tasks"])
    if isinstance(model, str | Path):
        model, tokenizer = load_model(model, tokenizer, dtype=dtype, device=device, load=load_with_adapter)
        model = on_load(model) if on_load else model
    elif tokenizer is None or isinstance(tokenizer, str | Path):
        if not (tokenizer or model.config._name_or_path):
            raise ValueError("the model comes from no folder that could hold its tokenizer; give the tokenizer too")
        tokenizer = load_tokenizer(tokenizer or model.config._name_or_path)
    assert not isinstance(tokenizer, str | Path | None)
    if chat_template and not tokenizer.chat_template:
        raise ValueError(f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template; leave --chat-template out")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} predicts no tokens; load the model by AutoModelForCausalLM")

    result: dict[str, Any] = {
        **describe(model),
        "batch_size": batch_size,
        "limit": limit,
        "chat_template": chat_template,
        "tasks": {},
        "text": {},
    }
    with evaluation_mode(model):
        if loaded:
            result["versions"]["lm_eval"] = importlib.metadata.version("lm_eval")
            options = {"limit": limit, "batch_size": batch_size, "log_samples": log_samples, "chat": chat_template}
            options["run_code"] = run_code
            result["tasks"] = _run_tasks(model, tokenizer, loaded, files, **options)
        for path, content in documents.items():
            name = Path(path).name
            result["text"][path] = text_loss(
                model, tokenizer, content, batch_size=batch_size, context=context, name=name
            )
    return _plain(result)


def _run_tasks(model, tokenizer, loaded, files, *, limit, batch_size, log_samples, chat=False, run_code=False) -> dict:
    from lm_eval.evaluator import evaluate as run

    from hf_twell.evaluation.generation import StoppingRows

    for name, task in loaded["tasks"].items():
        shots = task.get_config("num_fewshot") or 0
        examples = len(task.sampler.df) if shots else 0
        if shots > examples:
            raise ValueError(f"num_fewshot={shots}: {name} has {examples} rows to draw examples from; give less")
        task.set_fewshot_seed(seed=1234)
    if model.device.type == "meta":
        raise ValueError("lm-eval cannot feed a model whose embeddings are offloaded; keep them on a device")
    with quiet_logs():
        # A copy, because lm-eval gives the tokenizer a padding token.
        lm = StoppingRows(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
    for name, task in loaded["tasks"].items():
        _check_room(name, task, lm)
    # Requests of every kind are put in order by it, so each prompt passes it before the model.
    lm.tok_encode = _refusing_strange_ids(lm.tok_encode, model, tokenizer)
    # Examples as earlier turns are the default of lm-eval's command.
    chat_options = {"apply_chat_template": chat, "fewshot_as_multiturn": chat}
    options = {"log_samples": log_samples, "confirm_run_unsafe_code": run_code}
    with _compiling_templates_once():
        raw = run(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAP_DRAWS, **options, **chat_options)
    for name, task in loaded["tasks"].items():
        _check_finite(name, task, model.dtype)
    results = {}
    for name, values in raw["results"].items():
        task = loaded["tasks"].get(name)
        if task is None and not any("," in key for key in values):
            continue  # a group that only lists its members
        entry = {
            "version": raw["versions"].get(name),
            "num_fewshot": raw["n-shot"].get(name),
            "metrics": _metrics(values),
            "written": task is not None and task.OUTPUT_TYPE == "generate_until",
            "chance": None if task is None else _chance(task),
        }
        if task is not None:
            entry["split"] = task.get_config("test_split") or task.get_config("validation_split")
            entry["n_samples"] = raw["n-samples"][name]["effective"]
            entry["data_file"] = files.get(name)
        if log_samples and task is not None:
            written = task.OUTPUT_TYPE == "generate_until"
            entry["samples"] = [_sample(sample, written) for sample in raw["samples"][name]]
        results[name] = entry
    return results


@contextlib.contextmanager
def _compiling_templates_once() -> Iterator[None]:
    """lm-eval compiles a task's prompt for each of its rows, which takes longer than a GPU takes to score them."""
    from lm_eval.utils import env

    env.from_string = functools.cache(env.from_string)
    try:
        yield
    finally:
        del env.from_string


def _refusing_strange_ids(encode: Callable, model, tokenizer) -> Callable:
    """lm-eval's encoding, with another model's tokenizer refused before its ids reach the embeddings."""

    def encode_checked(*args, **options):
        ids = encode(*args, **options)
        for row in ids if len(ids) and isinstance(ids[0], list) else [ids]:
            check_ids(model, tokenizer, torch.as_tensor(row))
        return ids

    return encode_checked


def _check_room(name: str, task, lm) -> None:
    """lm-eval keeps room for the longest answer, and cuts prompts to what is left of the model's context."""
    if task.OUTPUT_TYPE == "generate_until":
        longest = task.config.generation_kwargs.get("max_gen_toks", lm.max_gen_toks)
        if longest >= lm.max_length:
            raise ValueError(
                f"{name} lets a model write {longest} tokens after the prompt, but this one's context is "
                f"{lm.max_length} tokens; leave {name} out"
            )


def _check_finite(name: str, task, dtype: torch.dtype) -> None:
    """lm-eval takes NaN for the largest of a row's log-likelihoods, and so makes an accuracy out of nothing."""
    # A log-likelihood, one with whether greedy decoding agrees, or a text.
    scores = [response[0] if isinstance(response, tuple) else response for i in task.instances for response in i.resps]
    nan = sum(isinstance(score, float) and math.isnan(score) for score in scores)
    if nan:
        raise ValueError(
            f"{name}: {nan} of {len(scores)} log-likelihoods are NaN in {str(dtype).removeprefix('torch.')}, so its "
            "scores would mean nothing; load the model in bfloat16 or float32"
        )


def _chance(task) -> float:
    """The share of rows that guessing answers right: of written answers and of texts to continue, none."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    docs = {instance.doc_id: instance.doc for instance in task.instances}
    return statistics.mean(1 / len(task.doc_to_choice(doc)) for doc in docs.values())


def _metrics(values: dict) -> dict:
    """lm-eval's "acc,none" and "acc_stderr,none" as {"acc": {"value", "stderr"}}; other filters keep their name."""
    metrics = {}
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = values.get(f"{metric}_stderr,{filter_name}")
            name = metric if filter_name == "none" else key
            metrics[name] = {"value": value, "stderr": stderr if isinstance(stderr, int | float) else None}
    return metrics


def _sample(sample: dict, written: bool) -> dict:
    return {
        # A row whose text the model wrote stands there once for each of the task's filters.
        **({"filter": sample["filter"], "text": sample["resps"][0][0]} if written else {}),
        "row": sample["doc_id"],
        "target": sample["target"],
        "responses": sample["filtered_resps"],
        "metrics": {metric: sample[metric] for metric in sample["metrics"]},
    }


def _check_arguments(model, tasks, text, split, limit, batch_size, num_fewshot, dtype, device):
    if not tasks and not text:
        raise ValueError(f"nothing to evaluate: name tasks (such as {', '.join(DATA_FILES)}) or text files")
    whole = isinstance(num_fewshot, int) and not isinstance(num_fewshot, bool)
    if num_fewshot is not None and not (whole and num_fewshot >= 0):
        raise ValueError(f"num_fewshot={num_fewshot!r}: give a whole number, 0 or more")
    if split not in (None, "test", "validation"):
        raise ValueError(f"split={split!r}: use test or validation, or leave it unset")
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if not (isinstance(value, int) and value >= 1) and not (name == "limit" and value is None):
            raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
    if not isinstance(model, str | Path) and (dtype or device):
        raise ValueError("dtype and device are for a model given by path; move or cast this one with model.to(...)")


def _check_code(tasks: Sequence[str], run_code: bool, chat_template: bool) -> None:
    if not run_code:
        raise ValueError(
            f"{', '.join(tasks)}: these run programs that the model writes; allow it with run_code=True (--run-code)"
        )
    if chat_template and "humaneval" in tasks:
        raise ValueError("humaneval is a text to continue; through a chat template use humaneval_instruct")
    check_sandbox()


def _plain(value):
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
