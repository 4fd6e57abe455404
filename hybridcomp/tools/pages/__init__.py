"""Render the templates in this folder into HTML pages that load no other files."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hybridcomp.errors import HybridcompError, install_hint

#: packages of a page with charts
NEEDS = ("jinja2", "plotly")


def missing(*needed: str) -> str:
    """Say which of the packages is missing and how to install it; "" where all are there."""
    lacking = [name for name in needed or NEEDS if find_spec(name) is None]
    return f"it needs {' and '.join(lacking)}: {install_hint('report')}" if lacking else ""


def render(template: str, **values: Any) -> str:
    """Fill ``values`` into a template of this folder, with all texts escaped.

    Raises HybridcompError where Jinja is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise HybridcompError(f"{template}: {missing('jinja2')}") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template(template).render(**values)
