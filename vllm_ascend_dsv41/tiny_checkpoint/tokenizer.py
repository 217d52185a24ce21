"""A byte-level BPE with the special tokens of the V4.1 prompt format."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE_PLACEHOLDER = "<｜deepseek_image｜>"
NOISE_TOKEN = "</think>"  # the released model uses the id of this token as DSpark noise
TEXT_MARKERS = ("<think>", "</think>", "｜DSML｜")  # ordinary added tokens: kept when decoding
PROMPT_MARKERS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE_PLACEHOLDER,
)

TRAINING_TEXT = """
The quick brown fox jumps over the lazy dog. the THE The quick QUICK Quick and AND And of OF Of.
A small model is a model with small sizes; every size is an option and every option has a value.
In the beginning there was the token, and the token was with the model, and the model was small.
What is the answer to the question? The answer is that the question is the answer, said the user.
Numbers: 0 1 2 3 10 12 42 100 128 256 512 1000 1024 2048 4096; 3.14159, 2.71828, 1e-20, -7, +8.
def compress(tokens, ratio):\n    return [tokens[i : i + ratio] for i in range(0, len(tokens), ratio)]\n
for (int i = 0; i < n; ++i) { sum += weight[i] * value[i]; } // return sum;
{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius", "days": 3}}
Das ist ein kleiner Test. C'est un petit café. ¿Dónde está la biblioteca? Übung macht den Meister.
今天天气很好，我们去公园散步。模型很小，但是结构完整。请问北京的天气怎么样？你好，世界！
The window slides, the indexer selects, the compressor pools, the engram remembers, the gate routes.
Reasoning is slow and careful; answering is fast and short. Please think before you answer, please.
"""


def build_tokenizer(vocab_size: int, phrases: Sequence[str] = (), text: str = "") -> Tokenizer:
    """A byte-level BPE with exactly ``vocab_size`` ids: bos/eos/pad first, markers last.

    ``phrases``: texts that are one token each; ``text``: what it is trained on beside the usual."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(r"[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(
                Regex(
                    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
                    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [*TEXT_MARKERS, *PROMPT_MARKERS, *phrases]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(markers),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # NFC keeps the text independent of how this file was saved
    tokenizer.train_from_iterator([unicodedata.normalize("NFC", TRAINING_TEXT)] * 4 + [text], trainer)
    missing = vocab_size - len(markers) - tokenizer.get_vocab_size()
    if missing < 0:
        raise ValueError(f"vocab_size must be at least {vocab_size - missing}")
    fillers = [f"<｜place▁holder▁no▁{i}｜>" for i in range(missing)]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in fillers])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    for marker in (*TEXT_MARKERS, *PROMPT_MARKERS):
        token = AddedToken(marker, normalized=False, special=marker in PROMPT_MARKERS)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if tokenizer.get_vocab_size() != vocab_size or tokenizer.token_to_id(IMAGE_PLACEHOLDER) != vocab_size - 1:
        raise RuntimeError(f"tokenizer has {tokenizer.get_vocab_size()} ids, expected {vocab_size}")
    return tokenizer


def compressed_vocab_size(tokenizer: Tokenizer) -> int:
    """Number of distinct tokens after the Engram normalisation (case, accents, white space)."""
    sentinel = "\ue000"  # protects a token that is exactly one space from Strip()
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), sentinel),
            normalizers.Strip(),
            normalizers.Replace(sentinel, " "),
        ]
    )
    keys: set[str] = set()
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:  # part of a multi-byte character
            keys.add(tokenizer.id_to_token(token_id) or "")
        else:
            keys.add(normalizer.normalize_str(text) or text)
    return len(keys)
