"""The published results in benchmarks/published.py: each is a valid run, and its figures agree."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from shardwise.mesh import parse_mesh
from shardwise.recipe import load_recipe, make_run
from shardwise.sharding import Rules

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location(
    "published", ROOT / "benchmarks" / "published.py"
)
published = sys.modules["published"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(published)
recipe = load_recipe(published.RECIPE, "recipe")
BY_NAME = {config.name: config for config in published.PUBLISHED}


def flops_per_token(model, length, causal):
    head = model.width // model.num_heads
    attention = model.width * head * 2 * (model.num_heads + model.num_kv_heads)
    weights = (
        model.num_layers * (attention + 3 * model.width * model.mlp_width)
        + model.vocab_size * model.width
    )
    return 6 * weights + (6 if causal else 12) * model.num_layers * length * model.width


@pytest.mark.parametrize("name", BY_NAME)
def test_a_published_result_is_a_valid_run_with_consistent_figures(name):
    config = BY_NAME[name]
    run = make_run(recipe, config.recipe_arguments())
    sizes = parse_mesh(config.mesh, config.chips)
    assert set(sizes) <= set(Rules().batch)
    assert run.data.batch_size % math.prod(sizes.values()) == 0
    if config.mfu is None or config.counting == "nominal":
        return
    size = sys.modules["llama"].SIZES[config.arguments["size"]]
    counted = flops_per_token(
        size, config.arguments["length"], config.counting == "causal"
    )
    assert config.mfu == pytest.approx(
        config.tokens_per_second * counted / published.PEAK[config.chip], rel=0.015
    )
