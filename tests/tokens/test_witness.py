"""Ids from token texts: every form in which engines tell them, and what is not believed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from witness import FORMS

from eyas.records import Piece, Prompt, Response, Sample
from eyas.settings import Validate
from eyas.tokens.audit import mismatches, truth_metrics, witness_metrics
from eyas.tokens.codecs import Codec, ReplyParts
from eyas.tokens.codecs.byte_level import bytes_by_id, id_by_bytes
from eyas.tokens.codecs.chatml import ChatML, load_chatml
from eyas.tokens.codecs.kimi import NEEDED, Kimi, load_kimi
from eyas.tokens.codecs.kimi_prompt import RELEASES
from eyas.tokens.codecs.kimi_reply import call_of
from eyas.tokens.codecs.kimi_tokenizer import KimiTokenizer
from eyas.tokens.providers import AS_GIVEN, ProviderRule
from eyas.tokens.rebuild import Rebuilt, rebuild_response
from eyas.tokens.witness import Reading, RefusedError, read_witness

Ask = Callable[..., Prompt]
Make = Callable[..., Response]
OFFICIAL = Path("../shared/kimi")
TOKENIZER = KimiTokenizer({bytes([b]): b for b in range(256)}, dict(enumerate(NEEDED, start=256)))
KIMI = Kimi(TOKENIZER, RELEASES["kimi_k2_5"])
GIVEN = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def told_as(form: str) -> Callable[[Codec, Sequence[int]], tuple[Piece, ...]]:
    """Return the maker of pieces as one kind of engine tells them."""
    return lambda codec, ids: FORMS[form]([codec.bytes_of(i) for i in ids])


raw, texts, late_texts = map(told_as, FORMS)


def named(codec: Codec, ids: Sequence[int]) -> tuple[Piece, ...]:
    return tuple(f"token_id:{i}" for i in ids)


ENGINES = [raw, texts, late_texts, named]


def spelled(codec: Codec, *parts: str) -> list[int]:
    """Return ids that spell each part by itself: another spelling than that of the whole."""
    return [i for p in parts for i in codec.reply_ids(ReplyParts(content=p), "length")]


@pytest.fixture
def reply(make_prompt: Ask, make_response: Make) -> Callable[..., Response]:
    """Return a maker of replies of known ids and pieces; keywords replace fields."""

    def make(
        codec: Codec, ids: Sequence[int], pieces: Sequence[Piece], **changes: object
    ) -> Response:
        parts = codec.parse_reply(ids)
        said = {"content": parts.content, "reasoning": parts.reasoning}
        bill = {"completion_tokens": len(ids), "true_ids": tuple(ids), "pieces": tuple(pieces)}
        calls = {"tool_calls": parts.tool_calls}
        return make_response(make_prompt(), **(said | calls | bill | changes))

    return make


def read(
    response: Response, codec: Codec, rule: ProviderRule = AS_GIVEN, cut_text: str | None = None
) -> Reading:
    content = cut_text if cut_text is not None else response.content
    given = ReplyParts(
        content=content, reasoning=response.reasoning, tool_calls=response.tool_calls
    )
    return read_witness(response, codec.normalise(given), codec, rule)


@GIVEN
@given(data=st.data(), engine=st.sampled_from([raw, named]))
def test_any_ids_of_a_byte_level_vocabulary_come_back_from_their_pieces(
    codec: ChatML, reply: Callable[..., Response], data: st.DataObject, engine: Callable[..., tuple]
) -> None:
    ordinary = sorted(set(range(codec.vocab_size)) - codec.special_ids)
    ids = [*data.draw(st.lists(st.sampled_from(ordinary), min_size=1, max_size=30)), 2]
    assert read(reply(codec, ids, engine(codec, ids)), codec).ids == ids


@GIVEN
@given(
    thought=st.lists(st.integers(0, 255), max_size=20),
    said=st.lists(st.integers(0, 255), max_size=20),
)
def test_any_ids_of_a_kimi_reply_come_back_from_their_pieces(
    reply: Callable[..., Response], thought: list[int], said: list[int]
) -> None:
    ids = [*thought, KIMI.id_of(b"</think>") or 0, *said, *KIMI.stop_ids]
    assert read(reply(KIMI, ids, raw(KIMI, ids)), KIMI).ids == ids


@pytest.mark.skipif(not OFFICIAL.is_dir(), reason="../shared/kimi is not on this machine")
def test_every_token_of_kimi_k2_5_is_known_by_its_bytes(
    reply: Callable[..., Response],
) -> None:
    codec = load_kimi(OFFICIAL, "kimi_k2_5")
    assert all(codec.id_of(codec.bytes_of(i)) == i for i in range(codec.vocab_size))
    assert codec.id_of(b"no token at all") is None
    bare = load_kimi(OFFICIAL, "kimi_k2_5_instant")
    think_end = codec.id_of(b"</think>") or 0
    thought, said = spelled(bare, "Gr", "ü", "ße", "🫠"), spelled(bare, "東", "京 c", "ity")
    ids = [*thought, think_end, *said, *codec.stop_ids]
    assert ids != codec.reply_ids(codec.parse_reply(ids), "stop")
    for engine in ENGINES:
        assert read(reply(codec, ids, engine(codec, ids)), codec).ids == ids


@pytest.mark.parametrize("engine", ENGINES)
def test_a_spelling_that_text_cannot_show_is_taken_from_the_pieces(
    codec: ChatML, reply: Callable[..., Response], engine: Callable[..., tuple[Piece, ...]]
) -> None:
    ids = [*spelled(codec, "th", "e qui", "ck 🙂 fo", "x"), 2]
    assert ids != codec.reply_ids(codec.parse_reply(ids), "stop")
    reading = read(reply(codec, ids, engine(codec, ids)), codec)
    assert (reading.ids, reading.offset, reading.half_character) == (ids, 0, False)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_token_that_is_not_told_is_added_and_one_not_billed_is_an_offset(
    codec: ChatML, reply: Callable[..., Response], engine: Callable[..., tuple[Piece, ...]]
) -> None:
    ids = [*spelled(codec, "the 🙂"), 2]
    told = engine(codec, ids[:-1])
    assert read(reply(codec, ids, told), codec).ids == ids
    unbilled = reply(codec, ids, told, completion_tokens=len(ids) - 1)
    with pytest.raises(RefusedError, match=f"billed {len(ids) - 1} tokens, told {len(ids) - 1}"):
        read(unbilled, codec)
    assert read(unbilled, codec, ProviderRule(offset=-1)).offset == -1
    right = reply(codec, ids, engine(codec, ids))  # an offset that text alone had suggested
    assert read(right, codec, ProviderRule(offset=1)).offset == 0


def test_white_space_that_is_not_told_is_no_offset(
    codec: ChatML, reply: Callable[..., Response]
) -> None:
    ids = [*spelled(codec, "the fox"), 2]
    billed = reply(codec, ids, raw(codec, ids), content="\nthe fox", completion_tokens=len(ids) + 1)
    with pytest.raises(RefusedError, match="another content"):
        read(billed, codec, ProviderRule(offset=1))
    assert read(replace(billed, content="the fox"), codec, ProviderRule(offset=1)).offset == 1


def test_a_character_that_other_tokens_could_spell_is_refused(
    reply: Callable[..., Response],
) -> None:
    """Three bytes as two tokens: one and two, or two and one."""
    sign = "ऐ".encode()
    ranks = {bytes([b]): b for b in range(256)} | {sign[:2]: 256, sign[1:]: 257}
    codec = Kimi(
        KimiTokenizer(ranks, dict(enumerate(NEEDED, start=258))), RELEASES["kimi_k2_5_instant"]
    )
    ends = codec.stop_ids
    for ids in ([256, sign[2], *ends], [sign[0], 257, *ends]):
        assert read(reply(codec, ids, raw(codec, ids)), codec).ids == ids
        for engine in (texts, late_texts):
            with pytest.raises(RefusedError, match="in several ways"):
                read(reply(codec, ids, engine(codec, ids)), codec)
    one_by_one = [*sign, *ends]
    assert read(reply(codec, one_by_one, texts(codec, one_by_one)), codec).ids == one_by_one


def test_what_is_told_as_one_piece_is_shown_in_part(
    codec: ChatML, reply: Callable[..., Response]
) -> None:
    ids = [*spelled(codec, "the fox"), 2]
    with pytest.raises(RefusedError) as caught:
        read(reply(codec, ids, ("the fox " * 9999,)), codec)
    assert len(str(caught.value)) < 100


def test_white_space_that_a_provider_strips_is_in_the_ids(
    codec: ChatML, reply: Callable[..., Response]
) -> None:
    ids = [*spelled(codec, "\n\n", "the", " fox ", "\n"), 2]
    assert read(reply(codec, ids, raw(codec, ids), content="the fox"), codec).ids == ids


def test_a_marker_that_the_reply_only_spells_stays_text(
    codec: ChatML, reply: Callable[..., Response]
) -> None:
    ids = [*spelled(codec, "<|im_end|> ends a turn, <|im_start|> begins one"), 2]
    assert ids.count(2) == 1
    assert read(reply(codec, ids, raw(codec, ids)), codec).ids == ids
    real = [*spelled(codec, "it ends"), 1, 2]  # the model began a turn; the text does not show it
    with pytest.raises(RefusedError, match="a special token before the last"):
        read(reply(codec, real, raw(codec, real), content="it ends"), codec)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (("the",), "billed 3 tokens, told 1"),
        (("the", " dog", "<|im_end|>"), "another content"),
        (("the", "Ġfox", "<|im_end|>"), "'Ġfox' is no token"),
        (("the", (32, 102, 111, 120, 33), "<|im_end|>"), "is no token"),
        (("token_id:600", " fox", "<|im_end|>"), "'token_id:600' is no token"),
        (("�", " fox", "<|im_end|>"), "token 0 is not told, or not where"),
        (("the", "�", "<|im_end|>"), "token 1 is not told, or not where"),
        (("the", " fox", ""), "token 2 is not told, or not where"),
        (("�", "�", "�"), "token 0 is not told, or not where"),
        (("�", "�", "�", "�"), "token 0 is not told, or not where"),
        (("the", " fox", "<|im_end|>", "<|endoftext|>"), "billed 3 tokens, told 4"),
        ((), "billed 3 tokens, told 0"),
    ],
)
def test_pieces_that_are_no_part_of_a_character_are_never_filled(
    codec: ChatML, reply: Callable[..., Response], pieces: tuple[Piece, ...], words: str | None
) -> None:
    ids = [*spelled(codec, "the fox"), 2]
    assert texts(codec, ids) == ("the", " fox", "<|im_end|>")
    response = reply(codec, ids, pieces)
    if words is None:
        assert read(response, codec).ids == ids
    else:
        with pytest.raises(RefusedError, match=words):
            read(response, codec)


def test_a_guard_token_behind_the_stop_is_refused_even_if_it_is_billed(
    codec: ChatML, reply: Callable[..., Response]
) -> None:
    ids = [*spelled(codec, "the fox"), 2]
    for guard in ("<|endoftext|>", "�", "<|im_end|>"):
        pieces = (*texts(codec, ids), guard)
        billed = reply(codec, ids, pieces, completion_tokens=len(ids) + 1)
        with pytest.raises(RefusedError):
            read(billed, codec)


@pytest.mark.parametrize("engine", [raw, texts, late_texts])
@pytest.mark.parametrize("shown", ["the fox �", "the fox "])
def test_a_reply_cut_inside_a_character_loses_its_tokens(
    codec: ChatML,
    rules: Validate,
    make_prompt: Ask,
    reply: Callable[..., Response],
    engine: Callable[..., tuple[Piece, ...]],
    shown: str,
) -> None:
    whole = spelled(codec, "the f", "ox ")
    ids = [*whole, *spelled(codec, "\N{ALEMBIC}")[:2]]
    response = reply(codec, ids, engine(codec, ids), content=shown, finish_reason="length")
    rebuilt = rebuild_response(make_prompt(), response, codec, rules)
    assert isinstance(rebuilt.result, Sample)
    assert list(rebuilt.result.input_ids[rebuilt.result.spans[0][0] :]) == whole
    assert rebuilt.result.flags == ("truncated", "half_character")
    assert rebuilt.evidence is not None
    assert (rebuilt.evidence.identical, rebuilt.evidence.text_identical) == (True, False)


def test_a_cut_reply_whose_last_character_is_whole_keeps_it(
    codec: ChatML, reply: Callable[..., Response]
) -> None:
    ids = spelled(codec, "the ", "🙂")
    response = reply(codec, ids, raw(codec, ids), finish_reason="length")
    assert read(response, codec).ids == ids
    many = reply(codec, [*ids, *ids[-1:] * 4], ("the ", *"�" * 9), finish_reason="length")
    with pytest.raises(RefusedError):
        read(many, codec, cut_text="the 🙂")


CALLED = call_of("functions.f:7", '{"b": [1, 2], "a": "x"}')


def kimi_ids() -> list[int]:
    parts = ReplyParts(content="so", reasoning="hm 🙂", tool_calls=(CALLED,))
    return KIMI.reply_ids(parts, "tool_calls")


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_that_a_provider_writes_anew_have_the_models_own_spelling(
    reply: Callable[..., Response], engine: Callable[..., tuple[Piece, ...]]
) -> None:
    ids = kimi_ids()
    anew = {"id": "call_a1", "type": "function"}
    function = {"name": "f", "arguments": json.dumps({"a": "x", "b": [1, 2]})}
    calls = ({**anew, "function": function},)
    response = reply(KIMI, ids, engine(KIMI, ids), tool_calls=calls, finish_reason="tool_calls")
    assert read(response, KIMI).ids == ids
    for changed in ({"name": "g"}, {"arguments": '{"a": "y", "b": [1, 2]}'}, {"arguments": "{"}):
        other = replace(response, tool_calls=({**anew, "function": function | changed},))
        with pytest.raises(RefusedError, match="another tool_calls"):
            read(other, KIMI)
    with pytest.raises(RefusedError, match="another tool_calls"):
        read(replace(response, tool_calls=()), KIMI)


def test_pieces_of_the_content_alone_are_refused_whatever_is_billed(
    reply: Callable[..., Response],
) -> None:
    ids = KIMI.reply_ids(ReplyParts(content="so it is", reasoning="hm"), "stop")
    pieces = raw(KIMI, ids)[ids.index(KIMI.id_of(b"</think>") or 0) + 1 :]
    for billed in (len(ids), len(pieces)):
        with pytest.raises(RefusedError):
            read(reply(KIMI, ids, pieces, completion_tokens=billed), KIMI)


def test_the_evidence_tells_both_truths_and_a_refusal_is_counted_with_its_reason(
    codec: ChatML, rules: Validate, make_prompt: Ask, reply: Callable[..., Response]
) -> None:
    prompt = make_prompt()
    ids = [*spelled(codec, "th", "e", " fox"), 2]
    right = reply(codec, ids, raw(codec, ids))
    wrong = replace(right, pieces=raw(codec, [*spelled(codec, "th", "e", " dog"), 2]))
    rebuilt = [rebuild_response(prompt, r, codec, rules) for r in (right, wrong)]
    assert [kind(one) for one in rebuilt] == ["sample", "count_mismatch"]
    assert truth_metrics(rebuilt)["identical_share"] == 0.5
    assert truth_metrics(rebuilt)["text_identical_share"] == 0.0
    assert witness_metrics(rebuilt) == {"witnessed_share": 0.5, "witness_refused": 1}
    assert mismatches(rebuilt[0]) == []
    assert [(v.rule, v.severity) for v in mismatches(rebuilt[1])] == [
        ("caught_by_the_count", "reject"),
        ("witness_refused", "reject"),
    ]
    assert mismatches(rebuilt[1])[1].detail == "they tell another content than the reply has"
    silent = replace(wrong, true_ids=None, content="the", completion_tokens=2)
    (one,) = [rebuild_response(prompt, silent, codec, rules)]
    assert isinstance(one.result, Sample)
    assert one.result.flags == ("witness_refused",)
    bare = rebuild_response(prompt, replace(silent, pieces=None), codec, rules)
    assert witness_metrics([bare]) == {"witnessed_share": 0.0, "witness_refused": 0}
    assert [v.rule for v in mismatches(one)] == ["witness_refused"]
    assert mismatches(bare) == []


def kind(one: Rebuilt) -> str:
    return "sample" if isinstance(one.result, Sample) else one.result.rule


def test_only_a_byte_level_vocabulary_has_bytes() -> None:
    words = {"▁the": 0, "▁": 1, "<0xF0>": 2, "the": 3}
    piece = Tokenizer(models.WordLevel(words, unk_token="the"))
    assert bytes_by_id(piece) == {}
    wordpiece = Tokenizer(models.WordPiece({"the": 0, "##se": 1}, unk_token="the"))
    wordpiece.decoder = decoders.WordPiece()
    assert bytes_by_id(wordpiece) == {}
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    level = Tokenizer(models.BPE(alphabet, []))
    level.decoder = decoders.ByteLevel()
    level.add_special_tokens([AddedToken("<▁end▁>", special=True)])
    level.add_tokens([AddedToken("a")])
    found = bytes_by_id(level)
    assert {found[i] for i in range(256)} == {bytes([b]) for b in range(256)}
    assert found[256] == "<▁end▁>".encode()
    assert id_by_bytes({0: b"a", 1: b"b", 2: b"a"}) == {b"b": 1}


def test_a_target_without_bytes_falls_back_to_text_or_takes_ids(
    folder: Path, reply: Callable[..., Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = load_chatml(folder)
    ids = [*spelled(codec, "th", "e"), 2]
    pieces = raw(codec, ids)
    monkeypatch.setattr(ChatML, "bytes_of", lambda *_: b"")
    monkeypatch.setattr(ChatML, "id_of", lambda *_: None)
    for told, words in ((pieces, "is no token"), (("�",) * 3, "after the end")):
        with pytest.raises(RefusedError, match=words):
            read(reply(codec, ids, told), codec)
    assert read(reply(codec, ids, named(codec, ids)), codec).ids == ids
