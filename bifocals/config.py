"""Every option of both lenses: one definition, one default, one sentence each.

Command-line help and documentation are derived from here.
"""

from dataclasses import asdict, dataclass, field, fields
from reprlib import repr as brief  # a value from a file may have any length
from typing import Any, Literal, get_args, get_type_hints

MAXIMUM_TEMPERATURE = 4.0


def option(default: Any, sentence: str) -> Any:
    return field(default=default, metadata={"help": sentence})


@dataclass(frozen=True, kw_only=True, slots=True)
class FocalConfig:
    """Focal attention: divide the attention logits by a temperature below one."""

    temperature: float = option(0.4, "The temperature; where it is learned, the value it starts at. 1 is standard.")
    form: Literal["constant", "token", "length", "prefix", "sequence"] = option(
        "constant",
        "One number; or learned: from each token, from it and how many came before, or from the mean over the prefix "
        "or the sequence.",
    )
    per: Literal["layer", "head"] = option("layer", "A learned temperature for each layer, or for each query head.")
    minimum: float = option(0.1, "A learned temperature stays above this.")
    maximum: float = option(2.0, "A learned temperature stays below this.")

    def __post_init__(self) -> None:
        check_types(self)
        expect(
            0 < self.temperature <= MAXIMUM_TEMPERATURE,
            f"temperature in (0, {MAXIMUM_TEMPERATURE:g}]",
            self.temperature,
            "0.4 is the paper's choice and 1 is standard attention",
        )
        if self.is_learned:
            expect(
                0 < self.minimum < self.temperature < self.maximum,
                "0 < minimum < temperature < maximum",
                (self.minimum, self.temperature, self.maximum),
                "a learned temperature starts inside its range",
            )

    @property
    def is_learned(self) -> bool:
        return self.form != "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class FocusConfig:
    """Focus attention: near tokens in full, far tokens only inside the groups a query reads."""

    groups: int = option(8, "How many groups the tokens are sorted into.")
    top_k: int = option(
        0, "How many groups each query reads, with networks on average; 0 means two, or one if there is only one group."
    )
    window: int = option(128, "Keys at most this far from the query are near: always read.")
    sinks: int = option(4, "The first tokens of a sequence, which every query reads.")
    dim: int = option(16, "Size of the space in which tokens meet the centroids; with networks, their hidden width.")
    tau: float = option(0.1, "The scores are divided by this; smaller makes soft groups harder.")
    routers: Literal["kv_head", "layer"] = option("kv_head", "One router for each key-value head, or for each layer.")
    sides: Literal["separate", "same"] = option(
        "separate", "Queries and keys have their own projections, keys in one group; or both are in the same groups."
    )
    idle: float = option(
        0.0, "Share of the keys in no group, those least attended to from afar; networks only, 0.2 by default there."
    )
    score: Literal["cosine", "dot", "network"] = option(
        "cosine",
        "How a token is compared with a centroid; or small networks score the base's own queries and keys.",
    )
    balance: Literal["causal", "sinkhorn"] = option(
        "causal",
        "Equal groups by potentials learned from past steps, or by Sinkhorn over the sequence (it looks ahead).",
    )
    gate: Literal["log", "sigmoid"] = option("log", "The soft gate: add log(g_i.g_j), or the paper's sigmoid factor.")
    slope: float = option(10.0, "Slope of the sigmoid gate (lambda in the paper).")
    rounds: int = option(10, "Rounds of Sinkhorn.")
    momentum: float = option(0.9, "How much of its potentials a router keeps at each step.")
    allow_look_ahead: bool = option(False, "Accept a balance that reads the future in a decoder, to measure the leak.")

    def __post_init__(self) -> None:
        check_types(self)
        expect(self.groups >= 1, "groups >= 1", self.groups, "1 group is the base model")
        if self.top_k == 0:
            object.__setattr__(self, "top_k", min(2, self.groups))
        expect(1 <= self.top_k <= self.groups, f"top_k in 1..{self.groups}", self.top_k, "lower top_k or raise groups")
        expect(self.window >= 0, "window >= 0", self.window, "0 keeps only the token itself near")
        expect(self.sinks >= 0, "sinks >= 0", self.sinks, "0 keeps no token always visible")
        expect(self.dim >= 1, "dim >= 1", self.dim, "16 is enough for most models")
        expect(self.tau > 0, "tau > 0", self.tau, "0.1 is the paper's choice")
        expect(self.slope > 0, "slope > 0", self.slope, "it multiplies g_i.g_j inside the sigmoid")
        expect(self.rounds >= 1, "rounds >= 1", self.rounds, "10 is the paper's choice")
        expect(0 <= self.momentum < 1, "momentum in [0, 1)", self.momentum, "0.9 averages about ten steps")
        expect(0 <= self.idle < 1, "idle in [0, 1)", self.idle, "0 puts every key in a group")
        if self.score != "network":
            expect(self.idle == 0, "idle=0 without networks", self.idle, "centroids cannot foretell who is attended to")
        else:
            expect(
                (self.routers, self.sides, self.balance) == ("kv_head", "separate", "causal"),
                "routers='kv_head', sides='separate' and balance='causal' with score='network'",
                (self.routers, self.sides, self.balance),
                "networks score each head by itself; FocusConfig.network() sets what goes with them",
            )

    @classmethod
    def network(cls, **options: Any) -> "FocusConfig":
        """Small networks on the base's own queries and keys: what keeps most of a model's quality once it is fitted."""
        return cls(**{"score": "network", "dim": 64, "tau": 1.0, "idle": 0.2, **options})

    @classmethod
    def paper(cls, **options: Any) -> "FocusConfig":
        """The method as printed. In a decoder it reads the future, so pass ``allow_look_ahead=True`` there."""
        printed: dict[str, Any] = {"routers": "layer", "sides": "same", "score": "dot", "balance": "sinkhorn"}
        printed |= {"gate": "sigmoid", "sinks": 0, "top_k": 1}
        return cls(**{**printed, **options})


Config = FocalConfig | FocusConfig


def as_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def from_dict(kind: type[FocalConfig] | type[FocusConfig], values: dict[str, Any]) -> Config:
    """A config read from a file, which is not trusted: every name is checked here, every type and value by itself."""
    known = {item.name for item in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no option {brief(unknown)}. It has {sorted(known)}. Remove what it does not know."
        )
    return kind(**values)


def check_types(config: Any) -> None:
    for name, hint in get_type_hints(type(config)).items():
        value, choices = getattr(config, name), get_args(hint)
        allowed = (str,) if choices else (int, float) if hint is float else (hint,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool):
            wanted, got = " or ".join(kind.__name__ for kind in allowed), f"{brief(value)} ({type(value).__name__})"
            raise ValueError(f"{type(config).__name__}.{name}: expected {wanted}, got {got}. Convert it.")
        if choices:
            expect(value in choices, f"{name} one of {choices}", value, "choose one")


def expect(claim: bool, expected: str, got: object, remedy: str) -> None:
    if not claim:
        raise ValueError(f"Expected {expected}, got {brief(got)}: {remedy}.")
