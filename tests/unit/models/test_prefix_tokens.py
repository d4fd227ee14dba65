"""Prefix tokens before a history: states equal those of one longer sequence and do not depend on later tokens."""

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.models.backbone_registry import make_encoder
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.models.encoder_parts import encode_with_prefix, reserve_prefix
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
def test_prefix_tokens_equal_one_longer_sequence(cfg):
    torch.manual_seed(0)
    encoder = make_encoder(reserve_prefix(cfg, NUM_PREFIX)).eval().requires_grad_(False)
    for parameter in encoder.parameters():  # initial weights are too small for tokens to influence each other
        parameter.normal_(std=0.4)
    token_TD, prefix_BPD = torch.randn(sum(LENGTHS), DIM), torch.randn(len(LENGTHS), NUM_PREFIX, DIM)
    info = info_of(LENGTHS)
    found = torch.split(encode_with_prefix(encoder, token_TD, info, prefix_BPD), LENGTHS)
    for b, tokens in enumerate(torch.split(token_TD, LENGTHS)):
        longer = info_of((LENGTHS[b] + NUM_PREFIX,))
        # Prefix tokens have the time of the first event of the history.
        time = (longer.time_T - NUM_PREFIX).clamp(min=0)
        query_time = torch.where(longer.position_T < NUM_PREFIX, time, time + 1)
        one = SequenceInfo(longer.offsets, longer.max_length, longer.position_T, longer.token_key_T, time, query_time)
        expected = encoder(torch.cat([prefix_BPD[b], tokens]), one)
        assert torch.allclose(found[b], expected[NUM_PREFIX:], atol=1e-5)
    changed = prefix_BPD.clone()
    changed[0, 0] *= -1  # not an addition: a norm removes constants that are added to all channels
    other = torch.split(encode_with_prefix(encoder, token_TD, info, changed), LENGTHS)
    assert (other[0] - found[0]).abs().amax(1).min() > 1e-4, "the last event must depend on the prefix"
    assert torch.equal(other[1], found[1])
    later = token_TD.clone()
    later[2] *= -1
    assert torch.equal(encode_with_prefix(encoder, later, info, prefix_BPD)[:2], found[0][:2]), (
        "the prefix must not depend on later tokens"
    )


def test_prefix_tokens_have_different_dropout_masks():
    encoder = make_encoder(reserve_prefix(HSTUConfig(dim=DIM, head_dim=4, num_heads=2, max_length=6, dropout=0.5), 2))
    infos = []
    encoder.forward = lambda x_TD, info: infos.append(info) or x_TD
    prefix = torch.zeros(3, 2, DIM)
    assert encode_with_prefix(encoder, torch.ones(sum(LENGTHS), DIM), info_of(LENGTHS), prefix).eq(1).all()
    assert len(infos[0].token_key_T.unique()) == sum(LENGTHS) + 6
    assert infos[0].offsets.tolist() == [0, 5, 8, 15]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x[:-1], r"its forward method returned \(8, 8\)"),
        (lambda x: (x, None), "its forward method returned tuple"),
    ],
)
def test_prefix_tokens_reject_encoder_with_wrong_shape(output, message):
    class Own(torch.nn.Module):
        def forward(self, tokens, info):
            return output(tokens)

    with pytest.raises(UserError, match=rf"encoder=Own: {message}.*shape \(9, 8\)"):
        encode_with_prefix(Own(), torch.ones(9, DIM), info_of(LENGTHS), None)
