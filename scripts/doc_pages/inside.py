"""Generate sections about the package: public names, errors, wire formats."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import hybridcomp
from hybridcomp import codecs, errors, nn, session

FORMATS = Path(hybridcomp.__file__).resolve().parent / "kernels" / "formats"
#: first words of a header that documents a codec's format; other headers hold shared parts
TITLE = re.compile(r"// (\w+): ")

#: groups of names: for users, for model layers, for authors of codecs and engines
PUBLIC = (("", hybridcomp), ("nn.", nn), ("codecs.", codecs), ("session.", session))

#: methods of torch's protocols, which need no docs
OF_TORCH = {"state_dict", "load_state_dict", "zero_grad", "forward"}
#: public methods of classes whose other methods are internal
CALLED = {
    "Attached": {"detach", "on_detach", "take_events"},
    "CompressionConfig": {"parse"},
    "CachedEmbedding": {
        "from_embedding", "prefetch", "figures", "save", "load", "full_weight"
    },
}  # fmt: skip


def api() -> str:
    """Document every public name of ``PUBLIC``; errors have a table.

    Names for users get signature and docstring, names for authors a line, codecs their name;
    ``help`` has the rest.
    """
    entries, names, rows = [], [], []
    for name, found in public():
        if inspect.isclass(found) and issubclass(found, codecs.Codec) and found is not codecs.Codec:
            names.append(f"`{name.removeprefix('codecs.')}`")
        elif name.startswith(("codecs.", "session.")):
            rows.append(f"* `hybridcomp.{name}`: {_first(found)}")
        else:
            entries.append("\n".join(_entry(name, found)))
    head = (
        "## Codecs and engines\n\n`help(hybridcomp.codecs.Codec)` and so on have the contracts. "
        f"[Codecs](codecs.md) in `hybridcomp.codecs`: {', '.join(names)}."
    )
    return "\n\n".join([*entries, head, "\n".join(rows)])


def _first(found: object) -> str:
    """Return the first paragraph of a docstring as one line."""
    first = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return " ".join(first.replace("``", "`").split()).replace("|", "\\|")


def public() -> Iterator[tuple[str, object]]:
    """Yield name and object of every public function and class except errors."""
    for prefix, module in PUBLIC:
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found) and not (
                inspect.isclass(found) and issubclass(found, errors.HybridcompError)
            ):
                yield f"{prefix}{name}", found


def _entry(name: str, found: object) -> Iterator[str]:
    yield f"## `hybridcomp.{name}`"
    yield ""
    if inspect.isfunction(found):
        yield "```python"
        yield f"{name.rpartition('.')[2]}{_signature(found)}"
        yield "```"
        yield ""
    yield _markdown(inspect.getdoc(found) or "")
    if inspect.isclass(found) and (rows := list(_methods(found))):
        yield from ("", *rows)


def _signature(function: Callable[..., object]) -> str:
    """Return names, defaults and the result; the argument list below has the types."""
    whole = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in whole.parameters.values()]
    return str(whole.replace(parameters=bare)).replace("'", "")  # annotations are strings


def _methods(found: type) -> Iterator[str]:
    """Yield a line for each public method for users, with its first sentence."""
    for key, value in vars(found).items():
        function = getattr(value, "__func__", value)
        told = key in CALLED.get(found.__name__, (key,)) and key not in OF_TORCH
        told = told and not key.startswith("_")
        if told and inspect.isfunction(function) and _ours(function):
            yield f"* `{key}`: {_first(function)}"


def _ours(function: object) -> bool:
    """Return whether hybridcomp, not pydantic, defines ``function``."""
    return str(getattr(function, "__module__", "")).startswith("hybridcomp")


def _markdown(doc: str) -> str:
    """Convert a docstring to Markdown; its arguments become a list."""
    lines: list[str] = []
    inside = False
    for line in doc.replace("``", "`").splitlines():
        if line.strip() in ("Args:", "Raises:"):
            lines += ["", f"{line.strip()}", ""]
            inside = True
        elif inside and line.startswith("    ") and not line.startswith("        "):
            name, colon, rest = line.strip().partition(":")
            lines.append(f"* `{name}`{colon}{rest}")
        elif inside and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            inside = inside and not line.strip()
            lines.append(line)
    return "\n".join(lines).strip()


def error_classes() -> str:
    """Return a line for each error that hybridcomp raises on purpose."""
    rows = []
    for name, found in vars(errors).items():
        if inspect.isclass(found) and issubclass(found, errors.HybridcompError):
            bases = [base.__name__ for base in found.__bases__ if base.__module__ == "builtins"]
            rows.append(f"* `{name}` (a `{', '.join(bases)}`): {_first(found)}")
    return "\n".join(rows)


def formats() -> str:
    """Return a row for each format header: codec, first sentence, file."""
    rows = ["| codec | a payload | header below `hybridcomp/kernels/formats/` |", "|---|---|---|"]
    for path in sorted(FORMATS.glob("*.h")):
        lines = path.read_text("utf-8").splitlines()
        if (title := TITLE.match(lines[0])) is None:
            continue
        top = " ".join(line.removeprefix("//").strip() for line in takewhile(_comment, lines))
        first = re.split(r"(?<=[a-z)\d])\. |  ", top.partition(": ")[2])[0].rstrip(".")
        rows.append(f"| `{title[1]}` | {first.replace('|', chr(92) + '|')} | `{path.name}` |")
    return "\n".join(rows)


def _comment(line: str) -> bool:
    return line.startswith("//") and line != "//"
