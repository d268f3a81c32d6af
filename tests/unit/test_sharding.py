"""The resolver: which rule fires for a leaf, and what is said when none can."""

import io

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
        (("embed", "mlp"), "data=2,fsdp=2,model=2", P("fsdp", "model"), "annotation (embed, mlp)"),
        (("embed", "mlp"), "data=2,fsdp=2,tp=2", P("fsdp", "tp"), "annotation (embed, mlp)"),
        (("embed", "mlp"), "data=8", P(), "annotation (embed, mlp): no such axis in this mesh"),
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
def test_the_rule_that_fires_is_told(annotation, mesh, spec, why):
    leaves = {
        "w": ModelLeaf((512, 256), F32, annotation),
        "filler": ModelLeaf((64, 64), F32, (None, ("model", "tp"))),
    }
    placement = place_model(leaves, make_mesh(mesh), Rules())["w"]
    assert (placement.spec, placement.reason) == (spec, why)


def test_a_leaf_that_is_cut_already_is_cut_further_where_that_divides():
    assert place((8192,), ("model",)).spec == P(("model", "fsdp"))
    placement = place((4098,), ("model",))
    assert (placement.spec, placement.reason) == (
        P("model"),
        "annotation (model), no dim left that is divisible by fsdp (2)",
    )


def test_a_rule_by_path_speaks_where_no_annotation_does_and_is_taken_as_it_stands():
    rules = Rules(paths=(("w*", ("fsdp", None)), ("*", ())))
    only = Rules(paths=(("w*", (None, "fsdp")),))
    assert place((512, 256), rules=only).spec == P(None, "fsdp")
    assert place((512, 256), (None, "model"), rules=only).spec == P(
        "fsdp", "model"
    )  # the annotation, and automatic FSDP
    assert place((512, 256), (None, "tp"), rules=only).spec == P(
        None, "fsdp"
    )  # no such axis here: the rule
    two = {"w": ModelLeaf((512, 256), F32), "x": ModelLeaf((512, 256), F32)}
    specs = [p.spec for p in place_model(two, make_mesh("data=4,fsdp=2"), rules).values()]
    assert specs == [
        P("fsdp", None),
        P(),
    ]  # the first match wins, and what a rule keeps whole stays whole


def test_named_shardings_and_specs_count_as_annotations():
    mesh = make_mesh("data=4,model=2")
    assert annotation_of({"out_sharding": NamedSharding(mesh, P(None, "model"))}) == (None, "model")
    assert annotation_of({"out_sharding": P("model")}) == ("model",)
    assert annotation_of({}) is None


