"""Two lenses for transformers: Focal sharpens attention, Focus selects what is worth attending to."""

from typing import TYPE_CHECKING, Any

from bifocals.config import FocalConfig, FocusConfig
from bifocals.focal import ConstantTemperature, LearnedTemperature, focal_attention
from bifocals.focus import focus_attention, soft_focus_attention
from bifocals.routing import Router

if TYPE_CHECKING:
    from bifocals.adapter import load
    from bifocals.folding import fold
    from bifocals.lens import Lens, attach, lens_of
    from bifocals.promises import check

__all__ = [
    "ConstantTemperature",
    "FocalConfig",
    "FocusConfig",
    "LearnedTemperature",
    "Lens",
    "Router",
    "attach",
    "check",
    "focal_attention",
    "focus_attention",
    "fold",
    "lens_of",
    "load",
    "soft_focus_attention",
]
__version__ = "0.1.0"

# What fits models needs transformers, which takes seconds to import; the operators do without it.
_NEED_TRANSFORMERS = {
    "Lens": "bifocals.lens",
    "attach": "bifocals.lens",
    "check": "bifocals.promises",
    "fold": "bifocals.folding",
    "lens_of": "bifocals.lens",
    "load": "bifocals.adapter",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TRANSFORMERS:
        raise AttributeError(f"module 'bifocals' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEED_TRANSFORMERS[name]), name)
