"""Flax's own sharding rules: every variable gets the spec that Flax would give it.

The reference is Flax itself: a model that it creates eagerly on the mesh, and its
`nnx.get_partition_spec`.
"""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import fit
from shardwise.data.batches import Batches
from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh
from shardwise.run import Run
from shardwise.sharding import Rules
from shardwise.state import abstract_state, init_state
from shardwise.weights.adapters import lora

MESH = "data=4,model=2"


def model_of(out_sharding, own=None, shape=(16, 8)):
    """Return a factory of a layer whose kernel is annotated; `own` are its rules."""
    metadata = {} if own is None else {"sharding_rules": own}

    class Layer(nnx.Module):
        def __init__(self, rngs):
            value = jax.random.normal(rngs.params(), shape)
            self.kernel = nnx.Param(value, out_sharding=out_sharding, **metadata)
            # Without this, most cases would be refused because `model` shards nothing.
            self.filler = nnx.Param(jnp.ones((8, 8)), out_sharding=("model", None))

        def __call__(self, x):
            return x @ self.kernel @ self.filler

    return Layer


def context_of(rules):
    return nnx.logical_axis_rules(rules) if rules else nullcontext()


def trimmed(spec):
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def flax_spec(factory, context=()):
    """Return the spec of the kernel in a model that Flax creates on the mesh."""
    with jax.set_mesh(make_mesh(MESH)), context_of(context):
        kernel = factory(nnx.Rngs(0)).kernel
        created = trimmed(kernel.get_value().sharding.spec)
        assert trimmed(nnx.get_partition_spec(kernel).get_value()) == created
        return created


def our_spec(factory, context=(), mesh=MESH, rules=None):
    with context_of(context):
        spec = abstract_state(factory, optax.sgd(0.1), mesh, rules)
    return trimmed(spec.params["kernel"].spec)