@pytest.mark.parametrize(
    ("shape", "annotation", "mesh", "words"),
    [
        (
            (768, 2304),
            (None, "model"),
            "data=1,model=5",
            "dim 1 over mesh axis 'model' (size 5), and 2304 is not divisible by 5. Use model=2, 3, 4, 6 or 8",
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
def test_what_cannot_be_done_is_an_error_with_numbers(shape, annotation, mesh, words):
    devices = jax.devices()[:5] if "5" in mesh else None
    with pytest.raises(ConfigError) as error:
        place_model(
            {"blocks/0/w": ModelLeaf(shape, F32, annotation)}, make_mesh(mesh, devices), Rules()
        )
    assert "parameter 'blocks/0/w'" in str(error.value)
    assert words in str(error.value)


def test_a_leaf_of_small_pieces_that_nothing_divides_stays_whole_and_says_so():
    placed = place((99, 101), mesh="fsdp=8")
    assert placed.spec == P()
    assert placed.reason == "small: 8 shards of under 4096 elements, and no dim is divisible by fsdp"


def test_the_closest_name_is_offered():
    with pytest.raises(ConfigError, match="Did you mean 'model'"):
        place((64, 64), ("modle", None))
    with pytest.raises(
        ConfigError,
        match=r"rule 'blocks/\*/kernal'.*matches no parameter. Did you mean 'blocks/0/kernel'",
    ):
        place((64, 64), path="blocks/0/kernel", rules=Rules(paths=(("blocks/*/kernal", ()),)))


def test_all_mistakes_are_told_at_once():
    leaves = {name: ModelLeaf((7, 64), F32, ("model", None)) for name in ("a", "b", "c")}
    with pytest.raises(ConfigError) as error:
        place_model(leaves, make_mesh("data=4,model=2"), Rules())
    assert [f"parameter '{name}'" in str(error.value) for name in leaves] == [True] * 3


def test_an_axis_that_cuts_nothing_is_refused():
    with pytest.raises(
        ConfigError, match="mesh axis 'model' \\(size 2\\) shards neither the batch nor any parameter"
    ):
        place_model({"w": ModelLeaf((64, 64), F32)}, make_mesh("data=4,model=2"), Rules())
    place_model({"w": ModelLeaf((64, 64), F32)}, make_mesh("data=8,model=1"), Rules())


def test_rows_are_cut_over_all_batch_axes_and_parameters_are_whole_over_them_where_used():
    mesh = make_mesh("replica=2,fsdp=2,model=2")
    assert batch_spec(mesh, Rules()) == P(("replica", "fsdp"))
    assert at_use(P("fsdp", "model"), Rules()) == P(None, "model")
    assert at_use(P(("fsdp", "model"), None), Rules()) == P("model", None)


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 64]), min_size=0, max_size=4),
    st.sampled_from([2, 4, 8]),
)
def test_automatic_fsdp_stores_exactly_its_share_or_says_why_not(shape, size):
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
    cut = NamedSharding(mesh, placement.spec).shard_shape(tuple(shape))
    held = 4
    for dim in cut:
        held *= dim
    assert placement.bytes_per_device == held
    small = elements < 16 or (elements // size < 16 and all(dim % size for dim in shape))
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
    placements = place_optimizer(jax.eval_shape(masked.init, params), placed, mesh, Rules())
    assert [p.spec for path, p in placements.items() if path.endswith("/w")] == [
        P("fsdp", "model")
    ] * 2
    assert not any(path.endswith("/b") for path in placements)


def test_the_longest_path_wins_where_one_parameter_ends_like_another():
    mesh = make_mesh("data=4,model=2")
    leaves = {
        "kernel": ModelLeaf((8, 8), F32, ("model", None)),
        "a/kernel": ModelLeaf((8, 8), F32, (None, "model")),
    }
    placed = place_model(leaves, mesh, Rules())
    state = jax.eval_shape(
        optax.trace(0.9).init, {"kernel": jnp.zeros((8, 8)), "a": {"kernel": jnp.zeros((8, 8))}}
    )
    specs = {path: p.spec for path, p in place_optimizer(state, placed, mesh, Rules()).items()}
    assert specs == {"trace/kernel": P("model", None), "trace/a/kernel": P(None, "model")}


def test_the_table_shows_layout_reason_and_bytes():
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
        (
            "data=2,fsdp=2,model=2",
            ("batch", None, "embed"),
            P(("data", "fsdp")),
        ),  # the batch owns fsdp
        ("data=2,fsdp=2,model=2", ("batch", "model"), P(("data", "fsdp"), "model")),
        ("model=8", ("batch", None, "heads"), P(None, None, "model")),
    ],
)
def test_an_activation_goes_where_the_model_says(mesh, names, spec):
    mesh = make_mesh(mesh)
    x = jnp.ones((16, 8, 32))

    @jax.jit
    def inner(x):  # jitted on its own: traced anew for another mesh
        return constrain(x, *names)

    def outer(x):
        with activations_on(mesh, Rules()):
            return inner(x)

    assert jax.jit(outer)(x).sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert jax.jit(inner)(x).sharding.is_fully_replicated, "outside a step nothing is constrained"


def test_a_constraint_that_cannot_be_met_is_refused():
    with activations_on(make_mesh("data=4,model=2"), Rules()):
        with pytest.raises(
            ConfigError, match=r"an activation has shape .16, 9.; .* 9 is not divisible by 2"
        ):
            constrain(jnp.ones((16, 9)), "batch", "mlp")
        with pytest.raises(ConfigError, match=r"neither an axis of the mesh .* Did you mean 'mlp'"):
            constrain(jnp.ones((16, 8)), "batch", "mpl")
