"""Templates and files of the page, read from the package once."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from hocket import __version__
from hocket.service.page.moments import ago
from hocket.view.drawing import picture_css
from hocket.view.names import inert
from hocket.view.page import LOGO, template

_PACKAGE = "hocket.service.page"


def render(name: str, **values: Any) -> str:
    """A template with values; all text is escaped."""
    return _environment().get_template(name).render(**values)


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """Files that hold nothing of the fleet, by name: content and type."""
    folder = files(_PACKAGE) / "static"
    own_css, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    css = picture_css() + template("report.css") + own_css
    return {
        "page.css": (css.encode(), "text/css; charset=utf-8"),
        "page.js": (script.encode(), "text/javascript; charset=utf-8"),
        "icon.svg": (LOGO.encode(), "image/svg+xml"),
    }


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {"inert": inert, "ago": ago}
    environment.globals["version"] = __version__
    environment.globals["fingerprint"] = _fingerprint()
    return environment


def _fingerprint() -> str:
    """Hash of style and script, by which browsers can cache them until they change."""
    digest = hashlib.sha256()
    for content, _ in static_files().values():
        digest.update(content)
    return digest.hexdigest()[:12]
