"""All plugins that are installed, asked once; after that the engine holds plain objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from conch.api import hookspecs
from conch.api.errors import ConchError, PluginError

GROUP = "conch"
ALLOW_VARIABLE = "CONCH_PLUGINS"

HOOKS: Mapping[str, str] = {
    "scheduler": "conch_schedulers",
    "kv_manager": "conch_kv_managers",
    "prefix_cache": "conch_prefix_caches",
    "attention_kernel": "conch_attention_kernels",
    "drafter": "conch_drafters",
    "parallelism": "conch_parallelisms",
    "router": "conch_routers",
    "kv_connector": "conch_kv_connectors",
}
"""Seam (the configuration key that chooses; for drafters, `speculative_config.method`) to hook."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One name that a plugin offers for a seam, and where it comes from."""

    seam: str
    name: str
    factory: Callable[..., Any]
    plugin: str
    package: str
    version: str


class Catalogue:
    """Every name that plugins offer, by seam."""

    def __init__(self, offers: list[Offer]) -> None:
        self._offers: dict[str, dict[str, Offer]] = {seam: {} for seam in HOOKS}
        for offer in offers:
            taken = self._offers[offer.seam].get(offer.name)
            if taken is not None:
                raise PluginError(
                    f"{offer.seam} {offer.name!r} is offered twice: by {_origin(taken)} and "
                    f"{_origin(offer)}; uninstall one, or name the plugins to load in {ALLOW_VARIABLE}"
                )
            self._offers[offer.seam][offer.name] = offer

    @classmethod
    def load(cls) -> Catalogue:
        """Load the installed plugins and ask each hook once.

        ``CONCH_PLUGINS`` (comma-separated entry-point names) restricts which are loaded; the built-ins are
        loaded always.

        Raises
        ------
        PluginError
            A plugin cannot be imported, was written for another API version, implements an unknown
            hook, or offers a taken name. A server must not start without what it was asked for.
        """
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(hookspecs)
        origins: dict[str, tuple[str, str]] = {}
        for entry in _allowed(list(entry_points(group=GROUP))):
            plugin = _import(entry)
            manager.register(plugin, name=entry.name)
            distribution = entry.dist
            origins[entry.name] = (
                (distribution.name, distribution.version) if distribution else (entry.value, "unknown")
            )
        try:
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"a plugin implements a hook that conch does not have: {error}") from error
        return cls(_ask(manager, origins))

    def names(self, seam: str) -> list[str]:
        """Names offered for a seam, sorted."""
        return sorted(self._offers[seam])

    def factory(self, seam: str, name: str) -> Callable[..., Any]:
        """Return what builds `name`. Raises PluginError, listing the known names, for an unknown one."""
        offer = self._offers[seam].get(name)
        if offer is None:
            raise PluginError(f"unknown {seam} {name!r}; installed: {', '.join(self.names(seam)) or 'none'}")
        return offer.factory

    def build(self, seam: str, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - the seam's type, checked by its contract
        """Build `name`, naming the plugin in the error if it fails in a way of its own."""
        factory = self.factory(seam, name)
        try:
            return factory(*arguments)
        except ConchError:
            raise  # says itself what to change
        except Exception as error:
            raise PluginError(
                f"{seam} {name!r} of {_origin(self._offers[seam][name])} could not be built: "
                f"{type(error).__name__}: {error}"
            ) from error

    def describe(self) -> list[dict[str, str]]:
        """One record for each name: seam, name, plugin, package, version."""
        return [
            {
                "seam": offer.seam,
                "name": offer.name,
                "plugin": offer.plugin,
                "package": offer.package,
                "version": offer.version,
            }
            for seam in HOOKS
            for _, offer in sorted(self._offers[seam].items())
        ]


def _origin(offer: Offer) -> str:
    return f"plugin {offer.plugin!r} ({offer.package} {offer.version})"


def _allowed(entries: list[EntryPoint]) -> list[EntryPoint]:
    """Filter by the allow-list; an entry point that is seen twice (editable installs do that) counts once."""
    by_name: dict[str, EntryPoint] = {}
    for entry in entries:
        other = by_name.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise PluginError(
                f"two plugins are called {entry.name!r} in entry-point group {GROUP!r}: "
                f"{other.value} and {entry.value}"
            )
    listed = os.environ.get(ALLOW_VARIABLE)
    if listed is None:
        return list(by_name.values())
    wanted = {name.strip() for name in listed.split(",") if name.strip()}
    unknown = wanted - by_name.keys()
    if unknown:
        raise PluginError(
            f"{ALLOW_VARIABLE} names {', '.join(sorted(unknown))}, not installed; "
            f"installed: {', '.join(by_name)}"
        )
    return [entry for name, entry in by_name.items() if name in wanted or name == "builtin"]


def _import(entry: EntryPoint) -> object:
    version = entry.dist.version if entry.dist else "unknown version"
    label = f"plugin {entry.name!r} ({entry.value}, {version})"
    try:
        plugin: object = entry.load()
    except Exception as error:
        raise PluginError(f"{label} cannot be imported: {type(error).__name__}: {error}") from error
    written_for = getattr(plugin, "CONCH_API_VERSION", hookspecs.API_VERSION)
    if written_for != hookspecs.API_VERSION:
        raise PluginError(
            f"{label} was written for plugin API {written_for}; this conch has "
            f"plugin API {hookspecs.API_VERSION}"
        )
    return plugin


def _ask(manager: pluggy.PluginManager, origins: Mapping[str, tuple[str, str]]) -> list[Offer]:
    offers = []
    for seam, hook in HOOKS.items():
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            plugin = implementation.plugin_name
            try:
                catalogue = implementation.function()
            except Exception as error:
                raise PluginError(
                    f"plugin {plugin!r} failed in {hook}: {type(error).__name__}: {error}"
                ) from error
            package, version = origins[plugin]
            offers += [
                Offer(seam, name, factory, plugin, package, version) for name, factory in catalogue.items()
            ]
    return offers
