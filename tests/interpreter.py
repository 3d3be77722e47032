"""Triton's interpreter computes the same sooner, and a mask of scalars as a compiler does.

A few of its functions take most of the time of a kernel of small tiles. It makes the language's
functions its own again whenever one jit function calls another, combines the elements of a
`tl.reduce` one by one, looks types up in a dict that it builds for each of them, and describes the
shape of each result anew. Of each sum of integers it computes whether it overflows, for an
assertion that is off. Of a box that a tensor descriptor reads or writes it makes a pointer and a
mask for each element. Of two operands of the same type it works out anew which type they have
together. These are its internals, so each is left alone where it is not what is expected here.
"""

import ctypes
import dataclasses
import functools
import inspect

import numpy as np


def hasten() -> None:
    """To be called before the first kernel."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patched_once(interpreter)
    if hasattr(interpreter.ReduceOps, "generic_reduce"):
        interpreter.ReduceOps.generic_reduce = _reduce
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _remembered(interpreter)
    if hasattr(interpreter, "InterpreterBuilder"):
        interpreter.InterpreterBuilder.create_splat = _splat
        _copy_boxes(interpreter, interpreter.InterpreterBuilder)
    _assert_nothing(getattr(interpreter, "interpreter_builder", None))
    semantic = getattr(interpreter, "interpreter_semantic", None)
    _share_shapes(interpreter.tl.core, semantic)
    _check_types_once(interpreter.tl.core, semantic)


def _patched_once(interpreter):
    """`_patch_lang`, which does nothing for a function whose caller has patched what it uses."""
    tl, patch = interpreter.tl, interpreter._patch_lang
    patched = set()

    def patch_lang(fn):
        modules = {id(v) for v in fn.__globals__.values() if v is tl or v is tl.core} - patched
        if not modules and patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(modules)
        restore = scope.restore

        def restore_and_forget():
            restore()
            patched.difference_update(modules)

        scope.restore = restore_and_forget
        return scope

    return patch_lang


def _splat(self, ret_ty, arg):
    """`create_splat`, which takes the outcome of a comparison of scalars for a number of the type
    that was compared. In 3.9 loads and stores refuse it as a mask."""
    return type(arg)(np.full(ret_ty.shape, arg.data.flat[0], arg.data.dtype), arg.dtype.scalar)


def _reduce(self, input):
    """`ReduceOps.generic_reduce`, by halves of the axis, whose length is a power of two."""
    axis = self.axis
    if axis is None:
        input, _ = self.unravel(input, None)
    arrays = [np.moveaxis(x.handle.data, axis or 0, 0) for x in input]
    dtypes = [x.dtype for x in input]
    while len(arrays[0]) > 1:
        half = len(arrays[0]) // 2
        halves = [
            self.to_tensor(a[part], d)
            for part in (slice(half), slice(half, None))
            for a, d in zip(arrays, dtypes, strict=True)
        ]
        combined = self.combine_fn.fn(*halves)
        combined = combined if isinstance(combined, tuple) else (combined,)
        arrays = [
            self.to_tensor(c.handle.data, d).handle.data
            for c, d in zip(combined, dtypes, strict=True)
        ]
    results = [a[0] for a in arrays]
    if self.keep_dims:
        results = [np.expand_dims(r, axis or 0) for r in results]
    return [self.to_tensor(r, d) for r, d in zip(results, dtypes, strict=True)]


def _remembered(interpreter):
    """`_get_np_dtype` by the type of an element."""
    tl, of_scalar = interpreter.tl, functools.cache(interpreter._get_np_dtype)

    def get_np_dtype(kind):
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else of_scalar(kind)

    return get_np_dtype


def _copy_boxes(interpreter, builder) -> None:
    """Loads and stores of descriptors copy the part of the block that lies in the tensor."""
    if not hasattr(interpreter, "TensorDescHandle"):
        return
    load = builder.create_descriptor_load
    zero = interpreter._ir.PADDING_OPTION.PAD_ZERO

    def box(desc, offsets, dtype):
        """(what lies in the tensor, as an array in its memory; where that is in the block)"""
        starts = [int(offset.data.item()) for offset in offsets]
        assert starts[-1] * dtype.itemsize % 16 == 0, "block offset start must be 16-byte aligned"
        address, sizes, steps, places = int(desc.base.data.item()), [], [], []
        for start, block, size, stride in zip(
            starts, desc.block_shape, desc.shape, desc.strides, strict=True
        ):
            first, end = max(start, 0), min(start + int(block), int(size.data.item()))
            steps.append(int(stride.data.item()) * dtype.itemsize)
            sizes.append(max(end - first, 0))
            places.append(slice(first - start, first - start + sizes[-1]))
            address += first * steps[-1]
        if 0 in sizes:
            return None, ()
        span = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True)) + dtype.itemsize
        memory = (ctypes.c_char * span).from_address(address)
        return np.ndarray(sizes, dtype, memory, strides=steps), tuple(places)

    def load_box(self, desc, indices, *policies, **options):
        if desc.padding != zero or getattr(desc, "round_f32_to_tf32", False):
            return load(self, desc, indices, *policies, **options)
        kind = desc.base.get_element_ty()
        dtype = np.dtype(interpreter._get_np_dtype(kind))
        block = np.zeros([int(size) for size in desc.block_shape], dtype)
        there, places = box(desc, indices, dtype)
        if places:
            block[places] = there
        return interpreter.TensorHandle(block, kind)

    def store_box(self, desc, value, indices):
        there, places = box(desc, indices, value.data.dtype)
        if places:
            there[...] = value.data[places]

    builder.create_descriptor_load, builder.create_descriptor_store = load_box, store_box


def _assert_nothing(builder) -> None:
    """Overflow is not looked for where `device_assert` does nothing with what is found."""
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and getattr(options, "debug", True) is False:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _share_shapes(core, semantic) -> None:
    """Blocks of one shape share its description, and two that do need no broadcast."""
    block_type, tensor = core.block_type, core.tensor
    block = block_type(core.float32, [2, 4])
    described = {"element_ty", "shape", "numel", "name"}
    if vars(block).keys() != described or block.name != f"<{block.shape}, {block.element_ty}>":
        return
    if vars(tensor(None, block)).keys() != {"handle", "shape", "numel", "type", "dtype"}:
        return
    describe, make = block_type.__init__, tensor.__init__
    shapes: dict[tuple, tuple] = {}  # shape and elements of a type, the shape in its name
    of_tensors: dict[tuple, tuple] = {}  # shape and elements of a tensor

    def describe_once(self, element_ty, shape):
        key = tuple(shape)
        if any(type(size) is not int for size in key):
            return describe(self, element_ty, shape)
        if key not in shapes:
            describe(self, element_ty, shape)
            shapes[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = shapes[key]
        self.name = f"<{text}, {element_ty}>"

    def make_of_known_shape(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in of_tensors:
            make(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    block_type.__init__, tensor.__init__ = describe_once, make_of_known_shape
    if hasattr(semantic, "broadcast_impl_value"):
        broadcast = semantic.broadcast_impl_value

        def broadcast_if_different(lhs, rhs):
            a, b = lhs.type, rhs.type
            blocks = a.is_block(), b.is_block()
            if blocks == (False, False) or (all(blocks) and a.shape is b.shape):
                return lhs, rhs
            return broadcast(lhs, rhs)

        semantic.broadcast_impl_value = broadcast_if_different


def _check_types_once(core, semantic) -> None:
    """Operands that are both int32 or both float32, or one of them and a number that it holds, have
    that type together."""
    check = getattr(semantic, "binary_op_type_checking_impl", None)
    expected = ["lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"]
    if check is None or list(inspect.signature(check).parameters) != expected:
        return
    tensor, int32, float32 = core.tensor, core.int32, core.float32

    def holds(kind, number) -> bool:
        if kind is float32:
            return type(number) in (int, float)
        return kind is int32 and type(number) is int and -(2**31) <= number < 2**31

    def check_unless_alike(lhs, rhs, *options, **named):
        if type(lhs) is tensor:
            kind = lhs.dtype
            if type(rhs) is tensor:
                if rhs.dtype is kind and (kind is int32 or kind is float32):
                    return semantic.broadcast_impl_value(lhs, rhs)
            elif named.get("arithmetic_check", True) and len(options) < 3 and holds(kind, rhs):
                return semantic.broadcast_impl_value(lhs, semantic.scalar_constant(rhs, kind))
        return check(lhs, rhs, *options, **named)

    semantic.binary_op_type_checking_impl = check_unless_alike
