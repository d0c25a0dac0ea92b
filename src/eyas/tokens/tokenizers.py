"""Make the tokenizer files of a target: from a GGUF file's vocabulary, or trained on text.

Reads: a .gguf file, or texts. Writes: tokenizer.json, tokenizer_config.json with the chat template.
Source: llama.cpp src/llama-vocab.cpp, pre-tokenizer `smollm`: every digit is split off before the
GPT-2 pattern runs. A plain byte-level pre-tokenizer gets spaces before digits wrong: 'x=  1'.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import EyasError
from eyas.files import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CONTROL = 3  # tokenizer.ggml.token_type of tokens that text never spells


def save_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer and the chat template that a GGUF file carries.

    Raises: EyasError if the file has no chat template or another kind of vocabulary.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken

    reader = GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise EyasError(f"{path}: GGUF key '{key}' is missing")
        return field.contents()

    if reader.get_field("tokenizer.chat_template") is None:
        raise EyasError(
            f"{path}: a target without a chat template", hint="take an instruction-tuned model"
        )
    kind = (value("tokenizer.ggml.model"), value("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise EyasError(f"{path}: expected tokenizer gpt2 with pre-tokenizer smollm, got {kind}")
    tokens: list[str] = value("tokenizer.ggml.tokens")
    tokenizer = byte_level_bpe(tokens, value("tokenizer.ggml.merges"))
    types = value("tokenizer.ggml.token_type")
    specials = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    _save(
        tokenizer,
        folder,
        chat_template=value("tokenizer.chat_template"),
        model_max_length=value("llama.context_length"),
        bos_token=tokens[value("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[value("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[value("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[value("tokenizer.ggml.padding_token_id")],
    )


def byte_level_bpe(tokens: Sequence[str], merges: Sequence[str]) -> "Tokenizer":
    """Build a byte-level BPE tokenizer that splits digits, from its vocabulary in id order."""
    from tokenizers import Tokenizer, models

    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return _with_byte_level(Tokenizer(models.BPE(vocab=vocabulary, merges=pairs)))


def train_tokenizer(texts: Iterable[str], folder: Path, *, vocab_size: int, max_length: int) -> int:
    """Train a byte-level BPE with ChatML's specials (ids 0, 1, 2) and template; return its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = _with_byte_level(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CHATML_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end_of_text, start, end = CHATML_SPECIALS
    _save(
        tokenizer,
        folder,
        chat_template=CHATML_TEMPLATE,
        model_max_length=max_length,
        bos_token=start,
        eos_token=end,
        unk_token=end_of_text,
        pad_token=end,
    )
    return tokenizer.get_vocab_size()


def encode_texts(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts in which special tokens may be spelled out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [row.ids for row in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def _with_byte_level(tokenizer: "Tokenizer") -> "Tokenizer":
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _save(tokenizer: "Tokenizer", folder: Path, **settings: Any) -> None:
    """Write both files under the class name that transformers 4 and 5, SGLang and vLLM all know."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **settings,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)
