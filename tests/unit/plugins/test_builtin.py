"""The door of the built-in plugins."""

from __future__ import annotations

import subprocess
import sys

import pluggy
import pytest

from conch.api import AttentionSpec, hookspecs
from conch_plugins import builtin

NAMES = {
    "conch_schedulers": {"fcfs", "priority", "fair", "slo", "lpm"},
    "conch_kv_managers": {"paged"},
    "conch_prefix_caches": {"hash", "none"},
    "conch_attention_kernels": {"cpu", "torch"},
    "conch_drafters": {"none"},
    "conch_parallelisms": {"single"},
    "conch_routers": {"least_loaded", "round_robin", "prefix_affinity"},
    "conch_kv_connectors": {"none"},
}


def test_importing_it_loads_nothing_heavy():
    script = (
        "import sys, conch.api, conch_plugins.builtin as b\n"
        "for name in dir(b):\n"
        "    if name.startswith('conch_'): getattr(b, name)()\n"
        "print(','.join(m for m in ('torch', 'triton', 'transformers', 'numpy') if m in sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


@pytest.mark.parametrize("hook", NAMES)
def test_hook_offers_what_is_documented(hook):
    manager = pluggy.PluginManager("conch")
    manager.add_hookspecs(hookspecs)
    manager.register(builtin)
    manager.check_pending()
    offered = set().union(*getattr(manager.hook, hook)())
    assert offered >= NAMES[hook]
    documented = {name for name in offered if f"`{name}`" in getattr(builtin, hook).__doc__}
    assert documented == offered


def test_a_kernel_can_be_asked_before_it_is_built():
    pytest.importorskip("torch")
    spec = AttentionSpec(4, 2, 8, 8, (None,), False, False, "float32", "cpu", 4)
    factory = builtin.conch_attention_kernels()["torch"]
    assert factory.unfit(spec) == []
