"""Run the promises on the user's own model: what a lens must keep, whatever the model.

Top-k is a decision, and rounding may flip a near-tie. So the groups of one run are played in the other, and each
comparison asks two things: would the other run have sorted alike all tokens that no near-tie excuses; and are the
outputs the same?
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from bifocals.adapter import fingerprint, load
from bifocals.config import FocalConfig, FocusConfig
from bifocals.lens import Lens, attach, evaluating, lens_of
from bifocals.tape import Tape

# Above rounding, below anything that reads what it must not: the first in scores (cosines over tau, so of order 10),
# the second relative to the largest logit. In half precision, as many roundings as that dtype makes.
TIE, DIFFERENCE = 1e-3, 2e-4
ROUNDINGS = {"tie": 64, "difference": 16}
SHORTEST, LONGEST = 64, 512  # tokens: longer than most windows, short enough to wait for
DECODED = 12  # tokens decoded one by one


class Broken(Exception):
    """A promise that does not hold; the message says how it showed."""


@dataclass(frozen=True, slots=True)
class Result:
    """One promise on one model."""

    promise: str
    is_kept: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """All promises; prints as a table."""

    subject: str
    results: tuple[Result, ...]

    @property
    def is_kept(self) -> bool:
        return all(result.is_kept for result in self.results)

    def __str__(self) -> str:
        width = max(len(result.promise) for result in self.results)
        rows = [
            f"{'kept  ' if result.is_kept else 'BROKEN'}  {result.promise:<{width}}  {result.detail}"
            for result in self.results
        ]
        return "\n".join([self.subject, *rows])


def check(model: PreTrainedModel, tokenizer: Any = None, *, text: str | None = None) -> Report:
    """Check every promise with the model's lens, in its mode; without a lens, with a default one for the while."""
    lens = lens_of(model)
    if lens is not None:
        return _check(lens, tokenizer, text)
    lens = attach(model, FocalConfig(temperature=0.4), FocusConfig(window=32))
    try:
        return _check(lens, tokenizer, text)
    finally:
        lens.detach()


@torch.no_grad()
def _check(lens: Lens, tokenizer: Any, text: str | None) -> Report:
    model, mode = lens.model, lens.mode
    lens.mode = "hard" if mode == "off" else mode
    try:
        with evaluating(model):
            subject = _Subject(lens, _tokens(lens, tokenizer, text))
            subject.run(subject.tokens[:, :2], model=subject.base)  # a model that check cannot follow breaks no promise
            before = fingerprint(model)
            promises: dict[str, Callable[[], str]] = {
                "off is the base model, bit for bit": subject.off_is_base,
                "no look-ahead": subject.no_look_ahead,
                "padding changes nothing": subject.padding,
                "batching changes nothing": subject.batching,
                "decoding equals prefill": subject.decoding,
                "a saved lens loads the same": subject.saving,
                "the base's weights are unchanged": lambda: _unchanged(model, before),
            }
            results = tuple(_result(promise, run) for promise, run in promises.items())
            return Report(f"{lens!r}, {subject.tokens.shape[1]} tokens", results)
    finally:
        lens.mode = mode


def _result(promise: str, run: Callable[[], str]) -> Result:
    """A check that cannot be run is not kept either."""
    try:
        return Result(promise, True, run())
    except Broken as how:
        return Result(promise, False, str(how))
    except Exception as error:
        return Result(promise, False, f"{type(error).__name__}: {str(error)[:200]}")


def _unchanged(model: PreTrainedModel, before: str) -> str:
    if fingerprint(model) != before:
        raise Broken("a weight of the base changed during the checks")
    return "same fingerprint"


