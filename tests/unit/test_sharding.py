"""Sharding rules: which rule applies to a leaf, and the errors if none can."""

import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh
from shardwise.sharding import (
    ModelLeaf,
    Placement,
    Rules,
    activations_on,
    annotation_of,
    at_use,
    batch_spec,
    constrain,
    place_model,
    place_optimizer,
    placement_table,
)

F32 = jnp.dtype("float32")


def place(shape, annotation=None, mesh="data=2,fsdp=2,model=2", rules=None, path="w"):
    return place_model(
        {
            path: ModelLeaf(shape, F32, annotation),
            "filler": ModelLeaf((64, 64), F32, (None, "model")),
        },
        make_mesh(mesh),
        rules or Rules(),
    )[path]


@pytest.mark.parametrize(
    ("annotation", "mesh", "spec", "why"),
    [
        ((None, "model"), "data=4,model=2", P(None, "model"), "annotation (-, model)"),
        (
            ("embed", "mlp"),
            "data=2,fsdp=2,model=2",
            P("fsdp", "model"),
            "annotation (embed, mlp)",
        ),
        (
            ("embed", "mlp"),
            "data=2,fsdp=2,tp=2",
            P("fsdp", "tp"),
            "annotation (embed, mlp)",
        ),
        (
            ("embed", "mlp"),
            "data=8",
            P(),
            "annotation (embed, mlp): no such axis in this mesh",
        ),
        (
            (("data", "model"), None),
            "data=4,model=2",
            P(("data", "model"), None),
            "annotation (data*model, -)",
        ),
        (None, "fsdp=8", P("fsdp", None), "automatic FSDP on dim 0"),
        (
            ("model",),
            "fsdp=4,model=2",
            P("model", "fsdp"),
            "annotation (model), automatic FSDP on dim 1",
        ),
        (None, "data=8", P(), "no rule"),
        (
            ("fsdp", "model"),
            "data=2,fsdp=2,model=2",
            P("fsdp", "model"),
            "annotation (fsdp, model)",
        ),
    ],
)
def test_placement_names_the_rule_that_applies(annotation, mesh, spec, why):
    leaves = {
        "w": ModelLeaf((512, 256), F32, annotation),
        "filler": ModelLeaf((64, 64), F32, (None, ("model", "tp"))),
    }
    placement = place_model(leaves, make_mesh(mesh), Rules())["w"]
    assert (placement.spec, placement.reason) == (spec, why)


def test_sharded_leaf_is_sharded_further_if_divisible():
    assert place((8192,), ("model",)).spec == P(("model", "fsdp"))
    placement = place((4098,), ("model",))
    assert (placement.spec, placement.reason) == (
        P("model"),
        "annotation (model), no dim left that is divisible by fsdp (2)",
    )


def test_rule_by_path_applies_without_annotation_and_literally():
    rules = Rules(paths=(("w*", ("fsdp", None)), ("*", ())))
    only = Rules(paths=(("w*", (None, "fsdp")),))
    assert place((512, 256), rules=only).spec == P(None, "fsdp")
    # The annotation decides, and automatic FSDP is added.
    assert place((512, 256), (None, "model"), rules=only).spec == P("fsdp", "model")
    # The mesh has no axis "tp", so the rule decides.
    assert place((512, 256), (None, "tp"), rules=only).spec == P(None, "fsdp")
    two = {"w": ModelLeaf((512, 256), F32), "x": ModelLeaf((512, 256), F32)}
    specs = [
        p.spec for p in place_model(two, make_mesh("data=4,fsdp=2"), rules).values()
    ]
    # The first match decides, and a leaf that a rule replicates stays replicated.
    assert specs == [P("fsdp", None), P()]


def test_named_shardings_and_specs_are_annotations():
    mesh = make_mesh("data=4,model=2")
    assert annotation_of({"out_sharding": NamedSharding(mesh, P(None, "model"))}) == (
        None,
        "model",
    )
    assert annotation_of({"out_sharding": P("model")}) == ("model",)
    assert annotation_of({}) is None


