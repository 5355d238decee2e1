"""What a client tells the scheduler: as a tensor, or as a parameter of the request."""

from __future__ import annotations

import numpy as np
import pytest

from conch.api.errors import RequestError
from conch.host.inputs import read_inputs
from host.host_fakes import FakeRequest


def read(parameters=None, **inputs):
    return read_inputs(FakeRequest(text_input="hello", parameters=parameters, **inputs))


def seconds(value):
    return np.array([value], dtype=np.float32)


def test_nothing_said_is_none():
    inputs = read()
    assert (inputs.tenant, inputs.ttft_target_s, inputs.tpot_target_s) == (None, None, None)


def test_tensors_and_parameters_say_the_same():
    by_tensor = read(tenant="red", ttft_target_s=seconds(0.5), tpot_target_s=seconds(0.0625))
    by_parameter = read({"tenant": "red", "ttft_target_s": "0.5", "tpot_target_s": 0.0625})
    both = read(
        {"tenant": "red", "ttft_target_s": 0.5, "tpot_target_s": 0.0625},
        tenant="red",
        ttft_target_s=seconds(0.5),
        tpot_target_s=seconds(0.0625),
    )
    for inputs in (by_tensor, by_parameter, both):
        assert (inputs.tenant, inputs.ttft_target_s, inputs.tpot_target_s) == ("red", 0.5, 0.0625)


@pytest.mark.parametrize("key", ["ttft_target_s", "tpot_target_s"])
@pytest.mark.parametrize("value", [0, -1, "soon", "nan", "inf", True, []])
def test_a_bad_target_names_its_field(key, value):
    with pytest.raises(RequestError, match=f"^{key}: ") as caught:
        read({key: value})
    assert caught.value.field == key


@pytest.mark.parametrize("value", [0.0, -2.0, np.inf, np.nan])
def test_a_bad_target_tensor_names_its_field(value):
    with pytest.raises(RequestError, match=r"^ttft_target_s: "):
        read(ttft_target_s=seconds(value))


def test_a_target_tensor_of_another_type_names_its_field():
    with pytest.raises(RequestError, match=r"^tpot_target_s: must be one 32-bit float"):
        read(tpot_target_s=np.array([1, 2], dtype=np.float32))


@pytest.mark.parametrize("value", [5, ["red"], {"name": "red"}, True])
def test_a_tenant_that_is_no_string_is_refused(value):
    with pytest.raises(RequestError, match=r"^tenant: must be a string"):
        read({"tenant": value})


def test_a_tenant_has_a_bounded_name():
    with pytest.raises(RequestError, match=r"^tenant: must be at most"):
        read(tenant="x" * 2000)


@pytest.mark.parametrize(
    ("parameters", "inputs"),
    [
        ({"tenant": "red"}, {"tenant": "blue"}),
        ({"ttft_target_s": 1}, {"ttft_target_s": seconds(2)}),
    ],
)
def test_two_different_values_are_refused(parameters, inputs):
    with pytest.raises(RequestError, match="is given twice, with different values"):
        read(parameters, **inputs)
