"""Check the settings of a run: types, bounds, and settings that do not fit together. Nothing here needs torch."""

import json
from collections.abc import Mapping
from typing import Any, Self, get_args

from pydantic import ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from unfading.errors import check_count, check_number, check_positive, unknown
from unfading.files.checked_json import brief
from unfading.training.settings import BITS, COMPRESSIONS, FIELDS, RESERVED, Options, Settings


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class CheckedSettings(Settings):
    """Settings that are checked when they are created."""

    @field_validator(
        *("hidden", "layers", "batch", "steps", "epochs", "truncate", "valid_every", "valid_batches", "patience", "retries"),
        mode="before",
    )
    @classmethod
    def _check_count(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            check_count(str(info.field_name), value, least=0 if info.field_name == "retries" else 1)
        return value

    @field_validator("rate", "clip_norm", "clip_value", mode="before")
    @classmethod
    def _check_positive(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            check_positive(str(info.field_name), value)
        return value

    @field_validator("stop_at", mode="before")
    @classmethod
    def _check_score(cls, value: Any) -> Any:
        if value is not None:
            check_number("stop_at", value)
        return value

    @field_validator("rates", mode="before")
    @classmethod
    def _check_factors(cls, value: Any) -> Any:
        for pattern, factor in value.items() if isinstance(value, dict) else ():
            check_number(f"rates[{pattern!r}]", factor)
            if factor < 0:
                raise ValueError(f"rates[{pattern!r}] must be at least 0, which holds the parameter; got {factor}.")
        return value

    @field_validator("compress")
    @classmethod
    def _check_compress(cls, value: Options) -> Options:
        for name in value:
            if name not in COMPRESSIONS:
                raise ValueError(unknown("option of compress", name, COMPRESSIONS))
        if "rank" in value:
            check_count("compress: rank", value["rank"])
        if "sparsity" in value:
            check_number("compress: sparsity", value["sparsity"])
            if not 0 < value["sparsity"] < 1:
                raise ValueError(
                    f"compress: sparsity is the share of zeros in each matrix, above 0 and below 1; got {value['sparsity']}. "
                    "Leave it out for dense matrices."
                )
        if "bits" in value and (type(value["bits"]) is not int or value["bits"] != BITS):
            raise ValueError(
                f"compress: bits must be {BITS}, the size of an entry of an exported matrix; got {value['bits']!r}. Write "
                f"bits={BITS}, or leave it out."
            )
        return value

    @field_validator("seed")
    @classmethod
    def _check_bits(cls, value: int) -> int:
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"seed must have 64 bits at most; got {value}.")
        return value

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"a run takes steps or epochs, one of the two; got steps={self.steps} and epochs={self.epochs}.")
        return self

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError(
                f"a run clips by norm or by value; got clip_norm={self.clip_norm} and clip_value={self.clip_value}. "
                "Set one to None."
            )
        return self

    @model_validator(mode="after")
    def _check_evaluations(self) -> Self:
        for name in ("valid_every", "stop_at", "patience", "select_by"):
            if self.split == "full" and getattr(self, name) != FIELDS[name].default:
                raise ValueError(
                    'split="full" trains on the validation rows, so nothing is evaluated during training; got '
                    f"{name}={getattr(self, name)}. Leave it out."
                )
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.dtype == "tf32" and self.device == "cpu":
            raise ValueError('dtype="tf32" needs device="cuda"; a CPU has no tf32 products. Use dtype="float32".')
        return self

    @model_validator(mode="after")
    def _check_cell_options(self) -> Self:
        for name in RESERVED:
            if name in self.cell_options:
                raise ValueError(f"cell_options cannot hold {name!r}: the run or the task sets it.")
        if self.truncate is not None and self.cell_options.get("bidirectional"):
            raise ValueError(
                f"truncate={self.truncate} carries the state forward, and a bidirectional layer reads backward too. Drop one."
            )
        return self


def check(values: Mapping[str, Any]) -> Settings:
    """The settings with these values; the first wrong one raises a TypeError or a ValueError of one sentence.

    Values are copied in the form in which JSON returns them (a tuple becomes a list), so that equal runs have equal keys.
    """
    try:
        return CheckedSettings(**{name: _as_json(name, value) for name, value in values.items()})
    except ValidationError as error:
        raise _sentence(error) from None


def _as_json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False), parse_int=lambda digits: _whole(name, digits))
    except _TooLarge as error:
        raise ValueError(str(error)) from None
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{name} must be of JSON values, its numbers finite; got {brief(value)}.") from None


class _TooLarge(Exception):
    """A number that no setting can have."""


def _whole(name: str, digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise _TooLarge(f"{name} must have 64 bits at most; got {digits[:30]}{'...' if len(digits) > 30 else ''}.")
    return int(digits)


# What a value must be where pydantic refuses its type.
TYPES = {"string_type": "a str", "dict_type": "a dict", "int_type": "an int", "float_type": "a number"}


def _sentence(error: ValidationError) -> Exception:
    first = error.errors()[0]
    if isinstance(own := first.get("ctx", {}).get("error"), ValueError):  # of a check above
        return own
    name, value = str(first["loc"][0]), first["input"]
    if first["type"] == "unexpected_keyword_argument":
        return ValueError(unknown("field of a run", name, FIELDS))
    if first["type"] == "missing":
        return ValueError(f"a run needs a {name}; name one.")
    if first["type"] == "literal_error":
        return ValueError(unknown(name, value, get_args(FIELDS[name].annotation)))
    if first["type"] in TYPES:
        return TypeError(f"{name} must be {TYPES[first['type']]}; got {value!r} ({type(value).__name__}).")
    return ValueError(f"{name}: {first['msg']}")
