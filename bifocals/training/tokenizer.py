"""A tokenizer for text that has none: byte-level BPE, trained on the part of the text that is not held out.

The same text and size give the same tokenizer; it is kept in the cache, as plain JSON.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bifocals.files import cache_folder, write_file
from bifocals.training.data import Part, load_documents

logger = logging.getLogger(__name__)

END = "<|endoftext|>"
BYTES = 256  # each is a token, so that no text is unknown


def train_tokenizer(sources: Sequence[str], vocabulary: int, *, part: Part = "fitting") -> PreTrainedTokenizerFast:
    """At most ``vocabulary`` tokens; fewer if the text has no more pairs that occur twice."""
    if vocabulary <= BYTES:
        raise ValueError(f"Expected a vocabulary of more than the {BYTES} bytes and the end of text, got {vocabulary}.")
    documents = [text for source in sources for text in load_documents(source, part)]
    path = cache_folder() / "tokenizers" / f"{_key(documents, vocabulary)}.json"
    trained = _read(path, vocabulary)
    if trained is None:
        trained = _train(documents, vocabulary)
        try:
            write_file(path, trained.to_str().encode())
        except OSError as reason:
            logger.info("Did not keep the tokenizer: %s.", reason)
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END, clean_up_tokenization_spaces=False)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """How many bytes of text each token stands for; the end of text stands for none.

    A byte-level tokenizer writes every byte as one character.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [0 if token == END else len(token) for token in tokens]


def _train(documents: list[str], vocabulary: int) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def _read(path: Path, vocabulary: int) -> Any:
    """None if it was never kept, or if the file is damaged."""
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the package raises nothing more specific
        tokenizer = None
    if tokenizer is not None and tokenizer.token_to_id(END) == 0 and tokenizer.get_vocab_size() <= vocabulary:
        return tokenizer
    logger.info("%s is damaged and is made again.", path)
    return None


def _key(documents: list[str], vocabulary: int) -> str:
    digest = hashlib.sha256(json.dumps([tokenizers.__version__, vocabulary]).encode())
    for text in documents:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
