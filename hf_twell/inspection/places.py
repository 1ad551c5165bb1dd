"""Activity by position in the window and by vocabulary item, and a passage token by token."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

LISTED_TOKENS = 20
# A token seen less often is not listed among the quietest and busiest: its mean would be chance.
LISTED_COUNT = 10
PASSAGE_TOKENS = 160
_EXACT_POSITIONS = 8  # after these, positions come in ranges that double
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark, which decoding drops at the beginning of a text
_MEASURES = ("l0", "effective_neurons")


class Tables:
    """Sums over tokens of L0 and of effective neurons. L layers, S positions, V vocabulary items.

    For each batch: `begin`, then `add_layer` for every layer, then `end`.
    """

    def __init__(self, layers: int, context: int, vocabulary: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape):
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.layers, self.device = layers, device
        self.position_tokens, self.position_sum = zeros(context), zeros(len(_MEASURES), layers, context)
        self.item_tokens, self.item_sum = zeros(vocabulary), zeros(len(_MEASURES), vocabulary)
        self.passage_ids: torch.Tensor | None = None
        self.passage: list[list[torch.Tensor]] = [[] for _ in _MEASURES]

    def begin(self, ids: torch.Tensor, valid: torch.Tensor) -> None:
        """A batch of token ids (B, S); `valid` is False at padding."""
        self._ids, self._valid = ids, valid
        self._sum = torch.zeros(len(_MEASURES), *ids.shape, dtype=torch.float64, device=self.device)
        self._keep = self.passage_ids is None
        if self._keep:
            self.passage_ids = ids[0, :PASSAGE_TOKENS][valid[0, :PASSAGE_TOKENS]].cpu()

    def add_layer(self, layer: int, *measures: torch.Tensor) -> None:
        """One layer's L0 and effective neurons, (B, S) each, zero at padding."""
        for which, value_BS in enumerate(measures):
            value_BS = value_BS.to(self.device).double()
            self.position_sum[which, layer, : value_BS.shape[1]] += value_BS.sum(0)
            self._sum[which] += value_BS
            if self._keep and self.passage_ids is not None:
                self.passage[which].append(value_BS[0, : len(self.passage_ids)].cpu())

    def end(self) -> None:
        self.position_tokens[: self._valid.shape[1]] += self._valid.sum(0)
        ids = self._ids[self._valid]
        self.item_tokens.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float64))
        for which in range(len(_MEASURES)):
            self.item_sum[which].index_add_(0, ids, self._sum[which][self._valid])

    def report(self, tokenizer: PreTrainedTokenizerBase, rank_by: str) -> dict[str, Any]:
        """The positions, vocabulary and passage that `hf_twell.inspection.inspecting.inspect_text` describes."""
        assert self.passage_ids is not None
        return {
            "positions": self._positions(),
            "vocabulary": self._vocabulary(tokenizer, rank_by),
            "passage": {
                "text": [readable(tokenizer, id_) for id_ in self.passage_ids.tolist()],
                "l0": [values.long().tolist() for values in self.passage[0]],
                "effective_neurons": [[round(v, 1) for v in values.tolist()] for values in self.passage[1]],
            },
        }

    def _positions(self) -> list[dict]:
        tokens, sums, rows = self.position_tokens.cpu(), self.position_sum.cpu(), []
        first = 0
        while first < len(tokens) and tokens[first]:
            # Half a doubling at a time: 8-11, 12-15, 16-23, 24-31, ...
            width = 1 if first < _EXACT_POSITIONS else 1 << (first.bit_length() - 2)
            places = slice(first, first + width)
            count = int(tokens[places].sum())
            last = min(first + width, int((tokens > 0).sum())) - 1
            means = sums[:, :, places].sum(2) / count
            values = {name: means[which].tolist() for which, name in enumerate(_MEASURES)}
            rows.append({"first": first, "last": last, "tokens": count, **values})
            first += width
        return rows

    def _vocabulary(self, tokenizer, rank_by: str) -> dict:
        count, total = self.item_tokens.cpu(), self.item_sum.cpu() / self.layers
        mean = total / count.clamp(min=1)
        known = (count >= LISTED_COUNT).nonzero().flatten()
        order = known[mean[_MEASURES.index(rank_by)][known].argsort(stable=True)]
        listed = min(LISTED_TOKENS, len(order) // 2)

        def item(id_):
            values = {name: mean[which, id_].item() for which, name in enumerate(_MEASURES)}
            return {"id": id_, "text": readable(tokenizer, id_), "count": int(count[id_]), **values}

        return {
            "seen": int((count > 0).sum()),
            "listed_from": LISTED_COUNT,
            "quietest": [item(id_) for id_ in order[:listed].tolist()],
            "busiest": [item(id_) for id_ in order.flip(0)[:listed].tolist()],
            "by_count": self._by_count(count, total),
        }

    @staticmethod
    def _by_count(count, total) -> list[dict]:
        rows: list[dict] = []
        first, factors = 1, (3, 10 / 3)  # 1-2, 3-9, 10-29, 30-99, ...
        while first <= count.max():
            after = round(first * factors[len(rows) % 2])
            these = (count >= first) & (count < after)
            tokens = int(count[these].sum())
            values = {name: total[which, these].sum().item() / max(1, tokens) for which, name in enumerate(_MEASURES)}
            rows.append({"first": first, "last": after - 1, "items": int(these.sum()), "tokens": tokens, **values})
            first = after
        return [row for row in rows if row["tokens"]]


def readable(tokenizer: PreTrainedTokenizerBase, id_: int) -> str:
    """A token as text; the tokenizer's own name of it where it is only a part of a character."""
    text, name = tokenizer.decode([id_]), str(tokenizer.convert_ids_to_tokens(id_))
    if name.startswith(_SPACE):
        return name.replace(_SPACE, " ")
    return text if text and "\N{REPLACEMENT CHARACTER}" not in text else name
