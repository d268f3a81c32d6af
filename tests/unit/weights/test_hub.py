"""Published models: weights in one file or several, tokenizers, downloads from the Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from shardwise import (
    Checkpoints,
    InitFrom,
    TrainState,
    abstract_state,
    load_initial,
    make_mesh,
)
from shardwise.checkpoint.reader import SavedStep, open_step
from shardwise.data.tokenizers import Bytes, FromFile
from shardwise.errors import CheckpointError, ConfigError
from shardwise.tree import named_leaves
from shardwise.weights.export import export_hf
from shardwise.weights.hf import params_from_hf
from shardwise.weights.hf_config import config_from_hf, model_of
from shardwise.weights.hub import (
    INDEX,
    locate,
    tokenizer_files,
    tokenizer_of,
    weights_in,
)
from tests.helpers.hub import serve

FIXTURES = Path(__file__).parents[2] / "fixtures"


def fixture(name):
    """Return the content of config.json and the weights of a fixture."""
    with np.load(FIXTURES / f"{name}.npz", allow_pickle=False) as file:
        names = [part for part in file.files if part.startswith("weights/")]
        weights = {part.removeprefix("weights/"): file[part] for part in names}
        return json.loads(file["config"].tobytes()), weights


def publish(folder, name="llama_tiny", files=2):
    """Write a model as `save_pretrained` does, in one file or in several with an index."""
    config, weights = fixture(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    weight_map = {part: names[number % files] for number, part in enumerate(weights)}
    for name in names:
        part = {key: value for key, value in weights.items() if weight_map[key] == name}
        save_file(part, folder / name, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def spec_of(name="llama_tiny", **changes):
    config = config_from_hf({**fixture(name)[0], **changes})
    return abstract_state(
        lambda rngs: model_of(config, rngs), optax.identity(), make_mesh("data=8")
    )


@pytest.mark.parametrize("files", [1, 3])
def test_a_run_starts_from_a_published_llama(tmp_path, files):
    folder = publish(tmp_path / "llama", files=files)
    state, loaded = load_initial(InitFrom(folder), spec_of(), seed=0)
    config, weights = fixture("llama_tiny")
    expected = named_leaves(params_from_hf(weights, config_from_hf(config)))
    assert loaded.fresh == loaded.left_out == ()
    for path, leaf in named_leaves(state.params).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def test_a_model_that_computes_something_else_is_refused_although_all_shapes_match(
    tmp_path,
):
    folder = publish(tmp_path / "llama", files=1)
    with pytest.raises(
        CheckpointError,
        match="it has norm_epsilon=1e-05, this model has norm_epsilon=1e-06",
    ):
        load_initial(InitFrom(folder), spec_of(rms_norm_eps=1e-6), seed=0)
    with pytest.raises(
        CheckpointError,
        match=r"holds a Llama model, but .* 0 configurations of shardwise\.models\.llama\.Llama",
    ):
        load_initial(InitFrom(folder), spec_of("gpt2_tiny"), seed=0)
    with pytest.raises(ConfigError, match="neither steps nor averages"):
        load_initial(InitFrom(folder, step=3), spec_of(), seed=0)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "model.bin", 3]
)
def test_an_index_names_only_safetensors_in_its_directory(tmp_path, name):
    folder = publish(tmp_path / "llama")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(
        CheckpointError, match="does not name safetensors files in its directory"
    ):
        weights_in(folder)


def test_a_missing_part_is_named(tmp_path):
    folder = publish(tmp_path / "llama")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"has no model-00002-of-00002\.safetensors"
    ):
        weights_in(folder)


def test_download_errors_are_one_line_with_a_remedy(monkeypatch):
    import huggingface_hub.constants

    assert locate("some/path") == Path("some/path")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError,
        match=r"'hf:owner/name' cannot be downloaded .*`hf download owner/name --local-dir DIR`",
    ) as caught:
        locate("hf:owner/name")
    assert "\n" not in str(caught.value)
    with pytest.raises(
        CheckpointError, match=r"'a/b/c' is not a valid name\. Use owner/name\."
    ):
        locate("hf:a/b/c")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[hf\]'"):
        locate(Path("hf:owner/name"))


LOCATE = """
import sys
from shardwise.errors import ShardwiseError
from shardwise.weights.hub import locate

