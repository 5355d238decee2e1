"""Which attention kernel `auto` means."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from conch.api import PluginError
from conch.engine.build import with_kernel
from conch.engine.catalogue import Catalogue
from conch.testing.context import SMALL_ATTENTION, make_context
from conch_kernels.cpu.build import BuildError
from conch_plugins.attention import cpu_paged


def chosen(device="cpu", dtype="float32", kv="auto", **settings):
    attention = dataclasses.replace(SMALL_ATTENTION, device=device, dtype=dtype, kv_cache_dtype=kv)
    context = make_context(attention=attention, **settings)
    return with_kernel(Catalogue.load(), context).config.attention_kernel


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(cpu_paged, "library", lambda: None)


@pytest.fixture
def no_compiler(monkeypatch):
    def fail():
        raise BuildError("no C++ compiler here")

    monkeypatch.setattr(cpu_paged, "library", fail)


@pytest.mark.usefixtures("compiled")
def test_auto_is_the_cpu_kernel(caplog):
    assert chosen() == "cpu"
    assert chosen(dtype="bfloat16") == "cpu"
    assert chosen(attention_kernel="torch") == "torch"
    assert not caplog.records


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_is_torch_with_one_warning(caplog):
    assert chosen() == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C++ compiler here" in record.message


@pytest.mark.usefixtures("compiled")
def test_what_the_cpu_kernel_cannot_do_torch_does(caplog):
    assert chosen(dtype="float16") == "torch"
    (record,) = caplog.records
    assert "float16" in record.message


@pytest.mark.usefixtures("no_compiler")
def test_on_a_gpu_nothing_is_compiled_or_warned_of(caplog):
    assert chosen(device="cuda:0") == "torch"
    assert not caplog.records


@pytest.mark.usefixtures("no_compiler")
def test_a_kernel_asked_for_by_name_is_not_replaced():
    with pytest.raises(PluginError, match=r"'cpu' cannot serve .* no C\+\+ compiler .*torch"):
        chosen(attention_kernel="cpu")


@pytest.mark.usefixtures("compiled")
def test_int8_kv_is_the_cpu_kernels():
    assert chosen(kv="int8") == "cpu"
    with pytest.raises(PluginError, match=r"'torch' cannot serve .* it keeps KV in float32, not int8"):
        chosen(kv="int8", attention_kernel="torch")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("device", "why"), [("cpu", r"no C\+\+ compiler here.*not int8"), ("cuda", "not int8")]
)
def test_int8_kv_is_refused_where_no_kernel_has_it(device, why):
    with pytest.raises(PluginError, match=why):
        chosen(device=device, dtype="bfloat16", kv="int8")
