"""What the operators accept. Each error says what was expected, what came and what to do, before any work."""

import torch
from torch import Tensor


def check_focus(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    sinks: int,
    segments: Tensor | None,
    temperature: float | Tensor,
    scale: float | None,
    softcap: float | None,
    reach: int | None,
) -> float | Tensor:
    """What every form of Focus is given but its groups or gates; returns the temperature, as it divides queries."""
    check_heads(query, key, value)
    check_segments(segments, key)
    check_counts(window, sinks)
    check_positive("temperature", temperature)
    if isinstance(temperature, Tensor):
        temperature = temperature_per_query(temperature, query)
    check_positive("scale", scale)
    check_positive("softcap", softcap)
    check_positive("reach", reach)
    return temperature


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name}: expected (batch, head, length, dim), got shape {tuple(tensor.shape)}. "
                "Add the missing dimensions, e.g. with unsqueeze."
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: expected a floating-point tensor, got {tensor.dtype}. Convert it first.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key, value: expected one dtype, got {query.dtype}, {key.dtype}, {value.dtype}. Convert them."
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key, value: expected one device, got {query.device}, {key.device}, {value.device}. Move them."
        )
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value: expected the same (batch, kv_head, length), got {tuple(key.shape)} and "
            f"{tuple(value.shape)}. Pass the values of the same tokens."
        )
    if key.shape[0] != batch or key.shape[3] != dim:
        raise ValueError(
            f"query and key: expected the same batch and dim, got {tuple(query.shape)} and {tuple(key.shape)}. "
            "Layout is (batch, head, length, dim)."
        )
    if dim == 0:
        raise ValueError(f"query and key: expected dim >= 1, got {tuple(query.shape)}. Attention compares them.")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"Expected query heads to be a multiple of key-value heads, got {heads} and {kv_heads}. "
            "Repeat or select heads so that they divide."
        )
    if queries > keys:
        raise ValueError(
            f"Expected at most as many queries as keys (queries are the last positions), got {queries} and {keys}. "
            "Pass the keys of all positions."
        )


def check_segments(segments: Tensor | None, key: Tensor) -> None:
    if segments is None:
        return
    expected = (key.shape[0], key.shape[2])
    if tuple(segments.shape) != expected or segments.is_floating_point() or segments.dtype == torch.bool:
        raise ValueError(
            f"segments: expected integers of shape (batch, key length) = {expected}, got {segments.dtype} of shape "
            f"{tuple(segments.shape)}. Number the packed sequences 0, 1, ... and mark padding by -1."
        )
    if torch.compiler.is_compiling() or segments.shape[1] < 2:
        return
    before, after = segments[:, :-1], segments[:, 1:]
    runs = ((before != after) & (after >= 0)).sum(dim=1) + (segments[:, 0] >= 0)
    ordered = segments.clamp(min=-1).sort(dim=1).values
    names = ((ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum(dim=1) + (ordered[:, 0] >= 0)
    if not torch.equal(runs, names):
        raise ValueError(
            "segments: expected each segment to be one contiguous run, got a segment that comes back after another. "
            "Give each run its own number."
        )


def check_membership(name: str, membership: Tensor, query: Tensor, key: Tensor, length: int) -> None:
    batch, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    if membership.dtype != torch.bool:
        raise ValueError(
            f"{name}: expected bool (True = the token is in that group), got {membership.dtype}. "
            "For group numbers use torch.nn.functional.one_hot(groups, count).bool()."
        )
    fits = (
        membership.ndim == 4
        and membership.shape[0] == batch
        and membership.shape[1] in (1, kv_heads, heads)
        and membership.shape[2] == length
        and membership.shape[3] >= 1
    )
    if not fits:
        raise ValueError(
            f"{name}: expected shape (batch, 1 | kv_head | head, length, groups) = "
            f"({batch}, 1 | {kv_heads} | {heads}, {length}, groups), got {tuple(membership.shape)}. "
            "Queries shorter than keys need their own membership and a key_membership of all keys."
        )
    if membership.device != query.device:
        raise ValueError(f"{name}: expected device {query.device}, got {membership.device}. Move it there.")


def check_group_count(name: str, membership: Tensor, key_membership: Tensor) -> None:
    groups, of_keys = membership.shape[3], key_membership.shape[3]
    if groups != of_keys:
        raise ValueError(
            f"{name} and key_{name}: expected the same number of groups, got {groups} and {of_keys}. "
            "A group has one place in both, even where one side has no token in it."
        )


def check_gates(gates: Tensor, key_gates: Tensor, query: Tensor, key: Tensor) -> None:
    batch, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    for name, each, length in (("gates", gates, query.shape[2]), ("key_gates", key_gates, key.shape[2])):
        fits = (
            each.ndim == 4
            and each.is_floating_point()
            and each.shape[0] == batch
            and each.shape[1] in (1, kv_heads, heads)
            and each.shape[2] == length
        )
        if not fits:
            raise ValueError(
                f"{name}: expected floats of shape (batch, 1 | kv_head | head, length, groups) = "
                f"({batch}, 1 | {kv_heads} | {heads}, {length}, groups), got {each.dtype} of shape "
                f"{tuple(each.shape)}. They are the softmax over groups of a router's scores."
            )
    check_group_count("gates", gates, key_gates)


def check_counts(window: int, sinks: int) -> None:
    for name, number in (("window", window), ("sinks", sinks)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{name}: expected an integer >= 0, got {number!r}. 0 turns it off.")


REMEDIES = {
    "temperature": "1 is neutral for a temperature; below 1 sharpens",
    "scale": "Leave it out for 1 / sqrt(dim)",
    "softcap": "Leave it out for none",
    "reach": "Leave it out for no sliding window; 1 reaches the token itself",
    "slope": "It multiplies g_i.g_j inside the sigmoid",
}


def check_positive(name: str, number: float | Tensor | None) -> None:
    if number is None or (isinstance(number, Tensor) and torch.compiler.is_compiling()):
        return
    is_positive = bool((number > 0).all()) if isinstance(number, Tensor) else number > 0
    if not is_positive:
        shown = (
            f"a tensor whose least value is {number.min().item():g}" if isinstance(number, Tensor) else f"{number!r}"
        )
        raise ValueError(f"{name}: expected > 0, got {shown}. {REMEDIES[name]}.")


def temperature_per_query(temperature: Tensor, query: Tensor) -> Tensor:
    """Bring a temperature tensor to a shape that divides (batch, head, query, dim).

    ()  one number      (head,)      (batch, query)      (batch, head, query)      or four dimensions, broadcast
    """
    batch, heads, queries = query.shape[:3]
    by_dimensions = {
        0: lambda t: t,
        1: lambda t: t[None, :, None, None],
        2: lambda t: t[:, None, :, None],
        3: lambda t: t[..., None],
        4: lambda t: t,
    }
    shaped = by_dimensions[temperature.ndim](temperature) if temperature.ndim <= 4 else temperature
    fits = shaped.ndim == 0 or (
        shaped.ndim == 4 and all(got in (1, want) for got, want in zip(shaped.shape, (batch, heads, queries, 1)))
    )
    if not fits or not temperature.is_floating_point():
        raise ValueError(
            f"temperature: expected a number or floats of shape (), (head,), (batch, query), (batch, head, query) or "
            f"four dimensions that broadcast to ({batch}, {heads}, {queries}, 1), got {temperature.dtype} of shape "
            f"{tuple(temperature.shape)}. Reshape it."
        )
    return shaped
