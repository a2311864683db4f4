"""Divided loops whose products are summed: a program has some rows of the columns of several programs.

Where all multiprocessors together have room for the matrices, but each needs so many rows of the batch that it cannot have all
of a row vector beside its columns, most of the time would go into reading that vector, or the matrices. For 1024 units and 128
rows, an LSTM would read 64 MB in a step forward and 134 MB backward. So the programs form teams of `shares` programs. Program k
of a team multiplies share k of the row vector with the columns of the whole team, and stores the products. After an exchange,
each program adds up the products for its own units, in a fixed order. For 1024 units that is 33 MB in either direction, for one
more exchange.

Products are stored at two places in turns, for even and odd steps: a program that stores those of the step after the next has
met, in between, all programs after they had read these.
"""

from collections.abc import Sequence
from typing import NamedTuple

from unfading.fuse.ir.program import Block, Program, Value
from unfading.fuse.triton.launch_settings import shares_of
from unfading.fuse.triton.split_tiles import Factor, SplitTiles, joined_factors, turns_of
from unfading.fuse.triton.tile_shapes import LEAST, Tile
from unfading.fuse.triton.tiles import origin

CHUNK = 64  # entries of a share that one dot takes


class Product(NamedTuple):
    """Some dots that are one in the source, whose products are summed."""

    dots: list[Value]
    shares: int  # the programs of a team
    turns: int  # columns for each unit
    place: int  # the columns of the products before it, for each unit of a program

    @property
    def name(self) -> str:
        return f"joined{self.dots[0].id}"


