"""`shardwise sample` writes text, refuses bad input and executes only the code it was given."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest

from shardwise import Checkpoints, InitFrom, abstract_state, load_initial, make_mesh
from shardwise.checkpoint.reader import open_step
from shardwise.cli import main
from shardwise.cli.sample import _Out, _Text, can_sample
from shardwise.data.tokenizers import Bytes
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.module import describe_model
from shardwise.weights.export import export_hf

CONFIG = GPTConfig(vocab_size=256, max_length=32, num_layers=1, num_heads=2, width=16)
RECIPE = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from shardwise import Batches, Run, Tokens

class Model(nnx.Module):
    def __init__(self, rngs, width):
        self.table = nnx.Embed(256, width, rngs=rngs)
        self.out = nnx.Linear(width, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.9, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.dropout(self.table(tokens)))

def recipe(width: int = 4) -> Run:
    return Run(
        model=lambda rngs: Model(rngs, width),
        loss=lambda model, batch: model(batch["inputs"]).mean(),
        optimizer=optax.sgd(0.1),
        data=Batches(Tokens(np.arange(99, dtype=np.uint8), 8), 2),
        steps=1,
    )
"""


OTHERS = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from shardwise import Batches, Run, Tokens

class Fixed(nnx.Module):
    '''A mean over all tokens so far; it takes rows of 32 tokens and no others.'''

    def __init__(self, rngs):
        self.table = nnx.Embed(256, 16, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (32, 16)))

    def __call__(self, tokens):
        x = self.table(tokens) + self.positions[...]
        return jnp.sin(4 * jnp.cumsum(x, axis=1)) @ self.table.embedding[...].T

class Masked(Fixed):
    def __call__(self, tokens, mask):
        return super().__call__(tokens)

class Both(Fixed):
    def __call__(self, tokens):
        return super().__call__(tokens), 0.0

class Silent(nnx.Module):
    __init__ = Fixed.__init__

def recipe(kind: str = "Fixed") -> Run:
    return Run(
        model=globals()[kind],
        loss=lambda model, batch: model(batch["inputs"]).mean(),
        optimizer=optax.sgd(0.1),
        data=Batches(Tokens(np.arange(99, dtype=np.uint8), 32), 2),
        steps=1,
    )
"""


def save(folder, factory, step=0, **metadata):
    """A run directory with random weights in it, others for another step."""
    spec = abstract_state(factory, optax.sgd(0.1), make_mesh("data=8"))
    rng = np.random.default_rng(step)
    arrays = jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype), spec.abstract
    )
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(
            jax.device_put(replace(arrays, step=np.int32(step)), spec.shardings),
            metadata,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a GPT of bytes, what it exports, and a run of a model that only its recipe knows."""
    folder = tmp_path_factory.mktemp("sample")
    bytes_of = {"source": {"length": 8, "tokens": {"shape": [99], "dtype": "uint8"}}}
    gpt = lambda rngs: GPT(CONFIG, rngs)  # noqa: E731
    trap = folder / "trap.py"
    trap.write_text(f"open({str(folder / 'sprung')!r}, 'w')")
    spec = abstract_state(gpt, optax.sgd(0.1), make_mesh("data=8"))
    described = describe_model(spec.module(spec.abstract))
    save(
        folder / "run",
        gpt,
        model=described,
        data=bytes_of,
        recipe=f"{trap}:recipe",
        arguments={"steps": "1"},
    )
    (folder / "run" / "run.json").write_text(
        json.dumps({"recipe": f"{trap}:recipe", "source": trap.read_text()})
    )
    export_hf(open_step(folder / "run" / "checkpoints" / "0"), folder / "hub")
    (folder / "own.py").write_text(RECIPE)
    names = {}
    exec(RECIPE, names)  # noqa: S102
    save(folder / "own", lambda rngs: names["Model"](rngs, 6), data="a function")
    for step, loss in {1: 2.5, 2: 2.0, 3: 2.25}.items():
        save(
            folder / "evaluated", gpt, step, data=bytes_of, metrics={"eval_loss": loss}
        )
    (folder / "others.py").write_text(OTHERS)
    exec(OTHERS, names)  # noqa: S102
    save(folder / "others", names["Fixed"], data=bytes_of, recipe="others.py:recipe")
    return folder


@pytest.fixture
def sample(folder, monkeypatch, capsysbinary):
    """Return a function that runs the command in `folder`.

    It returns the exit code, the text, the words on standard error and the JSON answer.
    """
    monkeypatch.chdir(folder)

    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["sample", *args, "--json", "answer.json"])
        said = capsysbinary.readouterr()
        answer = json.loads((folder / "answer.json").read_text()) if code == 0 else None
        return code, said.out.decode(), said.err.decode(), answer

    return call


