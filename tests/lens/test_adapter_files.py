"""Adapter folders come from anywhere: whatever is wrong with one, there is a clear error and an untouched model."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bifocals import FocalConfig, FocusConfig, attach, lens_of, load
from bifocals import adapter as adapter_file
from bifocals.adapter import CONFIG, TENSORS, AdapterError, fingerprint
from bifocals.testing import tiny_model, tiny_tokens


@pytest.fixture
def saved(tmp_path):
    lens = attach(tiny_model("llama"), FocalConfig(form="token"), FocusConfig(groups=4, window=4))
    lens.save(tmp_path / "good")
    return tmp_path / "good"


def rewrite(folder, change):
    """Change the config as an attacker would: with a checksum that fits."""
    path = folder / CONFIG
    config = json.loads(path.read_text())
    change(config)
    config.pop("checksum", None)
    config["checksum"] = adapter_file._checksum(config, (folder / TENSORS).read_bytes())
    path.write_text(json.dumps(config))


def set_at(config, path, value):
    for name in path[:-1]:
        config = config[name]
    config[path[-1]] = value


def truncated(folder, draw):
    path = folder / draw.choice([CONFIG, TENSORS])
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def bit_flipped(folder, draw):
    path = folder / draw.choice([CONFIG, TENSORS])
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def wrong_type(folder, draw):
    config = json.loads((folder / CONFIG).read_text())
    paths = [(name,) for name in config if name != "checksum"]
    paths += [(method, name) for method in ("focal", "focus") for name in config[method]]
    paths += [("shapes", name) for name in config["shapes"]]
    wrong = draw.choice([[], {"a": 1}, "x\u0000../..", -1, 1e308, True, [None], 2**70])
    path = draw.choice([path for path in paths if path[-1] != "allow_look_ahead" or wrong is not True])
    rewrite(folder, lambda config: set_at(config, path, wrong))


def missing_or_extra_key(folder, draw):
    def change(config):
        part = draw.choice([config, config["focal"], config["focus"], config["shapes"]])
        if draw.random() < 0.4:
            part["../../etc/passwd"] = 1
        elif part is config:
            del part[draw.choice([name for name in part if name != "checksum"])]
        else:
            part[draw.choice(["__class__", "groups ", ""])] = draw.choice([0, None, "a"])

    rewrite(folder, change)


def huge_sizes(folder, draw):
    if draw.random() < 0.5:
        name = draw.choice(["groups", "dim", "rounds", "top_k"])
        rewrite(folder, lambda config: config["focus"].update({name: draw.choice([10**7, 10**12, 10**18, 10**30])}))
        return
    path = folder / TENSORS
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.5:
        path.write_bytes((draw.choice([2**63, 2**40, len(data) * 2])).to_bytes(8, "little") + data[8:])
    else:
        header = json.loads(data[8 : 8 + size])
        header[draw.choice(list(header))]["shape"] = draw.choice([[10**9, 10**9], [2**62], [-1], ["a"], 3])
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    rewrite(folder, lambda config: None)


def wrong_tensors(folder, draw):
    tensors = load_file(folder / TENSORS)
    name = draw.choice(list(tensors))
    kind = draw.randrange(5)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors["../" + name] = torch.zeros(3)
    elif kind == 2:
        tensors[name] = tensors[name][..., None].clone()
    elif kind == 3:
        tensors[name] = tensors[name].long()
    else:
        tensors[name].flatten()[0] = draw.choice([float("nan"), float("inf")])
    save_file(tensors, folder / TENSORS)
    rewrite(folder, lambda config: None)


def path_trick(folder, draw):
    path = folder / draw.choice([CONFIG, TENSORS])
    kind = draw.randrange(4)
    if kind == 0:
        outside = folder.parent / f"{path.name}.outside"
        shutil.move(path, outside)
        path.symlink_to(outside)
    elif kind == 1:
        path.unlink()
    elif kind == 2:
        path.unlink()
        os.mkfifo(path)
    else:
        path.unlink()
        path.mkdir()


MUTATIONS = [
    truncated,
    bit_flipped,
    bit_flipped,
    wrong_type,
    wrong_type,
    missing_or_extra_key,
    huge_sizes,
    wrong_tensors,
    path_trick,
]


def test_two_hundred_mutated_folders_give_two_hundred_errors(saved, tmp_path):
    model, draw = tiny_model("llama"), random.Random(0)
    before, module_names = fingerprint(model), [name for name, _ in model.named_modules()]
    for number in range(200):
        folder = tmp_path / f"mutated{number}"
        shutil.copytree(saved, folder)
        mutation = MUTATIONS[number % len(MUTATIONS)]
        mutation(folder, draw)
        with pytest.raises(AdapterError) as error:
            load(model, folder)
        assert 20 < len(str(error.value)) < 700, (mutation.__name__, str(error.value))
        assert lens_of(model) is None
        shutil.rmtree(folder)
    assert fingerprint(model) == before
    assert [name for name, _ in model.named_modules()] == module_names
    load(model, saved)


def test_other_weights_are_refused_unless_allowed(saved):
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-9
    with pytest.raises(AdapterError, match="other weights"):
        load(other, saved)
    assert load(other, saved, allow_other_weights=True).mode == "hard"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tiny_model("mistral"), "fitted to a 'llama' model, got 'mistral'"),
        (tiny_model("llama", hidden_size=64), "of shapes"),
        (tiny_model("llama", num_hidden_layers=3), "of shapes"),
    ],
)
def test_another_architecture_or_shape_is_refused(saved, model, message):
    with pytest.raises(AdapterError, match=message):
        load(model, saved, allow_other_weights=True)


def test_a_newer_format_asks_for_an_upgrade(saved):
    rewrite(saved, lambda config: config.update(format=2))
    with pytest.raises(AdapterError, match="Upgrade bifocals"):
        load(tiny_model("llama"), saved)


def test_a_save_that_stops_half_way_still_loads(saved, monkeypatch):
    """Killed between the two renames: the tensors are the new ones, and so is the lens that loads."""
    model = tiny_model("llama")
    lens = load(model, saved)
    for tensor in lens.state_dict().values():
        tensor.normal_()
    wanted = {name: tensor.clone() for name, tensor in lens.state_dict().items()}
    real, renamed = os.replace, []

    def stop_at_the_second(source, target):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        lens.save(saved)
    lens.detach()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in load(model, saved).state_dict().items())


def test_a_save_that_stops_early_leaves_the_old_lens(saved, monkeypatch):
    model = tiny_model("llama")
    lens = load(model, saved)
    wanted = {name: tensor.clone() for name, tensor in lens.state_dict().items()}
    for tensor in lens.state_dict().values():
        tensor.normal_()
    monkeypatch.setattr(os, "replace", lambda source, target: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lens.save(saved)
    lens.detach()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in load(model, saved).state_dict().items())


def test_saving_keeps_what_else_is_in_the_folder(saved):
    (saved / "notes.txt").write_text("mine")
    lens = load(tiny_model("llama"), saved)
    lens.save(saved)
    assert sorted(os.listdir(saved)) == [CONFIG, TENSORS, "notes.txt"]


def test_the_dial_is_saved_with_the_lens(saved):
    model = tiny_model("llama")
    lens = load(model, saved)
    lens.top_k = 1
    lens.save(saved)
    lens.detach()
    assert load(model, saved).top_k == 1


def test_a_hub_name_is_fetched_at_its_revision(saved, monkeypatch):
    asked = {}

    def fetched(name, *, revision, allow_patterns):
        asked.update(name=name, revision=revision, files=allow_patterns)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    load(tiny_model("llama"), "someone/lens", revision="v1")
    assert asked == {"name": "someone/lens", "revision": "v1", "files": [CONFIG, TENSORS]}


def test_a_name_that_is_nowhere_says_where_it_was_looked_for(monkeypatch):
    def absent(name, **options):
        raise OSError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    with pytest.raises(AdapterError, match="no folder, no lens shipped with bifocals, and the hub"):
        load(tiny_model("llama"), "someone/lens")
    with pytest.raises(AdapterError, match="expected a folder"):
        load(tiny_model("llama"), "../nowhere/../at/all")


def test_a_lens_is_pushed_as_its_two_files(saved, monkeypatch):
    sent = {}

    class Hub:
        def __init__(self, token=None):
            pass

        def create_repo(self, name, private=None, exist_ok=False):
            sent["repository"] = name

        def upload_folder(self, repo_id, folder_path, commit_message):
            sent["files"] = sorted(os.listdir(folder_path))
            return "https://hub/someone/lens/commit/1"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    lens = load(tiny_model("llama"), saved)
    assert lens.push_to_hub("someone/lens") == "https://hub/someone/lens/commit/1"
    assert sent == {"repository": "someone/lens", "files": [CONFIG, TENSORS]}


def test_a_lens_fits_the_body_and_the_whole_model_alike(saved):
    body = tiny_model("llama").model
    assert load(body, saved).layers.keys() == {"0", "1"}
    with torch.no_grad():
        assert body(tiny_tokens()).last_hidden_state.isfinite().all()


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("focus", "window"), 10**400),
        (("focus", "gate"), LONG),
        (("focus", LONG), 1),
        (("focal", "temperature"), [1] * 5000),
        (("shapes",), {LONG: LONG}),
        (("layers",), [2**70] * 5000),
        (("model_type",), LONG),
        (("package_version",), LONG),
        ((LONG,), LONG),
    ],
)
def test_a_value_of_any_length_gives_a_short_error(saved, path, value):
    rewrite(saved, lambda config: set_at(config, path, value))
    with pytest.raises(AdapterError) as error:
        load(tiny_model("llama"), saved)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("offsets", [[0], [], [0, 1, 2], ["a", "b"], None])
def test_offsets_that_are_no_pair_are_no_header(saved, offsets):
    path = saved / TENSORS
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    next(iter(header.values()))["data_offsets"] = offsets
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    rewrite(saved, lambda config: None)
    with pytest.raises(AdapterError):
        load(tiny_model("llama"), saved)