class _Subject:
    """A lens and a text, and the promises asked of them."""

    def __init__(self, lens: Lens, tokens: Tensor) -> None:
        self.lens, self.model, self.tokens = lens, lens.model, tokens
        self.base = untouched_copy(lens)
        self.decoded = tokens.flip(1)[:, :DECODED]  # by an encoder-decoder
        self.is_pair = bool(self.model.config.is_encoder_decoder)
        rounding = torch.finfo(self.model.dtype).eps
        self.tie = max(TIE, ROUNDINGS["tie"] * rounding)
        self.difference = max(DIFFERENCE, ROUNDINGS["difference"] * rounding)
        self.takes_positions = "position_ids" in signature(type(self.model).forward).parameters
        self.is_causal = self.is_pair or all(bool(getattr(module, "is_causal", True)) for module in lens.modules())

    def off_is_base(self) -> str:
        """Against a model built anew from the same weights, which never had a lens."""
        expected = self.run(self.tokens, model=self.base)
        before = self.lens.mode
        with self.lens.disabled():
            _expect_equal(self.run(self.tokens), expected, "in disabled()")
        self.lens.mode = "off"
        try:
            _expect_equal(self.run(self.tokens), expected, "in mode 'off'")
        finally:
            self.lens.mode = before
        if self.model.state_dict().keys() != self.base.state_dict().keys():
            raise Broken("the model's state_dict shows other keys than the base's")
        return "logits bit-equal to those of a model built anew"

    def no_look_ahead(self) -> str:
        """Change a token; nothing before it may move."""
        if not self.is_causal:
            return "not asked: an encoder reads both ways"
        tape, expected = self.record(self.tokens)
        length, worst = expected.shape[1], 0.0
        for position in sorted({1, length // 3, length // 2, length - 2, length - 1}):
            tokens, decoded = self.tokens.clone(), self.decoded.clone()
            changed = decoded if self.is_pair else tokens
            changed[:, position] = (changed[:, position] + 1) % self.model.config.get_text_config().vocab_size
            seen = tape if self.is_pair else tape.cut(position)
            where = f"before token {position}, when it changes"
            after = self.replay(tokens, seen, where, decoded=decoded)
            worst = max(worst, self.expect_close(after[:, :position], expected[:, :position], where))
        return f"5 tokens changed, earlier logits within {worst:.1e}"

    def padding(self) -> str:
        """A row, alone and padded on either side, beside a longer one."""
        length = self.tokens.shape[1]
        short = self.tokens[:, : length - length // 4]
        tape, expected = self.record(short)
        long_tape, _ = self.record(self.tokens)
        # Models that count positions in the array and cannot be told otherwise do not bear padding on the left.
        sides = {"right": 0, "left": length // 4} if self.takes_positions else {"right": 0}
        worst = 0.0
        for side, start in sides.items():
            stop = start + short.shape[1]
            rows, mask = self.tokens.repeat(2, 1), torch.ones_like(self.tokens).repeat(2, 1)
            rows[0], mask[0] = 0, 0
            rows[0, start:stop], mask[0, start:stop] = short[0], 1
            where = f"with padding on the {side}"
            output = self.replay(rows, _stack(tape, long_tape, start, length), where, attention_mask=mask)
            output = output[:1] if self.is_pair else output[:1, start:stop]
            worst = max(worst, self.expect_close(output, expected, where))
        return f"{' and '.join(sides)}, logits within {worst:.1e}"

    def batching(self) -> str:
        """A row alone, and beside another."""
        tape, expected = self.record(self.tokens)
        other, _ = self.record(self.tokens.flip(1))
        rows = torch.cat([self.tokens, self.tokens.flip(1)])
        output = self.replay(rows, _stack(tape, other, 0, self.tokens.shape[1]), "in a batch of two")
        return f"logits within {self.expect_close(output[:1], expected, 'in a batch of two'):.1e}"

    def decoding(self) -> str:
        """A chunk, another chunk, then token by token."""
        if not self.is_causal:
            return "not asked: an encoder does not decode"
        tape, expected = self.record(self.tokens)
        length = expected.shape[1]
        cuts = [0, (length - DECODED) // 2, *range(length - DECODED, length + 1)]
        if self.is_pair:
            cuts = [0, *range(length // 2, length + 1)]
        output = self.replay(self.tokens, tape, "while decoding", cuts=cuts)
        worst = self.expect_close(output, expected, "while decoding")
        close, decisions = tape.near_ties(self.tie)
        return f"logits within {worst:.1e}; {close} of {decisions} decisions within rounding of a tie"

    def saving(self) -> str:
        with TemporaryDirectory() as folder:
            self.lens.save(folder)
            other = load(self.base, folder)
        other.mode = self.lens.mode
        for name, tensor in self.lens.state_dict().items():
            if not torch.equal(tensor, other.state_dict()[name]):
                raise Broken(f"{name} differs after saving and loading")
        _expect_equal(self.run(self.tokens, model=other.model), self.run(self.tokens), "after saving and loading")
        return "tensors and logits bit-equal"

    def record(self, tokens: Tensor, **how: Any) -> tuple[Tape, Tensor]:
        tape = Tape()
        return tape, self.run(tokens, tape, **how)

    def replay(self, tokens: Tensor, tape: Tape, where: str, **how: Any) -> Tensor:
        """The logits of another run with the same groups; it must have chosen the same ones by itself."""
        output = self.run(tokens, tape.rewind(self.tie), **how)
        if tape.flips:
            raise Broken(f"{tape.flips} tokens in other groups {where}, though none was near a tie")
        return output

    def expect_close(self, got: Tensor, expected: Tensor, where: str) -> float:
        difference = float((got - expected).abs().max()) if got.numel() else 0.0
        if not difference <= self.difference * float(expected.abs().max()):
            raise Broken(f"logits differ by {difference:.1e} {where}")
        return difference

    def run(
        self,
        tokens: Tensor,
        tape: Tape | None = None,
        *,
        model: PreTrainedModel | None = None,
        attention_mask: Tensor | None = None,
        decoded: Tensor | None = None,
        cuts: list[int] | None = None,
    ) -> Tensor:
        """The logits of the tokens (of an encoder-decoder, of what it decodes), at once or piece by piece."""
        model = self.model if model is None else model
        known: dict[str, Any] = {}
        if attention_mask is not None:
            known["attention_mask"] = attention_mask
            if self.takes_positions:
                known["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        with nullcontext() if tape is None else self.lens.taped(tape):
            name, row = "input_ids", tokens
            if self.is_pair:
                known["encoder_outputs"] = model.get_encoder()(input_ids=tokens, **known)
                name, row = "decoder_input_ids", self.decoded if decoded is None else decoded
                row = row.expand(tokens.shape[0], -1)
            if not self.is_causal:
                return _per_token(model(input_ids=row, **known), row)
            if cuts is None:
                return _per_token(model(**{name: row}, use_cache=False, **known), row)
            past, found = None, []
            for start, stop in pairwise(cuts):
                step = model(**{name: row[:, start:stop]}, past_key_values=past, use_cache=True, **known)
                past = step.past_key_values
                found.append(_per_token(step, row[:, start:stop]))
            return torch.cat(found, dim=1)


def untouched_copy(lens: Lens) -> PreTrainedModel:
    """The base, built anew around the same weights: no lens was ever near it."""
    model = lens.model
    config = copy.deepcopy(model.config)
    config._attn_implementation = lens.base_implementation
    with no_init_weights():
        fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    own = dict(model.named_buffers())
    for name, buffer in fresh.named_buffers():
        buffer.data = own[name].data
    return fresh.eval()


def _tokens(lens: Lens, tokenizer: Any, text: str | None) -> Tensor:
    """One row, longer than the window if the model takes that many."""
    config = lens.model.config.get_text_config()
    window = 0 if lens.focus is None else lens.focus.window + lens.focus.sinks
    longest = getattr(config, "max_position_embeddings", None) or LONGEST
    length = min(max(SHORTEST, 2 * window), LONGEST, longest)
    device = next(lens.model.parameters()).device
    if tokenizer is None:
        drawn = torch.randint(3, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        return drawn.to(device)
    if text is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))[: 16 * length]
    row = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][:, :length]
    if row.shape[1] < 24:
        raise ValueError(f"text: expected at least 24 tokens, got {row.shape[1]}. Give a longer text.")
    return row.to(device)


def _per_token(output: Any, row: Tensor) -> Tensor:
    """The logits of each token; of a model without a head, its last hidden states."""
    found: Tensor = output.logits if "logits" in output else output.last_hidden_state
    if found.ndim < 3 or found.shape[:2] != row.shape:
        raise ValueError(
            f"check compares what a model says of each token: expected outputs of shape (*{tuple(row.shape)}, size), "
            f"got {tuple(found.shape)}. Attach the lens to its base_model and check that."
        )
    return found


def _stack(short: Tape, long: Tape, start: int, length: int) -> Tape:
    """The groups of two rows as those of one batch, the shorter one starting at ``start``."""
    stacked = Tape()
    for kept, first, second in zip(stacked.tracks(), short.tracks(), long.tracks()):
        for name, row in first.items():
            widened = torch.zeros_like(second[name])  # padding is in no group, and by no margin
            widened[:, :, start : start + row.shape[2]] = row
            kept[name] = torch.cat([widened, second[name]])
    return stacked


def _expect_equal(got: Tensor, expected: Tensor, where: str) -> None:
    if not torch.equal(got, expected):
        raise Broken(f"logits differ by {(got - expected).abs().max():.1e} {where}")
