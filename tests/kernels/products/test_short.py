"""Products with the norm ahead of them in one launch, against that norm and fp64's product.

They round where the twins do: what is added up, the norm, and the product.
"""

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error
from lanes import costly

from stree_kernels import naive
from stree_kernels.contracts import Gated, Stream
from stree_kernels.products import short as short_products

TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
ROUNDINGS = 2 if DEVICE == "cuda" else 4  # the interpreter cuts off
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, costly(torch.float16)], ids=str)
each_op = pytest.mark.parametrize("op", ["linear", "linear_swiglu"])


def launched(monkeypatch):
    """List the names of the launches so far of products that are not short, and of norms."""
    names = []
    for module, name in (
        (short_products.products, "linear"), (short_products.products, "linear_swiglu"),
        (short_products.gather, "embed_norm"), (short_products.pointwise, "add_rms_norm"),
    ):
        own = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, own=own, name=name, **k: names.append(name) or own(*a, **k)
        )
    return names


def streams(kind, batch, num_nodes, width, dtype):
    """Make the same stream twice, in a type and in fp64; what may not be read is NaN or far."""
    scale = normal(width, seed=1, dtype=torch.float32)
    if kind.startswith("embedding"):
        table = torch.full((11, width + 8), torch.nan, device=DEVICE, dtype=dtype)[:, :width]
        table.copy_(normal(11, width, dtype=dtype))
        tokens = torch.randint(11, (batch, num_nodes + 2), device=DEVICE)
        nodes = torch.randint(-1, num_nodes, (batch, num_nodes), device=DEVICE)
        tokens[:, num_nodes:] = 10**6
        added = normal(1, batch, num_nodes, width, seed=2, dtype=dtype)
        if kind == "embedding of nodes":
            added = added[:, :, :1].expand(-1, -1, num_nodes, -1)
        where = (tokens, nodes) if "nodes" in kind else (tokens[:, :num_nodes], None)
        of = (added, *where) if "nodes" in kind else (None, *where)
        return Stream(table, scale, 1e-5, *of), Stream(table.double(), scale, 1e-5, *(
            of if of[0] is None else (of[0].double(), *where)
        ))
    x, added = normal(batch, num_nodes, width, dtype=dtype), None
    if kind == "sum":
        added = normal(1, batch, num_nodes, width, seed=2, dtype=dtype)
    if kind == "parts":
        added = normal(3, batch, num_nodes, width, seed=2)
    wide = None if added is None else added.double()
    return Stream(x, scale, 1e-5, added), Stream(x.double(), scale, 1e-5, wide)


@pytest.mark.quick(12)
@each_op
@each_dtype
@pytest.mark.parametrize("kind", ["rows", "sum", "parts", "embedding", "embedding of nodes"])
@pytest.mark.parametrize("batch, num_nodes, width", [(1, 1, 64), (2, 5, 200), (1, 16, 384)])
def test_the_norm_is_no_launch(batch, num_nodes, width, kind, dtype, op, monkeypatch):
    stream, exact = streams(kind, batch, num_nodes, width, dtype)
    weight = normal(150, width, seed=3, dtype=dtype) / width**0.5
    names = launched(monkeypatch)
    got = getattr(short_products, op)(stream, weight)
    assert not names
    wanted = getattr(naive, op)(exact, weight.double())
    assert got.shape == wanted.shape and got.dtype == dtype and got.is_contiguous()
    assert relative_error(got, wanted) < 2 * ROUNDINGS * TOLERANCE[dtype]
    assert stream.is_sum and stream.source.shape == (batch, num_nodes, width)
    assert relative_error(stream.source, exact.source) < TOLERANCE[dtype] * ROUNDINGS
    again = getattr(short_products, op)(stream, weight)  # of the sum that is there by now
    assert torch.equal(again, got)