class SummedTiles(SplitTiles):
    """Writes the lines of a step whose products are summed."""

    summed = True

    def __init__(self, program: Program, blocks: dict[Block, str]):
        super().__init__(program, blocks)
        self.products: list[Product] = []
        self.columns = 0  # of all products, for each unit of a program
        for dots in self.joined_products():
            length = sum(v.size for v, _ in joined_factors(dots) if self.stages.is_divided(v))
            shares, turns = shares_of(length, turns_of(dots)), turns_of(dots)
            self.products.append(Product(dots, shares, turns, self.columns))
            self.columns += shares * turns
        # The places of dots of one entry: every program has summed up the products of its own units.
        self._ones: dict[int, int] = {}
        for dot in self.stages.order:
            if self.stages.is_product(dot) and dot.size == 1 and dot.id not in self.skipped:
                self._ones[dot.id] = self.columns
                self.columns += 1
        for shares in sorted({product.shares for product in self.products}):
            self.before.append(f"share{shares}, team{shares} = part % {shares}, part // {shares}")
        self._team = 0  # the shares of the product that is being written

    def write_exchange(self, stage: int) -> list[str]:
        """The stores of what is exchanged after a stage, products among them."""
        self.lines = super().write_exchange(stage)
        for product in self.products:
            if self.stages.of[product.dots[0].id] == stage + 1:
                self._store_products(product)
        for dot in self.stages.order:
            if dot.id in self._ones and self.stages.of[dot.id] == stage + 1:
                self._store_one(dot)
        return self.lines

    def _load_states(self, stage: int) -> None:
        """A product has been read before the exchange of the products, and so before a state can be replaced."""

    def _store_products(self, product: Product) -> None:
        """Multiply this program's share of each row vector with the columns of its team."""
        total, name = "None", f"{product.name}_all"
        self._team, self.dividing = product.shares, True
        for v, blocks in self._divided(product):
            size = share_of(v, product.shares)
            for start, stop in chunks(size):
                first = f"share{product.shares} * {size} + {start}"
                matrix = self._share_of_matrix(v, blocks, product.turns, first, stop - start)
                along = f"({first} + tl.arange(0, {stop - start})[None, :])"
                mask = "inside" if size * product.shares == v.size else f"inside & ({along} < {v.size})"
                row = self._exchange_load(v, self._place(v), along, mask)
                self.lines.append(f"{name} = product({row}, {matrix}, {total}, PRECISION)")
                total = name
                self.read += stop - start
        self._team, self.dividing = 0, False
        N = f"({product.shares * product.turns} * UNITS)"
        at = f"(part * ROWS + row) * {N} + tl.arange(0, {N})[None, :]"
        self.lines.append(f"tl.store({self._products_at(product.place)} + {at}, {name})")

    def _store_one(self, dot: Value) -> None:
        """Sum up the products of this program's units in a dot of one entry."""
        terms = []
        self.dividing = True
        for v, block in dot.factors:
            if self.stages.is_divided(v):
                W, r0, c0 = origin(block)
                name = f"M{next(self._numbers)}"
                at = f"{W} + (model * {W}_model + {r0}) * {W}_ROW + {c0} + unit"
                self.before.append(f"{name} = tl.load({at}, mask=unit < {v.size}, other=0.0)")
                terms.append(f"tl.where(unit < {v.size}, {self.full(v)} * {name}, 0.0)")
        self.dividing = False
        own = f"tl.sum({' + '.join(terms)}, axis=1, keep_dims=True)"
        self.lines.append(f"tl.store({self._products_at(self._ones[dot.id])} + (part * ROWS + row), {own})")

    def _dot_to_one(self, value: Value) -> Tile:
        if value.id not in self._ones:
            return super()._dot_to_one(value)
        every = "tl.arange(0, PARTS)[None, :]"
        at = f"{self._products_at(self._ones[value.id])} + ({every} * ROWS + row)"
        load = f'tl.load({at}, mask={every} < tl.num_programs(0) + row * 0, other=0.0, cache_modifier=".cg")'
        terms = [f"tl.sum({load}, axis=1, keep_dims=True)"]
        for v, block in value.factors:
            if v.size == 1:
                terms.append(f"{self._broadcast(self.tiles[v.id], (1,))} * {self._row(block)}")
            elif not self.stages.is_divided(v):
                terms.append(f"tl.sum({self._piece(v, 0, v.size)} * {self._row(block)}, axis=1, keep_dims=True)")
        return self._named(value, " + ".join(terms), True)

    def _share_of_matrix(self, v: Value, blocks: Sequence[Block], turns: int, first: str, size: int) -> str:
        """The rows of matrices from one on, and the columns of the team."""
        name, down = f"M{next(self._numbers)}", f"({first} + tl.arange(0, {size})[:, None])"
        load = self._matrix_load(blocks, turns, down, f" & ({down} < {v.size})")
        self.before.append(f"{name} = factor({load}, PRECISION)")
        self.matrix_sizes.append((size, self._team * turns, True))
        return name

    def _columns_on_chip(self, block: Block) -> tuple[str, str]:
        if not self._team:
            return super()._columns_on_chip(block)
        return f"{self._team} * UNITS", f"team{self._team} * {self._team} * UNITS"

    def _write_group(self, dots: Sequence[Value]) -> None:
        """The sums of the products for this program's units, and what short vectors add."""
        product = next((product for product in self.products if product.dots[0] is dots[0]), None)
        if product is None:
            super()._write_group(dots)
            return
        shares, turns, name = product.shares, product.turns, product.name
        for k in range(shares):
            at = f"((team{shares} * {shares} + {k}) * ROWS + row) * ({shares * turns} * UNITS)"
            at += f" + share{shares} * {turns} * UNITS + tl.arange(0, {turns} * UNITS)[None, :]"
            load = f'tl.load({self._products_at(product.place)} + {at}, cache_modifier=".cg")'
            self.lines.append(f"{name} = {f'{name} + {load}' if k else load}")
        for v, blocks in joined_factors(dots):
            if not self.stages.is_divided(v):
                matrix = self._matrix(tuple(blocks), turns)
                self.lines.append(f"{name} = product({self._piece(v, 0, v.size)}, {matrix}, {name}, PRECISION)")
        self._set_columns(dots, name, "UNITS")

    def _products_at(self, place: int) -> str:
        """The products of all programs of these rows, program by program."""
        rows = "(step % 2 * tl.num_programs(1) + tl.program_id(1))"
        return f"products + ({rows} * {self.columns} + {place}) * UNITS * tl.num_programs(0) * ROWS"

    def _divided(self, product: Product) -> list[Factor]:
        return [(v, blocks) for v, blocks in joined_factors(product.dots) if self.stages.is_divided(v)]


def share_of(v: Value, shares: int) -> int:
    """The entries of a share of a vector: a multiple of the shortest chunk, so that its first one is aligned."""
    return -(-v.size // (shares * LEAST)) * LEAST


def chunks(size: int) -> list[tuple[int, int]]:
    """Cut a share into chunks whose sizes are powers of two."""
    out, start = [], 0
    while start < size:
        stop = start + min(CHUNK, 1 << (size - start).bit_length() - 1)
        out.append((start, stop))
        start = stop
    return out
