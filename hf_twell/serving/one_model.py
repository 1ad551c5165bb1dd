"""The one model of a server: requests wait for its thread, and each is answered for as long as its client is there."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import InferenceThread, response_events_to_chunks

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for the first bytes of a character


class Generation:
    """The thread that generates, one request after the other."""

    def __init__(self) -> None:
        self.thread = InferenceThread()
        self.stopped = False

    def stop(self) -> None:
        """End what is being generated and what waits for it at the next token; the answers so far are sent."""
        self.stopped = True


class Answer:
    """One request's turn: what Transformers' handlers of requests take for their manager and for its streamer.

    It reads the tokens as a criterion for stopping, which `generate` asks after each of them.

    Attributes:
        total_tokens: that were generated, those of a stop sequence among them.
        finish_reason: "stop" after a token or a sequence that ends an answer, else "length".
    """

    def __init__(self, generation: Generation, seed: int | None, stops: Sequence[str]) -> None:
        self.total_tokens, self.finish_reason = 0, "length"
        self._generation, self._seed = generation, seed
        self._held = _Held(stops)
        self._over = False  # nobody waits for it

    def cancel(self) -> None:
        """Generate no more; if its turn has not come, never begin."""
        self._over = True

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: PreTrainedTokenizerBase,
        inputs: dict[str, Any],
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple["_Items", "Answer"]:
        """Wait for the thread.

        Returns: what will hold the items of the answer, with None after the last, and this, which can end it.
        """
        queue, loop = _Items(), asyncio.get_running_loop()
        self._send = lambda item: loop.call_soon_threadsafe(queue.put_nowait, item)
        self._parser, self._unread = response_parser, ""  # what it has made nothing of yet
        self._text = _Text(processor, skip_special_tokens=response_parser is None)
        self._prompt_tokens, self._ends = inputs["input_ids"].shape[-1], _tokens_that_end(gen_config)
        if response_parser is not None:
            self._say(response_events_to_chunks(response_parser.initial_events))

        def run() -> None:
            if self._over:
                return
            try:
                if self._seed is not None:
                    torch.manual_seed(self._seed)
                model.generate(
                    **inputs, generation_config=gen_config, tokenizer=processor, stopping_criteria=[self._read]
                )
                self._end()
            except Exception as error:  # for the client, and the thread goes on
                self._send(error)

        self._generation.thread.submit(run)
        return queue, self

    def _read(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        """Send what the new tokens say, and tell whether they were the last."""
        new = input_ids[0, self._prompt_tokens + self.total_tokens :].tolist()
        self.total_tokens += len(new)
        if new and new[-1] in self._ends:
            self.finish_reason = "stop"
        self._hear(self._text.after(new))
        over = self._over or self._generation.stopped or self._held.stopped
        return torch.full(input_ids.shape[:1], over, device=input_ids.device)

    def _hear(self, text: str) -> None:
        if not text or self._parser is None:
            self._say([text])
            return
        self._unread += text
        try:
            items = response_events_to_chunks(self._parser.feed(text))
        except Exception:  # the model wrote a call that is none: the client gets it, and what follows, as text
            self._parser, items = None, [self._unread]
        if items:
            self._unread = ""
        self._say(items)

    def _end(self) -> None:
        self._hear(self._text.rest())
        if self._parser is not None:
            with contextlib.suppress(Exception):  # the answer ends within a call
                self._say(response_events_to_chunks(self._parser.finalize()[1]))
        if rest := self._held.rest():
            self._send(rest)
        self._send(None)

    def _say(self, items: list) -> None:
        """Stop sequences are looked for in what the client reads as the answer: in no reasoning, and in no calls."""
        for item in items:
            is_text = type(item) is str
            if text := self._held.before_stop(item) if is_text else self._held.rest():
                self._send(text)
            if self._held.stopped:
                self.finish_reason = "stop"
            elif not is_text:
                self._send(item)


class _Items(asyncio.Queue):
    """An error is raised where its turn comes."""

    def get_nowait(self):
        item = super().get_nowait()
        if isinstance(item, Exception):
            raise item
        return item


class _Text:
    """The text of tokens as they come: a character waits for its last byte.

    Each step decodes the tokens of the step before once more, as some tokenizers write a token's space only behind
    another.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        self._decode = lambda tokens: tokenizer.decode(tokens, **options)
        self._before: list[int] = []  # written already
        self._new: list[int] = []

    def after(self, tokens: list[int]) -> str:
        self._new += tokens
        text = self._unwritten()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._before, self._new = self._new, []
        return text

    def rest(self) -> str:
        return self._unwritten()

    def _unwritten(self) -> str:
        return self._decode(self._before + self._new)[len(self._decode(self._before)) :]


class _Held:
    """Text up to the first stop sequence: an end that may become one waits for what follows.

    Attributes:
        stopped: whether one was found; nothing follows it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        self._stops, self._text = stops, ""

    def before_stop(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._text + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._text = "" if found else text[end:]
        return text[:end]

    def rest(self) -> str:
        """What waited, where nothing follows that could end a stop sequence."""
        text, self._text = self._text, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters begin `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _tokens_that_end(config: GenerationConfig) -> set[int]:
    ends = config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
