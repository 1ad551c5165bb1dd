"""How many answers another backend changes, beside how many two dense computations of the same model change."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.convert.sparsify import sparsify
from hf_twell.evaluation.harness import evaluate


def answer_flips(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    backend: str = "auto",
    batch_size: int = 8,
    **options: Any,
) -> dict:
    """Answer multiple-choice rows three times: with kernels, with the dense ReLU path, and with that path at another
    batch size, whose sums are added in another order.

    In fp32 nothing should flip. In bf16 near-ties do, between any two ways of computing; that a backend flips about as
    many as two dense paths do is what its exactness means there.

    Args:
        model: a sparsified model; its backend is `backend` afterwards.
        tasks, options: as `hf_twell.evaluate` has them.

    Returns:
        {task: {"rows", "kernels_vs_dense", "dense_vs_dense"}}; an answer is the choice of highest log-likelihood.

    Raises:
        ValueError: tasks that are not multiple choice, before anything is computed.
    """

    def samples(backend, batch_size):
        sparsify(model, backend=backend)
        result = evaluate(
            model, tokenizer, tasks, batch_size=batch_size, log_samples=True, on_tasks=check_choices, **options
        )
        return {name: entry["samples"] for name, entry in result["tasks"].items() if "samples" in entry}

    dense = samples("reference", batch_size)
    other = samples("reference", 1 if batch_size > 1 else 4)
    kernels = samples(backend, batch_size)
    return {
        name: {
            "rows": len(answers(rows)),
            "kernels_vs_dense": differing(answers(kernels[name]), answers(rows)),
            "dense_vs_dense": differing(answers(other[name]), answers(rows)),
        }
        for name, rows in dense.items()
    }


def check_choices(tasks: Mapping) -> None:
    """Refuse, by a ValueError that names one, lm-eval's tasks whose answers are no choices."""
    for name, task in tasks.items():
        if task.OUTPUT_TYPE != "multiple_choice":
            raise ValueError(
                f"flips are counted on multiple-choice tasks alone, such as arc_easy or hellaswag; {name} is none"
            )


def answers(samples: Sequence[Mapping]) -> list[int]:
    """The chosen option of each row; a ValueError of rows without two or more scored choices."""
    chosen = []
    for sample in samples:
        scores = [response[0] for response in sample["responses"]]
        if len(scores) < 2:
            raise ValueError("flips are counted on multiple-choice tasks alone, such as arc_easy or hellaswag")
        chosen.append(scores.index(max(scores)))
    return chosen


def differing(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
