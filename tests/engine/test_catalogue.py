"""Plugins load loudly or not at all."""

from __future__ import annotations

import types
from importlib.metadata import EntryPoint

import pytest

from conch.api import API_VERSION, ConfigError, PluginError, hookimpl
from conch.engine import catalogue as room
from conch.engine.catalogue import HOOKS, Catalogue


def plugin_module(**functions):
    module = types.ModuleType("somebody_elses_plugin")
    for name, value in functions.items():
        setattr(module, name, hookimpl(value) if callable(value) else value)
    return module


@pytest.fixture
def install(monkeypatch):
    """Pretend that modules are installed as plugins, beside the built-ins."""

    def install(**modules):
        installed = list(room.entry_points(group=room.GROUP))
        fakes = {name: EntryPoint(name, f"{name}_module", room.GROUP) for name in modules}
        monkeypatch.setattr(room, "entry_points", lambda group: [*installed, *fakes.values()])
        real_load = EntryPoint.load

        def load(entry):
            module = modules.get(entry.name)
            if isinstance(module, Exception):
                raise module
            return module if module is not None else real_load(entry)

        monkeypatch.setattr(EntryPoint, "load", load)

    return install


def test_every_seam_has_a_built_in():
    catalogue = Catalogue.load()
    assert {seam: bool(catalogue.names(seam)) for seam in HOOKS} == dict.fromkeys(HOOKS, True)


def test_describe_names_package_and_version():
    record = next(r for r in Catalogue.load().describe() if r["name"] == "fcfs")
    assert record["seam"] == "scheduler"
    assert record["package"] == "conch"
    assert record["version"][0].isdigit()


@pytest.mark.parametrize("seam", HOOKS)
def test_a_plugin_adds_a_name_to_each_seam(install, seam):
    install(extra=plugin_module(**{HOOKS[seam]: lambda: {"mine": object}}))
    assert "mine" in Catalogue.load().names(seam)
    assert Catalogue.load().factory(seam, "mine") is object


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(PluginError, match=r"unknown scheduler 'fifo'; installed: .*fcfs"):
        Catalogue.load().factory("scheduler", "fifo")


def test_a_name_offered_twice_is_refused_with_both_origins(install):
    install(extra=plugin_module(conch_schedulers=lambda: {"fcfs": object}))
    with pytest.raises(PluginError, match=r"'fcfs' is offered twice.*'builtin'.*'extra'"):
        Catalogue.load()


def test_a_mistyped_hook_is_refused(install):
    install(extra=plugin_module(conch_schedulerz=lambda: {}))
    with pytest.raises(PluginError, match="conch_schedulerz"):
        Catalogue.load()


def test_a_plugin_that_does_not_import_stops_the_server(install):
    install(extra=ImportError("no module named flux"))
    with pytest.raises(PluginError, match=r"'extra'.*cannot be imported.*flux"):
        Catalogue.load()


def test_another_api_version_is_refused_with_both_numbers(install):
    install(extra=plugin_module(CONCH_API_VERSION=API_VERSION + 1))
    with pytest.raises(PluginError, match=rf"plugin API {API_VERSION + 1}.*plugin API {API_VERSION}"):
        Catalogue.load()


def test_a_factory_that_raises_names_plugin_and_reason(install):
    def build(context):
        raise ZeroDivisionError("no can do")

    install(extra=plugin_module(conch_schedulers=lambda: {"mine": build}))
    with pytest.raises(PluginError, match=r"scheduler 'mine'.*'extra'.*ZeroDivisionError: no can do"):
        Catalogue.load().build("scheduler", "mine", None)


def test_what_a_factory_says_on_purpose_is_told_as_it_is(install):
    def build(context):
        raise ConfigError("kv_cache_memory_bytes is too small")

    install(extra=plugin_module(conch_schedulers=lambda: {"mine": build}))
    with pytest.raises(ConfigError, match=r"^kv_cache_memory_bytes is too small$"):
        Catalogue.load().build("scheduler", "mine", None)


def test_the_allow_list_leaves_others_out(install, monkeypatch):
    install(extra=plugin_module(conch_schedulers=lambda: {"mine": object}))
    monkeypatch.setenv(room.ALLOW_VARIABLE, "")
    assert "mine" not in Catalogue.load().names("scheduler")
    monkeypatch.setenv(room.ALLOW_VARIABLE, "extra")
    assert "mine" in Catalogue.load().names("scheduler")
    monkeypatch.setenv(room.ALLOW_VARIABLE, "missing")
    with pytest.raises(PluginError, match="missing"):
        Catalogue.load()