SWAPPED = (("embed", "model"), ("mlp", None))
CASES = {
    # (annotation, rules of the variable, rules of the context, the spec)
    "own rules": (("embed", "mlp"), SWAPPED, (), P("model")),
    "context": (("embed", "mlp"), None, SWAPPED, P("model")),
    "both": (("embed", "mlp"), (("embed", "data"),), (("mlp", "model"),), None),
    "both, equal": (("embed", "mlp"), SWAPPED, SWAPPED, P("model")),
    "unknown to shardwise": (
        ("rows", "columns"),
        (("rows", "data"),),
        (("columns", None),),
        None,
    ),
    "to several axes": ((None, "mlp"), (("mlp", ("data", "model")),), (), None),
    "last duplicate wins": (
        ("mlp",),
        (("mlp", "data"), ("mlp", "model")),
        (),
        P("model"),
    ),
    "last duplicate of a context": (
        ("mlp",),
        None,
        (("mlp", "data"), ("mlp", "model")),
        P("model"),
    ),
    "mesh axis without a rule": (
        ("data", "mlp"),
        (("mlp", "model"),),
        (),
        P("data", "model"),
    ),
    "mesh axis with a rule": (("data", None), (("data", "model"),), (), P("model")),
    "all to None": (("embed", "mlp"), None, (("embed", None), ("mlp", None)), P()),
    "None in an annotation": ((None, "mlp"), SWAPPED, (), P()),
    "tuple of mesh axes": ((None, ("data", "model")), SWAPPED, (), None),
    "PartitionSpec": (P("mlp", "embed"), SWAPPED, (), P(None, "model")),
    "list": (("mlp", "embed"), [["mlp", "data"], ["embed", "model"]], (), None),
    "rules of other names": (("model", None), (("mlp", "data"),), (), P("model")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_spec_is_that_of_flax(case):
    annotation, own, context, known = CASES[case]
    factory = model_of(annotation, own)
    expected = flax_spec(factory, context)
    if known is not None:
        assert expected == known
    assert our_spec(factory, context) == expected


def test_a_named_sharding_is_renamed_like_in_flax():
    sharding = NamedSharding(make_mesh(MESH), P("data", None))
    rules = (("data", "model"),)
    kernel = nnx.Param(jnp.ones((16, 8)), out_sharding=sharding, sharding_rules=rules)
    assert trimmed(kernel.get_value().sharding.spec) == P("model")
    assert our_spec(model_of(sharding, rules)) == P("model")


@pytest.mark.parametrize("name", ["sharding", "sharding_names"])
def test_deprecated_names_of_the_annotation_work(name):
    metadata = {name: ("embed", "mlp"), "sharding_rules": SWAPPED}
    with pytest.warns(DeprecationWarning, match="out_sharding"):
        assert our_spec(model_of_metadata(metadata)) == P("model")


def model_of_metadata(metadata):
    def make(rngs):
        layer = model_of(None)(rngs)
        layer.kernel = nnx.Param(jnp.ones((16, 8)), **metadata)
        return layer

    return make


def test_layers_of_nnx_carry_rules_too():
    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(
                nnx.initializers.lecun_normal(),
                ("mlp", "embed"),
                sharding_rules=SWAPPED,
            )
            self.up = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)
            self.down = nnx.Linear(
                8, 8, kernel_metadata={"out_sharding": ("mlp", None)}, rngs=rngs
            )

    spec = abstract_state(Net, optax.sgd(0.1), MESH)
    assert spec.params["up/kernel"].spec == P(None, "model")
    # This variable has no rules of its own, and there is no context.
    assert spec.params["down/kernel"].spec == P("model", None)
    assert "by Flax's rules" in spec.params["up/kernel"].reason
    assert "Flax" not in spec.params["down/kernel"].reason


def test_a_context_inside_the_factory_applies_to_what_is_created_under_it():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.before = model_of(("embed", "mlp"))(rngs)
            with nnx.logical_axis_rules(SWAPPED):
                self.inside = model_of(("embed", "mlp"))(rngs)
                with nnx.logical_axis_rules((("embed", "data"), ("mlp", "model"))):
                    self.nested = model_of(("embed", "mlp"))(rngs)
            self.after = model_of(("embed", "mlp"))(rngs)

    params = abstract_state(Net, optax.sgd(0.1), MESH).params
    assert params["before/kernel"].spec == P(None, "model")
    assert params["inside/kernel"].spec == P("model", None)
    assert params["nested/kernel"].spec == P("data", "model")
    assert params["after/kernel"].spec == P(None, "model")


def test_variables_are_created_by_flax_alone_outside_a_factory():
    construct = nnx.Variable.__init__
    with pytest.raises(ConfigError, match="cannot be built"):
        abstract_state(lambda rngs: 1 / 0, optax.sgd(0.1), MESH)
    assert nnx.Variable.__init__ is construct
    with nnx.logical_axis_rules(SWAPPED):
        assert "logical_axis_rules" not in nnx.Param(1.0).get_metadata()


STACKED = (("layers", "data"), ("embed", None), ("mlp", "model"))


@pytest.mark.parametrize("where", ["own", "context"])
def test_stacked_layers_equal_the_spec_of_flax(where):
    own, context = (STACKED, ()) if where == "own" else (None, STACKED)

    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=4)
            @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
            def make(rngs):
                return model_of(("embed", "mlp"), own)(rngs)

            self.layers = make(rngs)

        def __call__(self, x):
            @nnx.scan(
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
                transform_metadata={nnx.PARTITION_NAME: "layers"},
            )
            def apply(x, layer):
                return x @ layer.kernel @ jnp.ones((8, 16))

            return apply(x, self.layers)

    with jax.set_mesh(make_mesh(MESH)), nnx.use_eager_sharding(False):
        model = Stack(nnx.Rngs(0))
    with context_of(context):
        expected = nnx.get_partition_spec(model.layers.kernel).get_value()
        spec = abstract_state(Stack, optax.adam(0.1), MESH)
    assert expected == P("data", None, "model")
    assert spec.params["layers/kernel"].spec == expected
    state = init_state(spec, seed=0)
    # `data` shards the batch too, so that the scan gathers each layer where it uses it.
    assert spec.module(state)(jnp.ones((4, 16))).shape == (4, 16)
    assert state.params["layers"]["kernel"].sharding.spec == expected
    assert state.opt_state[0].mu["layers"]["kernel"].sharding.spec == expected


def test_adapters_follow_the_rules_of_their_weight():
    def make(rngs):
        with nnx.logical_axis_rules(SWAPPED):
            return model_of(("mlp", "embed"))(rngs)

    spec = abstract_state(lora(make, "kernel", rank=2), optax.sgd(0.1), MESH)
    assert spec.frozen["kernel"].spec == P(None, "model")
    assert spec.params["kernel/lora_b"].spec == P(None, "model")
    assert spec.params["kernel/lora_a"].spec == P()


