"""The text of a fit by the mass objective: whose sequences are whose, and which queries are learned from.

Every draw comes from the seed and from what is drawn, never from what was drawn before: so a run that was stopped goes
on bit for bit, and the batches are the same however many processes there are.
"""

import hashlib

import torch
from torch import Tensor

from bifocals.config import FocusConfig
from bifocals.training.capture import LayerCapture
from bifocals.training.options import MassOptions
from bifocals.training.processes import process_number, processes_met


class Sequences:
    """Those of this process; each place in a batch has its own, and a process has some of the places."""

    def __init__(self, blocks: Tensor, domains: Tensor, focus: FocusConfig, options: MassOptions) -> None:
        self.focus, self.options = focus, options
        self.domains = int(domains.max()) + 1
        order = torch.randperm(len(blocks), generator=self.drawn("order"))
        mine = slice(process_number(), None, processes_met())
        self.places = list(range(options.batch))[mine]
        own = [order[place :: options.batch] for place in self.places]
        self.of_place: list[list[int]] = []  # as indices into what this process captures
        taken = 0
        for sequences in own:
            self.of_place.append(list(range(taken, taken + len(sequences))))
            taken += len(sequences)
        numbers = torch.cat(own)
        self.numbers, self.order, self.all_domains = numbers.tolist(), order.tolist(), domains.tolist()
        self.blocks, self.domain_of = blocks[numbers], domains[numbers].tolist()
        first = focus.window + focus.sinks
        self.rows = torch.stack([self._rows(int(number), first, blocks.shape[1]) for number in numbers])

    def drawn(self, *what: object) -> torch.Generator:
        """A generator of its own for each thing drawn."""
        digest = hashlib.sha256(repr((self.options.seed, *what)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def _rows(self, sequence: int, first: int, length: int) -> Tensor:
        """Two random halves of queries that have far keys; each half in order."""
        drawn = first + torch.randperm(length - first, generator=self.drawn("rows", sequence))
        half = min(self.options.rows, len(drawn) // 2)
        return torch.cat([drawn[:half].sort().values, drawn[half : 2 * half].sort().values])

    def of_step(self, step: int, layer: int) -> list[int]:
        """For each place of this process, its sequence; every layer has an order of its own."""
        found = []
        for place, sequences in zip(self.places, self.of_place):
            epoch, index = divmod(step, len(sequences))
            order = torch.randperm(len(sequences), generator=self.drawn("epoch", layer, place, epoch))
            found.append(sequences[int(order[index])])
        return found

    def first_of_domains(self, count: int) -> list[int]:
        """Of the first ``count`` sequences of each domain over all processes, those of this one."""
        left, found = dict.fromkeys(self.all_domains, count), []
        for number in self.order:
            left[self.all_domains[number]] -= 1
            if left[self.all_domains[number]] >= 0 and number in self.numbers:
                found.append(self.numbers.index(number))
        return found

    def far(self, layer: LayerCapture, sequence: int, device: torch.device) -> Tensor:
        """Which keys are far from the rows of a sequence, (row, key)."""
        length = layer.key[sequence].shape[-2]
        return layer.far_keys(self.rows[sequence].to(device), length, self.focus.window, self.focus.sinks)
