import dataclasses

import torch

from eyas.drafter.attention import build_blocks
from eyas.drafter.inference import DraftRunner
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.unroll import build_layout


def test_parameters_have_the_names_and_shapes_that_servers_read(config) -> None:
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[10 : 10 + config.draft_vocab_size] = True
    state = Drafter(config, t2d).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "fc.weight": (16, 48),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (16, 32),
        "midlayer.self_attn.k_proj.weight": (8, 32),
        "midlayer.self_attn.v_proj.weight": (8, 32),
        "midlayer.self_attn.o_proj.weight": (16, 16),
        "midlayer.mlp.gate_proj.weight": (20, 16),
        "midlayer.mlp.up_proj.weight": (20, 16),
        "midlayer.mlp.down_proj.weight": (16, 20),
        "norm.weight": (16,),
        "lm_head.weight": (24, 16),
        "d2t": (24,),
        "t2d": (40,),
    }
    assert state["d2t"].dtype == torch.int64
    assert state["t2d"].dtype == torch.bool
    assert (torch.arange(24) + state["d2t"]).tolist() == list(range(10, 34))


def test_the_random_start_depends_on_the_seed_alone(config) -> None:
    t2d = torch.ones(config.vocab_size, dtype=torch.bool)
    config = dataclasses.replace(config, draft_vocab_size=config.vocab_size)
    drafters = [Drafter(config, t2d) for _ in range(3)]
    for drafter, seed in zip(drafters, (1, 1, 2), strict=True):
        random_start(drafter, seed)
    first, same, other = (d.fc.weight for d in drafters)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_only_rows_that_some_step_needs_are_computed() -> None:
    layout = build_layout(torch.tensor([3, 4, 8]), (6, 5), steps=2)
    # p = 3, 4 of the first document: rows 2, 3 at step 0, 1, 2 at step 1; p = 8 (position 2 of the
    # second): row 7, then row 6
    assert layout.active_A.tolist() == [1, 2, 3, 6, 7]
    assert layout.position_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]


def test_blocks_see_their_own_documents_past_only() -> None:
    blocks = build_blocks(torch.tensor([1, 3, 6]), (5, 4))
    assert [(b.rows, b.keys) for b in blocks] == [
        (slice(0, 2), slice(0, 4)),
        (slice(2, 3), slice(5, 7)),
    ]
    # row 1 sees key 1 of keys 1..3, row 3 all of them; key 0 both see
    inf = float("inf")
    assert blocks[0].bias_QW.tolist() == [[0.0, -inf, -inf], [0.0] * 3]
    assert blocks[1].bias_QW.tolist() == [[0.0]]


def test_a_block_ends_before_a_gap_whose_keys_its_first_rows_would_be_given_for_nothing() -> None:
    active = torch.cat([torch.arange(10), torch.arange(30, 40), torch.arange(100, 105)])
    blocks = build_blocks(active, (200,))
    assert [(b.rows, b.keys.stop) for b in blocks] == [(slice(0, 20), 40), (slice(20, 25), 105)]


def test_a_long_document_is_cut_into_blocks_of_rows_that_cover_it() -> None:
    blocks = build_blocks(torch.arange(300), (300,))
    assert [b.rows.stop - b.rows.start for b in blocks] == [128, 128, 44]
    assert [b.keys.stop for b in blocks] == [128, 256, 300]


def test_training_and_decoding_run_the_same_network(tiny) -> None:
    aux_TLD, embed_VD = tiny.documents.documents[0].aux_TLD.float(), tiny.embed_VD.float()
    drafter = tiny.drafter.float()
    runner = DraftRunner(drafter.state_dict(), tiny.config, embed_VD)
    path = [5, 6]  # goes on with what is drafted, so that both read the same tokens at step 1
    with torch.no_grad():
        while len(path) < len(aux_TLD):
            path.append(int(runner.draft_everywhere(path, aux_TLD, 1)[-1, 0]))
        drafted = runner.draft_everywhere(path, aux_TLD, 3)
        rows = torch.arange(len(path) - 1)
        layout = build_layout(rows + 1, (len(path),), 3)
        outputs = drafter.unroll(embed_VD[torch.tensor(path)], aux_TLD, layout, 3)
    used = drafter.t2d.nonzero().flatten()
    assert len(set(path)) > 5, "a path of one token would show little"
    agree = torch.ones(len(rows), dtype=torch.bool)  # training reads the text, decoding its drafts
    for step, out in enumerate(outputs):
        agree[len(rows) - step :] = False
        want = used[drafter.logits(out).argmax(-1)]
        assert torch.equal(drafted[agree, step], want[agree]), step
        assert int(agree.sum()) > 1, step
        following = torch.tensor([*path[2 + step :], *[-1] * (1 + step)])
        agree &= drafted[:, step] == following
