"""Two lenses for transformers: Focal sharpens attention, Focus selects what is worth attending to."""

from bifocals.config import FocalConfig, FocusConfig
from bifocals.focal import ConstantTemperature, LearnedTemperature, focal_attention
from bifocals.focus import focus_attention, soft_focus_attention
from bifocals.routing import Router

__all__ = [
    "ConstantTemperature",
    "FocalConfig",
    "FocusConfig",
    "LearnedTemperature",
    "Router",
    "focal_attention",
    "focus_attention",
    "soft_focus_attention",
]
__version__ = "0.1.0"
