"""The recipes of known results: nanoGPT's model, the classifier of digits, the flow model."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.datasets import load_digits

from recipes import digits, flow, shakespeare
from shardwise import Keep, fit, make_mesh, verify
from tests.helpers import command

ROOT = Path(__file__).parents[2]
NANOGPT = ROOT / "tests" / "fixtures" / "nanogpt_tiny.npz"
TINY = shakespeare.Config(
    max_length=8,
    batch_size=4,
    num_layers=2,
    num_heads=2,
    width=16,
    dropout=0.0,
    steps=10,
    eval_batches=2,
    compute_dtype=None,
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(400)))
    return path


def weights_of_nanogpt(arrays, when):
    """Return weights of nanoGPT as parameters of `CharGPT`. PyTorch's are (outs, ins)."""

    def array(name):
        return jnp.asarray(arrays[f"{when}/transformer.{name}.weight"])

    def block(number):
        at = f"h.{number}"
        shape = 16, 2, 8
        heads = [
            part.T.reshape(shape)
            for part in array(f"{at}.attn.c_attn").reshape(3, 16, 16)
        ]
        names = "query", "key", "value"
        return {
            "norm1": {"scale": array(f"{at}.ln_1")},
            "attn": {
                **{
                    name: {"kernel": part}
                    for name, part in zip(names, heads, strict=True)
                },
                "out": {"kernel": array(f"{at}.attn.c_proj").T.reshape(2, 8, 16)},
            },
            "norm2": {"scale": array(f"{at}.ln_2")},
            "up": {"kernel": array(f"{at}.mlp.c_fc").T},
            "down": {"kernel": array(f"{at}.mlp.c_proj").T},
        }

    return {
        "tokens": {"embedding": array("wte")},
        "positions": {"embedding": array("wpe")},
        "blocks": {0: block(0), 1: block(1)},
        "norm": {"scale": array("ln_f")},
    }


def test_a_run_has_the_logits_losses_and_weights_of_nanogpt(text, tmp_path):
    """10 steps on 8 devices: model, loss, clipping, weight decay and learning rate."""
    arrays = np.load(NANOGPT)
    before = weights_of_nanogpt(arrays, "before")
    batch = {"inputs": arrays["tokens"], "labels": arrays["labels"]}

    def model(rngs):
        built = shakespeare.CharGPT(TINY, 11, rngs)
        params = nnx.state(built, nnx.Param)
        shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(params))
        assert shapes == jax.tree.map(jnp.shape, before)
        structure = jax.tree.structure(params)
        nnx.update(built, jax.tree.unflatten(structure, jax.tree.leaves(before)))
        return built

    logits = model(nnx.Rngs(0))(jnp.asarray(batch["inputs"]))
    np.testing.assert_allclose(logits, arrays["logits"], atol=1e-5)

    run = shakespeare.recipe(text, "cpu", steps=10, lr=1e-2)
    run = replace(run, model=model, data=lambda step: batch, eval_data=None)
    run = replace(run, keep=Keep(), sample=None, save_every=0)
    result = fit(replace(run, out=tmp_path / "run"))
    losses = losses_in(tmp_path / "run" / "metrics.jsonl")
    found = [losses[step, "loss"] for step in range(1, 11)]
    np.testing.assert_allclose(found, arrays["losses"], rtol=1e-5)
    after = weights_of_nanogpt(arrays, "after")
    after["blocks"] = {str(key): value for key, value in after["blocks"].items()}
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-5),
        result.state.params,
        after,
    )


@pytest.mark.parametrize(
    ("config", "count"), [("gpu", 10_646_784), ("cpu", 804_096 - 8192)]
)
def test_the_models_have_as_many_parameters_as_nanogpt_prints(config, count):
    """nanoGPT prints 10.65M and 0.80M, without the embeddings of positions."""
    c = shakespeare.CONFIGS[config]
    model = nnx.eval_shape(lambda: shakespeare.CharGPT(c, 65, nnx.Rngs(0)))
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) - c.max_length * c.width == count


