"""Triton's interpreter in a fifth of the time; what it computes stays as it is.

The interpreter replaces the functions of triton.language by its own when a launch begins and restores them when it
ends. It does this again at every call of a device function, although all is in place by then. For every value, however
small, it describes type and shape anew. It computes all whole numbers twice, once in 64 bits, for a check of overflows
that only debug=True makes. Before each operation it brings the operands to one type and shape, even if they have one
already, and makes a tensor of each number in the source anew. Together these take most of the time of a kernel's test.
Tests and `bench.run` skip them.
"""

import functools
import math
from types import SimpleNamespace

_NOTHING_TO_RESTORE = SimpleNamespace(restore=lambda: None)


@functools.cache
def speed_up() -> None:
    """Speeds the interpreter up for the rest of this process."""
    _patch_once_a_launch()
    _describe_types_once()
    _compute_once()
    _match_once()


def _patch_once_a_launch() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    patched: set[str] = set()  # since the launch began

    @functools.cache
    def names_of(fn) -> set[str]:
        """Returns what _patch_lang would patch for this function: the names that its module has imported."""
        modules = {"tl": tl, "core": tl.core}
        return {name for name, lang in modules.items() if any(value is lang for value in fn.__globals__.values())}

    def patch(fn):
        if patched and names_of(fn) <= patched:
            return _NOTHING_TO_RESTORE
        is_launch, scope = not patched, patch_lang(fn)
        patched.update(names_of(fn))
        if is_launch and scope is not None:  # None: a Triton that leaves everything patched
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    patch_attr = interpreter._patch_attr

    def patch_function(obj, name, member, *others):
        """Leaves out the wrapper that tells users that a function works in kernels alone."""
        patch_attr(obj, name, getattr(member, "__wrapped__", member), *others)

    interpreter._patch_lang = patch
    interpreter._patch_attr = patch_function


def _describe_types_once() -> None:
    from triton.language import core
    from triton.runtime import interpreter

    numpy_dtype = interpreter._get_np_dtype
    numpy_dtypes: dict[str, object] = {}

    def find_numpy_dtype(dtype):
        scalar = dtype.scalar
        name = "pointer" if isinstance(scalar, core.pointer_type) else scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(dtype)
        return numpy_dtypes[name]

    @functools.cache  # so that tensors of one shape hold the same object
    def describe(*sizes):
        """Returns shape and number of elements of a tensor as values of the language, which nobody changes."""
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    scalar = describe()

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.described if type.is_block() else scalar

    init_block, blocks = core.block_type.__init__, {}

    def init_block_once(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)  # triton 3.4 wraps them
        if key not in blocks:
            init_block(self, element_ty, shape)
            self.described = describe(*self.shape.values)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    are_equal = core.dtype.__eq__

    interpreter._get_np_dtype = find_numpy_dtype
    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_block_once
    core.dtype.__eq__ = lambda self, other: other is self or are_equal(self, other)


def _compute_once() -> None:
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_if_asked(self, *operation):
        if self.builder.options.debug:
            check(self, *operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_asked


def _match_once() -> None:
    from triton.language.core import tensor
    from triton.language.semantic import TritonSemantic

    match, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    numbers: dict[tuple, object] = {}

    def match_once(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        """Returns both as tensors of one type and shape; a number beside tensors of one kind is made once."""
        flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if not isinstance(lhs, tensor) or lhs.dtype.is_ptr():
            return match(self, lhs, rhs, *flags)
        if isinstance(rhs, tensor) and lhs.shape is rhs.shape and lhs.dtype is rhs.dtype and not div_or_mod:
            return lhs, rhs
        if type(rhs) not in (int, float):
            return match(self, lhs, rhs, *flags)
        key = id(lhs.shape), lhs.dtype.name, repr(rhs), arithmetic_check, div_or_mod
        if key in numbers:
            return lhs, numbers[key]
        new_lhs, new_rhs = match(self, lhs, rhs, *flags)
        if new_lhs is lhs:
            new_rhs.handle.data.flags.writeable = False
            numbers[key] = new_rhs
        return new_lhs, new_rhs

    def broadcast_if_needed(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = match_once
    TritonSemantic.broadcast_impl_value = broadcast_if_needed
