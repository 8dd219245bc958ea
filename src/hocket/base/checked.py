"""Validate untrusted data with a pydantic model, and report errors in hocket's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import shown

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)

_MAX_MESSAGES = 3
_MAX_PART = 60
"""Maximum length of a key in an error message."""


def checked(model: type[Model], data: object, where: str, hint: str = "") -> Model:
    """Validate ``data`` as ``model``; raises `InputFileError` that names the key.

    For an unknown key the error suggests the closest known one; ``hint`` is used otherwise.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(data)
    except ValidationError as error:
        message = "; ".join(_messages(error))
        raise InputFileError(message, hint=_meant(model, error) or hint, where=where) from None


def _messages(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False)[:_MAX_MESSAGES]:
        place = ".".join(
            shown(part) if len(str(part)) > _MAX_PART else str(part) for part in problem["loc"]
        )
        if problem["type"] == "extra_forbidden":
            yield f"unknown key {place!r}"
        elif problem["type"] == "tuple_type" and isinstance(problem["input"], str):
            words = json.dumps(problem["input"][:_MAX_PART].split())
            yield f"{place}: should be a list of strings, such as {words}"
        else:
            yield f"{place}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _meant(model: type[BaseModel], error: ValidationError) -> str:
    """Suggestion for the first unknown key, from the fields of the model that refused it."""
    for problem in error.errors(include_url=False):
        *parents, key = problem["loc"]
        # A number is an index of a list, and all entries of a list have one model.
        owner = _inner(model, [part for part in parents if isinstance(part, str)])
        if problem["type"] == "extra_forbidden" and owner is not None:
            names = [field.alias or name for name, field in owner.model_fields.items()]
            return did_you_mean(str(key), names)
    return ""


def _inner(model: type[BaseModel], parents: list[str]) -> type[BaseModel] | None:
    """Model of a nested part of a file; None if the part is a table with arbitrary keys."""
    from pydantic import BaseModel

    for name in parents:
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        if name not in fields:
            return None
        kinds = _kinds(fields[name].annotation)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if len(inner) != 1:
            return None
        model = inner[0]
    return model


def _kinds(annotation: object) -> tuple[object, ...]:
    """Members of a union type, or the annotation itself."""
    return getattr(annotation, "__args__", ()) or (annotation,)
