"""Fit either method, or both, to a pretrained model, in place, and take it off again.

    lens = attach(model, FocalConfig(temperature=0.4), FocusConfig(groups=8, top_k=2))
    lens.mode = "hard"      # or, to fit the routers, "soft": gates on all far pairs, or "sparse": on those kept alone;
                            # or "off": the base model, bit for bit
    lens.detach()           # the model as it was

Each attention module that the lens covers gets one submodule. The config's attention implementation becomes ours while
the lens is on, and the base's own name while it is off, so that off runs nothing of ours.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from bifocals.config import Config, FocalConfig, FocusConfig
from bifocals.families import Site, attention_sites
from bifocals.interface import NAME, Mode, register
from bifocals.layer import Captures, LayerLens, Settings
from bifocals.measure import Measurement, measure_patterns
from bifocals.network import AnyRouter
from bifocals.tape import Tape

ATTRIBUTE = "_bifocals_lens"


def attach(model: PreTrainedModel, *configs: Config, layers: Iterable[int] | None = None) -> "Lens":
    """Fit a lens to ``model`` in place: Focal, Focus or both, on all layers or on those named."""
    focal, focus = _sort_configs(configs)
    every_site = attention_sites(model)
    if any(NAME in site.module._modules for site in every_site):
        raise ValueError(
            f"This {type(model).__name__} has a lens already: expected a model without one. Call "
            "bifocals.lens_of(model).detach() first; to have both methods, pass both configs to one attach."
        )
    sites = choose_sites(every_site, layers)
    settings = Settings(top_k=1 if focus is None else focus.top_k)
    # Everything that may fail comes first: nothing half-done is left behind.
    lenses = [(site, _layer_lens(site, focal, focus, settings)) for site in sites]
    lenses = [(site, lens) for site, lens in lenses if lens.temperature is not None or lens.router is not None]
    if not lenses:
        raise ValueError(
            f"The layers {sorted({site.layer for site in sites})} take no Focus: in an encoder-decoder it sits on the "
            "encoder, whose layers come first. Name those, or leave layers out."
        )
    register()
    return Lens(model, focal, focus, settings, lenses)


def lens_of(model: nn.Module) -> "Lens | None":
    """The lens of a model, or of the model that it wraps; or None."""
    return next((part.__dict__[ATTRIBUTE] for part in model.modules() if ATTRIBUTE in part.__dict__), None)


class Lens:
    """A fitted lens: switch it, dial it, measure it, save it, take it off."""

    def __init__(
        self,
        model: PreTrainedModel,
        focal: FocalConfig | None,
        focus: FocusConfig | None,
        settings: Settings,
        lenses: list[tuple[Site, LayerLens]],
    ) -> None:
        self.model, self.focal, self.focus = model, focal, focus
        self._settings = settings
        self._configs = _own_configs(model)
        self._implementations = [config._attn_implementation for config in self._configs]
        self._layers: dict[str, tuple[nn.Module, LayerLens]] = {}
        self._hooks: list[RemovableHandle] = []
        for site, lens in lenses:
            lens.train(site.module.training)
            site.module.add_module(NAME, lens)
            self._hooks += lens.watch(site.module)
            self._layers[site.name] = site.module, lens
        model.__dict__[ATTRIBUTE] = self
        self.mode = settings.mode

    def __repr__(self) -> str:
        methods = " and ".join(repr(config) for config in (self.focal, self.focus) if config is not None)
        return f"Lens on {type(self.model).__name__}, mode {self.mode!r}: {methods}"

    @property
    def layers(self) -> dict[str, LayerLens]:
        """The lens of each covered layer; what reads another sequence is called "3.cross"."""
        return {name: lens for name, (_, lens) in self._layers.items()}

    def modules(self) -> list[nn.Module]:
        """The attention modules that the lens sits on."""
        return [module for module, _ in self._layers.values()]

    @property
    def routers(self) -> dict[str, AnyRouter]:
        return {name: lens.router for name, lens in self.layers.items() if lens.router is not None}

    @property
    def base_implementation(self) -> str | None:
        """The attention implementation that the model has without the lens."""
        return self._implementations[0]

    @property
    def mode(self) -> Mode:
        return self._settings.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {get_args(Mode)}, got {mode!r}. 'off' is the base model.")
        if mode == "sparse" and self.focus is not None and self.focus.gate != "log":
            raise ValueError(
                f"mode 'sparse' has gates on the kept pairs alone: expected gate='log', got {self.focus.gate!r}, which "
                "never closes. Use mode 'soft'."
            )
        self._expect_attached()
        self._settings.mode = mode
        for number, config in enumerate(self._configs):
            if config._attn_implementation != NAME:
                self._implementations[number] = config._attn_implementation  # perhaps chosen while the lens was off
            config._attn_implementation_internal = self._implementations[number] if mode == "off" else NAME

    @property
    def top_k(self) -> int:
        """How many groups each query reads (with networks, on average): the dial between speed and quality."""
        return self._expect_focus().top_k

    @top_k.setter
    def top_k(self, top_k: int) -> None:
        self._expect_focus()
        assert self.focus is not None
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= self.focus.groups:
            raise ValueError(f"top_k: expected an integer in 1..{self.focus.groups}, got {top_k!r}.")
        self._settings.top_k = top_k

    @contextmanager
    def disabled(self) -> Iterator[PreTrainedModel]:
        """The base model, bit for bit, for the length of the block."""
        before = self.mode
        self.mode = "off"
        try:
            yield self.model
        finally:
            self.mode = before

    def parameters(self) -> Iterator[nn.Parameter]:
        """Only what the lens added."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, lens in self.layers.items():
            yield from lens.named_parameters(prefix=f"layers.{name}")

    def state_dict(self) -> dict[str, Tensor]:
        """The lens's own tensors: parameters and potentials."""
        return {
            f"layers.{name}.{key}": tensor
            for name, lens in self.layers.items()
            for key, tensor in nn.Module.state_dict(lens).items()
        }

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Copy tensors of the same names and shapes into the lens."""
        own = self.state_dict()
        if own.keys() != tensors.keys():
            missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
            raise ValueError(f"Expected the tensors of this lens; missing {missing[:3]}, not known {extra[:3]}.")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise ValueError(f"{name}: expected shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}.")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)

    def train(self, mode: bool = True) -> "Lens":
        """Training mode of the lens alone: in it, routers collect what their balance needs."""
        for lens in self.layers.values():
            lens.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "Lens":
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def step_balance(self) -> None:
        """Once per optimizer step: move every router's potentials towards equal groups."""
        for router in self.routers.values():
            router.step_balance()

    @contextmanager
    def taped(self, tape: Tape) -> Iterator[Tape]:
        """Record the groups of every layer on ``tape``, or play them from it."""
        before, self._settings.tape = self._settings.tape, tape
        try:
            yield tape
        finally:
            self._settings.tape = before

    @contextmanager
    def capturing(self, capture: Captures) -> Iterator[None]:
        """Run the base's own pattern and show ``capture`` what each layer would route and attend."""
        before, self.mode = self.mode, "hard"
        self._settings.capture = capture
        try:
            yield
        finally:
            self._settings.capture, self.mode = None, before

    @torch.no_grad()
    def measure(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Measurement:
        """What share of the pairs the routers keep on this text, and how balanced the groups are."""
        self._expect_focus()
        before, self.mode = self.mode, "hard"
        try:
            with evaluating(self.model), self.taped(Tape()) as tape:
                known = {} if attention_mask is None else {"attention_mask": attention_mask}
                body = self.model.base_model if isinstance(self.model, PreTrainedModel) else self.model
                body(input_ids=input_ids, use_cache=False, **known)
        finally:
            self.mode = before
        return self.measure_tape(tape, attention_mask)

    def measure_tape(self, tape: Tape, attention_mask: Tensor | None = None) -> Measurement:
        """The same, of a run that was recorded on ``tape``."""
        self._expect_focus()
        assert self.focus is not None
        return measure_patterns(tape, self.focus, self._patterns(), attention_mask)

    def summary(self) -> "Summary":
        """What was added, and where."""
        added = sum(parameter.numel() for parameter in self.parameters())
        total = sum(parameter.numel() for parameter in self.model.parameters())
        rows = tuple(
            LayerSummary(
                name,
                sum(parameter.numel() for parameter in lens.parameters()),
                None if self.focal is None else self.focal.temperature,
                None if lens.focus is None else lens.focus.groups,
                None if lens.focus is None else lens.focus.window,
            )
            for name, lens in self.layers.items()
        )
        return Summary(type(self.model).__name__, self.mode, added, added / (total - added), rows)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write adapter_config.json and adapter_model.safetensors, both or neither."""
        from bifocals.adapter import save_adapter

        save_adapter(self, folder)

    def push_to_hub(self, repository: str, **options: Any) -> str:
        """Upload the adapter to a repository of the Hugging Face hub."""
        from bifocals.adapter import push_adapter

        return push_adapter(self, repository, **options)

    def detach(self) -> PreTrainedModel:
        """Take the lens off: the model as it was."""
        self.mode = "off"
        for hook in self._hooks:
            hook.remove()
        for module, _ in self._layers.values():
            del module._modules[NAME]
        del self.model.__dict__[ATTRIBUTE]
        self._hooks = []
        return self.model

    def _patterns(self) -> dict[str, tuple[bool, int | None]]:
        """Of each routed layer: is it causal, and how far does the base see?"""
        found = {}
        for name, (module, lens) in self._layers.items():
            if lens.router is not None:
                config = module.config
                kinds = getattr(config, "layer_types", None)
                slides = kinds is None or kinds[lens.cached_layer] == "sliding_attention"
                reach = getattr(config, "sliding_window", None) if slides else None
                found[name] = bool(getattr(module, "is_causal", True)), reach
        return found

    def _expect_attached(self) -> None:
        if self.model.__dict__.get(ATTRIBUTE) is not self:
            raise ValueError("This lens was detached from its model. Attach or load one again.")

    def _expect_focus(self) -> Settings:
        if self.focus is None:
            raise ValueError("This lens has no Focus, so it has no groups. Pass a FocusConfig to attach.")
        return self._settings


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One covered layer."""

    layer: str
    parameters: int
    temperature: float | None
    groups: int | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A lens in numbers; prints as a table."""

    model: str
    mode: str
    added: int
    share: float
    layers: tuple[LayerSummary, ...]

    def __str__(self) -> str:
        head = f"{self.model}, mode {self.mode}: {self.added:,} parameters added, {self.share:.3%} of the model"
        columns = ("layer", "parameters", "temperature", "groups", "window")
        rows = ["  ".join(f"{name:>11}" for name in columns)]
        for row in self.layers:
            cells = (row.layer, f"{row.parameters:,}", row.temperature, row.groups, row.window)
            rows.append("  ".join(f"{'-' if cell is None else cell!s:>11}" for cell in cells))
        return "\n".join([head, *rows])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode for the length of the block, then as it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _sort_configs(configs: tuple[Config, ...]) -> tuple[FocalConfig | None, FocusConfig | None]:
    focal = [config for config in configs if isinstance(config, FocalConfig)]
    focus = [config for config in configs if isinstance(config, FocusConfig)]
    if len(focal) > 1 or len(focus) > 1 or not configs or len(focal) + len(focus) < len(configs):
        got = [type(config).__name__ for config in configs]
        raise ValueError(f"Expected a FocalConfig, a FocusConfig, or one of each, got {got}.")
    return (focal[0] if focal else None), (focus[0] if focus else None)


def choose_sites(sites: list[Site], layers: Iterable[int] | None) -> list[Site]:
    """Those of the named layers; all if none is named."""
    if layers is None:
        return sites
    wanted, known = list(layers), {site.layer for site in sites}
    if not wanted or any(isinstance(layer, bool) or layer not in known for layer in wanted):
        raise ValueError(f"layers: expected some of 0..{max(known)}, got {wanted}. Leave it out to cover all.")
    return [site for site in sites if site.layer in wanted]


def _layer_lens(site: Site, focal: FocalConfig | None, focus: FocusConfig | None, settings: Settings) -> LayerLens:
    """On the device of its attention module; in float32 at least, as routing decides."""
    weight = next(site.module.parameters())
    if weight.is_meta:
        raise ValueError(
            f"Layer {site.name} has no weights in memory: expected some on a device, got 'meta' (offloaded?). "
            "Load the model onto a device, or several, and attach then."
        )
    floating = weight.dtype if weight.is_floating_point() else torch.float32
    lens = LayerLens(site, focal, focus if site.may_focus else None, settings)
    return lens.to(device=weight.device, dtype=torch.promote_types(floating, torch.float32))


def _own_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Give the model configs of its own: models made from one config object share it, and a lens is for one model."""
    copies: dict[int, Any] = {}
    own: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.__dict__["config"] = own.setdefault(id(config), copy.deepcopy(config, copies))
    return list(own.values())
