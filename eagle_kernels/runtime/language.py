"""`triton` and `tl`, or stand-ins where no triton is installed that the kernels run on. With the stand-ins every module
still imports, argument checks and references work, and only a launch fails, with one line that says what is missing
(`launch.py`). Differences between versions of Triton's language are handled here."""

import functools
import os
import re
import warnings

# The minor versions that the kernels were run with (op_tests/README.md); older ones lack parts of the language.
OLDEST_TRITON, NEWEST_TRITON = (3, 4), (3, 9)


def wants_interpreter() -> bool:
    """Returns whether the environment asks for Triton's interpreter now, as Triton reads it for a kernel."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


_IS_INTERPRETING = wants_interpreter()


def is_interpreting() -> bool:
    """Returns whether kernels run through Triton's interpreter, which is fixed when the first one is imported."""
    return _IS_INTERPRETING


def _version(package) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", package.__version__)[:2])


def _import_triton():
    """Returns (triton, None), or (None, what a launch needs)."""
    try:
        import triton
        import triton.language
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return None, "the package triton, which is not installed"
        return None, f"the package triton, which is installed but broken: {error}"
    except Exception as error:  # of whatever kind: a broken installation must not take the references with it
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return None, f"the package triton, which is installed but broken: {first_line}"
    if _version(triton) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return None, f"triton {oldest} or newer; {triton.__version__} is installed"
    return triton, None


triton, MISSING = _import_triton()  # MISSING: what a launch needs, in words; None if nothing is missing


class _StandIn:
    """A stand-in that answers every attribute and call with itself, so that module-level uses of triton do nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    def cdiv(self, number: int, divisor: int) -> int:  # launchers compute sizes with it before they launch
        return -(-number // divisor)


def _splat_by_type() -> None:
    """Makes the interpreter broadcast a scalar bool as bools.
    Its comparisons keep the dtype of their operands, so a scalar bool is broadcast as integers. Up to triton 3.8 these
    worked as a mask; 3.9 refuses them ("mask has unsupported dtype")."""
    from triton.runtime.interpreter import InterpreterBuilder

    splat = InterpreterBuilder.create_splat

    def splat_by_type(self, result_type, value):
        handle = splat(self, result_type, value)
        if result_type.scalar == tl.int1:
            handle.data = handle.data.astype(bool)
        return handle

    InterpreterBuilder.create_splat = splat_by_type


def _reduce_without_nan() -> None:
    """Makes the interpreter of triton 3.4 ignore NaN in `tl.max` and `tl.min`, as GPUs and later versions do."""
    import numpy
    from triton.language import standard
    from triton.runtime.interpreter import ReduceOps

    apply = ReduceOps.apply_impl
    without_nan = {standard._elementwise_max: numpy.nanmax, standard._elementwise_min: numpy.nanmin}

    def apply_without_nan(self, values):
        if self.combine_fn in without_nan:
            return self.min_max(values[0], val_reduce_op=without_nan[self.combine_fn])
        return apply(self, values)

    ReduceOps.apply_impl = apply_without_nan


def _constexpr_function(function):
    """Lets kernels call a function on constants; triton 3.4's own decorator returns constants on the host too."""
    from triton.language.core import constexpr_function

    in_kernel = constexpr_function(function)

    @functools.wraps(in_kernel)
    def call(*args, _semantic=None):
        result = in_kernel(*args)
        return result.value if _semantic is None else result

    return call


if MISSING is None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    tl = triton.language
    if _version(triton) > NEWEST_TRITON:
        newest = ".".join(map(str, NEWEST_TRITON))
        warnings.warn(
            f"eagle_kernels: tested with triton up to {newest}; {triton.__version__} is untested", stacklevel=2
        )
    # triton 3.4 has the functions, but fails to compile calls of them ("unexpected keyword argument '_semantic'")
    HAS_DEPENDENT_LAUNCH = _version(triton) >= (3, 5)
    # ... nor does it compile the product of two 32-bit numbers in 64 bits
    HAS_WIDE_PRODUCT = _version(triton) >= (3, 5)
    # ... nor products on the tensor cores with fewer rows or columns
    LEAST_DOT_ROWS = 8 if _version(triton) >= (3, 5) else 16
    # 3.6 lets a loop write registers that Hopper's products still read (`unpacking.await_products`), 3.9 does not
    KEEPS_OPERANDS = _version(triton) >= (3, 9)
    constexpr_function = _constexpr_function if _version(triton) < (3, 5) else triton.constexpr_function
    if is_interpreting():
        _splat_by_type()
        if _version(triton) < (3, 5):
            _reduce_without_nan()
else:
    if "not installed" not in MISSING:
        warnings.warn(f"eagle_kernels: kernels cannot run: they need {MISSING}", stacklevel=2)
    triton = tl = TensorDescriptor = _StandIn()
    HAS_DEPENDENT_LAUNCH = HAS_WIDE_PRODUCT = KEEPS_OPERANDS = True  # unused: every launch raises, with the reason
    LEAST_DOT_ROWS = 8

    def constexpr_function(function):
        return function


@constexpr_function
def ceil_log2(n):
    """Returns the smallest k for which 2^k is at least n, in kernels and on the host."""
    return (n - 1).bit_length()


@constexpr_function
def next_power_of_2(n, least=1):
    """Returns the smallest power of two that is at least n, and at least `least`, in kernels and on the host.
    Importing SGLang replaces `triton.next_power_of_2` by a function that kernels of triton 3.6 cannot call."""
    return max(1 << (n - 1).bit_length() if n > 1 else 1, least)
