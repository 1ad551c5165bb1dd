"""Conversations as training tokens: through the tokenizer's chat template, and which of them the assistant says."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_twell.files.configs import one_line
from hf_twell.files.rows import kind_of
from hf_twell.train.divergence import IGNORED


def chat_fault(value: object) -> str | None:
    """What keeps a row's value from being a list of messages, {"role": ..., "content": a text}; None where it is one.

    The sentence goes on after the value's name: " is null, ...", "[1].content is null, ...".
    """
    if not isinstance(value, list) or not value:
        return f" is {'an empty list' if value == [] else kind_of(value)}, and must be a list of messages"
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            return f"[{index}] is {kind_of(message)}, and must be a message" + ' ({"role": ..., "content": a text})'
        for key in ("role", "content"):
            if key not in message:
                return f"[{index}] has no {key}"
            if fault := text_fault(message[key]):
                empty = ' (beside tool_calls "", if there is none)' if message.get("tool_calls") else ""
                return f"[{index}].{key}{fault}{empty}"
    return None


def text_fault(value: object) -> str | None:
    """What keeps a row's value from being text that can be tokenized; see `chat_fault`."""
    if not isinstance(value, str):
        return f" is {kind_of(value)}, and must be a text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f" holds half of a surrogate pair at character {error.start + 1}, which is no text"
    return None


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], *, assistant_only: bool = False
) -> tuple[list[int], list[int]]:
    """The token ids of a conversation and their labels: the ids, or with `assistant_only` -100 for others' tokens. What
    the assistant says runs from the template's generation prompt to the end of its turn, end marker included. A last
    message with a true "unfinished" was cut, and gets no end marker. A ValueError as of `render`; with
    `assistant_only`, of a template that changes earlier turns when later ones come, or a tokenizer that does not say
    where in the text its tokens lie."""
    text = _whole(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=assistant_only, verbose=False)
    ids = encoded["input_ids"]
    if not assistant_only:
        return ids, ids
    spans = _assistant_spans(tokenizer, messages, text)
    places = encoded["offset_mapping"]
    said = [any(start <= first and last <= end for start, end in spans) for first, last in places]
    return ids, [token if by_it else IGNORED for token, by_it in zip(ids, said, strict=True)]


def _assistant_spans(tokenizer, messages, text) -> list[tuple[int, int]]:
    """Where in the rendered conversation each of the assistant's turns begins and ends."""
    if not tokenizer.is_fast:
        raise ValueError(f"assistant_only_loss needs a fast tokenizer, and this is a {type(tokenizer).__name__}")
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:index], add_generation_prompt=True)
        turn = _whole(tokenizer, messages[: index + 1])
        if not (text.startswith(turn) and turn.startswith(prompt)):
            raise ValueError(
                "assistant_only_loss: the chat template writes earlier turns in another way when later ones follow, so "
                "where the assistant speaks cannot be told; leave it out, cut conversations after their first answer, "
                "or train with trl's SFTTrainer"
            )
        spans.append((len(prompt), len(turn)))
    return spans


def _whole(tokenizer, messages) -> str:
    return render(tokenizer, messages, **({"continue_final_message": True} if messages[-1].get("unfinished") else {}))


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **options: Any) -> str:
    """A conversation as the tokenizer's chat template writes it; a ValueError where there is none, or it does not take
    these messages, or would leave their tool calls out."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template to read messages by; take an instruct "
            "model's, set tokenizer.chat_template and save it with the model, or give rows of text"
        )
    if any(message.get("tool_calls") for message in messages) and "tool_calls" not in str(tokenizer.chat_template):
        raise ValueError("the chat template does not write tool_calls, which the messages have; leave such rows out")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"the chat template does not take these messages: {one_line(error)}") from error
