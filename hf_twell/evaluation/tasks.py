"""lm-eval's task definitions, with rows from the Hub or from local files."""

import contextlib
import difflib
import functools
import importlib.metadata
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from hf_twell.evaluation.humaneval import CODE_TASKS, with_own_metric
from hf_twell.files.configs import one_line
from hf_twell.files.packages import how_to_install
from hf_twell.files.rows import read_rows

# The files of `data_dir`, one JSON object a line; a task's first split is the one that lm-eval scores by default.
DATA_FILES = {
    "arc_easy": {"test": "ARC-Easy-Test.jsonl", "validation": "ARC-Easy-Validation.jsonl"},
    "arc_challenge": {"test": "ARC-Challenge-Test.jsonl", "validation": "ARC-Challenge-Validation.jsonl"},
    "hellaswag": {"validation": "hellaswag-validation.jsonl"},
    "lambada_openai": {"test": "lambada_openai-test.jsonl"},
    "gsm8k_cot": {"test": "gsm8k-test.jsonl"},
    "humaneval": {"test": "humaneval.jsonl"},
    "humaneval_instruct": {"test": "humaneval.jsonl"},
}
# Their definitions are in these folders of lm-eval.
_FOLDERS = ("arc", "hellaswag", "lambada", "gsm8k", "humaneval")
_ARC_FIELDS = {"question", "choices", "answerKey"}
_HUMANEVAL_FIELDS = {"prompt", "test", "entry_point"}
_FIELDS = {
    "arc_easy": _ARC_FIELDS,
    "arc_challenge": _ARC_FIELDS,
    "hellaswag": {"activity_label", "ctx_a", "ctx_b", "endings", "label"},
    "lambada_openai": {"text"},
    "gsm8k_cot": {"question", "answer"},
    "humaneval": _HUMANEVAL_FIELDS,
    "humaneval_instruct": _HUMANEVAL_FIELDS,
}
DEFAULT_TASKS = ("arc_easy", "arc_challenge", "hellaswag")


def load_tasks(
    tasks: Sequence[str], data_dir: str | Path | None = None, split: str | None = None, num_fewshot: int | None = None
) -> tuple[dict, dict]:
    """lm-eval's tasks as `TaskManager.load` returns them, and the local file behind each task (with `data_dir`). Each
    is set to `num_fewshot` examples, or by default to as many as its definition says. A ValueError of what is unknown
    or unusable, or of examples that could only be drawn from the rows that are scored or that the task takes none of;
    an OSError where a local file is missing, or a data set cannot be fetched."""
    try:
        import lm_eval.tasks
    except ImportError as error:
        raise ValueError(f"tasks need lm-eval ({error}): {how_to_install('lm_eval')}") from error
    version = importlib.metadata.version("lm_eval")
    if Version(version) < Version("0.4.12"):
        raise ValueError(f"lm-eval {version} is too old: pip install 'lm-eval>=0.4.12'")
    files = _find_files(tasks, data_dir, split) if data_dir is not None else {}
    examples = {}
    if data_dir is not None and num_fewshot:
        examples = {name: _find_examples(name, Path(data_dir), *files[name]) for name in files}
    if set(tasks) <= set(DATA_FILES):
        # Indexing all of lm-eval's tasks takes seconds.
        root = Path(lm_eval.tasks.__file__).parent
        manager = lm_eval.tasks.TaskManager(include_path=[root / name for name in _FOLDERS], include_defaults=False)
    else:
        manager = lm_eval.tasks.TaskManager()
    for name in tasks:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=4, cutoff=0.5)
            hint = f" (near: {', '.join(near)})" if near else ""
            raise ValueError(
                f"lm-eval knows no task {name!r}{hint}; `lm_eval ls tasks` lists all; for a YAML of your own, call "
                "lm_eval.simple_evaluate with HFLM(pretrained=model)"
            )
    try:
        with quiet_logs():
            rows = {name: _local_rows(name, *files[name], examples.get(name)) for name in files}
            # A group with overrides: each task keeps its stock definition and only gets its rows from elsewhere.
            members = [{"task": name, **changes} for name, changes in rows.items() if name not in CODE_TASKS]
            specs: list[str | dict] = [{"group": "local files", "task": members}] if members else []
            specs += [name for name in tasks if name not in rows and name not in CODE_TASKS]
            specs += [
                with_own_metric(manager.task_index[name].cfg) | rows.get(name, {})
                for name in tasks
                if name in CODE_TASKS
            ]
            loaded = manager.load(specs)
            if files:
                loaded = {"tasks": {name: loaded["tasks"][name] for name in tasks}}
    except OSError as error:
        reason = f"the data of {', '.join(tasks)} cannot be loaded: {one_line(error)}"
        raise OSError(
            reason if files else f"{reason}; data_dir gives {', '.join(DATA_FILES)} without network"
        ) from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and name not in CODE_TASKS:
            raise ValueError(
                f"{name} runs what a model writes, unconfined; here {', '.join(CODE_TASKS)} alone run code"
            )
        _choose_split(name, task, split)
        shots = (task.get_config("num_fewshot") or 0) if num_fewshot is None else num_fewshot
        if shots:
            _check_examples(name, task)
        task.set_config("num_fewshot", shots)
    return loaded, {name: str(path) for name, (path, _) in files.items()}


