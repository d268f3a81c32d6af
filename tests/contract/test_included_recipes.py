"""Options that every included recipe has, and what they do."""

import inspect
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise import optim
from shardwise.recipe import bind_recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted(ROOT.glob("recipes/*.py"))
PARAMS = {
    "layer": {"kernel": jnp.ones((4, 3))},
    "tokens": jnp.ones((4, 3)),
    "positions": jnp.ones((2, 3)),
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_limit_for_the_gradients(path):
    recipe = load_recipe(path, "recipe")
    needed = ["--data", "x"] if path.stem in ("tokens_gpt", "shakespeare") else []
    assert bind_recipe(recipe, [*needed, "--clip", "0.1"], "train")["clip"] == 0.1
    assert inspect.signature(recipe).parameters["clip"].default in (1.0, None)


def test_every_optimizer_of_the_default_recipe_clips_as_it_is_told():
    recipe = load_recipe(ROOT / "recipes/stdlib_gpt.py", "recipe")
    make, names = (recipe.__globals__[name] for name in ("make_optimizer", "Optimizer"))
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    for name in get_args(names):
        limits = {}
        for clip in (None, 0.0, 0.1):
            tx = make(name, 10, clip=clip)
            _, state = tx.update(ones, tx.init(PARAMS), PARAMS)
            limits[clip] = optim.live_values(state).get("clipped_norm")
        assert limits[0.0] is None, name
        assert np.isclose(limits[0.1], 0.1), name
        if name == "prodigy":
            assert limits[None] is None
        else:
            assert np.isclose(limits[None], 1.0), name
