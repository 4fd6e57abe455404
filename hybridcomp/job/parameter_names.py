"""Names of parameters as the model defines them, without the prefixes that wrappers add."""

from __future__ import annotations

from torch import nn

#: prefixes that torch.compile and activation checkpointing put into the names of parameters
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return ``name`` without the prefixes that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_once(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Return every parameter under its first name, and map its other names to the first."""
    found: dict[str, nn.Parameter] = {}
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        if id(parameter) in first:
            aliases[plain] = first[id(parameter)]
        else:
            first[id(parameter)] = plain
            found[plain] = parameter
    return found, aliases
