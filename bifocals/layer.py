"""The lens of one layer: its temperature, its router, and how its attention is computed from them."""

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from bifocals.autocast import without_autocast
from bifocals.cache import Companion, memory_of, nothing_remembered, self_attention_cache
from bifocals.checks import temperature_per_query
from bifocals.config import FocalConfig, FocusConfig
from bifocals.families import Site
from bifocals.focal import ConstantTemperature, LearnedTemperature
from bifocals.focus import focus_attention, soft_focus_attention
from bifocals.fullness import Course, piece_start
from bifocals.gated import gated_focus_attention
from bifocals.grouped import GroupedLayer, Later
from bifocals.interface import NAME, BasePattern, Mode, base_attention, cross_attention, focus_over_all_pairs
from bifocals.network import AnyRouter, NetworkRouter
from bifocals.quick_router import QuickRouter, may_route_quickly, quick_router
from bifocals.routing import Router
from bifocals.segments import segment_starts
from bifocals.tape import NearOnly, Tape


@dataclass(slots=True)
class Settings:
    """What all layers of one lens share and what may change at any time."""

    mode: Mode = "hard"
    top_k: int = 1
    name: str = field(default_factory=lambda: uuid4().hex[:8])
    tape: Tape | None = None
    capture: "Captures | None" = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a layer would route and attend, and how it would scale its logits."""

    routed: tuple[Tensor, ...]
    query: Tensor
    key: Tensor
    pattern: BasePattern
    scale: float
    softcap: float | None
    temperature: float | Tensor


class Captures(Protocol):
    """Takes what passes through the layers, while they compute the base's own attention."""

    def take(self, layer: str, taken: Taken) -> None: ...


class Seen(threading.local):
    """What the hooks leave for attention, for each thread by itself: one model may serve several at a time."""

    hidden: Tensor | None = None
    past: Cache | None = None
    query: Tensor | None = None
    key: Tensor | None = None

    def __reduce__(self) -> tuple[type["Seen"], tuple[()]]:
        return Seen, ()  # a copy has seen nothing


