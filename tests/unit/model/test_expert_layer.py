"""Experts over several parts give what transformers' module gives, and send what the formula says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from conch.api.mesh import MeshShape, Seat
from conch.engine.mesh.meeting import Meeting
from conch.model.mesh.experts.cutting import ExpertShare
from conch.model.mesh.experts.layer import ExpertLayer
from conch.model.mesh.experts.load import LoadCounter
from conch.model.mesh.experts.placement import Placement
from conch.model.mesh.group import MeshGroup

HIDDEN, EXPERTS, EACH = 24, 6, 2


def make_experts(kind):
    family = {MixtralExperts: "mixtral", GptOssExperts: "gpt_oss"}[kind]
    config = AutoConfig.for_model(
        family, hidden_size=HIDDEN, intermediate_size=20, num_local_experts=EXPERTS, num_experts_per_tok=EACH
    )
    config._experts_implementation = "eager"
    experts = kind(config)
    make = torch.Generator().manual_seed(3)
    for weight in experts.parameters():
        weight.data = torch.randn(weight.shape, generator=make) / 4
    return experts


def make_tokens(count, seed):
    make = torch.Generator().manual_seed(seed)
    states = torch.randn(count, HIDDEN, generator=make)
    scores = torch.rand(count, EXPERTS - 1, generator=make)  # the last expert gets no tokens
    weights, chosen = scores.topk(EACH)
    return states, chosen, weights


def run_part(kind, seat, meeting, placement, tokens):
    experts = make_experts(kind)
    own = list(placement.parts[seat.expert_part])
    for name, weight in list(experts.named_parameters()):
        setattr(experts, name, torch.nn.Parameter(weight.data[own].clone()))
    group = MeshGroup(seat, meeting)
    counter = LoadCounter([placement], window=10)
    layer = ExpertLayer(ExpertShare(0, experts, placement, False), 0, group, counter)
    with torch.inference_mode():
        if len(tokens[0]):
            mixed = layer(*tokens)
        else:
            layer.serve()
            mixed = tokens[0]
    counter.end_step()
    counts = (group.bytes_exchanged, group.bytes_counted)
    group.close()
    return mixed, counter, counts


@pytest.mark.parametrize("kind", [MixtralExperts, GptOssExperts])
@pytest.mark.parametrize(("parts", "redundant"), [(1, 0), (2, 0), (2, 3), (3, 0), (4, 2)])
def test_tokens_of_all_parts(kind, parts, redundant):
    placement = Placement.first(EXPERTS, redundant, parts)
    tokens = [make_tokens((5, 1, 0, 9)[part], seed=part) for part in range(parts)]
    seats = [Seat(part, MeshShape(1, 1, parts), 60.0) for part in range(parts)]
    meeting = Meeting("127.0.0.1")
    with ThreadPoolExecutor(parts) as threads:
        runs = list(
            threads.map(lambda seat: run_part(kind, seat, meeting, placement, tokens[seat.rank]), seats)
        )
    whole = make_experts(kind)
    expected_tokens = torch.zeros(EXPERTS, dtype=torch.int64)
    bounds = placement.bounds
    sent = 0
    for part, ((states, chosen, weights), (mixed, _, _)) in enumerate(zip(tokens, runs, strict=True)):
        with torch.inference_mode():
            expected = whole(states, chosen, weights) if len(states) else states
        assert torch.allclose(mixed, expected, atol=1e-5)
        expected_tokens += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        slots = placement.slots_of(chosen, part)
        sent += int(((slots < bounds[part]) | (slots >= bounds[part + 1])).sum())
    assert expected_tokens[-1] == 0
    for _, counter, _ in runs:
        assert counter.tokens[0].tolist() == expected_tokens.tolist()
    exchanged = sum(counts[0] for _, _, counts in runs)
    assert exchanged == 2 * sent * HIDDEN * 4, "there and back, of fp32"
    assert all(counts[1] == (8 * len(placement.slots) if parts > 1 else 0) for _, _, counts in runs)