def test_characters_become_tokens_and_windows_start_anywhere(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("zabä€\nzab", encoding="utf-8")
    characters, tokens = shakespeare.read_characters(path)
    assert characters.alphabet == "\nabzä€"
    assert characters.decode(tokens) == "zabä€\nzab"
    numbers = np.arange(50, dtype=np.int32)
    draw = shakespeare.random_windows(numbers, 5, 64, seed=0)
    batch = draw(3)
    assert batch["inputs"].shape == (64, 5)
    np.testing.assert_array_equal(batch["inputs"] + 1, batch["labels"])
    np.testing.assert_array_equal(batch["inputs"], draw(3)["inputs"])
    assert not np.array_equal(batch["inputs"], draw(4)["inputs"])
    starts = {int(first) for step in range(30) for first in draw(step)["inputs"][:, 0]}
    # The last window ends with the last label.
    assert starts == set(range(45))


def test_the_text_is_split_as_in_nanogpt_and_a_sample_has_its_characters(
    text, monkeypatch
):
    monkeypatch.setitem(shakespeare.CONFIGS, "cpu", TINY)
    monkeypatch.setattr(shakespeare, "SAMPLE_LENGTH", 12)
    run = shakespeare.recipe(text, "cpu")
    _, tokens = shakespeare.read_characters(text)
    held_out = tokens[int(0.9 * len(tokens)) :]
    windows = np.lib.stride_tricks.sliding_window_view(held_out, 8).tolist()
    assert len(run.eval_data) == 2
    for batch in run.eval_data:
        assert all(row in windows for row in batch["inputs"].tolist())
    model = run.model(nnx.Rngs(0))
    model.eval()
    assert set(run.sample(model)) <= set(text.read_text())


@pytest.mark.slow
def test_dropout_is_the_same_on_every_mesh(text, monkeypatch):
    monkeypatch.setitem(shakespeare.CONFIGS, "cpu", replace(TINY, dropout=0.2))
    found = verify(
        lambda mesh: shakespeare.recipe(text, "cpu", mesh=mesh), ["fsdp=8"], steps=2
    )
    assert found.ok, "\n".join(found.lines())


def test_confusion_counts_digits_by_what_they_were_taken_for():
    counts = digits.confusion(np.array([1, 1, 2]), np.array([1, 7, 2]))
    assert counts.sum() == 3
    assert (counts[1, 1], counts[1, 7], counts[2, 2]) == (1, 1, 1)


def test_the_flow_of_one_image_leads_to_it():
    """With the exact velocity, Euler steps end at the image."""
    pixels, _ = load_digits(return_X_y=True)
    image = jnp.asarray(pixels[0] / 8 - 1, jnp.float32)

    class Exact(nnx.Module):
        def __call__(self, x, time, digit):
            return (image - x) / (1 - time[:, None])

    drawn = flow.draw(Exact(), jnp.arange(3), jax.random.key(0))
    np.testing.assert_allclose(
        drawn, jnp.broadcast_to((image + 1) / 2, (3, 64)).reshape(3, 8, 8), atol=1e-5
    )
    picture = flow.as_text(np.asarray(drawn[:1])).splitlines()
    assert [len(line) for line in picture] == [16] * 8
    # The hole of the 0.
    assert picture[3][8:10] == "  "


@pytest.mark.slow
def test_the_classifier_is_right_for_98_of_100_digits():
    replicated = fit(digits.recipe("data=8")).eval_metrics
    sharded = fit(digits.recipe("fsdp=8")).eval_metrics
    assert replicated["accuracy"] >= 0.98
    # A mesh does not change the result.
    assert replicated["loss"] == pytest.approx(sharded["loss"], abs=0.01)


@pytest.mark.slow
def test_generated_digits_are_recognized_and_drawn(tmp_path):
    from examples import pictures

    # Eight devices that share the cores of a CPU are slow.
    mesh = make_mesh("data=1", jax.devices()[:1])
    fit(replace(digits.recipe(out=tmp_path / "digits"), mesh=mesh))
    fit(replace(flow.recipe(steps=600, out=tmp_path / "flow"), mesh=mesh))
    said = pictures.draw_digits(tmp_path / "digits", tmp_path / "digits.png")
    assert float(said.split()[-1].rstrip("%")) >= 98
    said = pictures.draw_flow(
        tmp_path / "flow", tmp_path / "flow.png", tmp_path / "digits"
    )
    assert float(said.split("classifier: ")[1].split("%")[0]) >= 90
    for name in ("digits.png", "flow.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


RESUMED = {
    "digits": ["--steps", 200, "--save-every", 20],
    "flow": ["--steps", 200, "--save-every", 20, "--eval-every", 20],
    "shakespeare": [
        *("--config", "cpu", "--steps", 40),
        *("--save-every", 15, "--eval-every", 20),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_run_resumes_with_the_same_losses(name, text, tmp_path):
    words = ["train", ROOT / "recipes" / f"{name}.py", *RESUMED[name]]
    if name == "shakespeare":
        words += ["--data", text]
    assert command.run(*words, "--out", tmp_path / "a").returncode == 0
    metrics = tmp_path / "b" / "metrics.jsonl"
    with command.start(*words, "--out", tmp_path / "b") as process:
        until = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 25:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert command.run(*words, "--out", tmp_path / "b").returncode == 0
    assert losses_in(metrics) == losses_in(tmp_path / "a" / "metrics.jsonl")


def losses_in(metrics):
    records = map(json.loads, metrics.read_text().splitlines())
    return {
        (record["step"], name): record[name]
        for record in records
        for name in ("loss", "eval_loss", "grad_norm")
        if name in record
    }
