from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.tokens.tokenizers import (
    CHATML_SPECIALS,
    byte_level_bpe,
    encode_texts,
    save_gguf_tokenizer,
    train_tokenizer,
)

SPACE, NEWLINE = "\u0120", "\u010a"  # how byte-level vocabularies write them
LETTERS = [*"x=1)item2", SPACE, NEWLINE]
TOKENS = [*CHATML_SPECIALS, *dict.fromkeys(LETTERS), SPACE * 2, SPACE * 4]
MERGES = [f"{SPACE} {SPACE}", f"{SPACE * 2} {SPACE * 2}"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_gguf(path: Path, **changes: Any) -> Path:
    """Write a GGUF of a vocabulary only; a change to None leaves the key out."""
    from gguf import GGUFWriter

    values = {"pre": "smollm", "template": TEMPLATE} | changes
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if values["template"]:
        writer.add_chat_template(values["template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # a plain byte-level pre-tokenizer keeps the last space for the digit: 'Ġ', 'Ġ', '1'
        ("x=  1", ["x", "=", SPACE * 2, "1"]),
        ("    1) item", [SPACE * 4, "1", ")", SPACE, *"item"]),
        ("12", ["1", "2"]),
    ],
)
def test_digits_are_split_off_before_spaces_are_shared_out(text: str, tokens: list[str]) -> None:
    assert byte_level_bpe(TOKENS, MERGES).encode(text).tokens == tokens


def test_a_gguf_vocabulary_becomes_a_tokenizer_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_gguf_tokenizer(write_gguf(tmp_path / "v.gguf"), tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("x=  1<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["x", "=", SPACE * 2, "1", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x=  1"
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 64
    config = read_json(tmp_path / "out/tokenizer_config.json")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_gguf_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"v.gguf: a target without a chat template"):
        save_gguf_tokenizer(write_gguf(tmp_path / "v.gguf", template=None), tmp_path / "out")


def test_another_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="expected tokenizer gpt2 with pre-tokenizer smollm"):
        save_gguf_tokenizer(write_gguf(tmp_path / "v.gguf", pre="qwen2"), tmp_path / "out")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(EyasError, match=r"GGUF key 'tokenizer.ggml.model' is missing"):
        save_gguf_tokenizer(tmp_path / "v.gguf", tmp_path / "out")


def test_a_trained_tokenizer_keeps_every_byte_and_knows_chatml(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["the hawk saw the hawk 1234", "der Habicht sah den Habicht"] * 3
    size = train_tokenizer(texts, tmp_path, vocab_size=300, max_length=128)
    assert 259 < size <= 300
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    text = "ein Füchslein 🦊  12\tthe hawk"
    (ids,) = encode_texts(tmp_path, [text])
    assert ids == tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = encode_texts(tmp_path, [chat])
    assert [i for i in ids if i < 3] == [1, 2, 1]
