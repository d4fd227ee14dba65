"""Tokens before a history: states are those of one longer sequence, and depend on nothing that comes later."""

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.models.backbone_registry import make_encoder
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.models.encoder_parts import states_behind, with_room
from nestrec.models.fuxi import FuXiConfig
from nestrec.models.hstu import HSTUConfig
from nestrec.models.sasrec import SASRecConfig
from nestrec.models.sequence import SequenceInfo

LENGTHS = (3, 1, 5)
NUM_PREFIX = 2
DIM = 8


def info_of(lengths: tuple[int, ...]) -> SequenceInfo:
    position = torch.cat([torch.arange(n) for n in lengths])
    return SequenceInfo(
        offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        max_length=max(lengths),
        position_T=position,
        token_key_T=torch.arange(len(position)),
        time_T=position.double(),
        query_time_T=position.double() + 1,
    )


@pytest.mark.parametrize(
    "cfg",
    [
        HSTUConfig(
            dim=DIM, head_dim=4, num_heads=2, max_length=6, time_bias=True, attention=AttentionSpanConfig(window=2)
        ),
        FuXiConfig(dim=DIM, head_dim=4, num_heads=2, ffn_dim=8, max_length=6),
        SASRecConfig(dim=DIM, ffn_dim=8, max_length=6),
    ],
    ids=["hstu", "fuxi", "sasrec"],
)
def test_states_are_those_of_one_longer_sequence(cfg):
    torch.manual_seed(0)
    encoder = make_encoder(with_room(cfg, NUM_PREFIX)).eval().requires_grad_(False)
    for parameter in encoder.parameters():  # first weights are so small that nobody sees anybody
        parameter.normal_(std=0.4)
    token_TD, prefix_BPD = torch.randn(sum(LENGTHS), DIM), torch.randn(len(LENGTHS), NUM_PREFIX, DIM)
    info = info_of(LENGTHS)
    found = torch.split(states_behind(encoder, token_TD, info, prefix_BPD), LENGTHS)
    for b, tokens in enumerate(torch.split(token_TD, LENGTHS)):
        longer = info_of((LENGTHS[b] + NUM_PREFIX,))
        # What stands before a history has the time of its first event.
        time = (longer.time_T - NUM_PREFIX).clamp(min=0)
        asked = torch.where(longer.position_T < NUM_PREFIX, time, time + 1)
        one = SequenceInfo(longer.offsets, longer.max_length, longer.position_T, longer.token_key_T, time, asked)
        whole = encoder(torch.cat([prefix_BPD[b], tokens]), one)
        assert torch.allclose(found[b], whole[NUM_PREFIX:], atol=1e-5)
    changed = prefix_BPD.clone()
    changed[0, 0] *= -1  # a norm takes away what is added to all channels
    other = torch.split(states_behind(encoder, token_TD, info, changed), LENGTHS)
    assert (other[0] - found[0]).abs().amax(1).min() > 1e-4, "the last event sees it too"
    assert torch.equal(other[1], found[1])
    later = token_TD.clone()
    later[2] *= -1
    assert torch.equal(states_behind(encoder, later, info, prefix_BPD)[:2], found[0][:2]), (
        "the prefix does not look ahead"
    )


def test_masks_of_dropout_differ_between_prefix_tokens():
    encoder = make_encoder(with_room(HSTUConfig(dim=DIM, head_dim=4, num_heads=2, max_length=6, dropout=0.5), 2))
    seen = []
    encoder.forward = lambda x_TD, info: seen.append(info) or x_TD
    prefix = torch.zeros(3, 2, DIM)
    assert states_behind(encoder, torch.ones(sum(LENGTHS), DIM), info_of(LENGTHS), prefix).eq(1).all()
    assert len(seen[0].token_key_T.unique()) == sum(LENGTHS) + 6
    assert seen[0].offsets.tolist() == [0, 5, 8, 15]


@pytest.mark.parametrize(
    ("answer", "words"), [(lambda x: x[:-1], r"gives \(8, 8\)"), (lambda x: (x, None), "gives tuple")]
)
def test_an_encoder_that_gives_no_state_for_each_token_is_named(answer, words):
    class Own(torch.nn.Module):
        def forward(self, tokens, info):
            return answer(tokens)

    with pytest.raises(UserError, match=rf"encoder=Own: {words}.*shape \(9, 8\)"):
        states_behind(Own(), torch.ones(9, DIM), info_of(LENGTHS), None)
