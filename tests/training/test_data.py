"""Text becomes blocks: every source, the same parts each time, tokenised once."""

import gzip
import json

import datasets
import numpy as np
import pytest
import torch

from bifocals.files import cache_folder
from bifocals.training import data
from bifocals.training.data import DataError, load_blocks, load_tokens, read_documents


def as_text(tokenizer, tokens):
    return "".join(tokenizer.convert_ids_to_tokens(tokens.tolist()))


def test_a_file_is_packed_in_order_without_loss_but_the_rest(tmp_path, tokenizer):
    text = "the quick brown fox jumps over the lazy dog. " * 3
    (tmp_path / "a.txt").write_text(text)
    blocks = load_blocks([str(tmp_path / "a.txt")], tokenizer, 16)
    assert blocks.tokens.dtype == torch.int64
    assert as_text(tokenizer, blocks.tokens.flatten()) == text[: blocks.tokens.numel()]
    assert len(blocks.tokens) == (len(text) + 1) // 16


def test_files_folders_lines_and_compressed_ones_say_the_same(tmp_path, tokenizer):
    texts = ["one text of some length", "and another one"]
    folder = tmp_path / "folder"
    folder.mkdir()
    for index, text in enumerate(texts):
        (folder / f"{index}.txt").write_text(text)
    (folder / "picture.bin").write_bytes(b"\xff\xfe")
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = [read_documents(str(tmp_path / name)) for name in ("folder", "a.jsonl", "a.jsonl.gz")]
    assert found == [texts] * 3


def test_lines_of_json_end_where_json_says_whatever_else_their_text_holds(tmp_path):
    texts = ["a line\u2028another\x85and one", "more"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes(lines.encode())
    assert read_documents(str(tmp_path / "a.jsonl")) == texts


def test_documents_end_with_the_end_of_text(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n')
    assert as_text(tokenizer, load_tokens(str(tmp_path / "a.jsonl"), tokenizer)) == "ab</s>cd</s>"


def test_the_two_parts_are_disjoint_and_complete():
    texts = [f"document number {index}" for index in range(100)]
    fitting, held_out = (data._split(texts, part) for part in ("fitting", "held-out"))
    assert sorted(fitting + held_out) == sorted(texts)
    assert 5 <= len(held_out) <= 40
    assert data._split(["x" * 8 + "y" * 2], "fitting") == ["x" * 8]
    assert data._split(["x" * 8 + "y" * 2], "held-out") == ["y" * 2]


def test_a_part_can_be_named_with_its_source(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a" * 80 + "b" * 20)
    named = load_blocks([f"{tmp_path}/a.txt@held-out"], tokenizer, 10)
    assert as_text(tokenizer, named.tokens.flatten()) == "b" * 20
    assert torch.equal(named.tokens, load_blocks([f"{tmp_path}/a.txt"], tokenizer, 10, part="held-out").tokens)
    with pytest.raises(DataError, match="expected a source without '@'"):
        load_blocks([f"{tmp_path}/a.txt@fitting"], tokenizer, 10, part="held-out")
    with pytest.raises(DataError, match="after '@', got 'tset'"):
        load_blocks([f"{tmp_path}/a.txt@tset"], tokenizer, 10)


def test_blocks_know_their_source_and_a_limit_spreads_them(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("".join(character * 8 for character in "abcdefghij"))
    (tmp_path / "b.txt").write_text("z" * 40)
    blocks = load_blocks([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tokenizer, 8, limit=3)
    assert blocks.domains.tolist() == [0, 0, 0, 1, 1, 1]
    assert as_text(tokenizer, blocks.of(0)[:, 0]) == "bfi"


def test_the_built_in_corpora_are_there(tokenizer):
    assert len(read_documents("pydoc")) > 50
    sources = read_documents("stdlib")
    assert len(sources) > 300
    assert any("class OrderedDict" in text for text in sources)


def test_tokens_are_made_once_and_kept(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("hello world")
    first = load_tokens(str(tmp_path / "a.txt"), tokenizer)
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    assert np.array_equal(load_tokens(str(tmp_path / "a.txt"), tokenizer), first)


def test_another_text_or_tokenizer_is_not_served_from_the_cache(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("hello")
    first = load_tokens(str(path), tokenizer)
    path.write_text("hullo")
    assert not np.array_equal(load_tokens(str(path), tokenizer), first)
    tokenizer.add_tokens(["hullo"])
    assert len(load_tokens(str(path), tokenizer)) == 2


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"\x80\x04N."])
def test_a_damaged_cache_is_made_again(tmp_path, tokenizer, damage):
    (tmp_path / "a.txt").write_text("hello world")
    first = load_tokens(str(tmp_path / "a.txt"), tokenizer)
    (kept,) = (cache_folder() / "tokens").iterdir()
    kept.write_bytes(damage)
    assert np.array_equal(load_tokens(str(tmp_path / "a.txt"), tokenizer), first)
    assert kept.read_bytes() != damage


def test_tokens_beyond_the_vocabulary_are_not_taken_from_the_cache(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hello world")
    first = load_tokens(str(tmp_path / "a.txt"), tokenizer)
    (kept,) = (cache_folder() / "tokens").iterdir()
    np.save(kept, np.array([1, 10**6], dtype=np.int32))
    assert np.array_equal(load_tokens(str(tmp_path / "a.txt"), tokenizer), first)


def test_wrong_sources_say_what_was_expected(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "short.txt").write_text("hi")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"body": "not"}\n')
    (tmp_path / "empty").mkdir()
    for source, message in [
        ("short.txt", "at least one block of 8 tokens, got 3"),
        ("blank.txt", "nothing but blanks"),
        ("latin.txt", "UTF-8, got other bytes at 3"),
        ("a.jsonl", 'line 2: expected an object with a string "text"'),
        ("empty", "expected a folder with files that end in"),
        ("missing.txt", "No text at"),
    ]:
        with pytest.raises(DataError, match=message):
            load_blocks([str(tmp_path / source)], tokenizer, 8)
    with pytest.raises(DataError, match="at least one source"):
        load_blocks([], tokenizer, 8)
    with pytest.raises(DataError, match="no tokenizer"):
        load_blocks(["pydoc"], None, 8)
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'bifocals\[training\]'"):
        load_blocks(["wikitext"], tokenizer, 8)


def test_a_dataset_gives_its_texts(tokenizer, monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"text": ["one text", "two texts"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_documents("owner/name:raw:validation") == ["one text", "two texts"]
    assert read_documents("owner/name") == ["one text", "two texts"]
    assert asked == [("owner/name", "raw", "validation"), ("owner/name", None, "train")]
