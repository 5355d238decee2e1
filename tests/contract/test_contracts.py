"""Each seam's suite over every name that is installed."""

from __future__ import annotations

import pytest

from conch.engine.catalogue import HOOKS, Catalogue
from conch.testing import (
    AttentionKernelContract,
    DrafterContract,
    KVConnectorContract,
    KVManagerContract,
    ParallelismContract,
    PrefixCacheContract,
    RouterContract,
    SchedulerContract,
)

CATALOGUE = Catalogue.load()


class Named:
    """Runs a suite once for each name of its seam."""

    seam = ""

    @pytest.fixture(autouse=True)
    def choose(self, offered):
        self.factory = CATALOGUE.factory(self.seam, offered)

    def build(self, *arguments):
        return self.factory(*arguments)


def pytest_generate_tests(metafunc):
    if "offered" in metafunc.fixturenames:
        metafunc.parametrize("offered", CATALOGUE.names(metafunc.cls.seam))


class TestSchedulers(Named, SchedulerContract):
    seam = "scheduler"


class TestKVManagers(Named, KVManagerContract):
    seam = "kv_manager"


class TestPrefixCaches(Named, PrefixCacheContract):
    seam = "prefix_cache"


class TestAttentionKernels(Named, AttentionKernelContract):
    seam = "attention_kernel"

    def unfit(self, spec):
        return self.factory.unfit(spec)


class TestDrafters(Named, DrafterContract):
    seam = "drafter"


class TestParallelisms(Named, ParallelismContract):
    seam = "parallelism"


class TestRouters(Named, RouterContract):
    seam = "router"


class TestKVConnectors(Named, KVConnectorContract):
    seam = "kv_connector"


def test_every_seam_has_a_suite_and_a_plugin():
    assert {suite.seam for suite in Named.__subclasses__()} == set(HOOKS)
    assert all(CATALOGUE.names(seam) for seam in HOOKS)
