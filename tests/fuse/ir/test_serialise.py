"""A program as text: the same program after a round trip, and one error for a text that is no program."""

import json
import math
import random

import pytest

from tests.helpers.random_steps import some
from tests.helpers.variants import hidden_size, name
from unfading import catalogue
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import BINARY, UNARY, Block, InputKind, Op, Program, Store, TensorKind
from unfading.fuse.ir.serialise import from_text, to_text
from unfading.fuse.plan import PROGRAMS, plan
from unfading.fuse.trace.recorder import trace


def with_every_operation():
    b = Builder()
    x, h = b.leaf(TensorKind.INPUT, 0, 0, 6), b.leaf(TensorKind.STATE, 0, 0, 6)
    y = b.map(Op.SUB, x, b.dot([(h, Block(0, 0, 6, 0, 6))]))
    values = [b.map(op, y, attr=0.3 if op is Op.POWER else None) for op in UNARY]
    values += [b.map(op, y, h) for op in (*BINARY, Op.WITH_GRADIENT)]
    values += [b.map(Op.WHERE, b.map(Op.GT, x, 0.5), y, math.inf), b.map(Op.MUL, y, -0.0)]
    square = b.permute(b.reshape(y, (2, 3)), (1, 0))
    values.append(b.slice(b.reshape(b.slice(square, 1, 0, 1), (3,)), 0, 1, 3))
    values += [b.expand(b.reshape(b.reduce(op, y, [0]), ()), (6,)) for op in (Op.SUM, Op.AMAX)]
    values.append(b.cat([b.slice(y, 0, 0, 2), b.slice(h, 0, 0, 2)], 0))
    widths = {(TensorKind.INPUT, 0): 6, (TensorKind.STATE, 0): 6, (TensorKind.NEXT, 0): 6, (TensorKind.WEIGHT, 0): 36}
    stores = tuple(Store(TensorKind.NEXT, 0, 0, value) for value in values)
    return Program(stores, widths, (InputKind.SEQUENCE,))


@pytest.fixture(scope="module")
def programs():
    cells = [cell(3, hidden_size(cell)) for cell in catalogue.cells() if name(cell) in ("LSTM", "NRU", "SiRNN", "EURNN")]
    return [with_every_operation()] + [PROGRAMS[plan(cell).key] for cell in cells]


def test_a_text_is_read_as_the_same_program(programs):
    for program in programs:
        again = from_text(to_text(program))
        assert str(again) == str(program)
        assert again.key() == program.key()
        assert [(v.id, v.op, v.attr, v.shape, v.constant, v.is_zero) for v in again.values()] == [
            (v.id, v.op, v.attr, v.shape, v.constant, v.is_zero) for v in program.values()
        ]


@pytest.mark.long
def test_so_is_the_text_of_500_random_steps():
    for step in some(500, 20):
        program = trace(step.function(), step.signature())
        assert from_text(to_text(program)).key() == program.key()


def test_a_program_has_every_operation():
    assert set(Op) - {value.op for value in with_every_operation().values()} == {Op.ZERO}  # which only a derivative has


def mutated(content, draw):
    """The same JSON with one entry replaced, removed or doubled."""
    content = json.loads(json.dumps(content))
    parent, key = None, None
    node = content
    while isinstance(node, list | dict) and node and draw.random() < 0.9:
        key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
        parent, node = node, node[key]
    if parent is None:
        return draw.choice([None, 3, [], "tanh"])
    kind = draw.randrange(4)
    if kind == 0 and isinstance(parent, list):
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.append(node)
    elif kind == 2 and isinstance(node, int):
        parent[key] = node + draw.choice([-1, 1, 2, 10**6, -(10**6), 2**70])
    else:
        parent[key] = draw.choice([None, True, -1, 0, 1, 7, 10**6, 0.5, 1e400, "dot", "input", "slice", [], [3], {}, [[1, 2]]])
    return content


def within_bounds(program):
    for value in program.values():
        if value.op is Op.LEAF:
            assert 0 <= value.leaf.start <= value.leaf.stop <= program.widths[value.leaf.kind, value.leaf.index]
        for v, block in value.factors if value.op is Op.DOT else ():
            assert v.shape == (block.length,)
            assert value.shape == (block.width,)
    for store in program.stores:
        assert 0 <= store.start <= store.start + store.value.size <= program.widths[store.kind, store.index]


def outcomes(programs, count):
    """How many of `count` mutated texts are read, and how many are refused."""
    draw = random.Random(0)
    contents = [json.loads(to_text(program)) for program in programs]
    read = 0
    for _ in range(count):
        try:
            program = from_text(json.dumps(mutated(draw.choice(contents), draw)))
        except ValueError as error:
            assert "cannot be read" in str(error)  # noqa: PT017
        else:
            within_bounds(program)
            read += 1
    return read, count - read


def test_a_damaged_text_is_refused_or_stays_within_its_tensors(programs):
    read, refused = outcomes(programs, 2000)
    assert read > 50
    assert refused > 1000


@pytest.mark.long
def test_so_are_100_000_damaged_texts(programs):
    outcomes(programs, 100_000)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 2}', "[" * 100_000, '{"format": 1}'])
def test_a_text_that_is_no_program_is_refused_in_one_sentence(text):
    with pytest.raises(ValueError, match="the fused loop of an exported program cannot be read"):
        from_text(text)