def _find_files(tasks, data_dir, split) -> dict[str, tuple[Path, str]]:
    folder = Path(data_dir).resolve()
    if not folder.is_dir():
        raise ValueError(f"data_dir {data_dir} is no folder; give the one that holds the .jsonl files")
    found = {}
    for name in tasks:
        if name not in DATA_FILES:
            raise ValueError(
                f"no local files for task {name!r}; with data_dir use {', '.join(DATA_FILES)}, or drop data_dir"
            )
        splits = DATA_FILES[name]
        chosen = split or next(iter(splits))
        if chosen not in splits:
            raise ValueError(f"{name} has no {chosen} rows with answers; use split={' or '.join(splits)}")
        found[name] = (_find_file(name, folder, splits[chosen]), chosen)
    return found


def _find_file(name: str, folder: Path, file: str) -> Path:
    candidates = [folder / file, folder / f"{file}.xz"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{name} needs {' or '.join(path.name for path in candidates)} in {folder}")
    return path


def _find_examples(name: str, folder: Path, _: Path, scored: str) -> Path | None:
    """The file of the rows that few-shot examples are drawn from: validation rows, where test rows are scored.

    None where lm-eval's definition brings the examples itself.
    """
    if name == "gsm8k_cot":
        return None
    splits = DATA_FILES[name]
    if scored != "test" or "validation" not in splits:
        advice = "score the test rows" if len(splits) > 1 else "use num_fewshot=0"
        advice += ", or drop data_dir" if name == "hellaswag" else ""  # the Hub has train rows of it
        raise ValueError(
            f"{name}: few-shot examples could only be drawn from the {scored} rows that are scored, because its train "
            f"rows are not among the local files; {advice}"
        )
    return _find_file(name, folder.resolve(), splits["validation"])


def _check_examples(name: str, task) -> None:
    """lm-eval draws from train rows, else validation rows, else in silence from the rows that it scores.

    Its command passes over a number of examples in silence where the task's own definition says 0.
    """
    if task.get_config("num_fewshot") == 0:
        raise ValueError(f"{name} is zero-shot by lm-eval's definition; use num_fewshot=0 for it")
    if task.fewshot_cfg.split is not None or task.fewshot_cfg.samples is not None or task.has_training_docs():
        return
    if not (task.has_validation_docs() and task.has_test_docs()):
        raise ValueError(
            f"{name} has no rows for few-shot examples but those that are scored; use num_fewshot=0 for it"
        )


def _local_rows(name: str, path: Path, split: str, examples: Path | None) -> dict:
    # Rows are held in memory and not read by the "json" builder of datasets: that one writes a cache, which collides
    # or fails on a read-only machine.
    files = {split: path} | ({"validation": examples} if examples else {})
    splits = {f"{kind}_split": kind if kind in files else None for kind in ("validation", "test")}
    dataset = functools.partial(_read_splits, files, _FIELDS[name])
    return {"training_split": None, **splits, "custom_dataset": dataset}


def _read_splits(files: dict[str, Path], fields: set[str], **_) -> dict:
    """{split: Dataset} of JSON-lines files. lm-eval also passes the task's metadata, which nothing here needs."""
    return {split: _read_rows(path, fields) for split, path in files.items()}


def _read_rows(path: Path, fields: set[str]):
    import datasets

    rows = []
    for row in read_rows(path):
        if missing := sorted(fields - row.values.keys()):
            raise ValueError(f"{row.place} has no {', '.join(missing)}; give rows with {', '.join(sorted(fields))}")
        rows.append(row.values)
    return datasets.Dataset.from_list(rows)


def _choose_split(name: str, task, split: str | None):
    if split is None:
        return
    if task.get_config(f"{split}_split") is None:
        raise ValueError(f"task {name} has no {split} split; leave split unset, or use the other one")
    if split == "validation":
        task.set_config("test_split", None)  # lm-eval scores the test split where there is one


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Mute lm-eval's notes on live models and custom data: they speak of arguments that its own command has."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