def test_automatic_fsdp_is_added_to_the_spec_of_flax():
    spec = our_spec(
        model_of(("embed", "mlp"), SWAPPED),
        mesh="fsdp=4,model=2",
        rules=Rules(fsdp_min_size=1),
    )
    assert spec == P("model", "fsdp")


def test_an_axis_with_a_role_that_this_mesh_lacks_is_skipped():
    # Flax would refuse this. One model is to run on every mesh here.
    factory = model_of(("embed", "mlp"), SWAPPED)
    spec = abstract_state(factory, optax.sgd(0.1), "data=8")
    assert spec.params["kernel"].spec == P()
    assert "no such axis in this mesh" in spec.params["kernel"].reason


ERRORS = {
    # (annotation, rules of the variable, rules of the context, Flax's error, our remedy)
    "conflict": (
        ("mlp",),
        (("mlp", "data"),),
        (("mlp", "model"),),
        "ValueError",
        "Remove one of them",
    ),
    "conflict of duplicates": (
        ("mlp",),
        (("mlp", "data"), ("mlp", "model")),
        (("embed", None),),
        "ValueError",
        "Remove one of them",
    ),
    "name without a rule": (
        ("embed", "mlp"),
        (("mlp", "model"),),
        (),
        "ValueError",
        "('embed', None)",
    ),
    "name inside a tuple": (
        (("embed", "mlp"),),
        SWAPPED,
        (),
        "ValueError",
        "inside a tuple",
    ),
    "target that is no axis": (
        ("mlp",),
        (("mlp", "modle"),),
        (),
        "ValueError",
        "Did you mean 'model'?",
    ),
    "one axis twice": (
        ("a", "b"),
        (("a", "model"), ("b", "model")),
        (),
        "DuplicateSpecError",
        "one dim only",
    ),
    "not divisible": (
        ("mlp", None),
        (("mlp", ("data", "model")),),
        (),
        "IndivisibleError",
        "not divisible by 8",
    ),
    "more dims than the array": (
        ("mlp", None, None),
        SWAPPED,
        (),
        "ValueError",
        "Shorten it",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_of_flax_is_an_error_with_a_remedy(case):
    annotation, own, context, flax_error, remedy = ERRORS[case]
    factory = model_of(annotation, own, shape=(12, 8))
    # JAX does not export some of these classes.
    with pytest.raises(Exception) as raised:  # noqa: PT011
        flax_spec(factory, context)
    assert type(raised.value).__name__ == flax_error
    with pytest.raises(ConfigError) as error:
        our_spec(factory, context)
    assert "'kernel'" in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    ("annotation", "own", "message"),
    [
        (("mlp",), {"mlp": "model"}, "are not pairs"),
        (("mlp",), ("mlp", "model"), "are not pairs"),
        ("model", None, "Use a tuple with one entry per dim"),
        ((P.UNCONSTRAINED, None), None, "Use a tuple with one entry per dim"),
    ],
)
def test_what_cannot_be_read_is_refused(annotation, own, message):
    with pytest.raises(ConfigError, match=message):
        our_spec(model_of(annotation, own))


def test_a_context_around_fit_reaches_the_run(tmp_path):
    data = {"x": jnp.ones((8, 16)), "y": jnp.ones((8, 8))}
    run = Run(
        model=model_of(("embed", "mlp")),
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        optimizer=optax.sgd(1e-3),
        data=Batches(data, 8),
        mesh=MESH,
        steps=2,
        out=tmp_path,
    )
    with nnx.logical_axis_rules(SWAPPED):
        result = fit(run)
    assert result.state.params["kernel"].sharding.spec == P("model", None)


def test_own_logical_names_are_added_to_the_defaults():
    rules = Rules(logical={"rows": "data", "mlp": None})
    assert rules.logical["heads"] == Rules().logical["heads"]
    assert our_spec(model_of(("rows", "heads")), rules=rules) == P("data", "model")
    assert our_spec(model_of(("rows", "mlp")), rules=rules) == P("data")


def test_the_error_for_an_unknown_name_says_how_to_add_it():
    with pytest.raises(ConfigError) as error:
        our_spec(model_of(("rows", None)))
    assert "Rules(logical={'rows': None})" in str(error.value)