class LayerLens(nn.Module):
    """Sits inside an attention module; sees its hidden states and cache by a hook, and computes its attention."""

    def __init__(self, site: Site, focal: FocalConfig | None, focus: FocusConfig | None, settings: Settings) -> None:
        super().__init__()
        self.name, self.layer, self.is_cross = site.name, site.layer, site.is_cross
        self.cached_layer = int(site.module.layer_idx)  # type: ignore[arg-type]
        self.focus, self.settings = focus, settings
        self.temperature = None if focal is None else _temperature(site, focal)
        self.router = None if focus is None else _router(site, focus)
        self.heads, self.kv_heads = site.heads, site.kv_heads
        self.features = site.features if isinstance(self.router, NetworkRouter) else None
        self.quick_router: QuickRouter | None = None
        self.seen = Seen()
        self.register_load_state_dict_post_hook(_forgive_absence)

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Have the attention module show its hidden states and cache and, to networks, its queries and keys."""
        hooks = [module.register_forward_pre_hook(self.see, with_kwargs=True)]
        if self.features is not None:
            hooks.append(module.get_submodule(self.features.query).register_forward_hook(self.see_query))
            hooks.append(module.get_submodule(self.features.key).register_forward_hook(self.see_key))
        return hooks

    def see_query(self, projection: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.settings.mode != "off":
            self.seen.query = output

    def see_key(self, projection: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.settings.mode != "off":
            self.seen.key = output

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the attention module runs: keep what its attention function will not be given."""
        if self.settings.mode == "off":
            return
        if module.config._attn_implementation != NAME:  # type: ignore[union-attr]
            raise ValueError(
                f"The model's attention was switched under its lens: expected {NAME!r}, got "
                f"{module.config._attn_implementation!r}. Switch it while lens.mode is 'off', or after lens.detach()."  # type: ignore[union-attr]
            )
        self.seen.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if not self.is_cross:
            found = next((item for item in (*kwargs.values(), *args) if isinstance(item, Cache)), None)
            self.seen.past = self_attention_cache(found)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: BasePattern,
        *,
        scale: float | None,
        softcap: float | None,
        dropout: float = 0.0,
    ) -> Tensor:
        """The attention of this layer, by what the hook has seen."""
        hidden, past = self.seen.hidden, self.seen.past
        self.seen.hidden = self.seen.past = None
        assert hidden is not None, "the hook runs before attention"
        memory = None if past is None else self._memory(past, key, pattern, query.shape[2])
        real = None if self.is_cross or pattern.segments is None else pattern.segments[:, -query.shape[2] :] >= 0
        temperature, sums = self._temperature(hidden, real, pattern, memory)
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "dropout": dropout, "temperature": temperature}
        if self.is_cross:
            return cross_attention(query, key, value, pattern, **how)
        routed = self._routed(hidden)
        if self.settings.capture is not None:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            taken = Taken(routed, query, key, pattern, scale, softcap, temperature)
            self.settings.capture.take(self.name, taken)
            return base_attention(query, key, value, pattern, **how)
        reads, holds = (None, None) if self.router is None else self._route(routed, real, memory, pattern)
        if isinstance(memory, GroupedLayer):
            assert reads is not None
            assert holds is not None
            memory.remember(holds, real, sums)
            if self._may_step(memory, query, pattern, softcap, dropout):
                return self._step(memory, query, reads, pattern, scale, temperature)
            if memory.known > query.shape[2]:
                (key, value), holds = memory.unfile(), memory.membership()
        elif memory is not None:
            blank = nothing_remembered(query.shape[0], query.shape[2], query.device)
            assert not isinstance(holds, Later)
            holds = memory.remember(blank if holds is None else holds, blank if sums is None else sums)
        if reads is None:
            return base_attention(query, key, value, pattern, **how)
        assert isinstance(holds, Tensor)
        return self._focus(query, key, value, reads, holds, pattern, **how)

    @property
    def owner(self) -> tuple[object, ...]:
        """Who a cache belongs to: with the same groups on both sides, a key's groups depend on top_k."""
        if self.focus is None:
            return self.settings.name, "on", 0
        mode, top_k = self.settings.mode, self.settings.top_k
        # With networks, keys may be idle, in no group, and groups full, unless all groups are read.
        is_told_apart = self.focus.sides == "same" or (self.focus.score == "network" and top_k == self.focus.groups)
        return self.settings.name, mode, top_k if is_told_apart and mode in ("sparse", "hard") else 0

    def _memory(self, past: Cache, key: Tensor, pattern: BasePattern, new: int) -> Companion | GroupedLayer:
        settings, owner = self.settings, self.owner
        # Keys in several groups are not filed: each would have to be in several places, or be read twice.
        is_filed = self.focus is not None and (self.focus.sides == "separate" or settings.top_k == 1)
        focus = self.focus if is_filed and settings.mode == "hard" else None

        def is_on() -> bool:
            return settings.mode != "off" and self.owner == owner

        memory = memory_of(past, self.cached_layer, owner, is_on, key, new, focus)
        if pattern.seen not in (0, memory.get_seq_length()):  # type: ignore[union-attr]
            raise ValueError(
                f"This cache holds {memory.get_seq_length()} tokens in layer {self.cached_layer} and {pattern.seen} in "  # type: ignore[union-attr]
                "others: a step was interrupted. Start from an empty cache."
            )
        return memory

    def _routed(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the router looks at: hidden states; or queries and keys, (batch, head, length, dim)."""
        if self.features is None:
            return (hidden,)
        query, key = self.seen.query, self.seen.key
        self.seen.query = self.seen.key = None
        assert query is not None, "the hooks run before attention"
        assert key is not None, "the hooks run before attention"
        if self.features.part is not None:
            query, key = self.features.part(query, self.heads, self.kv_heads)
        length = hidden.shape[1]
        return (
            query.reshape(-1, length, self.heads, query.shape[2:].numel() // self.heads).transpose(1, 2),
            key.reshape(-1, length, self.kv_heads, key.shape[2:].numel() // self.kv_heads).transpose(1, 2),
        )

    def _may_be_full(self, pattern: BasePattern) -> bool:
        """With networks that were fitted so; not under a sliding window, whose cache forgets what groups it held."""
        if not isinstance(self.router, NetworkRouter) or pattern.reach is not None:
            return False
        return torch.compiler.is_compiling() or bool(self.router.steepness.any())

    def _course(
        self, pattern: BasePattern, new: Tensor, real: Tensor | None, memory: Companion | GroupedLayer | None
    ) -> Course | None:
        """Of the new tokens; None where no group is ever full."""
        if not self._may_be_full(pattern):
            return None
        known = 0 if memory is None else memory.known
        place = pattern.places(known, new.shape[-2], new.device)
        if memory is None or known == 0:
            return Course(place, real)
        of_known = pattern.places(0, known, new.device)
        is_before = of_known < piece_start(place[:, :1])
        is_real = torch.ones_like(is_before) if pattern.segments is None else pattern.segments[:, :known] >= 0
        return Course(place, real, memory.sizes(is_before & is_real), memory.sizes(~is_before & is_real))

    @staticmethod
    def _may_step(
        memory: GroupedLayer, query: Tensor, pattern: BasePattern, softcap: float | None, dropout: float
    ) -> bool:
        """Whether the cache itself can attend: a token or a few after a past, with nothing out of the ordinary."""
        is_plain = softcap is None and dropout == 0 and pattern.is_causal and pattern.reach_over(memory.known) is None
        is_plain = is_plain and not torch.is_autocast_enabled(query.device.type)
        return is_plain and memory.known > query.shape[2] and memory.may_attend(query.shape[2], pattern.starts)

    @staticmethod
    def _step(
        memory: GroupedLayer,
        query: Tensor,
        reads: Tensor,
        pattern: BasePattern,
        scale: float | None,
        temperature: float | Tensor,
    ) -> Tensor:
        assert pattern.starts is not None
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if isinstance(temperature, Tensor):
            query = query / temperature_per_query(temperature, query).to(query.dtype)
        else:
            scale = scale / temperature
        return memory.attend(query, reads, pattern.starts, scale)

    def _route(
        self,
        routed: tuple[Tensor, ...],
        real: Tensor | None,
        memory: Companion | GroupedLayer | None,
        pattern: BasePattern,
    ) -> tuple[Tensor, Tensor | Later]:
        """The gates (soft), those of the groups kept (sparse) or the groups (hard) of the new tokens, on both sides."""
        assert self.router is not None
        assert self.focus is not None
        if self.focus.balance == "sinkhorn" and memory is not None and memory.known > 0:
            raise ValueError(
                "Sinkhorn over the sequence is not defined while decoding: a new token would move the groups of cached "
                "ones. Use balance='causal', or use_cache=False."
            )
        tape, top_k = self.settings.tape, self.settings.top_k
        if self.settings.mode == "hard" and isinstance(tape, NearOnly):
            new = routed[0]
            return tape.nothing(self.name, new.shape[0], new.shape[-2], self.focus.groups, new.device)
        if self.settings.mode == "hard" and tape is None and may_route_quickly(self.router, routed[0]):
            return self._route_quickly(routed, real, memory, pattern)
        course = None if self.settings.mode == "soft" else self._course(pattern, routed[0], real, memory)
        with without_autocast(routed[0]):
            routing = self.router(*routed, *(() if self.features is None else (course,)), is_real=real)
        if self.settings.mode == "soft":
            return routing.gates()
        groups: tuple[Tensor, Tensor]
        groups = routing.groups(top_k) if tape is None else tape.pass_on(self.name, routing, top_k, real)
        if self.settings.mode == "hard":
            return groups
        reads, holds = (torch.where(member, gate, 0.0) for member, gate in zip(groups, routing.sorted_gates(top_k)))
        return reads, holds

    def _route_quickly(
        self,
        routed: tuple[Tensor, ...],
        real: Tensor | None,
        memory: Companion | GroupedLayer | None,
        pattern: BasePattern,
    ) -> tuple[Tensor, Tensor | Later]:
        """The groups alone; those of a single key that is going to be filed not before they are asked for."""
        is_step = routed[0].shape[-2] == 1 and memory is not None and memory.known > 0
        if not is_step:
            self.quick_router = None  # weights may change unseen between one prompt and the next
        quick, top_k = self._quick_router(), self.settings.top_k
        assert self.focus is not None
        is_grouped = isinstance(memory, GroupedLayer) and self.focus.sides == "separate"
        if is_step and is_grouped and pattern.starts is not None:
            assert memory is not None
            place = None
            if self._may_be_full(pattern):
                place = torch.tensor([[memory.known - start] for start in pattern.starts or (0,)])
            # A copy: what a model routes may be its caller's, who writes the next token there.
            return quick.reads(routed[0], top_k), Later(routed[-1].clone(), quick, top_k, place)
        return quick.membership(routed, top_k, self._course(pattern, routed[0], real, memory))

    def _quick_router(self) -> QuickRouter:
        """Prepared for each prompt, and whenever weights have changed."""
        assert self.router is not None
        prepared = self.quick_router
        if prepared is None or not prepared.is_fresh():
            prepared = self.quick_router = quick_router(self.router)
        return prepared

    def _temperature(
        self, hidden: Tensor, real: Tensor | None, pattern: BasePattern, memory: Companion | GroupedLayer | None
    ) -> tuple[float | Tensor, Tensor | None]:
        """The temperature of each query; of a running form also the sums that later tokens need."""
        form = self.temperature
        if form is None:
            return 1.0, None
        if isinstance(form, ConstantTemperature):
            return form(hidden), None
        if not form.is_running:
            return form(hidden, real), None
        raw = form.raw(hidden)
        sums = form.summed(raw, real).cumsum(dim=1)  # (batch, length, sums)
        before = None if memory is None else memory.last_sums()
        if before is not None:
            sums = sums + before[:, 0].to(sums.dtype)
        elif pattern.kind == "packed" and pattern.segments is not None:
            # A packed sequence starts its own sums: take off what came before its first token.
            starts = segment_starts(hidden.shape[1], pattern.segments_of(hidden.shape[1]), hidden.device)
            so_far = pad(sums, (0, 0, 1, 0))
            sums = sums - so_far.gather(1, starts[..., None].expand(hidden.shape[0], -1, sums.shape[-1]))
        return form.from_sums(raw, sums), sums[:, None]

    def _focus(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        reads: Tensor,
        holds: Tensor,
        pattern: BasePattern,
        *,
        dropout: float,
        **how: Any,
    ) -> Tensor:
        assert self.focus is not None
        window, sinks = self.focus.window, self.focus.sinks
        # A sliding cache has dropped its first keys. So that the first keys left are not taken for sinks, blank ones
        # stand for those just before: out of every query's reach.
        blank = min(pattern.dropped, sinks)
        if blank:
            key, value, holds = (pad(tensor, (0, 0, blank, 0)) for tensor in (key, value, holds))
        keys = key.shape[2]
        mode = self.settings.mode
        if pattern.kind == "holes" or dropout > 0:
            return focus_over_all_pairs(
                query, key, value, reads, holds, pattern, self.focus, mode=mode, dropout=dropout, **how
            )
        how |= {
            "window": window,
            "sinks": sinks,
            "segments": pattern.segments_of(keys),
            "reach": pattern.reach_over(keys),
            "is_causal": pattern.is_causal,
        }
        if mode == "sparse":
            return gated_focus_attention(query, key, value, gates=reads, key_gates=holds, **how)
        if mode == "soft":
            return soft_focus_attention(
                query, key, value, gates=reads, key_gates=holds, gate=self.focus.gate, slope=self.focus.slope, **how
            )
        return focus_attention(query, key, value, membership=reads, key_membership=holds, **how)

    # The base's state_dict shows the base's keys alone, so that its checkpoints stay stock.
    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) if destination is None else destination


def _router(site: Site, focus: FocusConfig) -> AnyRouter:
    if focus.score != "network":
        routers = site.kv_heads if focus.routers == "kv_head" else 1
        return Router(site.hidden_size, routers, focus, is_causal=site.is_causal)
    if site.features is None:
        raise ValueError(
            f"score='network' is not offered for {type(site.module).__name__}: no submodule of it shows the keys of "
            "new tokens before rotation. Use score='cosine'."
        )
    return NetworkRouter(site.heads, site.kv_heads, site.head_dim, focus)


def _temperature(site: Site, focal: FocalConfig) -> ConstantTemperature | LearnedTemperature:
    if focal.form == "constant":
        return ConstantTemperature(focal.temperature)
    if focal.form in ("prefix", "length") and site.is_cross:
        raise ValueError(
            "A temperature from the tokens before a query is not offered for attention to another sequence: expected "
            f"form 'constant' or 'token' for an encoder-decoder, got {focal.form!r}."
        )
    return LearnedTemperature(
        site.hidden_size,
        start=focal.temperature,
        minimum=focal.minimum,
        maximum=focal.maximum,
        outputs=site.heads if focal.per == "head" else 1,
        form=focal.form,
        is_causal=site.is_causal,
    )


def _forgive_absence(lens: nn.Module, keys: Any) -> None:
    """A stock checkpoint has no tensors of ours, and misses none."""
    ours = [name for name in keys.missing_keys if ".bifocals." in f".{name}"]
    for name in ours:
        keys.missing_keys.remove(name)