@pytest.mark.parametrize(
    ("shape", "annotation", "mesh", "message"),
    [
        (
            (768, 2304),
            (None, "model"),
            "data=1,model=5",
            "dim 1 over mesh axis 'model' (size 5), and 2304 is not divisible by 5. "
            "Use model=2, 3, 4, 6 or 8",
        ),
        (
            (64, 64),
            ("model", "model"),
            "data=4,model=2",
            "puts mesh axis 'model' on dim 0 and on dim 1",
        ),
        (
            (64, 64),
            ("embed", "embed"),
            "fsdp=4,model=2",
            "puts mesh axis 'fsdp' on dim 0 and on dim 1",
        ),
        ((64,), ("model", None), "data=4,model=2", "names 2 dims"),
        (
            (64, 64),
            ("modle", None),
            "data=4,model=2",
            "names 'modle', which is neither an axis of the mesh (data, model)",
        ),
        (
            (299, 301),
            None,
            "fsdp=4,model=2",
            "none of its dims is divisible by mesh axis fsdp (size 4)",
        ),
    ],
)
def test_invalid_shardings_are_errors_with_numbers(shape, annotation, mesh, message):
    devices = jax.devices()[:5] if "5" in mesh else None
    with pytest.raises(ConfigError) as error:
        place_model(
            {"blocks/0/w": ModelLeaf(shape, F32, annotation)},
            make_mesh(mesh, devices),
            Rules(),
        )
    assert "parameter 'blocks/0/w'" in str(error.value)
    assert message in str(error.value)


def test_indivisible_leaf_with_small_shards_is_replicated_with_a_reason():
    placed = place((99, 101), mesh="fsdp=8")
    assert placed.spec == P()
    assert (
        placed.reason
        == "small: 8 shards of under 4096 elements, and no dim is divisible by fsdp"
    )


def test_closest_name_is_suggested():
    with pytest.raises(ConfigError, match="Did you mean 'model'"):
        place((64, 64), ("modle", None))
    with pytest.raises(
        ConfigError,
        match=r"rule 'blocks/\*/kernal'.*matches no parameter. Did you mean 'blocks/0/kernel'",
    ):
        place(
            (64, 64),
            path="blocks/0/kernel",
            rules=Rules(paths=(("blocks/*/kernal", ()),)),
        )


def test_all_problems_are_reported_at_once():
    leaves = {
        name: ModelLeaf((7, 64), F32, ("model", None)) for name in ("a", "b", "c")
    }
    with pytest.raises(ConfigError) as error:
        place_model(leaves, make_mesh("data=4,model=2"), Rules())
    assert [f"parameter '{name}'" in str(error.value) for name in leaves] == [True] * 3


def test_axis_that_shards_nothing_is_refused():
    with pytest.raises(
        ConfigError,
        match="mesh axis 'model' \\(size 2\\) shards neither the batch nor any parameter",
    ):
        place_model(
            {"w": ModelLeaf((64, 64), F32)}, make_mesh("data=4,model=2"), Rules()
        )
    place_model({"w": ModelLeaf((64, 64), F32)}, make_mesh("data=8,model=1"), Rules())


def test_examples_are_sharded_and_used_parameters_replicated_over_batch_axes():
    mesh = make_mesh("replica=2,fsdp=2,model=2")
    assert batch_spec(mesh, Rules()) == P(("replica", "fsdp"))
    placed = Placement("w", (8, 8), F32, P("fsdp", "model"), "", 0)
    assert at_use(placed, Rules()) == P(None, "model")
    placed = replace(placed, spec=P(("fsdp", "model"), None))
    assert at_use(placed, Rules()) == P("model", None)


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 64]), min_size=0, max_size=4),
    st.sampled_from([2, 4, 8]),
)
def test_automatic_fsdp_stores_an_equal_share_or_gives_a_reason(shape, size):
    leaf = ModelLeaf(tuple(shape), F32)
    rules = Rules(fsdp_min_size=16)
    mesh = make_mesh(f"fsdp={size}", jax.devices()[:size])
    elements = 1
    for dim in shape:
        elements *= dim
    try:
        placement = place_model({"w": leaf}, mesh, rules)["w"]
    except ConfigError:
        assert elements // size >= 16
        assert all(dim % size for dim in shape)
        return
    shard_shape = NamedSharding(mesh, placement.spec).shard_shape(tuple(shape))
    held = 4
    for dim in shard_shape:
        held *= dim
    assert placement.bytes_per_device == held
    small = elements < 16 or (
        elements // size < 16 and all(dim % size for dim in shape)
    )
    assert held == elements * 4 // (1 if small else size)
    assert placement.reason.startswith("small") == small


