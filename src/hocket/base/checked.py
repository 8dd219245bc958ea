"""Untrusted data checked against a pydantic model, with errors in the form that hocket gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import shown

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)

_MAX_MESSAGES = 3
_MAX_PART = 60
"""Characters of a key that an error repeats as it is."""


def checked(model: type[Model], data: object, where: str, hint: str = "") -> Model:
    """``data`` as ``model``; raises `InputFileError` that names the key and, for one that is
    unknown, the one that may have been meant. ``hint`` is what to do otherwise.
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
        else:
            yield f"{place}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _meant(model: type[BaseModel], error: ValidationError) -> str:
    """Did-you-mean for the first unknown key, looked up in the model that refused it."""
    for problem in error.errors(include_url=False):
        *parents, key = problem["loc"]
        # A number is a place in a list, all of whose members have one model.
        owner = _inner(model, [part for part in parents if isinstance(part, str)])
        if problem["type"] == "extra_forbidden" and owner is not None:
            names = [field.alias or name for name, field in owner.model_fields.items()]
            return did_you_mean(str(key), names)
    return ""


def _inner(model: type[BaseModel], parents: list[str]) -> type[BaseModel] | None:
    """The model of a part of a file; None where that part is a table of many."""
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
    """The parts of ``A | None``, or the annotation itself."""
    return getattr(annotation, "__args__", ()) or (annotation,)
