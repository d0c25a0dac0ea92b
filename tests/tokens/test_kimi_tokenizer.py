"""Kimi's tokenizer: its cuts of long text against a naive loop, and the files that it refuses."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.files import write_json
from eyas.tokens.codecs import kimi_tokenizer
from eyas.tokens.codecs.kimi_tokenizer import PATTERN, KimiTokenizer, cut_long_runs, load_tokenizer

SPECIALS = {256: "<a>", 258: "<b>"}
BYTES = {bytes([byte]): byte for byte in range(256)}
PAIRS = {b"aa": 256, b"  ": 257, b"aaa": 258}


def cut_naively(text: str, max_run: int) -> Iterator[str]:
    """Cut character by character, as the tokenizer class does."""
    start, length = 0, 0
    for i, character in enumerate(text):
        is_same = i > 0 and character.isspace() == text[i - 1].isspace()
        length = length + 1 if is_same else 1
        if length > max_run:
            yield text[start:i]
            start, length = i, 1
    yield text[start:]


@given(
    text=st.text(alphabet="a \nß\u3000\x1c\x85", max_size=60),
    max_run=st.integers(1, 5),
    max_chars=st.integers(1, 30),
)
def test_long_runs_are_cut_as_by_a_naive_loop(text: str, max_run: int, max_chars: int) -> None:
    windows = [text[i : i + max_chars] for i in range(0, len(text), max_chars)]
    expected = [piece for window in windows for piece in cut_naively(window, max_run)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi_tokenizer, "MAX_RUN", max_run)
        patch.setattr(kimi_tokenizer, "MAX_CHARS", max_chars)
        assert [piece for piece in cut_long_runs(text) if piece] == [p for p in expected if p]


def test_a_cut_changes_ids_and_a_special_token_begins_the_count_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = KimiTokenizer(BYTES | PAIRS, {259: "<a>"})
    assert tokenizer.encode("<a>aaa<a>") == [259, 258, 259]
    monkeypatch.setattr(kimi_tokenizer, "MAX_RUN", 2)
    assert tokenizer.encode("aaa<a>aaa") == [256, 97, 259, 256, 97]
    assert tokenizer.encode("aaa<|reserved_token_300|>") == tokenizer.encode_plain(
        "aaa<|reserved_token_300|>"
    ), "the cuts come before a reserved token without a name is seen"
    assert tokenizer.encode_plain("a    ") == [97, 257, 257]


@given(text=st.text(max_size=80))
def test_plain_text_comes_back_and_holds_no_special_id(text: str) -> None:
    tokenizer = KimiTokenizer(BYTES, SPECIALS)
    for whole in (text, f"{text}<a>{text}"):
        ids = tokenizer.encode_plain(whole)
        assert max(ids, default=0) < 256
        assert tokenizer.decode(ids) == whole


def test_ids_without_a_name_are_reserved_ones() -> None:
    tokenizer = KimiTokenizer(BYTES, SPECIALS)
    assert tokenizer.size == 512
    assert len(tokenizer.ids) == 256
    assert tokenizer.encode("x<a><|reserved_token_257|><b>") == [120, 256, 257, 258]
    assert tokenizer.spells_special("x <a>")
    assert tokenizer.spells_special("<|reserved_token_511|>")
    assert not tokenizer.spells_special("< a> <|reserved_token_512|>")


def test_the_pattern_is_the_published_one() -> None:
    digest = "de5781783b193d5ccf5b1b28edfa70fa816ce78d54603fdc422cfd8d4ea4411f"
    assert hashlib.sha256(PATTERN.encode()).hexdigest() == digest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a target folder with one token a byte, pinned."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in BYTES.items()]
    (tmp_path / "tiktoken.model").write_text("".join(lines), encoding="utf-8")
    names = {str(i): {"content": name, "special": True} for i, name in SPECIALS.items()}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": names})
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    monkeypatch.setattr(kimi_tokenizer, "RANKS_SHA256", digest)
    return tmp_path


def test_a_folder_is_read(folder: Path) -> None:
    assert load_tokenizer(folder, ["<b>"]).encode("é<b>") == [0xC3, 0xA9, 258]


def test_a_folder_without_the_right_files_is_refused(folder: Path) -> None:
    with pytest.raises(EyasError, match=r"no special token <c>(.|\n)*not a Kimi K2 target"):
        load_tokenizer(folder, ["<a>", "<c>"])
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(EyasError, match=r"tokenizer_config\.json: no such file(.|\n)*hint"):
        load_tokenizer(folder, ())
    with (folder / "tiktoken.model").open("a") as ranks:
        ranks.write("\n")
    with pytest.raises(EyasError, match=r"tiktoken\.model: expected sha256 [0-9a-f]{64}, got "):
        load_tokenizer(folder, ())
    (folder / "tiktoken.model").unlink()
    with pytest.raises(EyasError, match=r"tiktoken\.model: no such file(.|\n)*hint"):
        load_tokenizer(folder, ())
