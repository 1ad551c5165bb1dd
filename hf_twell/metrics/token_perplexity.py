"""Perplexity of a causal language model, as a module of Hugging Face `evaluate`; load it by its path:

perplexity = evaluate.load(hf_twell.measure.perplexity.METRIC_PATH)
"""

import math

import datasets
import evaluate
import numpy

_DESCRIPTION = """
    nats_per_token = -1/N  sum over scored tokens of log p(token | tokens before it),   perplexity = exp(nats_per_token)

A token is scored where its label is not -100; the first position of a sequence never is, because nothing predicts it.
"""

_INPUTS = """
Args:
    predictions: log p of each token given those before it, in nats; one sequence for each of `references`, and aligned
        with it. Values where nothing is scored are ignored.
    references: the labels: token ids, or -100 where nothing is scored.
Returns:
    perplexity, nats_per_token, tokens (how many were scored).
"""


class TokenPerplexity(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("float64")),
                    "references": datasets.Sequence(datasets.Value("int64")),
                }
            ),
        )

    def _compute(self, predictions, references):
        total, tokens = 0.0, 0
        for log_p, labels in zip(predictions, references, strict=True):
            if len(log_p) != len(labels):
                raise ValueError(f"a sequence has {len(log_p)} predictions and {len(labels)} references; align them")
            scored = numpy.asarray(labels[1:]) != -100
            total -= float(numpy.asarray(log_p[1:], dtype=numpy.float64)[scored].sum())
            tokens += int(scored.sum())
        if not tokens:
            raise ValueError("no token is scored: every label after the first of its sequence is -100")
        loss = total / tokens
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "nats_per_token": loss, "tokens": tokens}
