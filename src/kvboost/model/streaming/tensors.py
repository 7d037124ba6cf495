"""All tensors of a module, wherever it keeps them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Place = tuple[Any, str]
"""A module, or an object that it holds, and the name of an attribute."""


def tensors_of(module: nn.Module, *, recurse: bool = True) -> dict[Place, torch.Tensor]:
    """Parameters, buffers, and tensors of objects of ours, such as the products of packed
    layers."""
    found: dict[Place, torch.Tensor] = {}
    for part in module.modules() if recurse else (module,):
        for held in (part._parameters, part._buffers):
            found |= {(part, name): each for name, each in held.items() if each is not None}
        for value in vars(part).values():
            found |= {(owner, name): tensor for owner, name, tensor in _inside(value)}
    return found


def _inside(value: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    owner = value.__self__ if inspect.ismethod(value) else value
    if isinstance(owner, nn.Module) or not type(owner).__module__.startswith("kvboost."):
        return
    for name, found in getattr(owner, "__dict__", {}).items():
        if isinstance(found, torch.Tensor):
            yield _Same(owner), name, found
        else:
            yield from _inside(found)


class _Same:
    """An object as a key that equals itself only: those of ours may compare tensors."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.owner is self.owner

    def __hash__(self) -> int:
        return id(self.owner)


def replace_tensor(place: Place, tensor: torch.Tensor) -> None:
    """Puts another tensor of the same shape and type where ``place`` is."""
    owner, name = place
    if isinstance(owner, _Same):
        object.__setattr__(owner.owner, name, tensor)  # some are frozen
    elif name in owner._parameters:
        owner._parameters[name].data = tensor
    else:
        owner._buffers[name] = tensor


def move_tensors(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Moves a module and what it holds. What is shared stays shared."""
    moved: dict[int, torch.Tensor] = {}
    for place, tensor in tensors_of(module, recurse=recurse).items():
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.detach().to(device)
        replace_tensor(place, moved[id(tensor)])