for name in sys.argv[1:]:
    try:
        print(sorted(path.name for path in locate(name).iterdir()))
    except ShardwiseError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_model_is_downloaded_by_name_and_cached(tmp_path):
    """Run the real client against a local server.

    The client reads the address when it is imported, so it runs in separate processes.
    """
    (tmp_path / "models" / "owner").mkdir(parents=True)
    folder = publish(tmp_path / "models" / "owner" / "tiny", files=2)
    word_tokenizer(folder / "tokenizer.json")
    wanted = sorted(path.name for path in folder.iterdir())
    for name in ("pytorch_model.bin", "modeling_evil.py", "README.md"):
        (folder / name).write_text("raise SystemExit(9)")
    pickled = tmp_path / "models" / "owner" / "pickled"
    pickled.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (pickled / name).write_text("{}")

    def run(*command):
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("HF_")
        }
        environment = {
            **kept,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "JAX_PLATFORMS": "cpu",
        }
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    with serve(tmp_path / "models") as hub:
        options = ["--prompt", "a b", "--tokens", "5", "--temperature", "0"]
        downloaded = run("-m", "shardwise.cli", "sample", "hf:owner/tiny", *options)
        local = run("-m", "shardwise.cli", "sample", str(folder), *options)
        assert downloaded == local
        assert downloaded[0].startswith("a b")
        requests = [path for method, path in hub.requests if method == "GET"]
        fetched = sorted(
            path.rpartition("/")[2] for path in requests if "/resolve/" in path
        )
        # Weights and JSON, and no file that could run code.
        assert fetched == wanted
        none, pickles = run("-c", LOCATE, "hf:owner/none", "hf:owner/pickled")
    assert (
        "'hf:owner/none' cannot be downloaded from the Hub: no such model, or no access to it. "
        in none
    )
    assert (
        "'hf:owner/pickled' has no model.safetensors on the Hub. Weights in other formats, such as "
        in pickles
    )
    names, unknown = run("-c", LOCATE, "hf:owner/tiny", "hf:owner/other")
    assert names == str(wanted)
    assert (
        "cannot be reached, and there is no complete copy in the cache (ConnectError: "
        in unknown
    )
    assert "`hf download owner/other --local-dir DIR`; then pass DIR." in unknown


# Tokenizers


def word_tokenizer(path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "</s>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return FromFile(path)


def saved_with(folder, metadata, name="llama31_tiny"):
    spec = spec_of(name)
    params = params_from_hf(fixture(name)[1], config_from_hf(fixture(name)[0]))
    state = jax.device_put(
        TrainState(np.int32(0), params, {}, spec.optimizer.init(params)), spec.shardings
    )
    (folder / "checkpoints").mkdir(parents=True)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, metadata)
    return open_step(folder / "checkpoints" / "0")


def test_the_tokenizer_of_a_run_is_found_by_its_digest_and_exported(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    tokenizer = word_tokenizer(data / "tokenizer.json")
    source = {
        "tokens": 10,
        "dtype": "uint16",
        "files": [],
        "tokenizer": {"name": "tokenizer.json", "sha256": tokenizer.sha256},
    }
    metadata = {
        "data": {"batch_size": 2, "source": {"split": {"source": source}}},
        "arguments": {"steps": "3", "data": str(data)},
    }
    saved = saved_with(tmp_path / "run", metadata)
    assert tokenizer_of(saved).sha256 == tokenizer.sha256
    export_hf(saved, tmp_path / "out")
    out = tmp_path / "out"
    content = (data / "tokenizer.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == content
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "</s>"
    assert config_from_hf(json.loads((out / "config.json").read_text())).tied
    assert (
        load_file(out / "model.safetensors").keys() == fixture("llama31_tiny")[1].keys()
    )
    # Another tokenizer under the same name is not accepted.
    (data / "tokenizer.json").write_bytes(content + b" ")
    assert tokenizer_of(saved) is None


@pytest.mark.parametrize(
    "data",
    [
        {"source": {"length": 4, "tokens": {"shape": [9], "dtype": "uint8"}}},
        {"source": {"files": [], "dtype": "uint8"}},
    ],
)
def test_byte_tokens_are_recognized_by_their_dtype(tmp_path, data):
    for described, kind in (
        (data, Bytes),
        ("a function", type(None)),
        ({"source": {"files": [], "dtype": "uint16"}}, type(None)),
    ):
        (tmp_path / "meta.json").write_text(json.dumps({"data": described}))
        assert isinstance(tokenizer_of(SavedStep(tmp_path, {}, {})), kind)


def test_the_tokenizer_json_of_bytes_maps_each_byte_to_its_number(tmp_path):
    for name, content in tokenizer_files(Bytes(), 128).items():
        (tmp_path / name).write_bytes(content)
    tokenizer = FromFile(tmp_path / "tokenizer.json")
    text = "def f(x):\n\treturn 'é\u4e2d😀'  # \x00\x7f"
    (tokens,) = tokenizer.encode([text.encode()])
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.vocab_size == 256