def test_factored_and_masked_optimizer_states_follow_their_parameters():
    mesh = make_mesh("fsdp=4,model=2")
    params = {"w": jnp.zeros((256, 512)), "b": jnp.zeros((512,))}
    leaves = {
        "w": ModelLeaf((256, 512), F32, ("fsdp", "model")),
        "b": ModelLeaf((512,), F32, ("model",)),
    }
    placed = place_model(leaves, mesh, Rules())
    adafactor = place_optimizer(
        jax.eval_shape(optax.adafactor(1e-3).init, params), placed, mesh, Rules()
    )
    by_shape = {
        (path.split("/")[-2], path.split("/")[-1]): p.spec
        for path, p in adafactor.items()
        if p.path.endswith(("/w", "/b"))
    }
    assert by_shape["v_row", "w"] == P("fsdp")
    assert by_shape["v_col", "w"] == P("model")
    assert by_shape["v", "b"] == P("model")
    masked = optax.partition(
        {"train": optax.adamw(1e-3), "freeze": optax.set_to_zero()},
        lambda p: {"w": "train", "b": "freeze"},
    )
    placements = place_optimizer(
        jax.eval_shape(masked.init, params), placed, mesh, Rules()
    )
    assert [p.spec for path, p in placements.items() if path.endswith("/w")] == [
        P("fsdp", "model")
    ] * 2
    assert not any(path.endswith("/b") for path in placements)


def test_longest_matching_parameter_path_decides():
    mesh = make_mesh("data=4,model=2")
    leaves = {
        "kernel": ModelLeaf((8, 8), F32, ("model", None)),
        "a/kernel": ModelLeaf((8, 8), F32, (None, "model")),
    }
    placed = place_model(leaves, mesh, Rules())
    state = jax.eval_shape(
        optax.trace(0.9).init,
        {"kernel": jnp.zeros((8, 8)), "a": {"kernel": jnp.zeros((8, 8))}},
    )
    specs = {
        path: p.spec
        for path, p in place_optimizer(state, placed, mesh, Rules()).items()
    }
    assert specs == {
        "trace/kernel": P("model", None),
        "trace/a/kernel": P(None, "model"),
    }


def test_table_shows_layout_reason_and_bytes():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(placement_table([place((512, 256), ("embed", "mlp"))], "parameters"))
    text = console.export_text()
    assert "(fsdp, model)" in text
    assert "annotation (embed, mlp)" in text
    assert "128.0 KiB per device, 512.0 KiB in total" in text


@pytest.mark.parametrize(
    ("mesh", "names", "spec"),
    [
        ("data=4,model=2", ("batch", None, "mlp"), P("data", None, "model")),
        # The batch owns the axis "fsdp".
        ("data=2,fsdp=2,model=2", ("batch", None, "embed"), P(("data", "fsdp"))),
        ("data=2,fsdp=2,model=2", ("batch", "model"), P(("data", "fsdp"), "model")),
        ("model=8", ("batch", None, "heads"), P(None, None, "model")),
    ],
)
def test_activation_gets_the_sharding_that_the_model_requests(mesh, names, spec):
    mesh = make_mesh(mesh)
    x = jnp.ones((16, 8, 32))

    # A jitted part of the model is traced again for another mesh.
    @jax.jit
    def inner(x):
        return constrain(x, *names)

    def outer(x):
        with activations_on(mesh, Rules()):
            return inner(x)

    assert jax.jit(outer)(x).sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert jax.jit(inner)(x).sharding.is_fully_replicated, "constrained outside a step"


def test_impossible_constraint_is_refused():
    with activations_on(make_mesh("data=4,model=2"), Rules()):
        with pytest.raises(
            ConfigError,
            match=r"an activation has shape .16, 9.; .* 9 is not divisible by 2",
        ):
            constrain(jnp.ones((16, 9)), "batch", "mlp")
        with pytest.raises(
            ConfigError, match=r"neither an axis of the mesh .* Did you mean 'mlp'"
        ):
            constrain(jnp.ones((16, 8)), "batch", "mpl")