def test_characters_of_a_text_are_tokens(sample, folder):
    alphabet = "".join(map(chr, range(1000, 1256)))
    (folder / "letters.txt").write_text(alphabet[::-1], encoding="utf-8")
    args = ["own", "--recipe", "own.py", "--width", "6", "--tokens", "9"]
    args += ["--tokenizer", "characters:letters.txt", "--temperature", "0"]
    prompt = alphabet[3] + alphabet[2]
    code, out, _, answer = sample(*args, "--prompt", prompt)
    assert code == 0
    assert answer["prompt_tokens"] == [3, 2]
    (written,) = answer["continuations"]
    assert written["text"] == "".join(alphabet[i] for i in written["tokens"])
    assert out.startswith(prompt + written["text"])
    code, _, err, _ = sample(*args, "--prompt", "a")
    assert code == 2
    assert "not in the alphabet of 256 characters: 'a'" in err
    # With a character less, the others would have other tokens.
    (folder / "letters.txt").write_text(alphabet[1:], encoding="utf-8")
    code, _, err, _ = sample(*args, "--prompt", prompt)
    assert code == 2
    assert "255 different characters, but the model knows 256 tokens" in err


@pytest.mark.slow
def test_text_goes_on_and_is_the_same_without_cache_on_a_mesh_and_published(
    sample, folder
):
    code, out, err, answer = sample(
        "run", "--prompt", "def ", "--tokens", "40", "--temperature", "0"
    )
    assert (code, err) == (0, "")
    (written,) = answer["continuations"]
    assert out == "def " + written["text"] + (
        "" if written["text"].endswith("\n") else "\n"
    )
    assert (len(written["tokens"]), answer["prompt_tokens"]) == (40, list(b"def "))
    assert bytes(written["tokens"]).decode(errors="replace") == written["text"]
    for args in (
        ["run", "--no-cache"],
        ["run/checkpoints/0"],
        ["hub"],
        ["run", "--mesh", "data=4,model=2"],
        ["run", "--mesh", "fsdp=2,context=4"],
    ):
        again = sample(
            *args,
            "--prompt",
            "-",
            "--tokens",
            "40",
            "--temperature",
            "0",
            stdin=b"def ",
        )
        assert again[3]["continuations"] == answer["continuations"], args
    assert not (folder / "sprung").exists()


def test_several_texts_come_at_once_and_the_first_does_not_depend_on_the_others(sample):
    args = ["run", "--prompt", "x", "--tokens", "6", "--seed", "3"]
    _, out, _, three = sample(*args, "--num", "3")
    _, _, _, one = sample(*args)
    texts = three["continuations"]
    assert texts[0] == one["continuations"][0]
    assert len({text["text"] for text in texts}) == 3
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        "--- 1 of 3",
        "--- 2 of 3",
        "--- 3 of 3",
    ]
    assert all(f"x{text['text']}" in out for text in texts)


def test_any_model_is_sampled_by_its_recipe(sample):
    args = [
        "own",
        "--prompt",
        "ab",
        "--tokenizer",
        "bytes",
        "--tokens",
        "20",
        "--temperature",
        "0",
    ]
    code, _, err, _ = sample(*args)
    assert code == 4
    assert "these 3 parameters belong to no known model family. GPT has" in err
    assert "--recipe FILE.py" in err
    code, _, err, _ = sample(*args, "--recipe", "own.py")
    assert code == 4
    assert "does not match this model" in err
    code, _, _, answer = sample(*args, "--recipe", "own.py", "--width", "6")
    assert code == 0
    tokens = answer["continuations"][0]["tokens"]
    assert len(tokens) == 20
    follows = dict(pairwise(tokens))
    assert all(
        follows[a] == b for a, b in pairwise(tokens)
    )  # each token decides the next: no dropout, no draws


def test_the_best_step_is_sampled_by_its_name(sample, folder):
    args = ["evaluated", "--prompt", "x", "--tokens", "4", "--temperature", "0"]
    for step, number in (("best", 2), ("1", 1), (None, 3)):
        code, _, _, answer = sample(*args, *(["--step", step] if step else []))
        assert code == 0
        assert answer["source"].endswith(f"evaluated/checkpoints/{number}")
    spec = abstract_state(
        lambda rngs: GPT(CONFIG, rngs), optax.sgd(0.1), make_mesh("data=8")
    )
    _, loaded = load_initial(
        InitFrom(folder / "evaluated", step="best"), spec, 0
    )  # a run may begin with it, too
    assert loaded.source.endswith("evaluated/checkpoints/2")


