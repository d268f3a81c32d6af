"""Groups of JAX primitives that the analysis of a loss treats alike, see `loss.dependence`."""

import numpy as np
from jax.extend import core


def names_in(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# They only decide where an array is.
PLACEMENT = ("sharding_constraint", "reshard", "mesh_cast")
# Linear in all operands together.
LINEAR = names_in(
    """
    add sub neg add_any convert_element_type reduce_sum reshape broadcast_in_dim transpose
    squeeze slice copy copy_p real imag reduce_precision sharding_constraint name
    optimization_barrier stop_gradient concatenate select_n psum split expand_dims cumsum
    pad rev dynamic_slice gather reshard mesh_cast stack unstack
    """
)
# Linear in one operand, if the others are FREE.
BILINEAR = names_in("mul dot_general conv_general_dilated")
# Applied to each entry alone; operands may have dims of size 1 that are broadcast.
ELEMENTWISE = names_in(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp conj convert_element_type copy copy_p cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
    or polygamma population_count pow random_clone random_fold_in random_unwrap
    random_wrap real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta clz name reshard
    mesh_cast pvary
    """
)
# Operations that add their operands.
ADDS = names_in("add sub add_any concatenate select_n pad")


def is_rounding(equation: core.JaxprEqn) -> bool:
    """Return whether an equation converts to integers or booleans, which is not linear."""
    if equation.primitive.name != "convert_element_type":
        return False
    return np.dtype(equation.params["new_dtype"]).kind in "biu"
