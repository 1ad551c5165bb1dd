"""Training batches, on the device."""

import numpy as np
import torch


class Batches:
    """Shuffled windows, epoch after epoch, with a share of the model's own text."""

    def __init__(self, context, settings: dict):
        self.windows, self.count = context.windows, settings["batch"] // context.windows.shape[1]
        self.generator = torch.Generator().manual_seed(settings["seed"])
        self.own, self.own_count = None, 0
        if settings["self_text"]:
            own = np.load(context.folder / f"{settings['self_text']['from']}.npy").astype(np.int32)
            self.own = torch.from_numpy(own).to(context.device)
            self.own_count = round(self.count * settings["self_text"]["ratio"])
        self.orders = {}
        self.next(settings["skip"], "text", len(self.windows))

    def next(self, count: int, name: str, size: int) -> torch.Tensor:
        order = self.orders.get(name, torch.empty(0, dtype=torch.long))
        while len(order) < count:
            order = torch.cat((order, torch.randperm(size, generator=self.generator)))
        self.orders[name] = order[count:]
        return order[:count].to(self.windows.device)

    def draw(self) -> torch.Tensor:
        parts = [self.windows[self.next(self.count - self.own_count, "text", len(self.windows))]]
        if self.own_count:
            parts.append(self.own[self.next(self.own_count, "own", len(self.own))])
        batch = torch.cat(parts)
        return batch[torch.randperm(len(batch), generator=self.generator).to(batch.device)].long()
