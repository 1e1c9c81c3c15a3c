"""Make Triton's interpreter faster: do only once, or not at all, what it repeats for nothing.

At each call of a device function, the interpreter looks through all of `triton.language` for what
to replace by its own; for each value it makes types, shapes and tables of types; and it computes
whether integers overflow. The results are kept, and overflow is computed only when debugging.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def do_once_what_comes_out_the_same() -> None:
    """Replace the interpreter's repeated work; a kernel's test then takes less than half the time.

    Parts that another version of Triton lacks are left alone.
    """
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _replace_the_language_once_a_launch()
    if hasattr(interpreter, "_get_np_dtype"):
        _keep_the_table_of_dtypes()
    if hasattr(core.block_type, "get_block_shapes"):
        _share_types_and_shapes()
    if hasattr(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl"):
        _compute_no_overflow_that_nobody_sees()


def _replace_the_language_once_a_launch() -> None:
    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[frozenset[str]] = set()

    @cache
    def languages(function: Any) -> frozenset[str]:
        modules = function.__globals__.values()
        return frozenset(each.__name__ for each in modules if each is tl or each is tl.core)

    def once(function: Any) -> Any:
        if languages(function) in replaced:
            return interpreter._LangPatchScope()
        scope = replace(function)
        replaced.add(languages(function))
        restore = scope.restore

        def end_launch() -> None:  # calls inside a launch leave theirs as it is
            restore()
            replaced.clear()

        scope.restore = end_launch
        return scope

    interpreter._patch_lang = once


def _keep_the_table_of_dtypes() -> None:
    make = interpreter._get_np_dtype
    of_scalars = cache(make)  # those of pointers and blocks cannot be hashed

    def numpy_s(dtype: Any) -> Any:
        return (of_scalars if type(dtype) is core.dtype else make)(dtype)

    interpreter._get_np_dtype = numpy_s


def _share_types_and_shapes() -> None:
    """Make the description of a block's element and shape once, for all blocks and tensors alike.

    Nothing changes it after it was made.
    """
    of_block, of_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}

    def block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        key = type(element), element.name, getattr(element, "address_space", None), sizes
        if key in blocks:
            vars(self).update(blocks[key])
        else:
            of_block(self, element, shape)
            blocks[key] = vars(self)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        said = vars(type).get("said_of_tensors")
        if said is None:
            of_tensor(self, handle, type)
            own = ("handle", "type")
            said = {name: value for name, value in vars(self).items() if name not in own}
            type.said_of_tensors = said
        else:
            vars(self).update(said, handle=handle, type=type)

    def to_one_shape(self: Any, left: Any, right: Any) -> Any:
        sizes = [each.type.shape.values for each in (left, right) if each.type.is_block()]
        if len(sizes) == 2 and sizes[0] == sizes[1]:
            return left, right
        return broadcast(self, left, right)

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    semantic.TritonSemantic.broadcast_impl_value = to_one_shape


def _compute_no_overflow_that_nobody_sees() -> None:
    """Check sums and products for overflow only when debugging, as the GPUs' backends do.

    The interpreter otherwise computes it always, which is a third of its time.
    """
    sanitize = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def when_debugging(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            sanitize(self, *operands)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = when_debugging