@each_dtype
@pytest.mark.parametrize("groups, width", [(1, 90), (3, 192), (8, 128), (3, 90)])
@pytest.mark.parametrize("batch, num_nodes", [(1, 1), (2, 5), (1, 20)])
def test_nor_is_a_gated_one(batch, num_nodes, groups, width, dtype):
    """It is one for many rows, or groups of a width that is no power of two."""
    y = normal(batch, num_nodes, width, dtype=dtype)
    gate = normal(batch, num_nodes, width + 40, seed=1, dtype=dtype)[..., :width]
    scale, weight = normal(width, seed=2), normal(50, width, seed=3, dtype=dtype)
    got = short_products.linear_parts(Gated(y, gate, scale, 1e-5, groups), weight)
    exact = Gated(y.double(), gate.double(), scale.double(), 1e-5, groups)
    wanted = naive.linear_parts(exact, weight.double())
    assert got.shape == wanted.shape and got.dtype == dtype
    assert relative_error(got, wanted) < 2 * ROUNDINGS * TOLERANCE[dtype]


@each_op
@pytest.mark.parametrize("rows, width", [(17, 64), (3, 1100)])
def test_other_products_follow_a_norm(rows, width, op, monkeypatch):
    stream, exact = streams("sum", 1, rows, width, torch.bfloat16)
    weight = normal(40, width, seed=3, dtype=torch.bfloat16) / width**0.5
    names = launched(monkeypatch)
    got = getattr(short_products, op)(stream, weight)
    assert names == ["add_rms_norm", op]
    wanted = getattr(naive, op)(exact, weight.double())
    assert relative_error(got, wanted) < 2 * ROUNDINGS * TOLERANCE[torch.bfloat16]
    getattr(short_products, op)(stream, weight)
    assert names == ["add_rms_norm", op, op]  # several products read one norm


@each_op
@pytest.mark.parametrize("beside, others", [(False, 1), (True, 0), (True, 1), (False, 2)])
def test_a_norm_of_several_is_a_launch(beside, others, op, monkeypatch):
    """The norm is of several sums, or of [stream, beside]; the product after it is short."""
    x, also = (normal(2, 5, 64, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    parts = normal(2, 2, 5, 64, seed=2)
    added = (parts, *[also[None]] * others) if others else parts
    wide = tuple(y.double() for y in added) if others else parts.double()
    width = 128 if beside else 64
    scale, weight = normal(width, seed=3), normal(40, width, seed=4, dtype=torch.bfloat16)
    given = (also, also.double()) if beside else (None, None)
    stream = Stream(x, scale, 1e-5, added, beside=given[0])
    exact = Stream(x.double(), scale, 1e-5, wide, beside=given[1])
    names = launched(monkeypatch)
    got = getattr(short_products, op)(stream, weight)
    assert names == ["add_rms_norm"]
    wanted = getattr(naive, op)(exact, weight.double())
    assert relative_error(got, wanted) < 4 * ROUNDINGS * TOLERANCE[torch.bfloat16]
    assert stream.is_sum and relative_error(stream.source, exact.source) < 4 * 2**-8
    assert torch.equal(getattr(short_products, op)(stream, weight), got) and len(names) == 1


@each_dtype
@pytest.mark.parametrize("outputs, inputs", [(2, 40), (96, 200), (1300, 64), (40, 1024)])
@pytest.mark.parametrize("rows", [(1, 1), (2, 8)], ids=str)
def test_linear(rows, outputs, inputs, dtype):
    x, weight = normal(*rows, inputs, dtype=dtype), normal(outputs, inputs, seed=1, dtype=dtype)
    wanted = naive.linear(x.double(), weight.double())
    for got in (short_products.linear(x, weight), short_products.linear_parts(x, weight)[0]):
        assert got.shape == (*rows, outputs) and got.dtype == dtype and got.is_contiguous()
        assert relative_error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.quick(2)
@each_op
@pytest.mark.parametrize("width", [24, 384])
def test_a_row_does_not_depend_on_the_others(width, op):
    stream, _ = streams("sum", 1, 16, width, torch.bfloat16)
    weight = normal(100, width, seed=3, dtype=torch.bfloat16)
    source, added = stream.source, stream.added
    together = getattr(short_products, op)(stream, weight)
    for rows in (1, 2, 8, 13):
        some = Stream(source[:, :rows], stream.scale, 1e-5, added[:, :, :rows])
        assert torch.equal(getattr(short_products, op)(some, weight), together[:, :rows])