def test_a_model_that_takes_one_length_only_sees_rows_of_that_length(sample, folder):
    """The reference: for each token the last 32, or all there are and anything behind them."""
    args = ["others", "--recipe", "others.py", "--prompt", "ab", "--temperature", "0"]
    (code, _, err, long), (_, _, _, short) = (
        sample(*args, "--tokens", "40"),
        sample(*args, "--tokens", "6"),
    )
    assert (code, err) == (0, "")
    names = {}
    exec(OTHERS, names)  # noqa: S102
    spec = abstract_state(names["Fixed"], optax.sgd(0.1), make_mesh("data=8"))
    model = spec.module(load_initial(InitFrom(folder / "others"), spec, 0)[0])
    forward = jax.jit(lambda tokens: model(tokens))
    text = list(b"ab")
    for _ in range(40):
        seen = text[-32:]
        row = np.pad(
            np.array([seen], np.int32), ((0, 0), (0, 32 - len(seen))), constant_values=7
        )
        text.append(int(forward(row)[0, len(seen) - 1].argmax()))
    assert long["continuations"][0]["tokens"] == text[2:]
    assert short["continuations"][0]["tokens"] == text[2:8]
    assert len(set(text[2:])) > 10


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (
            ["run", "--step", "best"],
            4,
            "has no step with the metric 'eval_loss', because no saved step was evaluated. "
            "Choose a step with --step.",
        ),
        (["others"], 4, "--recipe others.py:recipe [its arguments]"),
        (
            ["others", "--recipe", "others.py", "--kind", "Masked"],
            4,
            "Masked.__call__ cannot be called with tokens alone: missing a required",
        ),
        (
            ["others", "--recipe", "others.py", "--kind", "Both"],
            4,
            "the model returns a tuple for tokens (1, 32); to be sampled, it must",
        ),
        (
            ["others", "--recipe", "others.py", "--kind", "Silent"],
            4,
            "Silent has no __call__; to be sampled, it must return logits (B, T, V)",
        ),
        (["run", "--top-p", "2"], 2, "top_p is 2.0; it must be above 0 and at most 1"),
        (["run", "--tokens", "0"], 2, "--tokens 0: it must be at least 1"),
        (
            ["run", "--width", "6"],
            2,
            "unknown argument --width 6. Arguments of a recipe need --recipe",
        ),
        (["run", "--temprature", "1"], 2, "unknown argument --temprature"),
        (["run", "--step", "7"], 4, "has no step 7. Saved steps: 0."),
        (["nowhere"], 4, "nowhere does not exist"),
        (["own"], 2, "--tokenizer FILE, bytes or characters:FILE"),
        (["hub", "--step", "3"], 2, "has neither steps nor averages"),
        (["run", "--average"], 4, "keeps no average"),
        (["run", "--prompt", ""], 2, "the prompt is empty"),
        (
            ["hub", "--tokenizer", "none.json"],
            3,
            "data file 'none.json' does not exist",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(sample, args, code, words):
    found = sample("--prompt", "a", *args) if "--prompt" not in args else sample(*args)
    assert found[0] == code
    assert words in found[2]
    assert "Traceback" not in found[2]


@pytest.mark.parametrize("name", ["n_layer", "vocab_size"])
def test_a_model_that_the_weights_cannot_fill_is_refused(sample, folder, name):
    shutil.copytree(folder / "hub", folder / name)
    config = json.loads((folder / name / "config.json").read_text())
    (folder / name / "config.json").write_text(json.dumps({**config, name: 10**9}))
    code, _, said, _ = sample(name, "--prompt", "a")
    assert code == 4
    assert "1,000,000,000" in said
    assert "16 tensors of at most 256 rows" in said


def test_help_does_not_wait_for_jax_and_the_real_command_ends_with_its_reader(folder):
    began = time.monotonic()
    code = (
        "import sys; from shardwise.cli import main\n"
        "try: main(['sample', '--help'])\n"
        "finally: sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, "--top-p" in done.stdout) == (0, True), done.stderr
    assert time.monotonic() - began < 3
    command = f"{sys.executable} -m shardwise.cli sample run --prompt abc --tokens 3000 | head -c 3"
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("abc", "")


def test_a_character_is_written_when_it_is_whole():
    text = "aé中😀b"
    written = _Text(Bytes(), list(b"x"), None)
    parts = [written.push(byte) for byte in text.encode()]
    assert parts == ["a", "", "é", "", "", "中", "", "", "", "😀", "b"]
    for byte in b"\xf0\x9f":
        assert written.push(byte) == ""
    written.flush()
    assert (written.rest, written.text) == ("\ufffd", text + "\ufffd")
    broken = _Text(Bytes(), list(b"x"), end=10)
    assert "".join(
        broken.push(byte) for byte in b"\xff\xff\xff\xff\xffok\nmore"
    ).endswith("ok")
    assert (broken.ended, broken.tokens[-1]) == (True, 10)


def test_a_terminal_gets_no_commands():
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        _Out(terminal).write("a\x1b[2Jb\x9bc\td\u200de")
        assert os.read(master, 100).decode() == "a\ufffd[2Jb\ufffdc\td\u200de"
    os.close(master)
    file = io.StringIO()
    _Out(file).write("a\x1b[2J")
    assert file.getvalue() == "a\x1b[2J"


def test_what_can_be_sampled_without_being_told_more(folder):
    """`train` offers it at its end only then."""
    assert {
        name: can_sample(folder / name)
        for name in ("run", "evaluated", "own", "others", "none")
    } == {
        "run": True,
        "evaluated": True,
        "own": False,
        "others": False,
        "none": False,
    }
